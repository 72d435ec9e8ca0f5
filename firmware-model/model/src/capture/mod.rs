//! The wire as a pcapng file that Wireshark opens and follows without set-up.
//!
//! A [`Network`](crate::stream::Network) around the device's own ([`tapped`]) reports to a
//! [`Capture`] what each stream and each UDP port sent and received; without a capture there is no
//! such network, and no cost. IP, TCP and UDP headers are generated from the addresses and the
//! bytes' places in the stream. A connection with both ends in this process is written once.

mod conversation;
pub(crate) mod own_peer;
mod pcapng;
mod staging;
pub(crate) mod tapped;
#[cfg(test)]
mod tests;

pub(crate) use conversation::Side;

use crate::stream;
use crate::stream::descriptor::{Descriptor, DescriptorWatch, Descriptors};
use conversation::{Conversation, Ends, Write};
use pcapng::{PacketMeta, Way};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use staging::Staging;
use std::collections::{HashMap, HashSet};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use urnic_sync::{Mutex, MutexGuard};

/// A capture file of this process.
#[derive(Debug, Clone)]
pub struct CaptureFile(Arc<Shared>);

/// A capture file, and the interface under which a device is in it.
#[derive(Debug, Clone)]
pub struct Capture {
    shared: Arc<Shared>,
    interface: u32,
}

impl PartialEq for Capture {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared) && self.interface == other.interface
    }
}

impl Eq for Capture {}

#[derive(Debug)]
struct Shared {
    descriptors: Arc<Descriptors>,
    /// A leaf.
    state: Mutex<State>,
    /// A leaf.
    staging: Mutex<Staging>,
}

#[derive(Debug)]
struct State {
    writer: Writer,
    conversations: HashMap<Ends, Open>,
    /// Connections so far.
    number: u32,
    /// Addresses from which this process sends datagrams.
    senders: HashSet<SocketAddr>,
}

/// The writer of blocks.
#[derive(Debug)]
struct Writer {
    target: Target,
    descriptors: Arc<Descriptors>,
    /// Names and descriptions.
    interfaces: Vec<(String, String)>,
    /// The number of these bytes that the file has.
    described: usize,
    /// Room for blocks.
    blocks: Vec<u8>,
}

/// The path of the file.
#[derive(Debug)]
enum Target {
    /// To a file of about this name, once there is something to write.
    Named(PathBuf),
    Open {
        file: Descriptor,
        path: PathBuf,
        /// The end of the last whole block.
        len: u64,
    },
    /// No output: an operation failed, and the failure was reported.
    Stopped,
}

/// A connection that one or both of its ends report.
#[derive(Debug)]
struct Open {
    conversation: Conversation,
    number: u32,
    /// Which sides have reported the connection, and which sides still do.
    seen: [bool; 2],
    live: [bool; 2],
}

/// Reports one end of a connection.
#[derive(Debug)]
pub(crate) struct Tap {
    capture: Capture,
    ends: Ends,
    side: Side,
    number: u32,
    /// Bytes in either direction, sent first.
    offsets: [u64; 2],
}

/// The name of this process's file, `%p` being its number; `None` if there is no `%p`.
pub fn numbered(path: &Path) -> Option<PathBuf> {
    let bytes = path.as_os_str().as_bytes();
    let at = bytes.windows(2).position(|two| two == b"%p")?;
    let number = rustix::process::getpid().as_raw_nonzero().to_string();
    let name = [&bytes[..at], number.as_bytes(), &bytes[at + 2..]].concat();
    let name = PathBuf::from(OsString::from_vec(name));
    Some(numbered(&name).unwrap_or(name))
}

/// `path` with the process number before the extension.
fn beside(path: &Path) -> PathBuf {
    let mut name = path.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{}", rustix::process::getpid().as_raw_nonzero()));
    if let Some(extension) = path.extension() {
        name.push(".");
        name.push(extension);
    }
    path.with_file_name(name)
}

fn open(path: &Path, more: OFlags) -> Result<OwnedFd, Errno> {
    // A pipe without a reader would block the device, and a slow reader would block the traffic.
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags | more, Mode::from_raw_mode(0o644))?;
    match FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(file),
        _ => Err(Errno::NOTSUP),
    }
}

/// Opens a file for this process alone, and empties it. Other users can foresee the name: a link,
/// or a file of theirs, is refused.
fn open_own(path: &Path) -> Result<OwnedFd, Errno> {
    let file = match open(path, OFlags::CREATE | OFlags::EXCL) {
        Err(Errno::EXIST) => {
            let file = open(path, OFlags::NOFOLLOW)?;
            if rustix::fs::fstat(&file)?.st_uid != rustix::process::geteuid().as_raw() {
                return Err(Errno::PERM);
            }
            file
        }
        made => made?,
    };
    // Processes in containers that share a folder may have one number.
    if !lock(&file) {
        return Err(Errno::BUSY);
    }
    rustix::fs::ftruncate(&file, 0)?;
    Ok(file)
}

