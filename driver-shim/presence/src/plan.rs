//! The plan of a presence: its inputs, the devices, and the content of the tree, which has the
//! files that a kernel with an RNIC would show, and links to the machine's real files.

use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, major, makedev, minor};

use super::hw_counter::HwCounter;
use super::identity::{self, Digest, Scope, guid_text, words};
use super::own_folder::names;
use super::tree::{Item, Plan, folder};
use urnic_config::{Config, Identity};
use urnic_device::pci;
use urnic_process::gids::GidTable;
use urnic_process::port_gids;

/// Version of the tree's layout: another version gets another tree.
const LAYOUT: &[u8] = b"5";

/// Uverbs ABI of the device file (`IB_USER_VERBS_ABI_VERSION` of the driver; each provider has its
/// own number).
pub const UVERBS_DEVICE_ABI: u32 = 1;

/// The ABI of the connection manager's file (`RDMA_USER_CM_ABI_VERSION`).
pub const RDMA_CM_ABI: u32 = 4;

/// The first index of our devices in RDMA netlink, if the kernel's devices are shown too, now or
/// when they appear. The kernel counts from 0 on, and gives an index again only after all others.
const INDEX_BESIDE_REAL_DEVICES: u32 = 0x4000_0000;

/// The end of the name of a device's folder, as that of the name of a PCI function: NCCL takes
/// functions of one PCI device, whose folders differ only there, for ports of one adapter.
pub(super) const FUNCTION: &str = ":00.0";

const CLASS: &str = "sys/class/infiniband";
/// The folders of the devices, to which the class folders have links.
const DEVICES: &str = "sys/devices/urnic";
/// The bus of the devices.
const BUS: &str = "sys/bus/urnic";
const CLASS_VERBS: &str = "sys/class/infiniband_verbs";
const DEV: &str = "dev/infiniband";

/// The inputs of a process's presence, except the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    /// Folder for the tree; None: the first of `$XDG_RUNTIME_DIR`, `/tmp` and `/dev/shm` in which a
    /// tree can be made.
    pub dir: Option<PathBuf>,
    /// Names the devices that are shown (a device that is not in this process has addresses of its
    /// own), and their kind.
    pub config: Config,
    /// Digest of the configuration: processes with another configuration get another tree.
    pub digest: u64,
}

/// The folders in which a tree may be made, best first; the first one that permits it, and that is
/// safe from other users ([`OwnFolder`](super::OwnFolder)), is used.
pub fn homes(settings: &Settings) -> Vec<PathBuf> {
    if let Some(dir) = &settings.dir {
        return vec![dir.clone()];
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute());
    runtime
        .into_iter()
        .chain(["/tmp".into(), "/dev/shm".into()])
        .collect()
}

/// A device as this process sees it.
#[derive(Debug)]
pub struct Shown {
    index: usize,
    name: String,
    uverbs: String,
    node_guid: u64,
    netlink_index: u32,
    gids: GidTable,
}

impl Shown {
    /// The number of the device in the process, from 0 on.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Name of the device node: `uverbs0`, or another number that no real device has.
    pub fn uverbs(&self) -> &str {
        &self.uverbs
    }

    /// The node GUID, in host byte order.
    pub fn node_guid(&self) -> u64 {
        self.node_guid
    }

    /// The number of the device in RDMA netlink, which no real device has.
    pub fn netlink_index(&self) -> u32 {
        self.netlink_index
    }

    /// The port's GID table.
    pub fn gids(&self) -> &GidTable {
        &self.gids
    }
}

/// The real devices of this machine, by name.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct RealDevices {
    infiniband: Vec<String>,
    uverbs: Vec<String>,
    nodes: Vec<String>,
    /// Programs see none, also none that appears later.
    hidden: bool,
}

impl RealDevices {
    /// The devices that programs see beside ours.
    pub(super) fn shown(option: urnic_config::RealDevices) -> RealDevices {
        match option {
            urnic_config::RealDevices::Hidden => RealDevices {
                hidden: true,
                ..RealDevices::default()
            },
            urnic_config::RealDevices::First | urnic_config::RealDevices::Last => RealDevices::of_host(),
        }
    }

    fn of_host() -> RealDevices {
        let list = |path: &str| {
            let mut names = folder(CWD, Path::new(path)).map(names).unwrap_or_default();
            names.sort_unstable();
            names
        };
        RealDevices {
            infiniband: list("/sys/class/infiniband"),
            uverbs: list("/sys/class/infiniband_verbs"),
            nodes: list("/dev/infiniband"),
            hidden: false,
        }
    }

    #[cfg(test)]
    pub(super) fn fake(infiniband: &[&str], uverbs: &[&str], nodes: &[&str]) -> RealDevices {
        let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        RealDevices {
            infiniband: list(infiniband),
            uverbs: list(uverbs),
            nodes: list(nodes),
            hidden: false,
        }
    }

