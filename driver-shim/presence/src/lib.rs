//! Presence: makes `urnic0` visible to unmodified programs on a machine without an RDMA driver.
//!
//! * [`Presence`] is a private tree of real files ([`tree`](self)) for `/sys/class/infiniband*` and
//!   `/dev/infiniband`, built at the first use, with the [`GidTable`] and node GUID that it shows;
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
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use urnic_process::fds;
use urnic_process::gids::GidTable;

use urnic_config::{Config, Device};
use urnic_process::addressing::Gid as DeviceAddress;
use urnic_process::error_log;
use urnic_process::failure;

pub mod channel;
pub mod command;
pub mod events;
pub mod fork;
#[forbid(unsafe_code)]
mod identity;
#[forbid(unsafe_code)]
mod plan;
pub mod redirect;
pub mod registry;
#[forbid(unsafe_code)]
mod settings;
pub mod token;
#[forbid(unsafe_code)]
mod tree;

#[cfg(test)]
#[forbid(unsafe_code)]
mod tests;

pub use channel::{ChannelSender, Sent};
pub use plan::UVERBS_DEVICE_ABI;
pub use settings::{DEVICE_NAME, Settings, homes};

/// The device as this process sees it. Made at the first use, then unchanged.
#[derive(Debug)]
pub struct Presence {
    scope: identity::Scope,
    tree: tree::Tree,
    uverbs: String,
    node_guid: u64,
    gids: GidTable,
}

/// The current presence; null until the first use. A presence is never freed: contexts may still
/// refer to an older one.
static CURRENT: AtomicPtr<Presence> = AtomicPtr::new(std::ptr::null_mut());

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
    MAKING.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// `EEXIST` if a real device has our name; the errors of reaching the device and of making a
    /// tree.
    pub fn current() -> Result<&'static Presence, Errno> {
        let here = identity::Scope::current();
        // SAFETY: the pointer is null, or make() leaked the presence, so that it is never freed.
        match unsafe { CURRENT.load(Ordering::Acquire).as_ref() } {
            Some(presence) if presence.scope == here => Ok(presence),
            _ => Presence::make(here),
        }
    }

    #[cold]
    fn make(here: identity::Scope) -> Result<&'static Presence, Errno> {
        let making = making();
        // SAFETY: the pointer is null or leads to a leaked presence. Another thread may have made
        // it meanwhile.
        if let Some(presence) = unsafe { CURRENT.load(Ordering::Acquire).as_ref() }
            && presence.scope == here
        {
            return Ok(presence);
        }
        let usual = Settings::default();
        let settings = making.as_ref().map_or(&usual, |making| &making.settings);
        let gids = match making.as_ref() {
            Some(making) if settings.config.device != Device::Inproc => {
                GidTable::of_device(&(making.addresses)(&settings.config)?)
            }
            _ => GidTable::of_host(),
        };
        let made = Presence::build(here, gids, settings)?;
        let made: &'static Presence = Box::leak(Box::new(made));
        CURRENT.store(std::ptr::from_ref(made).cast_mut(), Ordering::Release);
        Ok(made)
    }

    fn build(scope: identity::Scope, gids: GidTable, settings: &Settings) -> Result<Presence, Errno> {
        let real = plan::RealDevices::of_host();
        if real.shadow_us() {
            tracing::error!(
                "this machine has a real RDMA device named {DEVICE_NAME}: rename it with `rdma dev set`"
            );
            return Err(Errno::EXIST);
        }
        let uverbs = real.free_uverbs();
        let node_guid = identity::node_guid(scope.netns);
        let inputs = plan::Inputs {
            scope,
            node_guid,
            gids: &gids,
            real: &real,
            uverbs: &uverbs,
            settings,
        };
        let homes = homes(settings);
        let tree = tree::provide(&inputs.plan(), &homes).inspect_err(|errno| {
            let homes: Vec<_> = homes.iter().map(|home| home.display().to_string()).collect();
            let places = homes.join(" or ");
            let fix = match *errno {
                Errno::MFILE | Errno::NFILE | Errno::NOMEM => failure::explained(*errno),
                errno => format!("{errno}: set URNIC_PRESENT_DIR to a folder that can be written"),
            };
            error_log::log_once(format!(
                "cannot keep the files that stand for {DEVICE_NAME} in {places}: {fix}"
            ));
        })?;
        tracing::debug!("{DEVICE_NAME} is in {}", tree.root.display());
        Ok(Presence {
            scope,
            tree,
            uverbs,
            node_guid,
            gids,
        })
    }

    /// The folder that stands for `/`: `/sys/class/infiniband` is `<root>/sys/class/infiniband`.
    pub fn root(&self) -> &Path {
        &self.tree.root
    }

    /// Name of our device node: `uverbs0`, or the first number that no real device has.
    pub fn uverbs(&self) -> &str {
        &self.uverbs
    }

    /// The node GUID, in host byte order.
    pub fn node_guid(&self) -> u64 {
        self.node_guid
    }

    /// The port's GID table.
    pub fn gids(&self) -> &GidTable {
        &self.gids
    }
}
