//! The file of a trace: one JSON array, to which several processes append, and which is complete
//! whenever one of them is killed.
//!
//! The kernel completes the part of a write(2) that lies in one page of the file, even if the
//! process is killed; between two pages it may stop. So the closing bracket is written before the
//! events: a process reserves a *region*, white space before the closing bracket, and writes its
//! events into it by writes that lie in one page each. Each event has its comma before it. Only to
//! reserve a region is the bracket moved, by two writes of a byte or two, under a lock.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fd::OwnedFd;
use rustix::fs::{FileType, FlockOperation, Mode, OFlags, flock, fstat, ftruncate, open};
use rustix::io::{Errno, pread, pwrite};
use urnic_process::file_length;

/// The unit of whole writes: no page of the kernel is smaller.
const PAGE: u64 = 4096;
/// Each region of a process is twice as long as the one before, up to this.
const LONGEST_REGION: u64 = 1 << 20;
/// The first event, so that each other one has a comma before it.
const OPENING: &[u8] =
    b"[\n{\"ph\":\"M\",\"name\":\"clock\",\"pid\":0,\"args\":{\"name\":\"CLOCK_MONOTONIC\"}}\n";
const CLOSING: &[u8] = b"]\n";
/// The longest white space in which the closing bracket is looked for, backwards from the end.
const LONGEST_GAP: u64 = 4 * LONGEST_REGION;
/// The number of further attempts to lock, and the time between them. A process holds the lock for
/// a few system calls, unless it is stopped.
const TRIES: u32 = 200;
const PAUSE: Duration = Duration::from_millis(5);

/// Why a trace cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unwritable {
    /// An error of the file; `ENOTSUP` for one that is not regular.
    Errno(Errno),
    /// The file has other contents.
    Foreign,
    /// Another process does not release the lock.
    Locked,
}

impl From<Errno> for Unwritable {
    fn from(errno: Errno) -> Unwritable {
        Unwritable::Errno(errno)
    }
}

impl fmt::Display for Unwritable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unwritable::Errno(errno) => write!(f, "{errno}"),
            Unwritable::Foreign => f.write_str("it exists and is no whole trace: name another file"),
            Unwritable::Locked => f.write_str("another process has locked it"),
        }
    }
}

/// The array, as one process appends to it.
#[derive(Debug)]
pub(super) struct Array {
    path: PathBuf,
    region: Option<Region>,
    next_region: u64,
}

/// The unused end of a region of this process: white space.
#[derive(Debug, Clone, Copy)]
struct Region {
    /// Device and number of the file.
    file: (u64, u64),
    at: u64,
    end: u64,
}

impl Region {
    /// The room that one write can fill: up to the end of the page.
    fn room(&self) -> u64 {
        let page_end = (self.at + 1).next_multiple_of(PAGE);
        page_end.min(self.end).saturating_sub(self.at)
    }
}

impl Array {
    pub(super) fn new(path: PathBuf) -> Array {
        Array {
            path,
            region: None,
            next_region: PAGE,
        }
    }

    /// Appends events, one in each line.
    ///
    /// # Errors
    /// Why they could not be written; some may have been.
    pub(super) fn append(&mut self, events: &str) -> Result<(), Unwritable> {
        let file = self.open()?;
        let (id, size) = identity(&file)?;
        // The user may have removed or emptied the file.
        self.region = self
            .region
            .filter(|region| region.file == id && region.end < size);
        let mut write = Vec::with_capacity(PAGE as usize);
        for event in events.lines() {
            let len = event.len() as u64 + 2;
            let room = self.region.map_or(0, |region| region.room());
            if write.len() as u64 + len > room {
                self.write(&file, &mut write)?;
                self.find_room(&file, len)?;
            }
            write.push(b',');
            write.extend_from_slice(event.as_bytes());
            write.push(b'\n');
        }
        Ok(self.write(&file, &mut write)?)
    }

    /// Gives back the unused end of the region, if no region of another process follows it.
    pub(super) fn end(&mut self) -> Result<(), Unwritable> {
        let Some(region) = self.region.take() else {
            return Ok(());
        };
        let file = self.open()?;
        let _lock = Lock::take(&file)?;
        let closing = CLOSING.len() as u64;
        if identity(&file)? == (region.file, region.end + closing) && region.at < region.end {
            write_at(&file, CLOSING, region.at)?;
            ftruncate(&file, region.at + closing)?;
        }
        Ok(())
    }

