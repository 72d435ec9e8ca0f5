//! Registers a driver named urnic with every libibverbs in the process, and matches its devices.
//!
//! libibverbs loads its drivers itself, but not a driver that the loader has already loaded: the
//! constructor of a preloaded file does not run a second time. A program may also have loaded
//! libibverbs privately (Python, Rust), so that its symbols are not in the global scope, or more
//! than one copy of it. So the plug-in searches for copies whenever a copy begins to search for
//! devices, and registers with new ones. Drivers registered early are tried first.

use std::ffi::{CStr, CString, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use urnic_presence::fork::OwnLock;
use urnic_presence::{Presence, Shown, UVERBS_DEVICE_ABI};
use urnic_rdma_core::{
    VERBS_MATCH_SENTINEL, ibv_device, verbs_context, verbs_device, verbs_device_ops, verbs_match_ent,
    verbs_sysfs_dev,
};

use urnic_sys::Plain;

use crate::from_c::{ToFree, called_by_c};
use crate::guard::guarded;
use crate::library::{Library, Registration};
use crate::opening;
use urnic_sys::loader::{LoadedFile, loaded_files};

/// Copies with which the plug-in is registered. The entries are never freed, and the copies never
/// unloaded: the plug-in holds a handle of each.
pub(crate) static REGISTERED: OwnLock<Vec<&'static Registration>> = OwnLock::new();

/// Registers with every copy of libibverbs that has no registration yet.
///
/// # Errors
/// Never; the return type is the type that [`guarded`](crate::guard::guarded) requires.
pub(crate) fn with_every_libibverbs() -> Result<(), Errno> {
    let mut known = REGISTERED.lock();
    let files = loaded_files();
    for file in files
        .iter()
        .filter(|file| file.to_bytes().windows(7).any(|part| part == b"ibverbs"))
    {
        register(file, &mut known);
    }
    if known.is_empty() {
        // libibverbs may be part of another file.
        files.iter().for_each(|file| register(file, &mut known));
    }
    Ok(())
}

/// A public symbol of the first libibverbs in the process; null if there is none. The caller of the
/// interposed function has loaded this libibverbs, and keeps it loaded.
pub(crate) fn symbol_of_libibverbs(name: &CStr) -> *mut c_void {
    for file in loaded_files() {
        let bytes = file.to_bytes();
        let base = bytes.rsplit(|byte| *byte == b'/').next().unwrap_or(bytes);
        if !base.starts_with(b"libibverbs") {
            continue;
        }
        let symbol = LoadedFile::find(&file).map(|file| file.symbol(name));
        if let Some(symbol) = symbol.filter(|symbol| !symbol.is_null()) {
            return symbol;
        }
    }
    std::ptr::null_mut()
}

fn register(name: &CStr, known: &mut Vec<&'static Registration>) {
    let Some(file) = LoadedFile::find(name) else {
        return;
    };
    let Some(library) = Library::of(&file) else { return };
    let same =
        |other: &&Registration| std::ptr::fn_addr_eq(other.library.register_driver, library.register_driver);
    if known.iter().any(same) {
        return;
    }
    file.keep();
    tracing::debug!(
        "registering with {} (private ABI {}, level {:?}, release {:?})",
        name.to_string_lossy(),
        library.pabi.number(),
        library.level,
        library.release,
    );
    let registration: &'static Registration = Box::leak(Box::new(Registration {
        ops: operations(),
        library,
    }));
    // SAFETY: the struct is never freed, as libibverbs requires of a driver's.
    unsafe { (registration.library.register_driver)(&registration.ops) };
    known.push(registration);
}

/// The match table, which has only its end: [`match_device`] matches.
static NO_MATCH: verbs_match_ent = verbs_match_ent {
    driver_data: std::ptr::null_mut(),
    modalias_or_driver_id: 0,
    vendor: 0,
    device: 0,
    kind: VERBS_MATCH_SENTINEL,
};

/// The operations to register; libibverbs copies nothing, so each registration has its own.
fn operations() -> verbs_device_ops {
    called_by_c! { match_device(found: *mut verbs_sysfs_dev) -> bool = self::match_device(found) }
    called_by_c! { alloc_device(found: *mut verbs_sysfs_dev) -> *mut verbs_device = self::alloc_device() }
    called_by_c! { uninit_device(device: *mut verbs_device) = self::uninit_device(device) }
    called_by_c! {
        alloc_context(device: *mut ibv_device, fd: c_int, private: *mut c_void) -> *mut verbs_context =
            opening::alloc_context(device, fd)
    }
    called_by_c! {
        import_context(device: *mut ibv_device, fd: c_int) -> *mut verbs_context =
            opening::import_context(device, fd)
    }
    verbs_device_ops {
        name: c"urnic".as_ptr(),
        match_min_abi_version: UVERBS_DEVICE_ABI,
        match_max_abi_version: UVERBS_DEVICE_ABI,
        match_table: &raw const NO_MATCH,
        static_providers: std::ptr::null(),
        match_device: Some(match_device),
        alloc_context: Some(alloc_context),
        import_context: Some(import_context),
        alloc_device: Some(alloc_device),
        uninit_device: Some(uninit_device),
    }
}

/// Matches a device by its name, and by a character device that no RDMA driver has.
fn match_device(found: &verbs_sysfs_dev) -> bool {
    let name = found.ibdev_name.map(|byte| byte as u8);
    let name = CStr::from_bytes_until_nul(&name).map_or(&[][..], CStr::to_bytes);
    rustix::fs::stat("/dev/null").is_ok_and(|null| null.st_rdev == found.sysfs_cdev)
        && guarded(|| {
            let presence = Presence::current()?;
            let shown = presence.device(name);
            Ok(shown.is_some_and(|shown| !is_too_early(presence, shown)))
        })
        .is_ok_and(|matches| matches)
}

/// The devices, by their index as a bit, that were not matched when they were first found.
static POSTPONED: AtomicU64 = AtomicU64::new(0);

/// A part of the names of libibverbs' drivers.
const DRIVER: &[u8] = b"-rdmav";

/// Whether a device would be listed before the real ones have drivers.
///
/// libibverbs matches the devices that it found, loads its drivers if some have none, and matches
/// the rest; each gets a place in front of those before it. So a device that is matched at the
/// first time comes after all whose drivers are loaded then, whatever order the kernel gave.
fn is_too_early(presence: &Presence, shown: &Shown) -> bool {
    let is_driver = |file: &CString| file.to_bytes().windows(DRIVER.len()).any(|part| part == DRIVER);
    let bit = 1 << (shown.index() % 64);
    presence.has_real_devices()
        && POSTPONED.fetch_or(bit, Ordering::Relaxed) & bit == 0
        && !loaded_files().iter().any(is_driver)
}

/// libibverbs fills the zeroes.
fn alloc_device() -> Result<Box<verbs_device>, Errno> {
    Ok(Box::new(verbs_device::zeroes()))
}

fn uninit_device(device: ToFree<verbs_device>) {
    device.free();
}
