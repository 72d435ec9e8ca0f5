//! `urnic doctor`: checks the requirements of a verbs program, in order, and names one command for
//! each fault.

mod finding;
mod fixes;
mod function;
mod loading;
mod origin;
mod presence_folder;
mod selftest;
mod system;
mod writable;

use std::env;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::ExitCode;

use rustix::process::{Resource, getrlimit};
use urnic_bus::vfio_user::VfioUserBus;
use urnic_config::{Config, Device, DeviceConfig, Identity, RealDevices, Wire};
use urnic_device::bus::Bus as _;
use urnic_rdma_core::Pabi;

use crate::answer::{Failure, print, print_json};
use crate::environment::{Environment, find_plugin};
use crate::options::Options;
use crate::verbs::Verbs;

use finding::{Finding, Verdict};

/// The number of sockets and channels that a modest program opens; a lower descriptor limit will
/// stop the program.
const FEW_DESCRIPTORS: u64 = 1024;

/// Runs every check, and prints each finding immediately, or all as JSON; the status is 1 if there
/// is a fault.
pub(crate) fn examine(options: &Options, json: bool) -> Result<ExitCode, Failure> {
    let mut wrong = 0;
    let mut all = Vec::new();
    let mut report = |finding: Finding| {
        wrong += usize::from(finding.verdict == Verdict::Wrong);
        match json {
            true => all.push(finding.json()),
            false => print(&format!("{finding}\n")).map(drop)?,
        }
        Ok::<_, Failure>(())
    };
    check_all(options, &mut report)?;
    if json {
        print_json(&serde_json::json!({ "well": wrong == 0, "checks": all }).to_string())?;
    } else if wrong == 0 {
        print("all well: urnic run -- COMMAND\n")?;
    } else {
        print(&format!("wrong: {wrong}\n"))?;
    }
    Ok(ExitCode::from(u8::from(wrong > 0)))
}

fn check_all(
    options: &Options,
    mut report: impl FnMut(Finding) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let environment = Environment::new(options);
    let config = match &environment {
        Ok(env) => {
            report(Finding::good("configuration", source_of_config()))?;
            env.config.clone()
        }
        // A missing plug-in is reported below, by a separate message.
        Err(failure) if failure.status != 2 => Config::default(),
        Err(failure) => {
            report(Finding::wrong(
                "configuration",
                &failure.message,
                "urnic run --help",
            ))?;
            Config::default()
        }
    };
    report(Finding::good("identity", identity(&config)))?;
    let devices = config.each_device();
    report(shown(&devices))?;
    system::findings().into_iter().try_for_each(&mut report)?;
    let plugin = plugin();
    let loads = plugin.verdict != Verdict::Wrong;
    report(plugin)?;
    if let Ok(path) = find_plugin() {
        report(names(&path))?;
    }
    report(libibverbs())?;
    report(null_device(Path::new("/dev/null")))?;
    let settings = urnic_presence::Settings {
        dir: config.present.dir.clone(),
        ..Default::default()
    };
    presence_folder::findings(&urnic_presence::homes(&settings))
        .into_iter()
        .try_for_each(&mut report)?;
    let mut ways: Vec<&Device> = Vec::new();
    for device in &devices {
        if !ways.contains(&&device.device) {
            ways.push(&device.device);
        }
    }
    let in_process = ways.contains(&&Device::Inproc);
    let elsewhere = ways.iter().flat_map(|way| match way {
        Device::Vfio(address) => function::examine(address),
        Device::VfioUser(path) => vec![server(path)],
        Device::Inproc => Vec::new(),
    });
    let mut findings: Vec<Finding> = elsewhere.collect();
    findings.extend(in_process.then(|| sockets(&config)));
    let reachable = loads && findings.iter().all(|finding| finding.verdict != Verdict::Wrong);
    let has_function = ways.iter().any(|way| matches!(way, Device::Vfio(_)));
    findings.into_iter().try_for_each(&mut report)?;
    if !has_function {
        report(Finding::good("memlock", "any limit will do: nothing is pinned"))?;
    }
    report(descriptors())?;
    report(hardware(Path::new("/sys/class/infiniband"), config.real_devices))?;
    report(Finding::note(
        "out of reach",
        "statically linked programs, set-user-id ones run by another user, and what sudo, doas, su and pkexec start, which \
         remove LD_PRELOAD: use `sudo urnic run -- COMMAND`",
        None,
    ))?;
    match &environment {
        Ok(_) if !reachable => report(Finding::note("self-test", "not run: see above", None))?,
        // Two programs would compete for the function.
        Ok(env) if has_function => report(selftest::answers(env))?,
        Ok(env) => report(selftest::run(env))?,
        Err(_) => report(Finding::note("self-test", "not run: see above", None))?,
    }
    Ok(())
}

