//! Selects the paths that are served from the presence tree.
//!
//! Runs on every `open`, `stat` and the like of the program, also in signal handlers: it compares
//! bytes, and needs neither memory nor a lock unless the path is ours.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;

use super::Presence;
use super::hw_counter::HwCounter;
use super::plan::{FUNCTION, Shown};

/// Longest path the kernel takes, with its end (`PATH_MAX`).
pub const PATH_MAX: usize = 4096;

/// The kind of file at a path of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// A folder or file of `/sys/class`, or something in `/dev/infiniband` that is not our device.
    Tree,
    /// The folder that libibverbs scans for devices.
    DeviceScan,
    /// The node of a device of ours.
    Uverbs,
    /// The node of the connection manager.
    RdmaCm,
    /// A file in `hw_counters` or `counters` of the device with this index.
    HwCounter(usize, HwCounter),
}

/// Room for one path, on the stack of the calling function.
#[derive(Debug)]
pub struct PathBuffer([MaybeUninit<u8>; PATH_MAX]);

impl PathBuffer {
    /// Makes an empty buffer.
    #[inline]
    pub fn new() -> PathBuffer {
        PathBuffer([MaybeUninit::uninit(); PATH_MAX])
    }
}

impl Default for PathBuffer {
    fn default() -> Self {
        PathBuffer::new()
    }
}

/// The folders that are ours, as path components.
const OURS: [&[&[u8]]; 5] = [
    &[b"sys", b"class", b"infiniband"],
    &[b"sys", b"class", b"infiniband_verbs"],
    &[b"sys", b"class", b"misc", b"rdma_cm"],
    &[b"dev", b"infiniband"],
    // Where links of the class folders lead.
    &[b"sys", b"devices", b"urnic"],
];

/// Whether the path may be ours. False for nearly every path of a program, after a few bytes; such
/// a path is certainly not ours.
///
/// # Safety
/// `path` is null or a C string.
#[inline]
pub unsafe fn may_be_ours(path: *const c_char) -> bool {
    if path.is_null() {
        return false;
    }
    let path: *const u8 = path.cast();
    // SAFETY: a byte is read only if the byte before it is not the terminator.
    unsafe {
        *path == b'/'
            && match *path.add(1) {
                b's' => *path.add(2) == b'y' && *path.add(3) == b's' && *path.add(4) == b'/',
                b'd' => *path.add(2) == b'e' && *path.add(3) == b'v' && *path.add(4) == b'/',
                other => other == b'/',
            }
    }
}

/// Whether the absolute path, which begins like ours, is served. Repeated slashes are accepted,
/// `..` is not.
pub fn is_ours(path: &CStr) -> bool {
    OURS.iter()
        .any(|folder| rest_under(path.to_bytes(), folder).is_some())
}

/// The part of `path` after `folder`; None if `path` is not under `folder`.
fn rest_under<'p>(path: &'p [u8], folder: &[&[u8]]) -> Option<&'p [u8]> {
    let mut rest = path;
    for part in folder {
        let slashes = rest.iter().take_while(|&&byte| byte == b'/').count();
        rest = rest.get(slashes..).filter(|_| slashes > 0)?.strip_prefix(*part)?;
    }
    matches!(rest.first(), None | Some(b'/')).then_some(rest)
}

impl Presence {
    /// The path of the real file that stands for `path`, written into `buffer`; None when the path
    /// is not ours or too long.
    pub fn redirect<'b>(&self, path: &CStr, buffer: &'b mut PathBuffer) -> Option<(&'b CStr, Target)> {
        if !is_ours(path) {
            return None;
        }
        let root = self.root().as_os_str().as_bytes();
        let place = self.place(path.to_bytes());
        let pieces = root.iter().chain(path.to_bytes_with_nul());
        let length = root.len() + path.to_bytes_with_nul().len();
        let target = buffer.0.get_mut(..length)?;
        for (to, &from) in target.iter_mut().zip(pieces) {
            to.write(from);
        }
        // SAFETY: every byte of `target` was written just now.
        let written = unsafe { &*(std::ptr::from_ref::<[MaybeUninit<u8>]>(target) as *const [u8]) };
        Some((CStr::from_bytes_with_nul(written).ok()?, place))
    }

    fn place(&self, path: &[u8]) -> Target {
        let blank = |rest: &[u8]| rest.iter().all(|&byte| byte == b'/');
        if rest_under(path, &[b"sys", b"class", b"infiniband_verbs"]).is_some_and(blank) {
            return Target::DeviceScan;
        }
        let is_node = |name: &[u8]| {
            rest_under(path, &[b"dev", b"infiniband", name]).is_some_and(|rest| rest.is_empty())
        };
        match () {
            () if self
                .devices()
                .iter()
                .any(|device| is_node(device.uverbs().as_bytes())) =>
            {
                Target::Uverbs
            }
            () if is_node(b"rdma_cm") => Target::RdmaCm,
            () => {
                let counter = |device: &Shown| Some((device.index(), hw_counter(path, device.name())?));
                let counter = self.devices().iter().find_map(counter);
                counter.map_or(Target::Tree, |(device, counter)| {
                    Target::HwCounter(device, counter)
                })
            }
        }
    }
}

