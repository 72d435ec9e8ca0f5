//! Memory that another process has mapped from a file or a segment, mapped here as well.
//!
//! The kernel lists in `/proc/PID/maps` what is mapped at an address of the process. The file is
//! found by a descriptor of the process, by its path, or by the kernel's own links (`map_files`,
//! for root alone); a System V segment has a number. Memory of a file without any of these, or on a
//! file system that shows other numbers in the list than in stat(2), cannot be mapped.

use super::mapping::Mapping;
use super::shared_memory::map;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, Stat, fstat, makedev, open, openat, readlinkat, stat};
use rustix::io::Errno;
use rustix::mm::{ProtFlags, munmap};
use rustix::process::Pid;
use std::ops::Deref;
use std::ptr::NonNull;

/// Most descriptors of a process that are searched for a file.
const DESCRIPTORS: usize = 1024;
/// Most bytes of a process's list of mappings.
const MAPS: usize = 16 << 20;
/// The kernel's name of a System V segment in the list of mappings.
const SEGMENT: &str = "/SYSV";

/// A part of a file or segment that a process has mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Origin {
    device: u64,
    inode: u64,
    /// The offset of `start` in the file.
    offset: u64,
    /// First address in the process, and the address after the last.
    start: u64,
    end: u64,
    path: String,
}

impl Origin {
    /// The file that is mapped at the `len` bytes at `address` of a process, if they are one part
    /// of one file, mapped to be read and written by all.
    pub(crate) fn find(process: Pid, address: u64, len: u64) -> Option<Origin> {
        let maps = read_file(&format!("/proc/{}/maps", process.as_raw_nonzero())).ok()?;
        Origin::in_list(&maps, address, address.checked_add(len)?)
    }

    /// The first address of this part in the process.
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    fn in_list(maps: &str, address: u64, end: u64) -> Option<Origin> {
        let mut found: Option<Origin> = None;
        for line in maps.lines() {
            let Some((origin, is_shared)) = parse(line) else {
                continue;
            };
            if origin.end <= address {
                continue;
            }
            match &mut found {
                None if is_shared && origin.start <= address => found = Some(origin),
                Some(before) if is_shared && before.continues_with(&origin) => before.end = origin.end,
                _ => return None,
            }
            if found.as_ref().is_some_and(|found| found.end >= end) {
                return found;
            }
        }
        None
    }

    fn continues_with(&self, next: &Origin) -> bool {
        let is_next = self.end == next.start && self.offset + (self.end - self.start) == next.offset;
        is_next && (self.device, self.inode) == (next.device, next.inode)
    }

    fn is_file(&self, file: &Stat) -> bool {
        // Anything else may do something when it is opened.
        FileType::from_raw_mode(file.st_mode) == FileType::RegularFile
            && (file.st_dev, file.st_ino) == (self.device, self.inode)
    }

    /// Whether this part has all of `other`, which may be mapped at another address.
    fn contains(&self, other: &Origin) -> bool {
        let last = |origin: &Origin| origin.offset + (origin.end - origin.start);
        (self.device, self.inode, &self.path) == (other.device, other.inode, &other.path)
            && self.offset <= other.offset
            && last(other) <= last(self)
    }

    fn open(&self, process: Pid) -> Option<OwnedFd> {
        let process = format!("/proc/{}", process.as_raw_nonzero());
        let link = format!("{process}/map_files/{:x}-{:x}", self.start, self.end);
        let path = format!("{process}/root{}", self.path);
        [link, path]
            .iter()
            .find_map(|path| self.open_if_it_is(path))
            .or_else(|| self.descriptor(&format!("{process}/fd")))
    }

    /// A file of the process, if one of its descriptors has this path.
    fn descriptor(&self, folder: &str) -> Option<OwnedFd> {
        let folder = open(
            folder,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .ok()?;
        let entries = Dir::read_from(&folder).ok()?;
        entries.flatten().take(DESCRIPTORS).find_map(|entry| {
            let target = readlinkat(&folder, entry.file_name(), Vec::new()).ok()?;
            let is_same = target.as_bytes() == self.path.as_bytes();
            let number = entry.file_name().to_str().ok().filter(|_| is_same)?;
            let path = OFlags::PATH | OFlags::CLOEXEC;
            self.reopen(&openat(&folder, number, path, Mode::empty()).ok()?)
        })
    }

    fn open_if_it_is(&self, path: &str) -> Option<OwnedFd> {
        self.reopen(&open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?)
    }

    /// The file of a descriptor that is only a path, if it is this one.
    fn reopen(&self, path: &OwnedFd) -> Option<OwnedFd> {
        let is_it = self.is_file(&fstat(path).ok()?);
        let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(path));
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOCTTY;
        is_it
            .then(|| openat(CWD, own, flags, Mode::empty()).ok())
            .flatten()
    }
}