    /// The names `uverbsN` that no real device has, lowest first.
    pub(super) fn free_uverbs(&self) -> impl Iterator<Item = String> {
        let taken = |name: &String| self.uverbs.contains(name) || self.nodes.contains(name);
        (0u32..)
            .map(|n| format!("uverbs{n}"))
            .filter(move |name| !taken(name))
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.infiniband.is_empty()
    }

    /// Whether a real device has this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.infiniband.iter().any(|real| real == name)
    }
}

/// The devices with these names and addresses, in addition to the real ones.
pub(super) fn shown(
    scope: Scope,
    real: &RealDevices,
    devices: impl Iterator<Item = (String, GidTable)>,
) -> Vec<Shown> {
    let numbered = devices.zip(real.free_uverbs()).enumerate();
    let first_index = match real.hidden {
        true => 0,
        false => INDEX_BESIDE_REAL_DEVICES,
    };
    let shown = |(index, ((name, gids), uverbs))| Shown {
        index,
        name,
        uverbs,
        node_guid: identity::node_guid(scope.netns, index),
        netlink_index: first_index + index as u32,
        gids,
    };
    numbered.map(shown).collect()
}

/// All inputs of the tree.
#[derive(Debug)]
pub(super) struct Inputs<'a> {
    pub(super) scope: Scope,
    pub(super) devices: &'a [Shown],
    pub(super) real: &'a RealDevices,
    pub(super) settings: &'a Settings,
}

impl Inputs<'_> {
    pub(super) fn plan(&self) -> Plan {
        let mut items = Vec::new();
        for shown in self.devices {
            items.extend(self.device(shown));
            items.extend(self.port(shown));
            items.extend(char_device(shown));
        }
        items.push(file(format!("{CLASS_VERBS}/abi_version"), "6"));
        items.push(Item::Link(format!("{DEV}/rdma_cm"), "/dev/null".to_owned()));
        items.extend(self.real_devices());
        items.push(file(
            "sys/class/misc/rdma_cm/abi_version",
            RDMA_CM_ABI.to_string(),
        ));

        let digest = items.iter().fold(self.digest(), |digest, item| {
            let digest = digest.with(item.path().as_bytes());
            match item {
                Item::File(_, content) => digest.with(content),
                Item::Link(_, target) => digest.with(target.as_bytes()),
                Item::Folder(_) => digest,
            }
        });
        let seed = digest.value();
        // Any time between 2001 and 2035 is right, as long as it is derived from this tree.
        let time = 1_000_000_000 + (seed & 0x3fff_ffff) as i64;
        let dated = |shown: &Shown| format!("{CLASS}/{}", shown.name);
        Plan {
            name: format!("{seed:016x}"),
            items,
            dated: self.devices.iter().map(dated).collect(),
            time,
        }
    }

    fn digest(&self) -> Digest {
        Digest::new("presence tree")
            .with(LAYOUT)
            .with(&self.scope.uid.to_le_bytes())
            .with(&self.scope.netns.0.to_le_bytes())
            .with(&self.scope.netns.1.to_le_bytes())
            .with(&self.settings.digest.to_le_bytes())
    }

    /// The folder of the device, and that of `sys/class/infiniband`, which is in it.
    fn device(&self, shown: &Shown) -> Vec<Item> {
        let name = &shown.name;
        let folder = folder_of(name);
        let parent = |file: &str| format!("{DEVICES}/{folder}/{file}");
        let at = |file: &str| format!("{DEVICES}/{folder}/infiniband/{name}/{file}");
        let (node_type, node_desc) = match self.settings.config.identity {
            Identity::Iwarp => ("4: RNIC", "urnic, an iWARP RNIC in user space"),
            Identity::Roce => ("1: CA", "urnic, a RoCE NIC in user space, over iWARP"),
        };
        let mut items = vec![
            file(parent("vendor"), format!("{:#06x}", pci::VENDOR_ID)),
            file(parent("device"), format!("{:#06x}", pci::DEVICE_ID)),
            file(parent("subsystem_vendor"), format!("{:#06x}", pci::VENDOR_ID)),
            file(parent("subsystem_device"), format!("{:#06x}", pci::DEVICE_ID)),
            file(parent("class"), format!("{:#08x}", pci::CLASS_CODE)),
            file(parent("revision"), "0x01"),
            file(parent("uevent"), "DRIVER=urnic"),
            file(parent("numa_node"), "-1"),
            Item::Folder(BUS.to_owned()),
            Item::Link(parent("subsystem"), "../../../bus/urnic".to_owned()),
            Item::Folder(parent("net")),
            file(at("node_type"), node_type),
            file(at("node_guid"), guid_text(shown.node_guid)),
            file(at("sys_image_guid"), guid_text(shown.node_guid)),
            file(at("node_desc"), node_desc),
            file(at("fw_ver"), env!("CARGO_PKG_VERSION")),
            file(at("hw_rev"), "1"),
            file(at("hca_type"), "urnic"),
            file(at("board_id"), "urnic"),
            file(at("uevent"), format!("NAME={name}")),
            Item::Link(at("device"), "../..".to_owned()),
            Item::Link(at("subsystem"), "../../../../../class/infiniband".to_owned()),
            Item::Link(
                format!("{CLASS}/{name}"),
                format!("../../devices/urnic/{folder}/infiniband/{name}"),
            ),
        ];
        // The device has one netdev: the one of its first address.
        if let Some(gid) = shown.gids.entries().first().filter(|gid| !gid.netdev.is_empty()) {
            items.push(Item::Link(
                parent(&format!("net/{}", gid.netdev)),
                format!("/sys/class/net/{}", gid.netdev),
            ));
        }
        items
    }

    fn port(&self, shown: &Shown) -> Vec<Item> {
        let (name, folder) = (&shown.name, folder_of(&shown.name));
        let at = |file: &str| format!("{DEVICES}/{folder}/infiniband/{name}/ports/1/{file}");
        let up = !shown.gids.entries().is_empty();
        let addresses = shown.gids.entries();
        let ips = addresses.iter().map(|gid| gid.ip);
        let (table, lid) = match self.settings.config.identity {
            Identity::Iwarp => (port_gids::of_rnic(ips), shown.gids.lid()),
            Identity::Roce => (port_gids::of_roce(ips), 0),
        };
        let mut items = vec![
            file(at("state"), if up { "4: ACTIVE" } else { "1: DOWN" }),
            file(at("phys_state"), if up { "5: LinkUp" } else { "3: Disabled" }),
            file(at("link_layer"), "Ethernet"),
            file(at("rate"), "100 Gb/sec (4X EDR)"),
            file(at("lid"), format!("{lid:#x}")),
            file(at("lid_mask_count"), "0"),
            file(at("sm_lid"), "0x0"),
            file(at("sm_sl"), "0"),
            file(at("cap_mask"), "0x04010000"),
            file(at("pkeys/0"), "0xffff"),
            Item::Folder(at("gids")),
            Item::Folder(at("gid_attrs/types")),
            Item::Folder(at("gid_attrs/ndevs")),
        ];
        // A program that opens one of these files gets the present value (`watch`); the content
        // here is for programs that only list the files.
        for counter in HwCounter::all() {
            items.push(file(at(&format!("hw_counters/{}", counter.name())), "0"));
        }
        for counter in HwCounter::of_port() {
            items.push(file(at(&format!("counters/{}", counter.name())), "0"));
        }
        for (index, gid) in table.iter().enumerate() {
            items.push(file(at(&format!("gids/{index}")), words(&gid.raw)));
            items.push(file(at(&format!("gid_attrs/types/{index}")), gid.gid_type.name()));
            let netdev = addresses.get(gid.address).map_or("", |address| &address.netdev);
            if !netdev.is_empty() {
                items.push(file(at(&format!("gid_attrs/ndevs/{index}")), netdev));
            }
        }
        items
    }

    fn real_devices(&self) -> Vec<Item> {
        let link = |folder: &'static str| {
            move |name: &String| Item::Link(format!("{folder}/{name}"), format!("/{folder}/{name}"))
        };
        let (infiniband, uverbs, nodes) = (&self.real.infiniband, &self.real.uverbs, &self.real.nodes);
        let mut items: Vec<Item> = infiniband.iter().map(link(CLASS)).collect();
        items.extend(
            uverbs
                .iter()
                .filter(|name| *name != "abi_version")
                .map(link(CLASS_VERBS)),
        );
        // Only our connection manager is shown.
        items.extend(nodes.iter().filter(|name| *name != "rdma_cm").map(link(DEV)));
        items
    }
}

