//! Attributes of a PCI function in sysfs: its identity, its driver, and the files by which user
//! space opens it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, FileType, Mode, OFlags, open, readlink, stat};
use rustix::io::{Errno, read};

/// The driver that gives functions to user space.
pub const DRIVER: &str = "vfio-pci";

/// The attributes of a function in sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// `DDDD:BB:DD.F`.
    pub address: String,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Class code: class, subclass, interface.
    pub class: u32,
    /// The driver to which the function is bound.
    pub driver: Option<String>,
    /// The IOMMU group of the function.
    pub group: Option<Group>,
    /// The function's VFIO character device (`vfio7`), on kernels that have them.
    pub cdev: Option<String>,
}

/// Functions that the IOMMU cannot isolate from each other: they are assigned to user space
/// together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Number of the group.
    pub number: u32,
    /// The function has no IOMMU: VFIO made this group for it (`enable_unsafe_noiommu_mode`).
    pub no_iommu: bool,
    /// Addresses of the other functions in the group.
    pub others: Vec<String>,
}

/// The root of sysfs; a test uses another folder.
#[derive(Debug, Clone)]
pub struct Sysfs(PathBuf);

impl Default for Sysfs {
    fn default() -> Self {
        Sysfs(PathBuf::from("/sys"))
    }
}

impl Sysfs {
    /// A tree with the layout of sysfs at `root`.
    pub fn at(root: impl Into<PathBuf>) -> Sysfs {
        Sysfs(root.into())
    }

    /// Reads the attributes of the function at this address.
    ///
    /// # Errors
    /// `ENODEV` if the function does not exist; the errors of reading files.
    pub fn function(&self, address: &str) -> Result<Function, Errno> {
        let folder = self.0.join("bus/pci/devices").join(address);
        let number = |name: &str| -> Result<u32, Errno> {
            let text = text_of(&folder.join(name))?;
            u32::from_str_radix(text.trim_start_matches("0x"), 16).map_err(|_| Errno::IO)
        };
        let vendor = number("vendor").map_err(|errno| {
            if errno == Errno::NOENT {
                Errno::NODEV
            } else {
                errno
            }
        })?;
        let group = last_of_link(&folder.join("iommu_group"))
            .and_then(|name| name.parse().ok())
            .map(|number| self.group(number, address));
        Ok(Function {
            address: address.to_owned(),
            vendor: vendor as u16,
            device: number("device")? as u16,
            class: number("class")?,
            driver: last_of_link(&folder.join("driver")),
            group,
            cdev: names_in(&folder.join("vfio-dev")).into_iter().next(),
        })
    }

    /// Whether the function responds on the bus. The kernel waits for minutes when a function that
    /// does not respond is opened.
    pub fn answers(&self, address: &str) -> bool {
        let path = self.0.join("bus/pci/devices").join(address).join("config");
        let mut ids = [0; 4];
        let read =
            open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).and_then(|file| read(file, &mut ids));
        read != Ok(4) || ids != [0xff; 4]
    }

    /// Addresses of all functions with these ids.
    pub fn functions_like(&self, vendor: u16, device: u16) -> Vec<String> {
        names_in(&self.0.join("bus/pci/devices"))
            .into_iter()
            .filter(|address| {
                self.function(address)
                    .is_ok_and(|f| (f.vendor, f.device) == (vendor, device))
            })
            .collect()
    }

    fn group(&self, number: u32, but: &str) -> Group {
        let folder = self.0.join("kernel/iommu_groups").join(number.to_string());
        let name = text_of(&folder.join("name")).unwrap_or_default();
        let mut others = names_in(&folder.join("devices"));
        others.remove(but);
        Group {
            number,
            no_iommu: name == "vfio-noiommu",
            others: others.into_iter().collect(),
        }
    }

    /// Whether a module is loaded, or built in with parameters.
    pub fn has_module(&self, name: &str) -> bool {
        stat(self.0.join("module").join(name)).is_ok()
    }

    /// Whether the administrator permits functions without an IOMMU in user space.
    pub fn allows_no_iommu(&self) -> bool {
        let file = self.0.join("module/vfio/parameters/enable_unsafe_noiommu_mode");
        text_of(&file).is_ok_and(|text| text == "Y")
    }

    /// Whether the kernel uses an IOMMU.
    pub fn has_iommu(&self) -> bool {
        !names_in(&self.0.join("class/iommu")).is_empty()
    }

    /// Whether the firmware describes an IOMMU, which the kernel may use: by the ACPI tables of
    /// Intel's, AMD's, Arm's and virtio's. Their names are public, their contents are not.
    pub fn firmware_names_iommu(&self) -> bool {
        let tables = names_in(&self.0.join("firmware/acpi/tables"));
        ["DMAR", "IVRS", "IORT", "VIOT"]
            .iter()
            .any(|name| tables.contains(*name))
    }

    /// Whether this machine is a guest of QEMU: the subsystem ids are those that QEMU gives to the
    /// functions that it emulates.
    pub fn is_qemu_guest(&self) -> bool {
        let devices = self.0.join("bus/pci/devices");
        names_in(&devices).into_iter().any(|address| {
            let is = |name: &str, id: &str| {
                text_of(&devices.join(&address).join(name)).is_ok_and(|text| text == id)
            };
            is("subsystem_vendor", "0x1af4") && is("subsystem_device", "0x1100")
        })
    }
}

