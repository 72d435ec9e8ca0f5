//! The device as libibverbs and the distribution's own tools see it.

use std::net::Ipv6Addr;

use urnic_tests::debian::Debian;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::{or_skip, wait};

/// The GIDs that `ibv_devinfo -v` lists, in their order.
pub(crate) fn gids(program: &Program) -> Vec<Ipv6Addr> {
    let text = program.run().success();
    let listed = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("GID[")?.split_once("]:"));
    let gid = |text: &str| {
        text.split([',', ' ', '\t'])
            .find(|word| !word.is_empty())?
            .parse()
            .ok()
    };
    listed.filter_map(|(_, text)| gid(text)).collect()
}

fn devinfo() -> Program {
    Program::new("ibv_devinfo").arg("-v")
}

#[test]
fn ibv_devices_lists_urnic0_once() {
    or_skip!(installed("ibv_devices"));
    let text = Program::new("ibv_devices").run().success();
    assert_eq!(text.matches("urnic0").count(), 1, "{text}");
}

#[test]
fn without_the_plug_in_no_urnic0_exists() {
    or_skip!(installed("ibv_devices"));
    let text = Program::plain("ibv_devices").run().output;
    assert!(!text.contains("urnic0"), "{text}");
}

#[test]
fn ibv_devinfo_shows_an_active_iwarp_port() {
    or_skip!(installed("ibv_devinfo"));
    let text = devinfo().run().success();
    for shown in [
        "hca_id:\turnic0",
        "iWARP",
        "PORT_ACTIVE",
        "Ethernet",
        "phys_port_cnt:\t\t\t1",
    ] {
        assert!(text.contains(shown), "no {shown:?} in:\n{text}");
    }
}

#[test]
fn gids_are_ip_addresses_without_holes() {
    or_skip!(installed("ibv_devinfo"));
    let gids = gids(&devinfo());
    assert!(!gids.is_empty());
    assert!(gids[0].to_ipv4_mapped().is_some(), "GID 0 is IPv4: {gids:?}");
    assert!(gids.iter().all(|gid| !gid.is_unspecified()), "{gids:?}");
}

#[test]
fn the_node_guid_stays() {
    or_skip!(installed("ibv_devinfo"));
    let guid = || {
        let text = devinfo().run().success();
        text.lines()
            .find(|line| line.contains("node_guid"))
            .map(str::to_owned)
    };
    let first = guid();
    assert!(first.is_some());
    assert_eq!(first, guid());
}

#[test]
fn many_programs_find_it_at_once() {
    or_skip!(installed("ibv_devinfo"));
    let running: Vec<_> = (0..16).map(|_| devinfo().spawn()).collect();
    for program in running {
        let text = program.wait().success();
        assert!(text.contains("urnic0"), "{text}");
    }
}

#[test]
fn ibv_asyncwatch_opens_it_and_waits() {
    or_skip!(installed("ibv_asyncwatch"));
    let mut watch = Program::new("ibv_asyncwatch").arg("-d").arg("urnic0").spawn();
    // The program's first line stays in its buffer; its sleep in read() shows that it got so far.
    let pid = watch.pid();
    let waits = wait::until(wait::TIME_LIMIT, || {
        let ended = watch.ended().is_some();
        let channel = std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default();
        let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
        // read(2) is call 0 on x86-64, 63 on arm64.
        let reads = ["0 ", "63 "].iter().any(|number| call.starts_with(number));
        (reads || channel.contains("recvmsg"))
            .then_some(true)
            .or_else(|| ended.then_some(false))
    });
    assert_eq!(waits, Some(true), "{}", watch.output());
}

#[test]
fn a_shell_and_its_tools_are_not_affected() {
    let text = Program::new("sh")
        .args(["-c", "ls /sys/class/net && cat /proc/self/comm && id -u"])
        .run()
        .success();
    assert!(text.contains("lo") && text.contains("cat"), "{text}");
}

#[test]
fn the_other_debian_lists_it_too() {
    let debian = or_skip!(Debian::other());
    let text = debian.program(devinfo()).run().success();
    assert!(
        text.contains("hca_id:\turnic0") && text.contains("PORT_ACTIVE"),
        "{text}"
    );
}
