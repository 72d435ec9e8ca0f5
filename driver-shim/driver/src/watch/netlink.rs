//! Requests to RDMA netlink: their answers describe the presence of this process, and the objects
//! and counters of all processes of this user that see it.

use std::cell::OnceCell;
use std::os::fd::{BorrowedFd, RawFd};

use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use urnic_config::{Identity, RealDevices};
use urnic_presence::rdma_netlink::answer::{self, CharDevice, Device, Host, Replies, Resource};
use urnic_presence::rdma_netlink::kernel;
use urnic_presence::rdma_netlink::message::Message;
use urnic_presence::{HwCounter, Presence, Shown, registry};

use super::requests;
use super::snapshot::{Objects, Snapshot};

/// `enum rdma_node_type`.
const NODE_CA: u8 = 1;
const NODE_RNIC: u8 = 4;

/// What this process sees.
struct Seen<'a> {
    presence: &'a Presence,
    devices: Vec<Device>,
    copies_on_fork: bool,
    /// The answers of the processes, once for all devices and requests: one that is stopped holds
    /// the program up once.
    objects: OnceCell<Vec<Objects>>,
    snapshots: OnceCell<Vec<Snapshot>>,
    /// The netlink port of the program's socket.
    port: u32,
}

/// Answers requests that the program sends on its RDMA netlink socket `fd`. When this returns, the
/// replies are in the socket. `copies_on_fork`: whether forked children may have registered memory.
///
/// # Errors
/// `ECONNREFUSED` if `fd` is no such socket; `ENOBUFS` if the program has not read earlier replies;
/// `EMFILE` if no fd is left, and the errors of a presence.
pub fn answer(fd: RawFd, requests: &[u8], copies_on_fork: bool) -> Result<(), Errno> {
    let presence = Presence::current()?;
    let socket = registry::netlink_socket(fd, false)?.ok_or(Errno::CONNREFUSED)?;
    let seen = Seen {
        presence,
        devices: presence
            .devices()
            .iter()
            .map(|shown| described(presence, shown))
            .collect(),
        copies_on_fork,
        objects: OnceCell::new(),
        snapshots: OnceCell::new(),
        port: socket.port(),
    };
    let datagrams = answer::answer(requests, socket.port(), &seen);
    // SAFETY: found above to be a socket of the program, which does not close it while it sends.
    let program = unsafe { BorrowedFd::borrow_raw(fd) };
    match socket.queue(program, &datagrams) {
        Err(Errno::CONNREFUSED) => registry::netlink_socket(fd, true)?
            .ok_or(Errno::CONNREFUSED)?
            .queue(program, &datagrams),
        queued => queued,
    }
}

fn described(presence: &Presence, shown: &Shown) -> Device {
    let (protocol, node_type) = match presence.identity() {
        Identity::Iwarp => ("iw", NODE_RNIC),
        Identity::Roce => ("roce", NODE_CA),
    };
    let first = shown.gids().entries().first();
    Device {
        index: shown.netlink_index(),
        name: shown.name().to_owned(),
        protocol,
        node_type,
        firmware: env!("CARGO_PKG_VERSION").to_owned(),
        guid: shown.node_guid(),
        active: first.is_some(),
        netdev: first
            .filter(|gid| !gid.netdev.is_empty())
            .map(|gid| (gid.ifindex, gid.netdev.clone())),
        uverbs: CharDevice {
            number: urnic_presence::uverbs_number(),
            abi: urnic_presence::UVERBS_DEVICE_ABI.into(),
            name: shown.uverbs().to_owned(),
        },
    }
}

impl Host for Seen<'_> {
    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn rdma_cm(&self) -> CharDevice {
        let (major, minor) = registry::CM_DEVICE;
        CharDevice {
            number: rustix::fs::makedev(major, minor),
            abi: urnic_presence::RDMA_CM_ABI.into(),
            name: "rdma_cm".to_owned(),
        }
    }

    fn resources(&self, device: &Device) -> Vec<Resource> {
        self.objects
            .get_or_init(|| requests::objects(self.presence))
            .iter()
            .filter(|objects| objects.name == device.name)
            .flat_map(|objects| objects.all.iter().cloned())
            .collect()
    }

    fn counters(&self, device: &Device) -> Vec<(String, u64)> {
        let snapshots = self
            .snapshots
            .get_or_init(|| requests::of_presence(self.presence));
        let of_device = || snapshots.iter().filter(|snapshot| snapshot.name == device.name);
        HwCounter::all()
            .map(|counter| {
                let sum = of_device().fold(0u64, |sum, snapshot| sum.wrapping_add(snapshot.value(counter)));
                (counter.name(), sum)
            })
            .collect()
    }

    fn copies_on_fork(&self) -> bool {
        self.copies_on_fork
    }

    fn may_administer(&self) -> bool {
        rustix::thread::capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::NET_ADMIN))
    }

    fn kernel(&self, request: &Message<'_>) -> Replies {
        match self.presence.real_devices() {
            RealDevices::Hidden => Ok(None),
            RealDevices::First | RealDevices::Last => kernel::ask(request, self.port),
        }
    }

    fn kernels_are_first(&self) -> bool {
        self.presence.real_devices() == RealDevices::First
    }
}