impl Function {
    /// The path of the group's file.
    pub fn group_file(&self) -> Option<PathBuf> {
        let group = self.group.as_ref()?;
        let kind = if group.no_iommu { "noiommu-" } else { "" };
        Some(PathBuf::from(format!("/dev/vfio/{kind}{}", group.number)))
    }

    /// The path of the function's own VFIO file, on kernels that have such files.
    pub fn cdev_file(&self) -> Option<PathBuf> {
        Some(Path::new("/dev/vfio/devices").join(self.cdev.as_ref()?))
    }

    /// Whether the function is a bridge: no driver takes a bridge, and it prevents no assignment.
    pub fn is_bridge(&self) -> bool {
        self.class >> 16 == 0x06
    }

    /// Whether the function prevents the assignment of its group: a kernel driver drives it.
    pub fn blocks_group(&self) -> bool {
        !self.is_bridge()
            && self
                .driver
                .as_deref()
                .is_some_and(|driver| driver != DRIVER && driver != "pci-stub")
    }
}

/// A file's contents without the surrounding white space; files of sysfs are short.
fn text_of(path: &Path) -> Result<String, Errno> {
    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = [0; 256];
    let len = read(&file, &mut bytes)?;
    let text = String::from_utf8_lossy(bytes.get(..len).unwrap_or_default());
    Ok(text.trim().to_owned())
}

fn last_of_link(path: &Path) -> Option<String> {
    let target = readlink(path, Vec::new()).ok()?.into_string().ok()?;
    Some(target.rsplit('/').next()?.to_owned())
}

/// The names in a folder, sorted; empty if the folder does not exist.
pub(super) fn names_in(folder: &Path) -> BTreeSet<String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(mut entries) = open(folder, flags, Mode::empty()).and_then(Dir::new) else {
        return BTreeSet::new();
    };
    let mut names = BTreeSet::new();
    while let Some(Ok(entry)) = entries.read() {
        let name = entry.file_name().to_string_lossy();
        if name != "." && name != ".." {
            names.insert(name.into_owned());
        }
    }
    names
}

