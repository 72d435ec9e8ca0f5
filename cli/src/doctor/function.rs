//! The checks of `urnic doctor --device vfio:…`: a PCI function from the kernel to this
//! user.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, geteuid, getrlimit};
use urnic_bus::vfio::{DRIVER, Function, Holder, Sysfs, holder_of};
use urnic_device::pci;

use super::finding::{Finding, Verdict};

/// Locked memory below which a modest program fails: the queues of the driver use five of these
/// MiB.
const MODEST_MEMLOCK: u64 = 64 << 20;

/// Runs every check, in the order of their dependencies.
pub(super) fn examine(address: &str) -> Vec<Finding> {
    let sysfs = Sysfs::default();
    let function = match sysfs.function(address) {
        Ok(function) => function,
        Err(_) => return vec![absent(address, &sysfs)],
    };
    let mut findings = Vec::new();
    // No fix may detach another device's function from its driver, so a fault here ends the list.
    let first: [&dyn Fn() -> Finding; 4] = [
        &|| identity(&function),
        &|| answers(address, &sysfs),
        // Before the driver check: no driver binds a function without a group.
        &|| group(&function, &sysfs),
        &|| driver(&function, &sysfs),
    ];
    for check in first {
        findings.push(check());
        if findings.iter().any(|finding| finding.verdict == Verdict::Wrong) {
            return findings;
        }
    }
    let holder = holder_of(&files(&function));
    findings.push(access(&function, holder.as_ref()));
    findings.push(holder_finding(holder));
    findings.push(memlock(&function));
    findings
}

fn files(function: &Function) -> Vec<PathBuf> {
    [function.cdev_file(), function.group_file()]
        .into_iter()
        .flatten()
        .collect()
}

fn absent(address: &str, sysfs: &Sysfs) -> Finding {
    let ours = format!("{:04x}:{:04x}", pci::VENDOR_ID, pci::DEVICE_ID);
    match sysfs.functions_like(pci::VENDOR_ID, pci::DEVICE_ID).first() {
        Some(there) => Finding::wrong(
            "function",
            format!("no urnic function at {address}, but one at {there}"),
            format!("urnic doctor --device vfio:{there}"),
        ),
        None => Finding::wrong(
            "function",
            format!("no urnic function at {address}, nor at another address ({ours})"),
            format!("lspci -D -d {ours}"),
        ),
    }
}

fn identity(function: &Function) -> Finding {
    let ids = format!(
        "{} is {:04x}:{:04x}",
        function.address, function.vendor, function.device
    );
    if (function.vendor, function.device) == (pci::VENDOR_ID, pci::DEVICE_ID) {
        return Finding::good("function", ids);
    }
    let ours = format!("{:04x}:{:04x}", pci::VENDOR_ID, pci::DEVICE_ID);
    Finding::wrong(
        "function",
        format!("{ids}, not a urnic device ({ours})"),
        format!("lspci -D -d {ours}"),
    )
}

fn answers(address: &str, sysfs: &Sysfs) -> Finding {
    if sysfs.answers(address) {
        return Finding::good("on the bus", "it answers");
    }
    let fix = "boot again, with the device's process (`urnic serve`) running";
    Finding::wrong(
        "on the bus",
        "it does not answer: the device was removed, or its server ended",
        fix,
    )
}

fn driver(function: &Function, sysfs: &Sysfs) -> Finding {
    match function.driver.as_deref() {
        Some(DRIVER) => Finding::good("driver", DRIVER),
        Some(other) => Finding::wrong("driver", format!("{other} has it"), bind(function, sysfs)),
        None => Finding::wrong("driver", "none has it", bind(function, sysfs)),
    }
}

/// The command by which root assigns a function to user space.
fn bind(function: &Function, sysfs: &Sysfs) -> String {
    let Function { address, .. } = function;
    let unbind = match function.driver {
        Some(_) => format!(" && echo {address} >/sys/bus/pci/devices/{address}/driver/unbind"),
        None => String::new(),
    };
    let load = match sysfs.has_module("vfio_pci") {
        true => String::new(),
        false => format!("modprobe {DRIVER} && "),
    };
    format!(
        "as root: {load}echo {DRIVER} >/sys/bus/pci/devices/{address}/driver_override{unbind} && echo {address} >/sys/bus/pci/drivers_probe"
    )
}

