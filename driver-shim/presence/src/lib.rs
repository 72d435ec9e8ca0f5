//! Presence: makes `urnic0`, or several devices, visible to unmodified programs on a machine
//! without an RDMA driver.
//!
//! * [`OwnFolder`] is the folder of this user, which other users cannot enter;
//! * [`Presence`] is a private tree of real files ([`tree`](self)) for `/sys/class/infiniband*` and
//!   `/dev/infiniband`, built at the first use, with the [`Shown`] devices;
//! * [`redirect`] decides which paths lead to the tree;
//! * [`fds`] and [`registry`] record which fds of the process stand for our device and its event
//!   channels;
//! * [`channel`] carries completion and asynchronous events to the program, and [`events`] makes
//!   such channels;
//! * [`token`] makes a connection manager's channel readable while it has events;
//! * [`command`] answers the commands that libibverbs sends to the device file by itself.
//!
//! The plug-in's interposed libc functions call this crate. Rules for the called functions: no lock
//! and no allocation before a path or fd is found to be ours, raw system calls only, and no panic.

use std::path::Path;
use urnic_sync::{Mutex, MutexGuard, Published};

use rustix::io::Errno;
use urnic_process::fds;
use urnic_process::gids::GidTable;

use urnic_config::{Config, Device, Identity, RealDevices};
use urnic_process::addressing::Gid as DeviceAddress;
use urnic_process::error_log;
use urnic_process::failure;

use tree::NoTree;

pub mod channel;
pub mod command;
pub mod events;
pub mod fork;
#[forbid(unsafe_code)]
mod hw_counter;
mod identity;
#[forbid(unsafe_code)]
mod own_folder;
#[forbid(unsafe_code)]
mod plan;
#[forbid(unsafe_code)]
pub mod rdma_netlink;
pub mod redirect;
pub mod registry;
pub mod token;
#[forbid(unsafe_code)]
mod tree;
#[forbid(unsafe_code)]
mod unwritable;

#[cfg(test)]
#[forbid(unsafe_code)]
mod tests;

pub use channel::{ChannelSender, Sent};
pub use hw_counter::HwCounter;
pub use own_folder::{OwnFolder, Refusal, safe_home, usual_name};
pub use plan::{RDMA_CM_ABI, Settings, Shown, UVERBS_DEVICE_ABI, homes, uverbs_number};

/// The devices as this process sees them. Made at the first use, then unchanged.
#[derive(Debug)]
pub struct Presence {
    scope: identity::Scope,
    tree: tree::Tree,
    devices: Vec<Shown>,
    identity: Identity,
    real_devices: RealDevices,
    has_real_devices: bool,
}

/// The current presence; null until the first use. A presence is never freed: contexts may still
/// refer to an older one.
static CURRENT: Published<Presence> = Published::new();

/// The addresses of a device that is not in this process.
pub type AddressesOf = fn(&Config) -> Result<Vec<DeviceAddress>, Errno>;

/// The inputs of a new presence, once the program's configuration is set.
#[derive(Debug)]
struct Making {
    settings: Settings,
    addresses: AddressesOf,
}

/// Locked while a presence is made.
static MAKING: Mutex<Option<Making>> = Mutex::new(None);

fn making() -> MutexGuard<'static, Option<Making>> {
    MAKING.lock()
}

/// To be called once when the plug-in is loaded. The call is cheap: it inspects nothing before the
/// program needs it.
pub fn install() {
    fds::adopt_process();
}

/// A digest of that part of the configuration which a presence depends on, for
/// [`Settings::digest`].
pub fn digest(configuration: &str) -> u64 {
    identity::Digest::new("configuration")
        .with(configuration.as_bytes())
        .value()
}

/// Sets the inputs of presences made from now on, and the function that returns the addresses of a
/// device outside this process.
pub fn configure(settings: Settings, addresses: AddressesOf) {
    *making() = Some(Making { settings, addresses });
}

