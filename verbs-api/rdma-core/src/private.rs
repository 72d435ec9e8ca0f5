//! The private structs of rdma-core's `driver.h` whose layout is the same in all releases from 34
//! on.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::sync::atomic::AtomicI32;

use super::consts::{IBV_SYSFS_NAME_MAX, IBV_SYSFS_PATH_MAX, ibv_access_flags, ibv_node_type, ibv_srq_type};
use super::objects::{ibv_context, ibv_cq, ibv_cq_ex, ibv_device, ibv_mr, ibv_qp, ibv_qp_ex, ibv_srq};

/// A `verbs_context`, whose layout depends on the [`Level`](super::Level); used only through
/// pointers. Its `ibv_context` is at [`Level::context_offset`](super::Level::context_offset).
#[repr(C)]
pub struct verbs_context {
    _opaque: [u8; 0],
}

/// A node of a doubly linked list.
#[repr(C)]
#[derive(Debug)]
pub struct list_node {
    /// Next node.
    pub next: *mut list_node,
    /// Previous node.
    pub prev: *mut list_node,
}

/// `verbs_match_ent.kind`: end of the table.
pub const VERBS_MATCH_SENTINEL: u8 = 0;
/// `verbs_match_ent.kind`: match `modalias`, or `rdma_device:N<name>`, with fnmatch(3).
pub const VERBS_MATCH_MODALIAS: u8 = 2;
/// `verbs_match_ent.kind`: match the kernel's driver id.
pub const VERBS_MATCH_DRIVER_ID: u8 = 3;

/// One rule by which a provider recognises its device.
#[repr(C)]
pub struct verbs_match_ent {
    /// Data for the provider.
    pub driver_data: *mut c_void,
    /// `char *modalias` or `uint64_t driver_id`, depending on `kind`.
    pub modalias_or_driver_id: u64,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI device.
    pub device: u16,
    /// One of `VERBS_MATCH_*`.
    pub kind: u8,
}

/// A device found by libibverbs' scan, which allocates it. Only this prefix has the same layout in
/// all releases.
#[repr(C)]
pub struct verbs_sysfs_dev {
    /// List of devices.
    pub entry: list_node,
    /// Data for the provider.
    pub provider_data: *mut c_void,
    /// The entry of the match table that matched.
    pub match_: *const verbs_match_ent,
    /// Flags of the attributes that libibverbs has read.
    pub flags: c_uint,
    /// Name of the uverbs character device, `uverbs0`.
    pub sysfs_name: [c_char; IBV_SYSFS_NAME_MAX],
    /// Device number of the character device.
    pub sysfs_cdev: libc::dev_t,
    /// Name of the RDMA device, `urnic0`.
    pub ibdev_name: [c_char; IBV_SYSFS_NAME_MAX],
    /// Path of the RDMA device, `<sysfs>/class/infiniband/urnic0`.
    pub ibdev_path: [c_char; IBV_SYSFS_PATH_MAX],
    /// The bus's identification of the device.
    pub modalias: [c_char; 512],
    /// GUID of the node, in host byte order.
    pub node_guid: u64,
    /// The kernel's driver id; set only for devices found by netlink.
    pub driver_id: u32,
    /// Type of the node: CA, RNIC, …
    pub node_type: ibv_node_type,
    /// The kernel's index, −1 for a device found by sysfs.
    pub ibdev_idx: c_int,
}

/// The operations that a provider registers.
#[repr(C)]
pub struct verbs_device_ops {
    /// Name of the provider, for messages.
    pub name: *const c_char,
    /// Lowest supported `abi_version` of the uverbs device.
    pub match_min_abi_version: u32,
    /// Highest supported `abi_version` of the uverbs device.
    pub match_max_abi_version: u32,
    /// Table that ends with a [`VERBS_MATCH_SENTINEL`]. Not null: libibverbs reads it for each
    /// device whose driver the kernel has named over netlink.
    pub match_table: *const verbs_match_ent,
    /// Used for static linking.
    pub static_providers: *const *const verbs_device_ops,
    /// Matches a device. If present, it replaces the match table.
    pub match_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> bool>,
    /// Opens the device. It owns the fd as soon as it is called, even if it fails.
    pub alloc_context:
        Option<unsafe extern "C" fn(*mut ibv_device, c_int, *mut c_void) -> *mut verbs_context>,
    /// Opens the device on an fd of another process; if absent, libibverbs returns EOPNOTSUPP.
    pub import_context: Option<unsafe extern "C" fn(*mut ibv_device, c_int) -> *mut verbs_context>,
    /// Creates the device that `ibv_get_device_list` returns.
    pub alloc_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> *mut verbs_device>,
    /// Frees the device.
    pub uninit_device: Option<unsafe extern "C" fn(*mut verbs_device)>,
}