fn group(function: &Function, sysfs: &Sysfs) -> Finding {
    const SUBJECT: &str = "IOMMU group";
    let Some(group) = &function.group else {
        if sysfs.has_iommu() {
            return Finding::wrong(
                SUBJECT,
                "none, although there is an IOMMU",
                "dmesg | grep -i -e iommu -e dmar",
            );
        }
        if sysfs.allows_no_iommu() {
            return Finding::note(
                SUBJECT,
                "none yet: made without an IOMMU when the function is bound",
                None,
            );
        }
        return no_iommu(SUBJECT, sysfs);
    };
    if group.no_iommu {
        let text = format!(
            "{}, made without an IOMMU: the device can reach all memory, and nothing is pinned; programs that fork will fail",
            group.number
        );
        return Finding::note(SUBJECT, text, None);
    }
    let others: Vec<Function> = group
        .others
        .iter()
        .filter_map(|other| sysfs.function(other).ok())
        .collect();
    match others.iter().find(|other| other.blocks_group()) {
        Some(other) => {
            let driver = other.driver.as_deref().unwrap_or_default();
            let text = format!(
                "{} has {} in it too, which {driver} drives: the kernel gives out whole groups",
                group.number, other.address
            );
            Finding::wrong(SUBJECT, text, bind(other, sysfs))
        }
        None if others.is_empty() => Finding::good(SUBJECT, format!("{}, alone in it", group.number)),
        None => Finding::good(
            SUBJECT,
            format!(
                "{}, with {}, which nothing of the kernel drives",
                group.number,
                group.others.join(", ")
            ),
        ),
    }
}

/// The kernel uses no IOMMU: the fix depends on whether the machine has one, and on its vendor.
fn no_iommu(subject: &'static str, sysfs: &Sysfs) -> Finding {
    let (text, fix) = if sysfs.firmware_names_iommu() {
        (
            "none: there is an IOMMU, but the kernel does not use it",
            "boot with intel_iommu=on on the kernel's command line (AMD's is on without amd_iommu=off)",
        )
    } else if sysfs.is_qemu_guest() {
        (
            "none: this QEMU guest has no IOMMU",
            "start QEMU with `-machine q35,kernel-irqchip=split -device intel-iommu,intremap=on,caching-mode=on` before its other \
             devices, and the guest's kernel with intel_iommu=on",
        )
    } else {
        (
            "none: this machine has no IOMMU",
            "turn it on in the firmware (VT-d, AMD-Vi) or add one to the virtual machine, and boot with intel_iommu=on",
        )
    };
    let allow = match sysfs.has_module("vfio") {
        true => "echo 1 >/sys/module/vfio/parameters/enable_unsafe_noiommu_mode",
        false => "modprobe vfio enable_unsafe_noiommu_mode=1",
    };
    let fix =
        format!("{fix}; or, with nothing pinned and all memory in the device's reach, as root: {allow}");
    Finding::wrong(subject, text, fix)
}

/// Whether this user may open the files that one of the interfaces requires.
fn access(function: &Function, holder: Option<&Holder>) -> Finding {
    const SUBJECT: &str = "its files";
    let by_itself = function
        .cdev_file()
        .map(|file| [file, PathBuf::from("/dev/iommu")]);
    let by_group = function
        .group_file()
        .map(|file| [file, PathBuf::from("/dev/vfio/vfio")]);
    let mut denied = Vec::new();
    for way in [by_itself, by_group].into_iter().flatten() {
        match way.iter().find_map(|file| complaint(file)) {
            None => {
                let [first, second] = way.map(|file| file.display().to_string());
                return Finding::good(SUBJECT, format!("{first} and {second} open"));
            }
            Some((file, ErrorKind::ResourceBusy)) => {
                let text = format!("{} is taken", file.display());
                let fix = match holder {
                    Some(holder) => format!("kill {}", holder.pid),
                    None => format!("as root: urnic doctor --device vfio:{}", function.address),
                };
                return Finding::wrong(SUBJECT, text, fix);
            }
            Some((file, kind)) => denied.push((file.to_owned(), kind)),
        }
    }
    let text = denied
        .iter()
        .map(|(file, kind)| format!("{}: {kind}", file.display()))
        .collect::<Vec<_>>()
        .join("; ");
    // The group's file needs the fewest permissions: it was tried last.
    let fix = match denied.pop() {
        Some((file, kind)) if kind != ErrorKind::NotFound => {
            format!("as root: chown {} {}", geteuid().as_raw(), file.display())
        }
        _ => "as root: modprobe -a vfio-pci vfio_iommu_type1".to_owned(),
    };
    Finding::wrong(SUBJECT, text, fix)
}

fn complaint(file: &Path) -> Option<(&Path, ErrorKind)> {
    let opened = OpenOptions::new().read(true).write(true).open(file);
    opened.err().map(|error| (file, error.kind()))
}

fn holder_finding(holder: Option<Holder>) -> Finding {
    match holder {
        None => Finding::good("held by", "no process that this user may see"),
        Some(holder) => {
            let fix = format!("kill {}", holder.pid);
            Finding::wrong(
                "held by",
                format!("{holder}: one process at a time can have it"),
                fix,
            )
        }
    }
}