    fn open(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = open(&self.path, flags, Mode::from_raw_mode(0o666))?;
        match FileType::from_raw_mode(fstat(&file)?.st_mode) {
            FileType::RegularFile => Ok(file),
            // The reader of a pipe could make the program wait.
            _ => Err(Errno::NOTSUP),
        }
    }

    /// Writes the gathered events into the region, and clears them.
    fn write(&mut self, file: &OwnedFd, events: &mut Vec<u8>) -> Result<(), Errno> {
        if let Some(region) = &mut self.region {
            write_at(file, events, region.at)?;
            region.at += events.len() as u64;
            events.clear();
        }
        Ok(())
    }

    /// Goes to a page with room for an event; an event that is longer than a page gets several.
    fn find_room(&mut self, file: &OwnedFd, len: u64) -> Result<(), Unwritable> {
        if let Some(region) = &mut self.region {
            region.at = region.at.next_multiple_of(PAGE);
            if region.at + len <= region.end {
                return Ok(());
            }
        }
        let longest = self.next_region.max((len + 2 * PAGE).next_multiple_of(PAGE));
        self.next_region = (self.next_region * 2).min(LONGEST_REGION);
        self.region = Some(reserve(file, longest, len)?);
        Ok(())
    }
}

/// Reserves a region for an event of `len` bytes and more: moves the closing bracket.
fn reserve(file: &OwnedFd, longest: u64, len: u64) -> Result<Region, Unwritable> {
    let _lock = Lock::take(file)?;
    if identity(file)?.1 == 0 {
        file_length::permits((OPENING.len() + CLOSING.len()) as u64)?;
        write_at(file, &[OPENING, CLOSING].concat(), 0)?;
    }
    let (id, size) = identity(file)?;
    let mut first = [0];
    pread(file, &mut first, 0)?;
    let (last, at) = last_character(file, size)?;
    let begin = match (first[0], last) {
        // Traces of earlier versions end with a comma.
        (b'[', b']' | b',') => at,
        // A process was killed while it moved the bracket.
        (b'[', b'}') => at + 1,
        _ => return Err(Unwritable::Foreign),
    };
    let end = (begin + longest).next_multiple_of(PAGE) - CLOSING.len() as u64;
    file_length::permits(end + CLOSING.len() as u64)?;
    let spaces = [b' '; PAGE as usize];
    let mut filled = size;
    while filled < end {
        let some = (end - filled).min(PAGE);
        write_at(file, &spaces[..some as usize], filled)?;
        filled += some;
    }
    write_at(file, b" ", begin)?;
    write_at(file, CLOSING, end)?;
    let mut region = Region {
        file: id,
        at: begin,
        end,
    };
    if region.room() < len {
        region.at = begin.next_multiple_of(PAGE);
    }
    Ok(region)
}

/// The last character that is no white space, and its position.
fn last_character(file: &OwnedFd, size: u64) -> Result<(u8, u64), Unwritable> {
    let mut block = [0; PAGE as usize];
    let mut end = size;
    while end > 0 && size - end < LONGEST_GAP {
        let start = (end - 1) / PAGE * PAGE;
        let part = &mut block[..(end - start) as usize];
        let read = pread(file, &mut *part, start)?;
        let is_character = |byte: &u8| !byte.is_ascii_whitespace();
        if let Some(at) = part[..read].iter().rposition(is_character) {
            return Ok((part[at], start + at as u64));
        }
        end = start;
    }
    Err(Unwritable::Foreign)
}

/// Device and number of a file, and its size.
fn identity(file: &OwnedFd) -> Result<((u64, u64), u64), Errno> {
    let stat = fstat(file)?;
    Ok(((stat.st_dev, stat.st_ino), stat.st_size.cast_unsigned()))
}

