//! A libibverbs in this process: its release, and its private functions.

use std::ffi::{CStr, c_int, c_void};

use urnic_rdma_core::private::{
    INIT_AND_ALLOC_CONTEXT, InitAndAllocContext, RegisterDriver, SET_OPS, SetOps, UNINIT_CONTEXT,
    UninitContext,
};
use urnic_rdma_core::{Level, Pabi, verbs_device_ops};

use urnic_sys::loader::{LoadedFile, file_of};

/// One loaded copy of libibverbs.
pub(crate) struct Library {
    pub(crate) pabi: Pabi,
    pub(crate) level: Level,
    /// rdma-core's release, from the file's name; None if the name does not contain it.
    pub(crate) release: Option<u32>,
    pub(crate) register_driver: RegisterDriver,
    pub(crate) init_and_alloc_context: InitAndAllocContext,
    pub(crate) set_ops: SetOps,
    pub(crate) uninit_context: UninitContext,
    /// `ibv_dontfork_range` and `ibv_dofork_range`.
    fork_ranges: Option<[ForkRange; 2]>,
}

/// Counts one more, or one less, registration of a range that a forked child must not have. Returns
/// 0, or -1 and an errno. Changes nothing else, so any range is permitted.
type ForkRange = extern "C" fn(*mut c_void, usize) -> c_int;

/// The registration of this plug-in with one copy of libibverbs.
#[repr(C)]
pub(crate) struct Registration {
    /// Must be first: libibverbs keeps the address in every device, and the address leads back to
    /// this value.
    pub(crate) ops: verbs_device_ops,
    pub(crate) library: Library,
}

impl Registration {
    /// The registration of a device's operations.
    ///
    /// # Safety
    /// `ops` is the field of a registration.
    pub(crate) unsafe fn of(ops: *const verbs_device_ops) -> &'static Registration {
        // SAFETY: the caller promises the first field of a Registration, which is never freed.
        unsafe { &*ops.cast() }
    }
}

impl Library {
    /// The libibverbs in this file; `None` if it has none, or one of an unknown private ABI.
    pub(crate) fn of(file: &LoadedFile) -> Option<Library> {
        Pabi::ALL.iter().rev().find_map(|&pabi| {
            let private = |name: &CStr| find(file, name, pabi.symbol_version());
            let register = private(pabi.register_symbol())?;
            let public = [c"ibv_dontfork_range", c"ibv_dofork_range"].map(|name| file.symbol(name));
            // SAFETY: the symbols' types, as all releases with this private ABI have them.
            unsafe {
                Some(Library {
                    pabi,
                    level: Level::detect(|name| !file.symbol(name).is_null()),
                    release: release(register),
                    register_driver: std::mem::transmute::<*mut c_void, RegisterDriver>(register),
                    init_and_alloc_context: std::mem::transmute::<*mut c_void, InitAndAllocContext>(private(
                        INIT_AND_ALLOC_CONTEXT,
                    )?),
                    set_ops: std::mem::transmute::<*mut c_void, SetOps>(private(SET_OPS)?),
                    uninit_context: std::mem::transmute::<*mut c_void, UninitContext>(private(
                        UNINIT_CONTEXT,
                    )?),
                    fork_ranges: (!public.contains(&std::ptr::null_mut())).then(|| {
                        public.map(|address| std::mem::transmute::<*mut c_void, ForkRange>(address))
                    }),
                })
            }
        })
    }

    /// Removes one count of a range that libibverbs withholds from children: without a count,
    /// children get the range.
    pub(crate) fn give_to_children(&self, addr: *mut c_void, length: usize) {
        if let Some([_, dofork]) = self.fork_ranges {
            dofork(addr, length);
        }
    }

    /// Adds a count of a range that libibverbs withholds from children, because libibverbs removes
    /// one next.
    pub(crate) fn withhold_from_children(&self, addr: *mut c_void, length: usize) {
        if let Some([dontfork, _]) = self.fork_ranges {
            dontfork(addr, length);
        }
    }
}

/// Finds a private symbol: by its version, or without a version in a copy that was linked into
/// another file, and where the loader knows no versions (musl).
fn find(file: &LoadedFile, name: &CStr, version: &CStr) -> Option<*mut c_void> {
    [file.versioned(name, version), file.symbol(name)]
        .into_iter()
        .find(|address| !address.is_null())
}

/// The release in the name of the file that contains `address`: 44 for `libibverbs.so.1.14.44.0`.
fn release(address: *mut c_void) -> Option<u32> {
    release_in(&target_of(&file_of(address)?.name))
}

/// The name of the file that a chain of links leads to: `libibverbs.so.1` →
/// `libibverbs.so.1.14.44.0`.
fn target_of(path: &CStr) -> String {
    let mut path = std::path::PathBuf::from(path.to_string_lossy().into_owned());
    for _ in 0..8 {
        let Ok(next) = rustix::fs::readlink(&path, Vec::new()) else {
            break;
        };
        let next = next.to_string_lossy().into_owned();
        path = path
            .parent()
            .map_or_else(|| next.clone().into(), |parent| parent.join(&next));
    }
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn release_in(name: &str) -> Option<u32> {
    // so.<library>.<symbols>.<release>.<patch>
    let (_, version) = name.split_once(".so.")?;
    version.split('.').nth(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_in_the_file_name() {
        assert_eq!(release_in("libibverbs.so.1.14.44.0"), Some(44));
        assert_eq!(release_in("libibverbs-6cb1d12f.so.1.15.59.0"), Some(59));
        assert_eq!(release_in("libibverbs.so.1"), None);
        assert_eq!(release_in("python3"), None);
    }
}