impl Presence {
    /// The presence for the calling thread's user and network namespace; the first call makes it.
    ///
    /// # Errors
    /// `EEXIST` if a real device has the name of one; `EADDRNOTAVAIL` if no interface has the
    /// address of one; the errors of reaching the device and of making a tree.
    pub fn current() -> Result<&'static Presence, Errno> {
        let here = identity::Scope::current();
        match CURRENT.get() {
            Some(presence) if presence.scope == here => Ok(presence),
            _ => Presence::make(here),
        }
    }

    #[cold]
    fn make(here: identity::Scope) -> Result<&'static Presence, Errno> {
        let making = making();
        // Another thread may have made it meanwhile.
        if let Some(presence) = CURRENT.get()
            && presence.scope == here
        {
            return Ok(presence);
        }
        let usual = Settings::default();
        let settings = making.as_ref().map_or(&usual, |making| &making.settings);
        let unreachable: AddressesOf = |_| Err(Errno::NODEV);
        let remote = making.as_ref().map_or(unreachable, |making| making.addresses);
        let host = GidTable::of_host();
        let tables = settings.config.each_device().into_iter().map(|device| match device.device {
            Device::Inproc if device.addresses.is_empty() => Ok(host.clone()),
            Device::Inproc => host.of_addresses(&device.addresses).map_err(|ip| {
                let name = &device.name;
                error_log::log_once(format!(
                    "no interface of this host that is up has {ip}, an address of {name}: `ip address` lists them"
                ));
                Errno::ADDRNOTAVAIL
            }),
            _ => Ok(GidTable::of_device(&remote(&settings.config.of_device(&device))?)),
        });
        let made = Presence::build(here, tables.collect::<Result<_, _>>()?, settings)?;
        Ok(CURRENT.set(made))
    }

    /// Makes the presence of the configured devices, which have these addresses.
    fn build(scope: identity::Scope, tables: Vec<GidTable>, settings: &Settings) -> Result<Presence, Errno> {
        let real = plan::RealDevices::shown(settings.config.real_devices);
        let names: Vec<String> = settings
            .config
            .each_device()
            .into_iter()
            .map(|device| device.name)
            .collect();
        if let Some(name) = names.iter().find(|name| real.has(name)) {
            tracing::error!(
                "this machine has a real RDMA device named {name}: hide it with --only, or give urnic's another name with --name"
            );
            return Err(Errno::EXIST);
        }
        let devices = plan::shown(scope, &real, names.into_iter().zip(tables));
        let inputs = plan::Inputs {
            scope,
            devices: &devices,
            real: &real,
            settings,
        };
        let homes = homes(settings);
        let names: Vec<_> = devices.iter().map(Shown::name).collect();
        let names = names.join(", ");
        let tree = tree::provide(&inputs.plan(), &homes).map_err(|NoTree { errno, reasons }| {
            let fix = match errno {
                Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::FBIG => failure::explained(errno),
                _ => "set URNIC_PRESENT_DIR to a folder of yours that can be written".to_owned(),
            };
            error_log::log_once(format!(
                "cannot keep the files that stand for {names} in {reasons}: {fix}"
            ));
            errno
        })?;
        tracing::debug!("{names}: in {}", tree.root.display());
        Ok(Presence {
            scope,
            tree,
            devices,
            identity: settings.config.identity,
            real_devices: settings.config.real_devices,
            has_real_devices: !real.is_empty(),
        })
    }

    /// The folder that stands for `/`: `/sys/class/infiniband` is `<root>/sys/class/infiniband`.
    pub fn root(&self) -> &Path {
        &self.tree.root
    }

    /// The folder that has the tree, and the stat sockets of this user's processes.
    ///
    /// # Errors
    /// It is not this user's alone any more.
    pub fn folder(&self) -> Result<OwnFolder, Refusal> {
        OwnFolder::open(self.root().parent().unwrap_or(Path::new("/")))
    }

    /// The kind of the devices.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Whether the real devices of the machine are shown, and at which place.
    pub fn real_devices(&self) -> RealDevices {
        self.real_devices
    }

    /// Whether the program sees real devices, too.
    pub fn has_real_devices(&self) -> bool {
        self.has_real_devices
    }

    /// The devices, at least one, by their indices.
    pub fn devices(&self) -> &[Shown] {
        &self.devices
    }

    /// The device with this name.
    pub fn device(&self, name: &[u8]) -> Option<&Shown> {
        self.devices
            .iter()
            .find(|device| device.name().as_bytes() == name)
    }
}
