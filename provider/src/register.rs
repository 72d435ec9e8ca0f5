//! Registers a driver named urnic with every libibverbs in the process.
//!
//! libibverbs loads its drivers itself, but not a driver that the loader has already loaded: the
//! constructor of a preloaded file does not run a second time. A program may also have loaded
//! libibverbs privately (Python, Rust), so that its symbols are not in the global scope, or more
//! than one copy of it. So the plug-in searches for copies whenever a copy begins to search for
//! devices, and registers with new ones. Drivers registered early are tried first.

use std::ffi::{CStr, CString, c_int, c_void};

use rustix::io::Errno;
use urnic_presence::fork::OwnLock;

use crate::device;
use crate::library::{Library, Registration};

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

/// A public symbol of the first libibverbs in the process; null if there is none.
pub(crate) fn symbol_of_libibverbs(name: &CStr) -> *mut c_void {
    for file in loaded_files() {
        let bytes = file.to_bytes();
        let base = bytes.rsplit(|byte| *byte == b'/').next().unwrap_or(bytes);
        if !base.starts_with(b"libibverbs") {
            continue;
        }
        // SAFETY: the name is a C string; NOLOAD runs no constructor.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if handle.is_null() {
            continue;
        }
        // SAFETY: an open handle and a C string; the caller of the interposed function, which has
        // loaded this libibverbs, keeps it loaded.
        let (symbol, _) = unsafe { (libc::dlsym(handle, name.as_ptr()), libc::dlclose(handle)) };
        if !symbol.is_null() {
            return symbol;
        }
    }
    std::ptr::null_mut()
}

fn register(file: &CStr, known: &mut Vec<&'static Registration>) {
    // SAFETY: the name is a C string; NOLOAD runs no constructor.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return;
    }
    // SAFETY: the handle is open, and stays open if it belongs to a libibverbs.
    let Some(library) = (unsafe { Library::behind(handle) }) else {
        // SAFETY: the handle came from the `dlopen` above.
        unsafe { libc::dlclose(handle) };
        return;
    };
    let same =
        |other: &&Registration| std::ptr::fn_addr_eq(other.library.register_driver, library.register_driver);
    if known.iter().any(same) {
        // SAFETY: the reference that `dlopen` took.
        unsafe { libc::dlclose(handle) };
        return;
    }
    tracing::debug!(
        "registering with {} (private ABI {}, level {:?}, release {:?})",
        file.to_string_lossy(),
        library.pabi.number(),
        library.level,
        library.release,
    );
    let registration: &'static Registration = Box::leak(Box::new(Registration {
        ops: device::OPS,
        library,
    }));
    // SAFETY: the struct is never freed, as libibverbs requires of a driver's.
    unsafe { (registration.library.register_driver)(&registration.ops) };
    known.push(registration);
}

/// The files that the loader has loaded, except this one.
fn loaded_files() -> Vec<CString> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _: usize, files: *mut c_void) -> c_int {
        // SAFETY: the pointer that dl_iterate_phdr got below, and the loader's own struct.
        let (files, info) = unsafe { (&mut *files.cast::<Vec<CString>>(), &*info) };
        if !info.dlpi_name.is_null() {
            // SAFETY: the loader's name for the file.
            files.push(unsafe { CStr::from_ptr(info.dlpi_name) }.to_owned());
        }
        0
    }
    let mut files: Vec<CString> = Vec::new();
    // SAFETY: `collect` only allocates; no dlopen happens until it is done.
    unsafe { libc::dl_iterate_phdr(Some(collect), std::ptr::from_mut(&mut files).cast()) };
    // The program itself has no name.
    files.retain(|file| !file.is_empty());
    files
}
