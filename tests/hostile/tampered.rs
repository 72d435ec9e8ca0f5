//! Real devices that go wrong: a verbs program under the plug-in, whose messages, descriptors,
//! accesses to other processes and shared memory are changed on the way.
//!
//! So the device takes every step that its peer demands, proofs included, and what arrives at the
//! peer is right but for a few bytes, late, incomplete, or the last word of a process that died
//! there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;
use urnic_tests::random::Random;

use crate::descriptors::{Zoo, release};
use crate::interception::{Call, Decision, Intercepted};
use crate::memory::scribble;
use crate::options::{Options, is_over};
use crate::sockets::{MOST_DESCRIPTORS, send};

/// A longer message is no message of ours.
const MOST_BYTES: u64 = 4096;
/// `SOL_SOCKET` and `SCM_RIGHTS`, as the header of a control message has them.
const RIGHTS: [u8; 8] = [1, 0, 0, 0, 1, 0, 0, 0];

/// How one child misbehaves, in percent.
#[derive(Debug)]
struct Manners {
    /// Of its messages that are changed.
    messages: usize,
    /// Of its accesses to another process that are.
    accesses: usize,
    /// Of the moments at which its shared memory is.
    memory: usize,
}

impl Manners {
    /// Mostly one thing is wrong, so that the others get further.
    fn any(random: &mut Random) -> Manners {
        let mut manners = Manners {
            messages: 0,
            accesses: 0,
            memory: 0,
        };
        match random.below(4) {
            0 => manners.messages = 60,
            1 => manners.accesses = 20,
            2 => manners.memory = 50,
            _ => (manners.messages, manners.accesses, manners.memory) = (5, 3, 10),
        }
        manners
    }
}

/// A message that a device was about to send.
struct Message {
    socket: OwnedFd,
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

#[derive(Debug, Default)]
struct Done {
    children: usize,
    messages: usize,
    accesses: usize,
    words: usize,
}

struct Tampering<'a> {
    child: Intercepted,
    zoo: &'a mut Zoo,
    random: &'a mut Random,
    manners: Manners,
    done: &'a mut Done,
    end: Instant,
}