fn memlock(function: &Function) -> Finding {
    const SUBJECT: &str = "memlock";
    if function.group.as_ref().is_some_and(|group| group.no_iommu) {
        return Finding::good(SUBJECT, "any limit will do: nothing is pinned");
    }
    match getrlimit(Resource::Memlock).current {
        _ if geteuid().is_root() => Finding::good(SUBJECT, "root may lock any amount"),
        None => Finding::good(SUBJECT, "no limit"),
        Some(limit) => {
            let text = format!("{} KiB for queues and registered memory together", limit >> 10);
            if limit >= MODEST_MEMLOCK {
                return Finding::good(SUBJECT, text);
            }
            Finding::note(
                SUBJECT,
                text,
                Some(
                    "ulimit -l unlimited, allowed by a line in /etc/security/limits.conf: USER hard memlock unlimited",
                ),
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use urnic_bus::vfio::Group;
    use urnic_testkit::Folder;

    fn ours() -> Function {
        Function {
            address: "0000:00:04.0".to_owned(),
            vendor: pci::VENDOR_ID,
            device: pci::DEVICE_ID,
            class: pci::CLASS_CODE,
            driver: Some(DRIVER.to_owned()),
            group: Some(Group {
                number: 5,
                no_iommu: false,
                others: Vec::new(),
            }),
            cdev: None,
        }
    }

    #[test]
    fn a_half_prepared_function_shows_the_next_step() {
        let nowhere = Sysfs::at("/no/such/place");
        let bound = ours();
        assert_eq!(identity(&bound).verdict, Verdict::Good);
        assert_eq!(driver(&bound, &nowhere).verdict, Verdict::Good);
        assert_eq!(
            answers(&bound.address, &nowhere).verdict,
            Verdict::Good,
            "nothing is known against it"
        );
        assert_eq!(group(&bound, &nowhere).verdict, Verdict::Good);

        let other = Function {
            vendor: 0x8086,
            ..ours()
        };
        assert_eq!(identity(&other).verdict, Verdict::Wrong);
        let driven = Function {
            driver: Some("e1000e".to_owned()),
            ..ours()
        };
        let fix = driver(&driven, &nowhere).fix.expect("a command");
        for word in [
            "modprobe vfio-pci",
            "0000:00:04.0/driver_override",
            "driver/unbind",
            "drivers_probe",
        ] {
            assert!(fix.contains(word), "{fix}");
        }
        let free = Function {
            driver: None,
            ..ours()
        };
        assert!(!driver(&free, &nowhere).fix.expect("a command").contains("unbind"));
        let no_group = Function {
            group: None,
            ..ours()
        };
        assert!(
            group(&no_group, &nowhere)
                .fix
                .expect("a command")
                .contains("intel_iommu=on")
        );
        assert_eq!(absent("0000:00:04.0", &nowhere).verdict, Verdict::Wrong);
    }

    #[test]
    fn a_machine_without_an_iommu_gets_the_advice_for_it() {
        let root = Folder::new("machine");
        let advice = || {
            let no_group = Function {
                group: None,
                ..ours()
            };
            group(&no_group, &Sysfs::at(root.path())).fix.expect("a command")
        };
        assert!(advice().contains("VT-d"), "{}", advice());
        let bridge = root.path().join("bus/pci/devices/0000:00:00.0");
        std::fs::create_dir_all(&bridge).expect("a folder");
        for (name, id) in [("subsystem_vendor", "0x1af4\n"), ("subsystem_device", "0x1100\n")] {
            std::fs::write(bridge.join(name), id).expect("a file");
        }
        assert!(advice().contains("-device intel-iommu"), "{}", advice());
        let tables = root.path().join("firmware/acpi/tables");
        std::fs::create_dir_all(&tables).expect("a folder");
        std::fs::write(tables.join("DMAR"), "").expect("a file");
        assert!(advice().starts_with("boot with intel_iommu=on"), "{}", advice());
        assert!(advice().ends_with("enable_unsafe_noiommu_mode=1"), "{}", advice());
    }

    #[test]
    fn missing_files_come_with_the_command_that_makes_them() {
        // No machine has as many groups.
        let mut function = ours();
        function.group = function.group.map(|group| Group {
            number: u32::MAX,
            ..group
        });
        let finding = access(&function, None);
        assert_eq!(finding.verdict, Verdict::Wrong);
        assert!(finding.fix.expect("a command").contains("modprobe"));
    }

    #[test]
    fn a_holder_is_named() {
        let holder = Holder {
            pid: 7,
            name: "rping".to_owned(),
        };
        let finding = holder_finding(Some(holder));
        assert!(finding.text.contains("process 7 (rping)"), "{finding}");
        assert_eq!(holder_finding(None).verdict, Verdict::Good);
    }
}
