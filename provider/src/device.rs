//! A device as an entry in libibverbs' list of devices.

use std::ffi::{CStr, c_char};

use urnic_presence::{Presence, UVERBS_DEVICE_ABI};
use urnic_rdma_core::{verbs_device, verbs_device_ops, verbs_sysfs_dev};

use crate::guard::guarded;
use crate::opening;

/// The registered operations; libibverbs copies nothing, so each registration has its own.
pub(crate) const OPS: verbs_device_ops = verbs_device_ops {
    name: c"urnic".as_ptr(),
    match_min_abi_version: UVERBS_DEVICE_ABI,
    match_max_abi_version: UVERBS_DEVICE_ABI,
    match_table: std::ptr::null(),
    static_providers: std::ptr::null(),
    match_device: Some(match_device),
    alloc_context: Some(opening::alloc_context),
    import_context: Some(opening::import_context),
    alloc_device: Some(alloc_device),
    uninit_device: Some(uninit_device),
};

/// Matches a device by its name, and by a character device that no RDMA driver has.
unsafe extern "C" fn match_device(found: *mut verbs_sysfs_dev) -> bool {
    // SAFETY: libibverbs passes a device of its scan, with its names terminated.
    let (device, name) = unsafe { (&*found, text(&(*found).ibdev_name)) };
    rustix::fs::stat("/dev/null").is_ok_and(|null| null.st_rdev == device.sysfs_cdev)
        && guarded(Presence::current).is_ok_and(|presence| presence.device(name).is_some())
}

unsafe extern "C" fn alloc_device(_: *mut verbs_sysfs_dev) -> *mut verbs_device {
    // SAFETY: calloc; all zeroes are a verbs_device, which libibverbs fills afterwards.
    unsafe { libc::calloc(1, size_of::<verbs_device>()).cast() }
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: the device came from alloc_device, and libibverbs no longer holds it.
    unsafe { libc::free(device.cast()) };
}

fn text(name: &[c_char]) -> &[u8] {
    // SAFETY: c_char and u8 have the same layout.
    let bytes = unsafe { std::slice::from_raw_parts(name.as_ptr().cast::<u8>(), name.len()) };
    CStr::from_bytes_until_nul(bytes).map_or(&[], CStr::to_bytes)
}
