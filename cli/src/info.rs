//! `urnic info`: the device as a verbs program sees it, through the system's libibverbs and the
//! plug-in.

use std::fmt::Write as _;
use std::net::Ipv6Addr;
use std::process::{Command, ExitCode};

use serde_json::{Value, json};
use urnic_config::Config;
use urnic_console::{escaped, escaped_json};
use urnic_driver::watch;
use urnic_rdma_core::{ibv_device_attr, ibv_gid, ibv_port_attr};

use crate::answer::Failure;
use crate::doctor;
use crate::environment::Environment;
use crate::verbs::{Verbs, text};

/// Starts this program again with the plug-in loaded.
pub(crate) fn reexecute(env: &Environment, json: bool) -> Result<ExitCode, Failure> {
    use std::os::unix::process::CommandExt;
    let error = Command::new("/proc/self/exe")
        .args(["info", "--inside"])
        .args(json.then_some("--json"))
        .envs(env.variables())
        .exec();
    Err(Failure::runtime(format!("cannot run myself again: {error}")))
}

/// The attributes of the devices that libibverbs reports, as text or JSON.
pub(crate) fn describe(json: bool) -> Result<String, Failure> {
    let verbs = Verbs::load().map_err(|error| {
        Failure::runtime(format!(
            "{error}: install libibverbs (Debian: apt-get install libibverbs1)"
        ))
    })?;
    let config = Config::from_env().map_err(Failure::usage)?;
    if json {
        let all: Result<Vec<_>, Failure> = config
            .each_device()
            .iter()
            .map(|device| object(&verbs, &config, &device.name))
            .collect();
        return Ok(escaped_json(&Value::from(all?).to_string()) + "\n");
    }
    let mut out = String::new();
    for device in config.each_device() {
        write_all(&mut out, &verbs, &config, &device.name)?;
    }
    Ok(out)
}

fn write_all(out: &mut String, verbs: &Verbs, config: &Config, name: &str) -> Result<(), Failure> {
    let device = verbs.open(name).map_err(Failure::runtime)?;
    let attr = device.attributes().map_err(Failure::runtime)?;
    write_device(out, name, &attr);
    write_way(out, config, name);
    for number in 1..=attr.phys_port_cnt {
        let port = device.port(number).map_err(Failure::runtime)?;
        write_port(out, number, &port);
        for index in 0..port.gid_tbl_len {
            let gid = device.gid(number, index).map_err(Failure::runtime)?;
            let _ = writeln!(out, "    {:<22} {}", format!("gid {index}"), address(&gid));
        }
    }
    Ok(())
}

/// A device as an object, with the names of the attributes in verbs.
fn object(verbs: &Verbs, config: &Config, name: &str) -> Result<Value, Failure> {
    let device = verbs.open(name).map_err(Failure::runtime)?;
    let attr = device.attributes().map_err(Failure::runtime)?;
    let homes = watch::homes(config.present.dir.clone());
    let own = watch::snapshots(&homes, Some(std::process::id()));
    let own = own.iter().find(|own| own.name == name);
    let mut ports = Vec::new();
    for number in 1..=attr.phys_port_cnt {
        let port = device.port(number).map_err(Failure::runtime)?;
        let gids: Result<Vec<String>, _> = (0..port.gid_tbl_len)
            .map(|index| device.gid(number, index).map(|gid| address(&gid)))
            .collect();
        ports.push(json!({
            "port": number,
            "active": port.state == 4,
            "active_mtu": 128u32.checked_shl(port.active_mtu).unwrap_or(0),
            "lid": port.lid,
            "max_msg_sz": port.max_msg_sz,
            "gids": gids.map_err(Failure::runtime)?,
        }));
    }
    Ok(json!({
        "name": name,
        "version": env!("CARGO_PKG_VERSION"),
        "fw_ver": text(&attr.fw_ver),
        "node_guid": guid(attr.node_guid),
        "vendor_id": attr.vendor_id,
        "vendor_part_id": attr.vendor_part_id,
        "hw_ver": attr.hw_ver,
        "max_qp": attr.max_qp,
        "max_qp_wr": attr.max_qp_wr,
        "max_sge": attr.max_sge,
        "max_sge_rd": attr.max_sge_rd,
        "max_cq": attr.max_cq,
        "max_cqe": attr.max_cqe,
        "max_mr": attr.max_mr,
        "max_mr_size": attr.max_mr_size,
        "max_pd": attr.max_pd,
        "max_qp_rd_atom": attr.max_qp_rd_atom,
        "max_qp_init_rd_atom": attr.max_qp_init_rd_atom,
        "max_srq": attr.max_srq,
        "max_srq_wr": attr.max_srq_wr,
        "max_mw": attr.max_mw,
        "atomics": attr.atomic_cap != 0,
        "identity": config.identity.name(),
        "device": own.map(|own| &own.device),
        "memory": own.map(|own| &own.memory),
        "ports": ports,
    }))
}

