//! Descriptors that a device does not expect.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixDatagram;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open};
use rustix::net::sockopt::set_socket_linger;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};
use urnic_tests::random::Random;

/// Most groups of descriptors that are kept, and for how long: longer than a victim's clients wait.
const KEPT: usize = 300;
const KEPT_FOR: Duration = Duration::from_secs(60);
/// Lengths of memory: pages, and the usual lengths of shared memory and their neighbours.
const LENGTHS: [u64; 8] = [0, 1, 64, 4095, 4096, (1 << 20) + 4096, 1 << 30, 1 << 40];

/// Makes descriptors, and keeps what makes them harmful after they have been passed.
#[derive(Debug, Default)]
pub(crate) struct Zoo {
    sockets: Kept,
    /// What keeps sockets lingering.
    peers: Kept,
    truncated: Vec<OwnedFd>,
}

impl Zoo {
    /// A descriptor of any kind.
    pub(crate) fn any(&mut self, random: &mut Random) -> std::io::Result<OwnedFd> {
        Ok(match random.below(12) {
            0 => eventfd(0, EventfdFlags::CLOEXEC)?,
            1 => rustix::pipe::pipe()?.0,
            2 => rustix::pipe::pipe()?.1,
            3 => File::open("/dev/null")?.into(),
            4 => open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?,
            5 => pidfd_open(getpid(), PidfdFlags::empty())?,
            6 => other_process(random)?,
            7 => self.passed_socket()?,
            8 | 9 => self.lingering()?,
            _ => self.memory(random)?,
        })
    }

    /// Memory that is sealed, or not, or only in part, and of any length.
    pub(crate) fn memory(&mut self, random: &mut Random) -> std::io::Result<OwnedFd> {
        let file = memfd_create("urnic-stream", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, LENGTHS[random.below(LENGTHS.len())])?;
        let seals = SealFlags::from_bits_truncate(random.below(32) as u32);
        if random.below(2) == 0 {
            fcntl_add_seals(&file, seals)?;
        } else {
            self.truncated.push(file.try_clone()?);
        }
        Ok(file)
    }

    /// A TCP socket whose close blocks: its peer receives nothing, and the socket lingers for
    /// hours.
    pub(crate) fn lingering(&mut self) -> std::io::Result<OwnedFd> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut socket = TcpStream::connect(listener.local_addr()?)?;
        let (peer, _) = listener.accept()?;
        socket.set_nonblocking(true)?;
        while socket.write(&[0; 1 << 16]).is_ok() {}
        set_socket_linger(&socket, Some(Duration::from_secs(30_000)))?;
        self.peers.keep(vec![peer.into(), listener.into()]);
        Ok(socket.into())
    }

    /// A socket in whose queue is its own other end.
    fn passed_socket(&mut self) -> std::io::Result<OwnedFd> {
        let (ours, theirs) = UnixDatagram::pair()?;
        crate::sockets::send(ours.as_fd(), b"x", &[theirs.as_fd(), ours.as_fd()])?;
        Ok(theirs.into())
    }

    /// Keeps sockets open for a while.
    pub(crate) fn keep(&mut self, sockets: Vec<OwnedFd>) {
        if !sockets.is_empty() {
            self.sockets.keep(sockets);
        }
    }

    /// Truncates the memory that was passed, and may be mapped by now.
    pub(crate) fn truncate(&mut self) {
        for file in self.truncated.drain(..) {
            let _ = ftruncate(&file, 0);
        }
    }
}

/// Descriptors that are closed later.
#[derive(Debug, Default)]
struct Kept(VecDeque<(Instant, Vec<OwnedFd>)>);

impl Kept {
    fn keep(&mut self, descriptors: Vec<OwnedFd>) {
        self.0.push_back((Instant::now(), descriptors));
        while let Some((since, _)) = self.0.front()
            && (self.0.len() > KEPT || since.elapsed() > KEPT_FOR)
        {
            let oldest = self.0.pop_front();
            oldest.into_iter().flat_map(|(_, fds)| fds).for_each(release);
        }
    }
}

/// Closes a descriptor without waiting: it may be the last one of a socket that lingers.
pub(crate) fn release(descriptor: OwnedFd) {
    std::thread::spawn(move || drop(descriptor));
}

/// The pidfd of any process.
fn other_process(random: &mut Random) -> std::io::Result<OwnedFd> {
    let numbers = std::fs::read_dir("/proc")?
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let numbers: Vec<i32> = numbers.collect();
    let number = numbers.get(random.below(numbers.len().max(1))).copied();
    let pid = number.and_then(Pid::from_raw).unwrap_or(getpid());
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}