/// Checks that a server answers at this socket.
fn server(path: &Path) -> Finding {
    let socket = path.display();
    match VfioUserBus::open(path) {
        Ok(bus) => {
            let text = format!("{socket}, which reaches program memory by {}", bus.memory());
            Finding::good("server", text)
        }
        Err(errno) => {
            let fix = format!("urnic serve --addr host --socket {socket}");
            Finding::wrong("server", format!("{socket}: {errno}"), fix)
        }
    }
}

fn source_of_config() -> String {
    match env::var("URNIC_CONFIG") {
        Ok(path) if !path.is_empty() => format!("{path}, then variables and flags"),
        _ => "no file; variables and flags".to_owned(),
    }
}

/// The devices that programs see.
fn shown(devices: &[DeviceConfig]) -> Finding {
    let each = devices.iter().map(|device| match device.addresses.as_slice() {
        [] => format!("{} ({})", device.name, device.device),
        addresses => {
            let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
            format!("{} ({}, {})", device.name, device.device, addresses.join(" "))
        }
    });
    Finding::good("devices", each.collect::<Vec<_>>().join(", "))
}

/// The kind of device that programs see, and the wire.
pub(crate) fn identity(config: &Config) -> &'static str {
    match config.identity {
        Identity::Roce if config.wire == Wire::Roce => "a RoCE v2 NIC; the wire is RoCE v2",
        Identity::Iwarp => "an iWARP RNIC; the wire is iWARP (RDMAP, DDP and MPA over TCP)",
        Identity::Roce if config.speaks_roce_to_some() => {
            "a RoCE v2 NIC; the wire is iWARP (RDMAP, DDP and MPA over TCP), and RoCE v2 to peers of [[peer]] sections"
        }
        Identity::Roce => "a RoCE v2 NIC; the wire is iWARP (RDMAP, DDP and MPA over TCP)",
    }
}

fn plugin() -> Finding {
    match find_plugin() {
        Ok(path) => loading::finding(&path),
        Err(message) => Finding::wrong("plug-in", message, "make build"),
    }
}

/// The names under which libibverbs itself loads the plug-in, needed only without LD_PRELOAD.
fn names(plugin: &Path) -> Finding {
    let missing: Vec<&str> = Pabi::ALL
        .into_iter()
        .map(Pabi::provider_file)
        .filter(|name| !plugin.with_file_name(name).exists())
        .collect();
    if missing.is_empty() {
        return Finding::good("plug-in's names", "there for every provider ABI");
    }
    let text = format!(
        "not there: {}; nothing needs them under `urnic run`",
        missing.join(", ")
    );
    Finding::note("plug-in's names", text, Some("make install"))
}

fn libibverbs() -> Finding {
    const INSTALL: &str = "apt-get install libibverbs1";
    let verbs = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(error) => return Finding::wrong("libibverbs", error, INSTALL),
    };
    let file = verbs.file().unwrap_or_default();
    let number = version(&file);
    let version = number.as_ref().map_or_else(
        || "of unknown version".to_owned(),
        |v| format!("of rdma-core {v}"),
    );
    match verbs.provider_abi() {
        Some(abi) => {
            let text = format!("{} {version}, provider ABI {}", file.display(), abi.number());
            Finding::good("libibverbs", text)
        }
        None => {
            let known: Vec<String> = Pabi::ALL.iter().map(|abi| abi.number().to_string()).collect();
            let text = format!(
                "{} {version}: none of the provider ABIs {}",
                file.display(),
                known.join(", ")
            );
            let path = env::var("LD_LIBRARY_PATH").ok();
            let fix = fixes::libibverbs(&file, number.as_deref(), path.as_deref());
            Finding::wrong("libibverbs", text, fix)
        }
    }
}

/// `libibverbs.so.1.14.44.0` contains rdma-core's version after the library's own.
fn version(file: &Path) -> Option<String> {
    let name = file.file_name()?.to_str()?;
    let (_, numbers) = name.split_once(".so.")?;
    let package: Vec<&str> = numbers.splitn(3, '.').skip(2).collect();
    package.first().map(|&version| version.to_owned())
}

/// libibverbs opens the null device in place of the uverbs one and compares its number.
fn null_device(path: &Path) -> Finding {
    let good = path
        .metadata()
        .is_ok_and(|m| m.file_type().is_char_device() && m.rdev() == rustix::fs::makedev(1, 3));
    let opens = std::fs::OpenOptions::new().read(true).write(true).open(path);
    match (good, opens) {
        (true, Ok(_)) => Finding::good("null device", path.display()),
        (false, _) => {
            let text = format!("{} is not the null device", path.display());
            Finding::wrong(
                "null device",
                text,
                format!("mknod -m 666 {} c 1 3", path.display()),
            )
        }
        (true, Err(error)) => {
            let text = format!("{}: {error}", path.display());
            Finding::wrong("null device", text, format!("chmod 666 {}", path.display()))
        }
    }
}