/// Takes the file for this process; `false` if another has it.
fn lock(file: &OwnedFd) -> bool {
    // A file system without locks has to do without.
    rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

/// Opens the file of this process: `path` if that file is empty and no other process has it, else
/// another file in the same folder.
fn claim(path: &Path) -> Result<(OwnedFd, PathBuf), Errno> {
    if let Some(path) = numbered(path) {
        return Ok((open_own(&path)?, path));
    }
    let file = open(path, OFlags::CREATE)?;
    if lock(&file) && rustix::fs::fstat(&file)?.st_size == 0 {
        return Ok((file, path.to_owned()));
    }
    let path = beside(path);
    Ok((open_own(&path)?, path))
}

impl CaptureFile {
    /// Captures to `path`, from the first connection on. `%p` in it becomes the process number. If
    /// there is no `%p` and the file is not empty, because it belongs to another or an earlier
    /// process, this process writes to a file in the same folder, with its number before the
    /// extension.
    pub fn new(path: PathBuf, watch: Option<DescriptorWatch>) -> CaptureFile {
        let descriptors = Descriptors::new(8, watch);
        CaptureFile(Arc::new(Shared {
            staging: Mutex::new(Staging::new(descriptors.clone())),
            state: Mutex::new(State {
                writer: Writer {
                    target: Target::Named(path),
                    descriptors: descriptors.clone(),
                    interfaces: Vec::new(),
                    described: 0,
                    blocks: Vec::new(),
                },
                conversations: HashMap::new(),
                number: 0,
                senders: HashSet::new(),
            }),
            descriptors,
        }))
    }

    /// A device that is in the file as the interface of this name and description.
    pub fn interface(&self, name: &str, description: &str) -> Capture {
        let interfaces = &mut self.0.lock().writer.interfaces;
        let interface = u32::try_from(interfaces.len()).unwrap_or(u32::MAX);
        interfaces.push((name.to_owned(), description.to_owned()));
        Capture {
            shared: self.0.clone(),
            interface,
        }
    }

    /// Makes sure that captures can go to `path`, and empties an existing file unless a process
    /// captures to it.
    ///
    /// # Errors
    /// Those of opening the file; `NOTSUP` if it is no regular file.
    pub fn prepare(path: &Path) -> Result<(), Errno> {
        if numbered(path).is_some() {
            return Ok(());
        }
        let file = open(path, OFlags::CREATE)?;
        if lock(&file) {
            rustix::fs::ftruncate(&file, 0)?;
        }
        Ok(())
    }
}

impl Capture {
    /// In a forked child: closes the file. Async-signal-safe.
    pub(crate) fn abandon_in_child(&self) {
        self.shared.descriptors.close_all();
    }

    /// A connection was made. Each end in this process opens its own tap.
    pub(crate) fn open(&self, ends: stream::Ends, side: Side) -> Tap {
        let stream::Ends { local, remote } = ends;
        let ends = match side {
            Side::Initiator => (local, remote),
            Side::Responder => (remote, local),
        };
        let mut state = self.shared.lock();
        let State {
            writer,
            conversations,
            number,
            ..
        } = &mut *state;
        let joined = conversations
            .get_mut(&ends)
            .filter(|open| !open.seen[side as usize]);
        let number = match joined {
            Some(open) => {
                open.seen[side as usize] = true;
                open.live[side as usize] = true;
                open.number
            }
            None => {
                *number = number.wrapping_add(1);
                let mut sides = [false; 2];
                sides[side as usize] = true;
                let open = Open {
                    conversation: writer.write(self.interface, Some(local), |write| {
                        Conversation::open(ends, *number, write)
                    }),
                    number: *number,
                    seen: sides,
                    live: sides,
                };
                conversations.insert(ends, open);
                *number
            }
        };
        drop(state);
        Tap {
            capture: self.clone(),
            ends,
            side,
            number,
            offsets: [0; 2],
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl Writer {
    /// Runs a function that writes segments, and puts them into the file. `local`: the address of
    /// the reporting end, if the other end is not in this process.
    fn write<T>(
        &mut self,
        interface: u32,
        local: Option<SocketAddr>,
        act: impl FnOnce(&mut Write<'_>) -> T,
    ) -> T {
        let at = now();
        self.append(|blocks| {
            act(&mut |segment, payload| {
                let way = local.map(|local| if segment.from == local { Way::Out } else { Way::In });
                let meta = PacketMeta { interface, at, way };
                pcapng::packet(blocks, meta, &segment.headers(payload), payload);
            })
        })
    }

    /// Runs a function that adds blocks, and puts them into the file.
    fn append<T>(&mut self, act: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        let mut blocks = std::mem::take(&mut self.blocks);
        let result = act(&mut blocks);
        if !blocks.is_empty()
            && let Err(errno) = self.store(&blocks)
        {
            self.stop(errno);
        }
        blocks.clear();
        self.blocks = blocks;
        result
    }

    /// Appends blocks, after those that the file must have before them.
    fn store(&mut self, blocks: &[u8]) -> Result<(), Errno> {
        let mut front = Vec::new();
        if let Target::Named(path) = &self.target {
            let (file, path) = claim(path)?;
            pcapng::section(&mut front, concat!("urnic ", env!("CARGO_PKG_VERSION")));
            self.target = Target::Open {
                file: self.descriptors.adopt(file)?,
                path,
                len: 0,
            };
        }
        let Target::Open { file, len, .. } = &mut self.target else {
            return Ok(());
        };
        for (name, description) in &self.interfaces[self.described..] {
            pcapng::interface(&mut front, name, description);
        }
        self.described = self.interfaces.len();
        // Growing a file beyond the limit raises a signal, which would end the program.
        let end = *len + (front.len() + blocks.len()) as u64;
        if getrlimit(Resource::Fsize)
            .current
            .is_some_and(|limit| end > limit)
        {
            return Err(Errno::FBIG);
        }
        for part in [&front[..], blocks] {
            let mut rest = part;
            while !rest.is_empty() {
                let at = *len + (part.len() - rest.len()) as u64;
                match rustix::io::pwrite(file.as_fd(), rest, at) {
                    Ok(n) => rest = &rest[n..],
                    Err(Errno::INTR) => {}
                    Err(errno) => return Err(errno),
                }
            }
            *len += part.len() as u64;
        }
        Ok(())
    }

    /// Ends the capture; the file can be read.
    fn stop(&mut self, errno: Errno) {
        let reason: &dyn std::fmt::Display = match errno {
            Errno::NOTSUP => &"it is no regular file",
            Errno::BUSY => &"another process captures to it",
            _ => &std::io::Error::from(errno),
        };
        match std::mem::replace(&mut self.target, Target::Stopped) {
            Target::Named(path) => {
                tracing::warn!(
                    "cannot capture to {}: {reason}; traffic continues",
                    path.display()
                )
            }
            Target::Open { file, path, len } => {
                // An incomplete block would make the file unreadable.
                let _ = rustix::fs::ftruncate(file.as_fd(), len);
                tracing::warn!(
                    "the capture {} ends here: {reason}; traffic continues",
                    path.display()
                );
            }
            Target::Stopped => {}
        }
    }
}

impl Tap {
    fn record(&mut self, act: impl FnOnce(&mut Conversation, &mut Write<'_>)) {
        let mut state = self.capture.shared.lock();
        let State {
            writer,
            conversations,
            ..
        } = &mut *state;
        let open = conversations
            .get_mut(&self.ends)
            .filter(|open| open.number == self.number);
        if let Some(open) = open {
            let ends = [self.ends.0, self.ends.1];
            let local = (open.seen != [true; 2]).then_some(ends[self.side as usize]);
            writer.write(self.capture.interface, local, |write| {
                act(&mut open.conversation, write)
            });
        }
    }

    fn bytes(&mut self, from: Side, bytes: &[u8]) {
        let offsets = &mut self.offsets[usize::from(from != self.side)];
        let offset = *offsets;
        *offsets += bytes.len() as u64;
        self.record(|conversation, write| conversation.bytes(from, offset, bytes, write));
    }

    /// The stream took these.
    pub(crate) fn sent(&mut self, bytes: &[u8]) {
        self.bytes(self.side, bytes);
    }

    /// Records bytes that the stream delivered.
    pub(crate) fn received(&mut self, bytes: &[u8]) {
        self.bytes(self.side.other(), bytes);
    }

    /// One end has finished sending: ours if `ours`, else the peer's.
    pub(crate) fn finished(&mut self, ours: bool) {
        let from = if ours { self.side } else { self.side.other() };
        self.record(|conversation, write| conversation.finish(from, write));
    }

    /// One end reset the connection: ours if `ours`, else the peer.
    pub(crate) fn reset(&mut self, ours: bool) {
        let from = if ours { self.side } else { self.side.other() };
        self.record(|conversation, write| conversation.reset(from, write));
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let mut state = self.capture.shared.lock();
        if let Some(open) = state.conversations.get_mut(&self.ends)
            && open.number == self.number
        {
            open.live[self.side as usize] = false;
            if open.live == [false; 2] {
                state.conversations.remove(&self.ends);
            }
        }
    }
}