/// The number of a character device; `None` if the file is of another kind or does not exist.
pub(super) fn device_number(path: &Path) -> Option<u64> {
    let stat = stat(path).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice).then_some(stat.st_rdev)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{create_dir_all, write};
    use std::os::unix::fs::symlink;
    use urnic_testkit::Folder;

    /// A tree with a urnic function, another function of its group, and a function of another
    /// vendor.
    struct Tree(Folder);

    impl Tree {
        fn new() -> Tree {
            let root = Folder::new("sysfs");
            create_dir_all(root.file("bus/pci/devices")).unwrap();
            Tree(root)
        }

        fn function(&self, address: &str, ids: [&str; 3], driver: Option<&str>, group: Option<(u32, &str)>) {
            let folder = self.0.file("bus/pci/devices").join(address);
            create_dir_all(&folder).unwrap();
            for (name, id) in ["vendor", "device", "class"].into_iter().zip(ids) {
                write(folder.join(name), format!("{id}\n")).unwrap();
            }
            if let Some(driver) = driver {
                symlink(format!("../../bus/pci/drivers/{driver}"), folder.join("driver")).unwrap();
            }
            if let Some((group, name)) = group {
                let place = self.0.file(&format!("kernel/iommu_groups/{group}"));
                create_dir_all(place.join("devices").join(address)).unwrap();
                if !name.is_empty() {
                    write(place.join("name"), name).unwrap();
                }
                symlink(
                    format!("../../kernel/iommu_groups/{group}"),
                    folder.join("iommu_group"),
                )
                .unwrap();
            }
        }
    }

    #[test]
    fn a_function_is_shown_with_driver_group_and_files() {
        let tree = Tree::new();
        let ours = ["0xfffe", "0x524e", "0x028000"];
        tree.function("0000:00:03.0", ours, Some("vfio-pci"), Some((7, "")));
        tree.function(
            "0000:00:03.1",
            ["0x8086", "0x10d3", "0x020000"],
            Some("e1000e"),
            Some((7, "")),
        );
        tree.function(
            "0000:00:02.0",
            ["0x8086", "0x29c0", "0x060000"],
            Some("pcieport"),
            None,
        );
        create_dir_all(tree.0.file("bus/pci/devices/0000:00:03.0/vfio-dev/vfio0")).unwrap();
        let sysfs = Sysfs::at(tree.0.path());

        let function = sysfs.function("0000:00:03.0").unwrap();
        assert_eq!(
            (function.vendor, function.device, function.class),
            (0xfffe, 0x524e, 0x02_8000)
        );
        assert_eq!(function.driver.as_deref(), Some("vfio-pci"));
        let group = function.group.clone().unwrap();
        assert_eq!((group.number, group.no_iommu), (7, false));
        assert_eq!(group.others, ["0000:00:03.1"]);
        assert_eq!(function.group_file().unwrap(), Path::new("/dev/vfio/7"));
        assert_eq!(
            function.cdev_file().unwrap(),
            Path::new("/dev/vfio/devices/vfio0")
        );
        assert!(!function.blocks_group());
        assert!(sysfs.function("0000:00:03.1").unwrap().blocks_group());
        assert!(
            !sysfs.function("0000:00:02.0").unwrap().blocks_group(),
            "a bridge"
        );

        assert_eq!(sysfs.function("0000:00:09.0"), Err(Errno::NODEV));
        let config = tree.0.file("bus/pci/devices/0000:00:03.0/config");
        write(&config, [0xfe, 0xff, 0x4e, 0x52, 0]).unwrap();
        assert!(sysfs.answers("0000:00:03.0"));
        write(&config, [0xff; 64]).unwrap();
        assert!(!sysfs.answers("0000:00:03.0"));
        assert_eq!(sysfs.functions_like(0xfffe, 0x524e), ["0000:00:03.0"]);
    }

    #[test]
    fn a_group_without_an_iommu_has_another_file() {
        let tree = Tree::new();
        tree.function(
            "0000:00:03.0",
            ["0xfffe", "0x524e", "0x028000"],
            Some("vfio-pci"),
            Some((0, "vfio-noiommu\n")),
        );
        let function = Sysfs::at(tree.0.path()).function("0000:00:03.0").unwrap();
        assert!(function.group.clone().unwrap().no_iommu);
        assert_eq!(function.group_file().unwrap(), Path::new("/dev/vfio/noiommu-0"));
        assert_eq!(function.cdev_file(), None);
        let parameters = tree.0.file("module/vfio/parameters");
        create_dir_all(&parameters).unwrap();
        for (text, allowed) in [("N\n", false), ("Y\n", true)] {
            write(parameters.join("enable_unsafe_noiommu_mode"), text).unwrap();
            assert_eq!(Sysfs::at(tree.0.path()).allows_no_iommu(), allowed);
        }
    }
}