fn sockets(config: &Config) -> Finding {
    let address = config.native.listen.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    let ports = config.native.port_range.clone().unwrap_or(0..=0);
    let mut last: Option<std::io::Error> = None;
    if loopback_is_down() {
        let text = "the loopback interface lo is down: programs of this host do not reach each other";
        let fix = match rustix::process::geteuid().is_root() {
            true => "ip link set lo up",
            false => "ip link set lo up    # as root in this network namespace",
        };
        return Finding::wrong("sockets", text, fix);
    }
    for port in ports.clone() {
        match TcpListener::bind(SocketAddr::new(address, port)) {
            Ok(_) => return Finding::good("sockets", format!("can listen at {address}")),
            Err(error) => last = Some(error),
        }
    }
    let is_denied = last
        .as_ref()
        .is_some_and(|error| error.kind() == ErrorKind::PermissionDenied);
    let error = last.map_or_else(String::new, |error| error.to_string());
    let text = format!(
        "cannot listen at {address}, ports {}-{}: {error}",
        ports.start(),
        ports.end()
    );
    let fix = if config.native.listen.is_some() || config.native.port_range.is_some() {
        "urnic run --set native.listen=any --set native.port_range=any -- COMMAND"
    } else if is_denied {
        fixes::SANDBOX
    } else {
        "ip link set lo up"
    };
    Finding::wrong("sockets", text, fix)
}

/// Whether 127.0.0.1 is not an address of this host, or is unreachable.
fn loopback_is_down() -> bool {
    let tried = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .and_then(|listener| TcpStream::connect(listener.local_addr()?));
    let down = [ErrorKind::AddrNotAvailable, ErrorKind::NetworkUnreachable];
    tried.is_err_and(|error| down.contains(&error.kind()))
}

fn descriptors() -> Finding {
    match getrlimit(Resource::Nofile).current {
        Some(limit) if limit < FEW_DESCRIPTORS => {
            let text = format!("at most {limit} open files; each connection takes one");
            Finding::note("open files", text, Some("ulimit -n \"$(ulimit -Hn)\""))
        }
        Some(limit) => Finding::good("open files", format!("{limit}; each connection takes one")),
        None => Finding::good("open files", "no limit; each connection takes one"),
    }
}

/// Hardware HCAs stay visible, unless they are hidden: a program may use one of them.
fn hardware(class: &Path, shown: RealDevices) -> Finding {
    let entries = std::fs::read_dir(class).into_iter().flatten().flatten();
    let names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    match names.is_empty() {
        true => Finding::good("other devices", "none"),
        false => {
            let names = names.join(", ");
            let text = match shown {
                RealDevices::Hidden => return Finding::good("other devices", format!("{names}, hidden")),
                RealDevices::Last => "after urnic's in lists",
                RealDevices::First => "before urnic's in lists",
            };
            let text = format!(
                "{names} too, {text}: --only hides them, or name the device to programs, as in -d NAME"
            );
            Finding::note("other devices", text, None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_name_has_rdma_cores_version() {
        let version = |name: &str| version(Path::new(name));
        assert_eq!(
            version("/usr/lib/libibverbs.so.1.14.44.0").as_deref(),
            Some("44.0")
        );
        assert_eq!(
            version("/usr/lib/libibverbs.so.1.15.56.1").as_deref(),
            Some("56.1")
        );
        assert_eq!(version("/usr/lib/libibverbs.so.1"), None);
        assert_eq!(version(""), None);
    }

    #[test]
    fn each_fault_names_the_command_that_fixes_it() {
        let nowhere = Path::new("/no/such/place");
        for finding in [null_device(nowhere), null_device(Path::new("/dev/zero"))] {
            assert_eq!(finding.verdict, Verdict::Wrong);
            assert!(
                finding.to_string().contains("\n                       fix: "),
                "{finding}"
            );
        }
    }

    #[test]
    fn a_non_local_address_cannot_be_listened_at() {
        let mut config = Config::default();
        assert_eq!(sockets(&config).verdict, Verdict::Good);
        // TEST-NET-3 (RFC 5737): no machine has this address.
        config.native.listen = Some("203.0.113.1".parse().expect("an address"));
        assert_eq!(sockets(&config).verdict, Verdict::Wrong);
    }

    #[test]
    fn real_devices_are_named() {
        let class = urnic_testkit::Folder::new("doctor-test");
        std::fs::create_dir(class.file("mlx5_0")).expect("a folder");
        let finding = hardware(class.path(), RealDevices::Last);
        assert!(finding.text.contains("mlx5_0"), "{finding}");
        let hidden = hardware(class.path(), RealDevices::Hidden);
        assert!(
            hidden.verdict == Verdict::Good && hidden.text.contains("mlx5_0, hidden"),
            "{hidden}"
        );
        let none = hardware(Path::new("/no/such/class"), RealDevices::Last);
        assert_eq!(none.verdict, Verdict::Good);
    }
}