/// The counter of a file of a device, by its path.
fn hw_counter(path: &[u8], device: &str) -> Option<HwCounter> {
    let device = device.as_bytes();
    let by_class = rest_under(path, &[b"sys", b"class"]);
    let in_class = by_class.or_else(|| {
        // Where the link of the class folder leads.
        let folder = rest_under(path, &[b"sys", b"devices", b"urnic"])?;
        let name = folder.iter().position(|&byte| byte != b'/')?;
        let rest = folder.get(name..)?.strip_prefix(device)?;
        rest.strip_prefix(FUNCTION.as_bytes())
    })?;
    let in_port = rest_under(in_class, &[b"infiniband", device, b"ports", b"1"])?;
    let of = |folder: &[u8]| {
        let name = rest_under(in_port, &[folder])?;
        let slashes = name.iter().take_while(|&&byte| byte == b'/').count();
        name.get(slashes..)
    };
    match of(b"hw_counters") {
        Some(name) => HwCounter::named(name),
        None => HwCounter::named_of_port(of(b"counters")?),
    }
}

#[cfg(test)]
mod tests {
    use urnic_device::counter::Counter;

    use super::*;

    fn ours(path: &CStr) -> bool {
        // SAFETY: `path` is a C string.
        let candidate = unsafe { may_be_ours(path.as_ptr()) };
        assert!(
            candidate || !is_ours(path),
            "{path:?} is ours and was not let through"
        );
        is_ours(path)
    }

    #[test]
    fn the_rdma_folders_are_ours() {
        for path in [
            c"/sys/class/infiniband",
            c"/sys/class/infiniband/",
            c"/sys/class/infiniband/urnic0/node_guid",
            c"/sys//class///infiniband_verbs/uverbs0/dev",
            c"//sys/class/infiniband",
            c"/sys/class/misc/rdma_cm/abi_version",
            c"/dev/infiniband",
            c"/dev/infiniband/uverbs0",
            c"/sys/devices/urnic/urnic0/numa_node",
        ] {
            assert!(ours(path), "{path:?}");
        }
    }

    #[test]
    fn counters_are_known_by_their_files() {
        let folder = "/sys/class/infiniband/urnic0/ports/1/hw_counters";
        let of = |rest: &str| hw_counter(format!("{folder}{rest}").as_bytes(), "urnic0");
        assert_eq!(of("/tx_bytes"), Some(HwCounter::Device(Counter::TxBytes)));
        assert_eq!(of("//rx_messages"), Some(HwCounter::Device(Counter::RxMessages)));
        for rest in ["", "/", "/nothing", "/tx_bytes/", "/../state"] {
            assert_eq!(of(rest), None, "{rest}");
        }
        let port = |path: &str| hw_counter(path.as_bytes(), "urnic0").map(HwCounter::name);
        let folder = "/sys/class/infiniband/urnic0/ports/1/counters";
        assert_eq!(
            port(&format!("{folder}/port_xmit_data")).as_deref(),
            Some("port_xmit_data")
        );
        assert_eq!(port(&format!("{folder}/tx_bytes")), None);
        let real = "//sys/devices/urnic//urnic0:00.0/infiniband/urnic0/ports/1";
        let xmit = port(&format!("{real}/counters/port_xmit_data"));
        assert_eq!(xmit.as_deref(), Some("port_xmit_data"));
        let bytes = port(&format!("{real}/hw_counters/tx_bytes"));
        assert_eq!(bytes.as_deref(), Some("tx_bytes"));
        for folder in [
            "urnic1:00.0/infiniband/urnic0",
            "urnic0:00.0/infiniband/urnic1",
            "urnic0/infiniband/urnic0",
        ] {
            let path = format!("/sys/devices/urnic/{folder}/ports/1/counters/port_xmit_data");
            assert_eq!(port(&path), None, "{path}");
        }
    }

    #[test]
    fn nothing_else_is() {
        for path in [
            c"",
            c"/",
            c"/s",
            c"/sys",
            c"/sys/class",
            c"/sys/class/net",
            c"/sys/class/infiniband_mad",
            c"/sys/class/infinibandit",
            c"/sys/class/misc",
            c"/dev/null",
            c"/dev/infiniband2",
            c"sys/class/infiniband",
            c"/tmp/sys/class/infiniband",
            c"/etc/passwd",
        ] {
            assert!(!ours(path), "{path:?}");
        }
        // SAFETY: a null path is allowed.
        assert!(!unsafe { may_be_ours(std::ptr::null()) });
    }
}