impl Tampering<'_> {
    fn read(&self, at: u64, len: u64) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; len.min(MOST_BYTES) as usize];
        let read = self.child.memory().read_exact_at(&mut bytes, at);
        read.map(|()| bytes).map_err(|_| Errno::FAULT)
    }

    fn words(&self, at: u64, count: u64) -> Result<Vec<u64>, Errno> {
        let bytes = self.read(at, 8 * count)?;
        let words = bytes.as_chunks().0.iter();
        Ok(words.map(|word| u64::from_le_bytes(*word)).collect())
    }

    /// The message of a sendto(2) or sendmsg(2).
    fn message(&self, call: &Call) -> Result<Message, Errno> {
        let [socket, second, third, ..] = call.arguments;
        let socket = self.child.descriptor(socket)?;
        if call.number == libc::SYS_sendto {
            let (bytes, fds) = (self.read(second, third)?, Vec::new());
            return Ok(Message { socket, bytes, fds });
        }
        // struct msghdr: name and its length, parts and their number, control and its length.
        let header = self.words(second, 6)?;
        let [_, _, parts, count, control, control_len] = header[..] else {
            return Err(Errno::FAULT);
        };
        let mut bytes = Vec::new();
        for part in self.words(parts, 2 * count.min(8))?.as_chunks::<2>().0 {
            bytes.extend(self.read(part[0], part[1])?);
        }
        let control = self.read(control, control_len)?;
        let mut fds = Vec::new();
        if control.len() > 16 && control[8..16] == RIGHTS {
            let len = u64::from_le_bytes(control[..8].try_into().map_err(|_| Errno::INVAL)?) as usize;
            for number in control[16..len.min(control.len())].as_chunks::<4>().0 {
                fds.push(self.child.descriptor(u32::from_le_bytes(*number).into())?);
            }
        }
        Ok(Message { socket, bytes, fds })
    }

    fn change_bytes(&mut self, bytes: &mut Vec<u8>) {
        let random = &mut *self.random;
        match random.below(8) {
            0 => bytes.truncate(random.below(bytes.len() + 1)),
            1 => bytes.resize(bytes.len() + 1 + random.below(64), 0),
            _ if bytes.is_empty() => {}
            _ => {
                for _ in 0..1 + random.below(3) {
                    let at = random.below(bytes.len());
                    let value = match random.below(4) {
                        0 => bytes[at] ^ 1 << random.below(8),
                        1 => 0,
                        2 => 0xff,
                        _ => random.next() as u8,
                    };
                    let end = bytes.len().min(at / 4 * 4 + 4);
                    match random.below(3) {
                        0 => bytes[at / 4 * 4..end].fill(value),
                        _ => bytes[at] = value,
                    }
                }
            }
        }
    }

    fn change_descriptors(&mut self, fds: &mut Vec<OwnedFd>) {
        let count = fds.len();
        match self.random.below(6) {
            0 => fds.truncate(self.random.below(count + 1)),
            1 => fds.reverse(),
            2 => {
                let more = 1 + self.random.below(16);
                fds.extend((0..more).filter_map(|_| self.zoo.any(self.random).ok()));
            }
            _ if count == 0 => {}
            3 => {
                let copy = fds[self.random.below(count)].try_clone();
                let place = self.random.below(count);
                if let Ok(copy) = copy {
                    fds[place] = copy;
                }
            }
            _ => {
                let place = self.random.below(count);
                if let Ok(other) = self.zoo.any(self.random) {
                    release(std::mem::replace(&mut fds[place], other));
                }
            }
        }
        fds.truncate(MOST_DESCRIPTORS);
    }

    /// Sends something else in place of a message; returns what the device gets to know.
    fn misrepresent(&mut self, mut message: Message) -> Decision {
        let len = message.bytes.len() as i64;
        match self.random.below(8) {
            // It never comes.
            0 => return Decision::Return(len),
            1 => {
                let _ = send(message.socket.as_fd(), b"x", &[]);
                return Decision::Pass;
            }
            2 => {
                let late = Duration::from_millis(self.random.below(1500) as u64);
                std::thread::sleep(late);
                return Decision::Pass;
            }
            3 => {
                let _ = self.child.child().kill();
                return Decision::Pass;
            }
            4 => self.change_bytes(&mut message.bytes),
            5 => self.change_descriptors(&mut message.fds),
            _ => {
                self.change_bytes(&mut message.bytes);
                self.change_descriptors(&mut message.fds);
            }
        }
        let fds: Vec<BorrowedFd<'_>> = message.fds.iter().map(AsFd::as_fd).collect();
        let times = 1 + self.random.below(3) / 2;
        for _ in 0..times {
            let _ = send(message.socket.as_fd(), &message.bytes, &fds);
        }
        message.fds.into_iter().for_each(release);
        Decision::Return(len)
    }

    /// Whether the call sends to a process of this host beside TCP and UDP.
    fn is_local(&self, call: &Call) -> bool {
        let socket = self.child.descriptor(call.arguments[0]);
        socket.is_ok_and(|socket| socket_domain(&socket) == Ok(AddressFamily::UNIX))
    }

    fn decide(&mut self, call: &Call) -> Decision {
        let is_message = [libc::SYS_sendmsg, libc::SYS_sendto].contains(&call.number);
        if is_message {
            if !self.is_local(call) || self.random.below(100) >= self.manners.messages {
                return Decision::Pass;
            }
            let message = self.message(call);
            self.done.messages += 1;
            return message.map_or(Decision::Pass, |message| self.misrepresent(message));
        }
        if self.random.below(100) >= self.manners.accesses {
            return Decision::Pass;
        }
        self.done.accesses += 1;
        match self.random.below(5) {
            // In the middle of an access, which the peer must not wait for any longer.
            0 => {
                let _ = self.child.child().kill();
                Decision::Pass
            }
            1 => Decision::Fail(Errno::PERM),
            2 => Decision::Return(self.random.below(1 << 17) as i64),
            _ => {
                std::thread::sleep(Duration::from_millis(self.random.below(1500) as u64));
                Decision::Pass
            }
        }
    }

    fn run(&mut self) {
        let pid = self.child.pid();
        let mut thread = pid;
        while !is_over(self.end) && !self.child.is_over() {
            let call = self.child.next(Duration::from_millis(1));
            if self.random.below(100) < self.manners.memory {
                self.done.words += scribble(pid, thread, self.child.memory(), self.random);
            }
            let Some(call) = call else { continue };
            thread = call.thread;
            let decision = self.decide(&call);
            self.child.decide(&call, decision);
        }
        self.zoo.truncate();
    }
}

/// Runs one tampered child after the other until the time is over.
pub(crate) fn run(mut options: Options) -> String {
    let mut zoo = Zoo::default();
    let mut done = Done::default();
    let role = if options.attack == "server" { "-p" } else { "-v" };
    while !options.is_over() {
        let mut command = Command::new(&options.program);
        command
            .args([role, &options.port.to_string(), "-t", "1"])
            .env("LD_PRELOAD", &options.plugin)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = match Intercepted::start(&mut command) {
            Ok(child) => child,
            Err(error) => {
                eprintln!(
                    "hostile: cannot run {} under a filter of system calls: {error}",
                    options.program
                );
                std::process::exit(1);
            }
        };
        done.children += 1;
        let random = &mut options.random;
        let lifetime = Duration::from_millis(200 + random.below(3000) as u64);
        let mut tampering = Tampering {
            child,
            zoo: &mut zoo,
            manners: Manners::any(random),
            random,
            done: &mut done,
            end: options.end.min(Instant::now() + lifetime),
        };
        tampering.run();
    }
    let Done {
        children,
        messages,
        accesses,
        words,
    } = done;
    format!("{children} processes, {messages} messages, {accesses} accesses, {words} words changed")
}