fn write_at(file: &OwnedFd, bytes: &[u8], at: u64) -> Result<(), Errno> {
    let mut written = 0;
    while written < bytes.len() {
        match pwrite(file, &bytes[written..], at + written as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => written += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// The lock of the file, which processes have while they move the bracket.
struct Lock<'a>(&'a OwnedFd);

impl Lock<'_> {
    fn take(file: &OwnedFd) -> Result<Lock<'_>, Unwritable> {
        for _ in 0..TRIES {
            match flock(file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Lock(file)),
                Err(Errno::WOULDBLOCK) => std::thread::sleep(PAUSE),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(Unwritable::Locked)
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // Not only by the close: a child that another thread forks has a copy of the descriptor.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::path::Path;
    use urnic_testkit::Folder;

    /// The names of the events of a file, which is whole, without the first.
    #[track_caller]
    fn names(file: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(file).unwrap();
        let all: Vec<Value> = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let names = all.iter().map(|event| event["name"].as_str().unwrap().to_owned());
        names.filter(|name| name != "clock").collect()
    }

    fn event(name: &str, len: usize) -> String {
        let fill = "x".repeat(len);
        format!("{{\"name\":\"{name}\",\"fill\":\"{fill}\"}}\n")
    }

    #[test]
    fn a_trace_is_whole_after_each_append() {
        let folder = Folder::new("trace-array");
        let file = folder.file("t.json");
        let mut arrays = [Array::new(file.clone()), Array::new(file.clone())];
        let mut expected = Vec::new();
        for number in 0..400 {
            let name = format!("event {number}");
            // Two processes, in turn; pages that are nearly full, and events that need several.
            let len = [10, 4000, 200, 1, 9000, 4060, 4070, 4080][number % 8];
            arrays[number / 3 % 2].append(&event(&name, len)).unwrap();
            expected.push(name);
            let mut found = names(&file);
            found.sort();
            expected.sort();
            assert_eq!(found, expected);
        }
        for array in &mut arrays {
            array.end().unwrap();
            assert_eq!(names(&file).len(), expected.len());
        }
    }

    #[test]
    fn a_short_trace_has_no_room_left_at_its_end() {
        let folder = Folder::new("trace-short");
        let file = folder.file("t.json");
        let mut array = Array::new(file.clone());
        array.append(&(event("one", 0) + &event("two", 0))).unwrap();
        array.end().unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        let opening = std::str::from_utf8(OPENING).unwrap();
        let events = format!(",{},{}", event("one", 0), event("two", 0));
        assert_eq!(text, format!("{opening}{events}]\n"));
    }

    /// Files after a kill between two writes, and files of earlier versions.
    #[test]
    fn a_trace_is_continued_however_it_ended() {
        let folder = Folder::new("trace-continued");
        let file = folder.file("t.json");
        for end in ["]\n", "]", "]\n     \n  ", "", "   ", ",\n", "]\n"] {
            std::fs::write(&file, format!("[\n{}{end}", event("before", 3))).unwrap();
            let mut array = Array::new(file.clone());
            array.append(&event("later", 5000)).unwrap();
            assert_eq!(names(&file), ["before", "later"], "{end:?}");
            array.end().unwrap();
            assert_eq!(names(&file), ["before", "later"], "{end:?}");
        }
    }

    #[test]
    fn a_file_that_was_emptied_or_removed_begins_again() {
        let folder = Folder::new("trace-removed");
        let file = folder.file("t.json");
        let mut array = Array::new(file.clone());
        array.append(&event("one", 0)).unwrap();
        std::fs::write(&file, "").unwrap();
        array.append(&event("two", 0)).unwrap();
        assert_eq!(names(&file), ["two"]);
        std::fs::remove_file(&file).unwrap();
        array.append(&event("three", 0)).unwrap();
        assert_eq!(names(&file), ["three"]);
    }

    #[test]
    fn a_file_with_other_contents_is_left_alone() {
        let folder = Folder::new("trace-foreign");
        let file = folder.file("notes");
        for contents in ["notes\n", "{}\n", "[", "[\n{\"name\":\"hal", "   \n"] {
            std::fs::write(&file, contents).unwrap();
            let refused = Array::new(file.clone()).append(&event("one", 0));
            assert_eq!(refused, Err(Unwritable::Foreign), "{contents:?}");
            assert_eq!(std::fs::read_to_string(&file).unwrap(), contents);
        }
        let refused = Array::new("/dev/null".into()).append(&event("one", 0));
        assert_eq!(refused, Err(Unwritable::Errno(Errno::NOTSUP)));
    }

    #[test]
    fn a_lock_that_is_never_released_ends_the_wait() {
        let folder = Folder::new("trace-locked");
        let file = folder.file("t.json");
        let other = std::fs::File::create(&file).unwrap();
        flock(&other, FlockOperation::LockExclusive).unwrap();
        let refused = Array::new(file).append(&event("one", 0));
        assert_eq!(refused, Err(Unwritable::Locked));
    }
}