// SAFETY: the pointers in the struct lead to immutable statics for the life of the process.
unsafe impl Sync for verbs_device_ops {}
// SAFETY: the entry is an immutable static; its only pointer member is an address that libibverbs
// returns to the provider.
unsafe impl Sync for verbs_match_ent {}

/// A device as libibverbs stores it. The provider zeroes it; libibverbs fills it.
#[repr(C)]
pub struct verbs_device {
    /// The public part; must be first.
    pub device: ibv_device,
    /// The operations of the provider.
    pub ops: *const verbs_device_ops,
    /// Number of lists and contexts that hold the device.
    pub refcount: AtomicI32,
    /// List of devices.
    pub entry: list_node,
    /// The scan's entry for the device.
    pub sysfs: *mut verbs_sysfs_dev,
    /// Features of the kernel's core: [`IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS`].
    pub core_support: u64,
}

/// `verbs_device.core_support`: optional access flags reach `reg_mr` instead of being stripped.
pub const IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS: u64 = 1;

/// A CQ as providers allocate it.
#[repr(C)]
pub union verbs_cq {
    /// Used by `ibv_create_cq`.
    pub cq: core::mem::ManuallyDrop<ibv_cq>,
    /// Used by `ibv_create_cq_ex`.
    pub cq_ex: core::mem::ManuallyDrop<ibv_cq_ex>,
}

/// An SRQ as providers allocate it.
#[repr(C)]
pub struct verbs_srq {
    /// The public part; must be first.
    pub srq: ibv_srq,
    /// Basic, XRC or tag-matching type.
    pub srq_type: ibv_srq_type,
    /// XRC domain of an XRC SRQ.
    pub xrcd: *mut c_void,
    /// CQ of an XRC or tag-matching SRQ.
    pub cq: *mut ibv_cq,
    /// Number of an XRC SRQ.
    pub srq_num: u32,
}

/// `verbs_mr.mr_type` of an ordinary memory region.
pub const IBV_MR_TYPE_MR: u32 = 0;
/// `verbs_mr.mr_type` of a region without memory: libibverbs does not keep its pages from forks.
pub const IBV_MR_TYPE_NULL_MR: u32 = 1;
/// `verbs_mr.mr_type` of a region that another context registered: libibverbs does not reregister
/// it, and leaves its pages alone.
pub const IBV_MR_TYPE_IMPORTED_MR: u32 = 2;
/// `verbs_mr.mr_type` of a region of a dma-buf, which has no address in the program.
pub const IBV_MR_TYPE_DMABUF_MR: u32 = 3;

/// An MR as providers allocate it; `ibv_dereg_mr` and `ibv_rereg_mr` read its tail.
#[repr(C)]
pub struct verbs_mr {
    /// The public part; must be first.
    pub ibv_mr: ibv_mr,
    /// [`IBV_MR_TYPE_MR`] or a special kind.
    pub mr_type: u32,
    /// Access flags of the registration.
    pub access: ibv_access_flags,
}

/// A QP as providers allocate it, as large as the largest known.
///
/// `ibv_qp_to_qp_ex()` reads the `comp_mask` after `ibv_qp_ex`, which grew while the private ABI
/// stayed at 34: see [`qp_comp_mask_offset`]. A zero `comp_mask` means "no extended interface" in
/// every release.
#[repr(C)]
pub struct verbs_qp {
    /// The public part; must be first.
    pub qp: VerbsQpPublic,
    /// Room for `comp_mask` and `xrcd` at their newest offsets.
    pub tail: [u64; 2],
}

/// `ibv_qp` or `ibv_qp_ex`, at the same address.
#[repr(C)]
pub union VerbsQpPublic {
    /// Used by `ibv_create_qp`.
    pub qp: core::mem::ManuallyDrop<ibv_qp>,
    /// Used by `ibv_create_qp_ex` with send operations.
    pub qp_ex: core::mem::ManuallyDrop<ibv_qp_ex>,
}

/// `verbs_qp.comp_mask`: the QP has the work-request builder interface.
pub const VERBS_QP_EX: u32 = 1 << 1;

/// Offset in bytes of `verbs_qp.comp_mask` in an rdma-core release (its major number).
///
/// No exported symbol distinguishes these releases; the release is in the library's file name,
/// `libibverbs.so.1.14.<release>.0`.
pub const fn qp_comp_mask_offset(release: u32) -> usize {
    MUTEX_MORE
        + match release {
            ..=43 => 344,
            44 => 352,
            45.. => 360,
        }
}