/// A line of the list of mappings, and whether writes there are shared with other processes.
fn parse(line: &str) -> Option<(Origin, bool)> {
    let (range, rest) = line.split_once(' ')?;
    let (rights, rest) = rest.split_once(' ')?;
    let (offset, rest) = rest.split_once(' ')?;
    let (device, rest) = rest.split_once(' ')?;
    let (inode, path) = rest.split_once(' ').unwrap_or((rest, ""));
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    let (start, end) = range.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let device = makedev(number(major)?.try_into().ok()?, number(minor)?.try_into().ok()?);
    let origin = Origin {
        device,
        inode: inode.parse().ok()?,
        offset: number(offset)?,
        start: number(start)?,
        end: number(end)?,
        path: path.trim_start_matches(' ').to_owned(),
    };
    let shared = rights.starts_with("rw") && rights.ends_with('s');
    let fits = origin.end.checked_sub(origin.start)?.checked_add(origin.offset);
    fits.map(|_| (origin, shared))
}

fn read_file(path: &str) -> Result<String, Errno> {
    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    let mut chunk = vec![0; 1 << 16];
    while bytes.len() < MAPS {
        match rustix::io::read(&file, &mut chunk) {
            Ok(0) => break,
            Ok(n) => bytes.extend_from_slice(chunk.get(..n).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Such memory, mapped here. A truncated file makes accesses fault, so they are those of
/// [`in_place`](super::revocable::in_place).
#[derive(Debug)]
pub(crate) struct ForeignMapping {
    origin: Origin,
    mapping: Mapping,
    /// A System V segment is given back in another way.
    is_segment: bool,
}

impl ForeignMapping {
    /// Maps the memory that a process has mapped.
    pub(crate) fn open(process: Pid, origin: Origin) -> Option<ForeignMapping> {
        let len = usize::try_from(origin.end - origin.start).ok()?;
        if origin.path.starts_with(SEGMENT) {
            return attach(process, origin, len);
        }
        let file = origin.open(process)?;
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let mapping = map(file.as_fd(), origin.offset, len, rights).ok()?;
        Some(ForeignMapping {
            origin,
            mapping,
            is_segment: false,
        })
    }

    /// Whether all of this memory of the process is here.
    pub(crate) fn contains(&self, origin: &Origin) -> bool {
        self.origin.contains(origin)
    }

    /// The offset of a contained part in this mapping.
    pub(crate) fn place_of(&self, origin: &Origin) -> u64 {
        origin.offset - self.origin.offset
    }
}

/// Attaches a System V segment. Its inode is its number, which each IPC namespace counts for
/// itself.
fn attach(process: Pid, origin: Origin, len: usize) -> Option<ForeignMapping> {
    let namespace = |of: &str| {
        stat(format!("/proc/{of}/ns/ipc"))
            .map(|s| (s.st_dev, s.st_ino))
            .ok()
    };
    let theirs = namespace(&process.as_raw_nonzero().to_string())?;
    let number = libc::c_int::try_from(origin.inode).ok()?;
    if namespace("self")? != theirs || origin.offset != 0 {
        return None;
    }
    // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping.
    let start = unsafe { libc::shmat(number, std::ptr::null(), 0) };
    if start.addr() == usize::MAX {
        return None;
    }
    let start = NonNull::new(start.cast())?;
    let foreign = ForeignMapping {
        origin,
        // SAFETY: attached until this value is dropped, as long as the check below says, and given
        // out as a borrow only.
        mapping: unsafe { Mapping::of_raw(start, len) },
        is_segment: true,
    };
    // The mapping here must be of the same segment, and as long.
    let maps = read_file("/proc/self/maps").ok()?;
    let here = start.as_ptr().addr() as u64;
    let own = Origin::in_list(&maps, here, here + len as u64)?;
    (own.start == here
        && foreign.origin.contains(&Origin {
            end: here + len as u64,
            ..own
        }))
    .then_some(foreign)
}

impl Deref for ForeignMapping {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl Drop for ForeignMapping {
    fn drop(&mut self) {
        let start: *mut libc::c_void = self.mapping.as_ptr().cast();
        // SAFETY: this is the whole mapping that was made for this value, and nothing refers to it
        // any more.
        unsafe {
            if self.is_segment {
                libc::shmdt(start);
            } else {
                let _ = munmap(start, self.mapping.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create, unlink};
    use rustix::mm::{MapFlags, MprotectFlags, mmap_anonymous, mprotect};
    use rustix::process::getpid;

    const PAGE: usize = 4096;
    const LEN: usize = 8 * PAGE;

    /// Memory of this process, which stands for the other process as well.
    struct Theirs(Mapping);

    impl Theirs {
        fn of(file: &OwnedFd) -> Theirs {
            ftruncate(file, LEN as u64).unwrap();
            Theirs(map(file.as_fd(), 0, LEN, ProtFlags::READ | ProtFlags::WRITE).unwrap())
        }

        fn address(&self, at: usize) -> u64 {
            (self.0.address() + at) as u64
        }

        fn open(&self, at: usize, len: usize) -> Option<(ForeignMapping, usize)> {
            let origin = Origin::find(getpid(), self.address(at), len as u64)?;
            let skip = self.address(at) - origin.start();
            let mapping = ForeignMapping::open(getpid(), origin.clone())?;
            let place = mapping.place_of(&origin) + skip;
            Some((mapping, place as usize))
        }

        /// Checks that writes at one mapping appear at the other.
        fn is_seen(&self, at: usize, len: usize) -> bool {
            let Some((here, place)) = self.open(at, len) else {
                return false;
            };
            assert_ne!(here.address(), self.0.address());
            here.copy_in(place, b"here");
            let mut seen = [0; 4];
            self.0.copy_out(at, &mut seen);
            &seen == b"here"
        }
    }

    impl Drop for Theirs {
        fn drop(&mut self) {
            // SAFETY: the test's mapping, to which nothing refers any more.
            let _ = unsafe { munmap(self.0.as_ptr().cast(), LEN) };
        }
    }

    #[test]
    fn shm_19_a_memfd_is_found_by_a_descriptor() {
        let file = memfd_create("found", MemfdFlags::CLOEXEC).unwrap();
        let theirs = Theirs::of(&file);
        for (at, len) in [(0, LEN), (PAGE + 100, 8), (3 * PAGE - 4, 2 * PAGE)] {
            assert!(theirs.is_seen(at, len), "{at} {len}");
        }
        // Beyond its end there is nothing, or something else.
        assert!(Origin::find(getpid(), theirs.address(LEN - 8), 4 * PAGE as u64).is_none());
    }

    #[test]
    fn shm_19_a_file_is_found_by_its_path() {
        let folder = urnic_testkit::Folder::inside("/dev/shm".as_ref(), "urnic-foreign");
        let path = folder.file("mapped");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let file = open(&path, flags, Mode::RUSR | Mode::WUSR).unwrap();
        let theirs = Theirs::of(&file);
        drop(file);
        let seen = theirs.is_seen(2 * PAGE, PAGE);
        unlink(&path).unwrap();
        assert!(seen);
        // Another file of this name is not it. Root reaches the old one by the kernel's link.
        let other = open(&path, flags, Mode::RUSR | Mode::WUSR).unwrap();
        ftruncate(&other, LEN as u64).unwrap();
        let opened = theirs.open(0, 8);
        unlink(&path).unwrap();
        if let Some((here, place)) = opened {
            here.copy_in(place, b"here");
            let mut seen = [0; 4];
            theirs.0.copy_out(0, &mut seen);
            assert_eq!(&seen, b"here");
        }
    }

    #[test]
    fn shm_19_a_segment_is_attached() {
        // SAFETY: a new segment, which this test alone knows.
        let number = unsafe { libc::shmget(libc::IPC_PRIVATE, LEN, libc::IPC_CREAT | 0o600) };
        assert!(number >= 0);
        // SAFETY: a new mapping; the segment goes with its last mapping.
        let start = unsafe {
            let start = libc::shmat(number, std::ptr::null(), 0);
            libc::shmctl(number, libc::IPC_RMID, std::ptr::null_mut());
            start
        };
        let start = NonNull::new(start.cast()).unwrap();
        // SAFETY: it is mapped until the end of the test.
        let theirs = Theirs(unsafe { Mapping::of_raw(start, LEN) });
        assert!(theirs.is_seen(PAGE, 4 * PAGE));
    }

    #[test]
    fn shm_19_memory_that_is_not_shared_is_left_alone() {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, which the test unmaps.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), LEN, rights, MapFlags::PRIVATE) };
        let start = NonNull::new(start.unwrap().cast()).unwrap();
        // SAFETY: it is mapped until the end of the test.
        let private = Theirs(unsafe { Mapping::of_raw(start, LEN) });
        assert!(private.open(0, 8).is_none());
        // Nor is memory that its process could not write.
        let file = memfd_create("read only", MemfdFlags::CLOEXEC).unwrap();
        let theirs = Theirs::of(&file);
        let page = theirs.0.as_ptr().wrapping_add(PAGE).cast();
        // SAFETY: a page of the test's mapping.
        unsafe { mprotect(page, PAGE, MprotectFlags::READ) }.unwrap();
        assert!(theirs.open(0, LEN).is_none());
        assert!(theirs.open(PAGE, 8).is_none());
        assert!(theirs.is_seen(2 * PAGE, PAGE));
    }

    #[test]
    fn shm_19_any_list_of_mappings_is_harmless() {
        for list in [
            "",
            "7f00-",
            "7f00-8f00",
            "7f00-8f00 rw-s",
            "7f00-8f00 rw-s 0 0:1 x /a",
            "8f00-7f00 rw-s 0 0:1 5 /a",
            "0-ffffffffffffffff rw-s ffffffffffffffff ffffffff:ffffffff 5 /a",
            "0-ffffffffffffffff rw-s ffffffffffffffff 0:1 5 /a\nffffffffffffffff-0 rw-s 0 0:1 5 /a",
        ] {
            let found = Origin::in_list(list, 0x7f10, 0x7f20);
            assert!(found.is_none_or(|found| found.start <= 0x7f10), "{list}");
        }
    }
}
