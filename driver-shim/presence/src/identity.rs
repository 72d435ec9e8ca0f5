//! The identity of a process on this host: the scope of a presence tree, and the node GUID.

use std::fmt::Write as _;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// A 64-bit digest (FNV-1a, with a final mix). It is the same on every build and machine, which the
/// standard library does not promise for its own hash; not for secrets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Digest(u64);

impl Digest {
    pub(super) fn new(purpose: &str) -> Digest {
        Digest(0xcbf2_9ce4_8422_2325).with(purpose.as_bytes())
    }

    /// Adds a piece to the digest; the boundaries of pieces count.
    pub(super) fn with(self, piece: &[u8]) -> Digest {
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        let hash = piece.iter().fold(self.0, |hash, &byte| step(hash, byte));
        let length = (piece.len() as u64).to_le_bytes();
        Digest(length.iter().fold(hash, |hash, &byte| step(hash, byte)))
    }

    /// 64 well mixed bits.
    pub(super) fn value(self) -> u64 {
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

/// The user and network namespace of a thread: a presence tree is valid for exactly one scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Scope {
    pub(super) uid: u32,
    /// The calling thread's network namespace: device and inode of its handle; zeros without /proc.
    pub(super) netns: (u64, u64),
}

impl Scope {
    pub(super) fn current() -> Scope {
        let netns =
            rustix::fs::stat("/proc/thread-self/ns/net").map_or((0, 0), |stat| (stat.st_dev, stat.st_ino));
        Scope {
            uid: rustix::process::geteuid().as_raw(),
            netns,
        }
    }
}

/// The node GUID of the device with this index: an EUI-64 of the locally administered kind, the
/// same for all processes in this network namespace on this boot of this host, and different in all
/// others. librdmacm distinguishes devices by it.
pub(super) fn node_guid(netns: (u64, u64), index: usize) -> u64 {
    // Containers share a machine id with their image, virtual machines with their template; no two
    // boots share a boot id.
    let host = read_small("/proc/sys/kernel/random/boot_id")
        .or_else(|_| read_small("/etc/machine-id"))
        .unwrap_or_default();
    let node = rustix::system::uname().nodename().to_bytes().to_vec();
    let digest = Digest::new("node guid")
        .with(&host)
        .with(&node)
        .with(&netns.0.to_le_bytes())
        .with(&netns.1.to_le_bytes());
    let digest = match index {
        0 => digest,
        index => digest.with(&(index as u64).to_le_bytes()),
    };
    const LOCAL: u64 = 0x02 << 56;
    const GROUP: u64 = 0x01 << 56;
    (digest.value() | LOCAL) & !GROUP
}

/// A GUID as sysfs writes it: `0250:56ff:fe00:0001`.
pub(super) fn guid_text(guid: u64) -> String {
    words(&guid.to_be_bytes())
}

/// Bytes in network order as colon-separated 16-bit words.
pub(super) fn words(bytes: &[u8]) -> String {
    let mut text = String::new();
    for pair in bytes.chunks(2) {
        let separator = if text.is_empty() { "" } else { ":" };
        let _ = text.write_str(separator);
        for byte in pair {
            let _ = write!(text, "{byte:02x}");
        }
    }
    text
}

/// The beginning of a small file.
fn read_small(path: &str) -> Result<Vec<u8>, Errno> {
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = vec![0; 128];
    let n = rustix::io::read(&fd, bytes.as_mut_slice())?;
    bytes.truncate(n);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guid_is_a_local_unicast_eui64_of_this_namespace() {
        let guid = node_guid((4, 1), 0);
        assert_eq!(guid, node_guid((4, 1), 0));
        assert_ne!(guid, node_guid((4, 2), 0));
        assert_ne!(guid, node_guid((4, 1), 1));
        assert_eq!((guid >> 56) & 0x03, 0x02);
    }

    #[test]
    fn a_digest_separates_its_pieces() {
        let digest = |a: &str, b: &str| Digest::new("").with(a.as_bytes()).with(b.as_bytes()).value();
        assert_ne!(digest("ab", "c"), digest("a", "bc"));
        assert_ne!(digest("", "abc"), digest("abc", ""));
    }

    #[test]
    fn guids_look_like_the_kernels() {
        assert_eq!(guid_text(0x0250_56ff_fe00_0001), "0250:56ff:fe00:0001");
    }
}