/// Number of bytes by which a mutex of the C library, and a struct that contains one, is longer
/// than on x86-64: 8 on arm64.
const MUTEX_MORE: usize = size_of::<libc::pthread_mutex_t>() - 40;

/// Symbol: `verbs_register_driver_NN`.
pub type RegisterDriver = unsafe extern "C" fn(*const verbs_device_ops);
/// Symbol: `_verbs_init_and_alloc_context(device, cmd_fd, alloc_size, offset of verbs_context,
/// driver_id)`. Returns zeroed memory from calloc(3) with the context initialised; takes the fd.
pub type InitAndAllocContext =
    unsafe extern "C" fn(*mut ibv_device, c_int, usize, *mut verbs_context, u32) -> *mut c_void;
/// Symbol: `verbs_set_ops`. An operation whose pointer is null stays unchanged (at first it returns
/// EOPNOTSUPP).
pub type SetOps = unsafe extern "C" fn(*mut verbs_context, *const c_void);
/// Symbol: `verbs_uninit_context`. Closes the context's fds; the caller frees its memory.
pub type UninitContext = unsafe extern "C" fn(*mut verbs_context);

/// Name of [`InitAndAllocContext`].
pub const INIT_AND_ALLOC_CONTEXT: &core::ffi::CStr = c"_verbs_init_and_alloc_context";
/// Name of [`SetOps`].
pub const SET_OPS: &core::ffi::CStr = c"verbs_set_ops";
/// Name of [`UninitContext`].
pub const UNINIT_CONTEXT: &core::ffi::CStr = c"verbs_uninit_context";

const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<verbs_device_ops>() == 72);
    assert!(offset_of!(verbs_device_ops, match_min_abi_version) == 8);
    assert!(offset_of!(verbs_device_ops, match_max_abi_version) == 12);
    assert!(offset_of!(verbs_device_ops, match_table) == 16);
    assert!(offset_of!(verbs_device_ops, static_providers) == 24);
    assert!(offset_of!(verbs_device_ops, match_device) == 32);
    assert!(offset_of!(verbs_device_ops, alloc_context) == 40);
    assert!(offset_of!(verbs_device_ops, import_context) == 48);
    assert!(offset_of!(verbs_device_ops, alloc_device) == 56);
    assert!(offset_of!(verbs_device_ops, uninit_device) == 64);

    assert!(size_of::<verbs_device>() == 712);
    assert!(size_of::<ibv_device>() == 664);
    assert!(size_of::<ibv_context>() == 328 + MUTEX_MORE);
    assert!(offset_of!(verbs_device, ops) == 664);
    assert!(offset_of!(verbs_device, refcount) == 672);
    assert!(offset_of!(verbs_device, entry) == 680);
    assert!(offset_of!(verbs_device, sysfs) == 696);
    assert!(offset_of!(verbs_device, core_support) == 704);

    assert!(size_of::<verbs_match_ent>() == 24);
    assert!(offset_of!(verbs_match_ent, kind) == 20);

    assert!(offset_of!(verbs_sysfs_dev, sysfs_name) == 36);
    assert!(offset_of!(verbs_sysfs_dev, sysfs_cdev) == 104);
    assert!(offset_of!(verbs_sysfs_dev, ibdev_name) == 112);
    assert!(offset_of!(verbs_sysfs_dev, ibdev_path) == 176);
    assert!(offset_of!(verbs_sysfs_dev, node_guid) == 944);
    assert!(offset_of!(verbs_sysfs_dev, driver_id) == 952);
    assert!(offset_of!(verbs_sysfs_dev, node_type) == 956);
    assert!(offset_of!(verbs_sysfs_dev, ibdev_idx) == 960);

    assert!(size_of::<verbs_cq>() == 288 + MUTEX_MORE);
    assert!(size_of::<verbs_srq>() == 160 + MUTEX_MORE);
    assert!(size_of::<verbs_mr>() == 56);
    assert!(offset_of!(verbs_mr, mr_type) == 48);
    assert!(offset_of!(verbs_mr, access) == 52);
    assert!(offset_of!(verbs_qp, tail) == qp_comp_mask_offset(45));
    assert!(offset_of!(ibv_qp_ex, wr_atomic_write) == qp_comp_mask_offset(43));
    assert!(offset_of!(ibv_qp_ex, wr_flush) == qp_comp_mask_offset(44));
};