fn write_device(out: &mut String, name: &str, attr: &ibv_device_attr) {
    let _ = writeln!(out, "{name}");
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "  {name:<24} {value}");
    };
    line("firmware", escaped(&text(&attr.fw_ver)));
    line("node guid", guid(attr.node_guid));
    line(
        "vendor, part, hardware",
        format!(
            "{:#06x}, {}, {}",
            attr.vendor_id, attr.vendor_part_id, attr.hw_ver
        ),
    );
    line(
        "queue pairs",
        format!("{}, {} work requests each", attr.max_qp, attr.max_qp_wr),
    );
    line(
        "scatter/gather",
        format!("{}, {} on reads", attr.max_sge, attr.max_sge_rd),
    );
    line(
        "completion queues",
        format!("{}, {} entries each", attr.max_cq, attr.max_cqe),
    );
    line(
        "memory regions",
        format!("{}, {} each", attr.max_mr, size(attr.max_mr_size)),
    );
    line("protection domains", attr.max_pd.to_string());
    line(
        "reads in, out",
        format!(
            "{}, {} per queue pair",
            attr.max_qp_rd_atom, attr.max_qp_init_rd_atom
        ),
    );
    line(
        "shared receive queues",
        format!("{}, {} work requests each", attr.max_srq, attr.max_srq_wr),
    );
    line("memory windows", attr.max_mw.to_string());
    line(
        "atomics",
        if attr.atomic_cap == 0 { "no" } else { "yes" }.to_owned(),
    );
}

/// Writes how this process reaches the device, and how the device reaches the program's memory.
fn write_way(out: &mut String, config: &Config, name: &str) {
    let homes = watch::homes(config.present.dir.clone());
    let _ = writeln!(out, "  {:<24} {}", "programs see", doctor::identity(config));
    let own = watch::snapshots(&homes, Some(std::process::id()));
    for own in own.iter().filter(|own| own.name == name) {
        let _ = writeln!(out, "  {:<24} {}", "device", escaped(&own.device));
        let _ = writeln!(out, "  {:<24} {}", "program memory", escaped(&own.memory));
    }
}

fn write_port(out: &mut String, number: u8, port: &ibv_port_attr) {
    let _ = writeln!(out, "  port {number}");
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "    {name:<22} {value}");
    };
    // enum ibv_port_state: 1 down … 4 active.
    line(
        "state",
        if port.state == 4 {
            "active".to_owned()
        } else {
            format!("{} (not active)", port.state)
        },
    );
    // enum ibv_mtu: 1 is 256, each step doubles.
    line(
        "mtu",
        format!("{}", 128u32.checked_shl(port.active_mtu).unwrap_or(0)),
    );
    line("lid", format!("{:#06x}", port.lid));
    line("largest message", size(port.max_msg_sz.into()));
}

/// A number of bytes, in the largest unit in which it is whole.
fn size(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let steps = match bytes {
        0 => 0,
        _ => (bytes.trailing_zeros() / 10) as usize,
    };
    format!("{} {}", bytes >> (10 * steps), units[steps])
}

fn guid(network_order: u64) -> String {
    let bytes = network_order.to_ne_bytes();
    bytes
        .chunks(2)
        .map(|pair| pair.iter().map(|b| format!("{b:02x}")).collect())
        .collect::<Vec<String>>()
        .join(":")
}

/// GIDs are IP addresses here, IPv4 ones mapped.
fn address(gid: &ibv_gid) -> String {
    Ipv6Addr::from(gid.raw).to_canonical().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_read_as_addresses() {
        let mut gid = ibv_gid::default();
        gid.raw[10..].copy_from_slice(&[0xff, 0xff, 192, 0, 2, 7]);
        assert_eq!(address(&gid), "192.0.2.7");
        gid.raw = Ipv6Addr::LOCALHOST.octets();
        assert_eq!(address(&gid), "::1");
    }

    #[test]
    fn sizes_have_the_unit_in_which_they_are_whole() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 bytes"),
            (1 << 31, "2 GiB"),
            (1 << 46, "64 TiB"),
            (3 << 10, "3 KiB"),
            ((1 << 31) - 1, "2147483647 bytes"),
            (1 << 63, "8 EiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn guids_read_as_ibv_devinfo_prints_them() {
        assert_eq!(guid(0x0002_c903_0000_1234_u64.to_be()), "0002:c903:0000:1234");
    }
}