/// The name of the folder of a device.
fn folder_of(name: &str) -> String {
    format!("{name}{FUNCTION}")
}

/// The number of the character devices of our devices: that of /dev/null.
pub fn uverbs_number() -> u64 {
    rustix::fs::stat("/dev/null")
        .ok()
        .filter(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice)
        .map_or(makedev(1, 3), |stat| stat.st_rdev)
}

/// The uverbs class device and its node: /dev/null, which every fstat(2) reports as the
/// character device that `dev` names, and whose ioctl(2) fails with ENOTTY.
fn char_device(shown: &Shown) -> Vec<Item> {
    let (folder, uverbs) = (folder_of(&shown.name), &shown.uverbs);
    let at = |file: &str| format!("{DEVICES}/{folder}/infiniband_verbs/{uverbs}/{file}");
    let null = uverbs_number();
    vec![
        file(at("ibdev"), &shown.name),
        file(at("dev"), format!("{}:{}", major(null), minor(null))),
        file(at("abi_version"), UVERBS_DEVICE_ABI.to_string()),
        Item::Link(at("device"), "../..".to_owned()),
        Item::Link(
            format!("{CLASS_VERBS}/{uverbs}"),
            format!("../../devices/urnic/{folder}/infiniband_verbs/{uverbs}"),
        ),
        Item::Link(format!("{DEV}/{uverbs}"), "/dev/null".to_owned()),
    ]
}

/// A file with one line.
fn file(path: impl Into<String>, line: impl AsRef<str>) -> Item {
    Item::File(path.into(), format!("{}\n", line.as_ref()).into_bytes())
}
