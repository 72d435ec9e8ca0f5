//! The exchange by which the two ends of a connection in memory get access to each other's process.
//!
//! Processes of one user may share a ring, but this does not permit them to access each other's
//! memory by process_vm_writev(2), nor to name memory on which the other end acts: a process may
//! have less permission than others of its user (prctl(2), PR_SET_DUMPABLE; Yama). So each end
//! first proves that the kernel lets it trace the other, by the other's [nonce](super::nonce):
//!
//! | message | nonce of its sender | shows |
//! |---|---|---|
//! | offer | where it is | |
//! | answer | where it is | the initiator's nonce |
//! | initiator's disclosure | | the responder's nonce |
//! | responder's disclosure | | |
//!
//! A disclosure has the sender's table of STags, if the other end has proved its permission before.
//! An end with this permission gains nothing by false statements about processes: it can control
//! this process in any case. Each end also sends the number of the descriptor that its process has
//! for the TCP socket. So the other end can verify that this process has the connection, and not
//! another process with a process number that is used again.
//!
//! The initiator sends its disclosure before its first bytes in memory, and the responder its own
//! before it confirms the first of them; so neither waits for the other.

use super::by_file::ByFile;
use super::messages;
use super::messages::LocalSocket;
use super::messages::{Disclosure, Greeting, Passed, TableMessage};
use super::nonce::{Nonce, NonceValue};
use super::owner::Owner;
use crate::host::{SharedMemory, number_of, proof_of_access, revocable};
use crate::memory::RemoteAccessTable;
use crate::stream::descriptor::{Descriptor, Descriptors};
use crate::stream::same_host::local_peer::process::{PassedTable, PeerProcess};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{PTracer, Pid, getpid, set_ptracer};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The device's own table of STags, and those of its peers.
#[derive(Debug)]
pub(super) struct Tables {
    descriptors: Arc<Descriptors>,
    /// This device's table and the descriptor by which peers read it, if they may access the
    /// memory.
    own: OnceLock<(Arc<RemoteAccessTable>, Descriptor)>,
    peers: ByFile<PeerProcess>,
}

/// The results of the introduction: what each end needs to access the other's memory.
#[derive(Debug, Default)]
pub(in crate::stream) struct Reach {
    /// The peer's process, whose memory we reach.
    pub(super) there: Option<Arc<PeerProcess>>,
    /// Our table, which the peer has. The process is the peer's.
    pub(super) here: Option<(Arc<RemoteAccessTable>, Pid)>,
}

/// The nonce by which the other end proves its permission.
#[derive(Debug)]
pub(super) struct Challenge {
    nonce: Nonce,
    traceable: Traceable,
}

impl Challenge {
    /// The address of the nonce.
    pub(super) fn address(&self) -> u64 {
        self.nonce.address()
    }
}

/// A peer whose greeting has arrived.
#[derive(Debug)]
pub(super) struct PeerEnd<'a> {
    greeting: &'a Greeting,
    /// The peer's process, if it is known to have the other end of the TCP connection.
    process: Option<Pid>,
    /// The peer's nonce, zeroes if it could not be fetched; `None` if the peer has none.
    proof: Option<NonceValue>,
    is_known: bool,
}

impl<'a> PeerEnd<'a> {
    /// The process at the other end of `socket`, which greeted, if a connection to it has shown
    /// that it may trace this process. It can control this process in any case, so its message need
    /// not be verified, and a thread may wait for it.
    pub(super) fn known(
        greeting: &'a Greeting,
        socket: &LocalSocket,
        tables: &Tables,
    ) -> Option<PeerEnd<'a>> {
        let process = socket.peer_process()?;
        let is_it = |peer: &PeerProcess| peer.number == process && peer.is_there();
        tables.peers.any(is_it).filter(|_| socket.peer_lives())?;
        let proof = greeting
            .nonce()
            .map(|address| NonceValue::fetch(process, address));
        Some(PeerEnd {
            greeting,
            process: Some(process),
            proof,
            is_known: true,
        })
    }

    /// Whether a connection has shown before that the process may trace this one.
    pub(super) fn is_known(&self) -> bool {
        self.is_known
    }

    /// Looks at the process at the other end of `socket`, which greeted.
    ///
    /// # Errors
    /// `EPERM`: another process has the other end of the TCP connection, whose owner is `owner`.
    pub(super) fn of(
        greeting: &'a Greeting,
        socket: &LocalSocket,
        owner: Owner,
    ) -> Result<PeerEnd<'a>, Errno> {
        let process = socket.peer_process();
        let proof = process.zip(greeting.nonce()).map(|(process, address)| {
            // The read may block forever if the peer chooses so.
            let fetched = socket.blocking().ask(move || NonceValue::fetch(process, address));
            fetched.unwrap_or_default()
        });
        // The check comes after the read: the number of a process that has ended may belong to
        // another one by now.
        let is_it = process.map(|process| owner.is_process(process, greeting.socket()));
        match is_it {
            Some(Some(false)) => Err(Errno::PERM),
            Some(Some(true)) => Ok(PeerEnd {
                greeting,
                process,
                proof,
                is_known: false,
            }),
            _ => Ok(PeerEnd {
                greeting,
                process: None,
                proof: None,
                is_known: false,
            }),
        }
    }
}

/// The conversation of two ends, after the answer.
#[derive(Debug)]
pub(super) struct Introduction {
    tables: Arc<Tables>,
    socket: LocalSocket,
    challenge: Challenge,
    peer: Pid,
    /// The peer's nonce, zeroes if it could not be fetched.
    proof: NonceValue,
    /// Of an initiator: whether the responder has shown its permission.
    admits: Option<bool>,
}

impl Tables {
    pub(super) fn new(descriptors: &Arc<Descriptors>) -> Tables {
        Tables {
            descriptors: descriptors.clone(),
            own: OnceLock::new(),
            peers: ByFile::default(),
        }
    }

    /// Lets peers reach the memory that the table describes.
    pub(super) fn export(&self, table: Arc<RemoteAccessTable>, file: OwnedFd) -> Result<(), Errno> {
        let file = self.descriptors.adopt(file)?;
        let _ = self.own.set((table, file));
        Ok(())
    }

    /// Lets the last peer's process go; as [`ByFile::expire`].
    pub(super) fn expire(&self) -> Option<Duration> {
        self.peers.expire()
    }

    /// Creates the nonce by which a peer proves its permission; `None`: peers may not, or cannot,
    /// access the memory of this device.
    pub(super) fn challenge(&self) -> Option<Challenge> {
        self.own.get().filter(|_| revocable::is_available())?;
        Some(Challenge {
            traceable: Traceable::new(),
            nonce: Nonce::new()?,
        })
    }

    /// Our table for a peer that has shown its permission, and the descriptors that go with it.
    fn own(&self, peers_nonce: NonceValue) -> Option<(TableMessage, Vec<BorrowedFd<'_>>)> {
        let (table, file) = self.own.get()?;
        let host = table.host().and_then(|host| {
            let proof = proof_of_access(host.number(), peers_nonce.bytes())?;
            Some((host.descriptor(), proof))
        });
        let message = TableMessage {
            slots: table.slots(),
            address: table.address(),
            host_proof: host.map(|(_, proof)| proof),
        };
        let fds = [Some(file.as_fd()), host.map(|(pidfd, _)| pidfd)];
        Some((message, fds.into_iter().flatten().collect()))
    }
}

impl Introduction {
    /// Of an initiator, which has the answer; `None`: neither reaches the other's memory.
    pub(super) fn initiate(
        tables: &Arc<Tables>,
        socket: LocalSocket,
        challenge: Option<Challenge>,
        peer: PeerEnd<'_>,
    ) -> Option<Introduction> {
        let challenge = challenge?;
        let (answer, proof) = (peer.greeting, peer.proof?);
        let peer = peer.process?;
        let admits = challenge.nonce.is_proved_by(answer.proof());
        let own = tables.own(proof).filter(|_| admits);
        let (message, fds) = own.map_or_else(Default::default, |(message, fds)| (Some(message), fds));
        messages::send(&socket, &Disclosure::new(proof, message), &fds).ok()?;
        Some(Introduction {
            tables: tables.clone(),
            socket,
            challenge,
            peer,
            proof,
            admits: Some(admits),
        })
    }

    /// Of a responder, which is to answer an offer.
    pub(super) fn respond(
        tables: &Arc<Tables>,
        socket: LocalSocket,
        challenge: Option<Challenge>,
        peer: PeerEnd<'_>,
    ) -> Result<Introduction, LocalSocket> {
        let (Some(challenge), Some(process), Some(proof)) = (challenge, peer.process, peer.proof) else {
            return Err(socket);
        };
        Ok(Introduction {
            tables: tables.clone(),
            socket,
            challenge,
            peer: process,
            proof,
            admits: None,
        })
    }

    /// The socket for the answer.
    pub(super) fn socket(&self) -> &LocalSocket {
        &self.socket
    }

    /// The parts of an answer: the address of our nonce, and the value that was fetched as the
    /// peer's.
    pub(super) fn answer(&self) -> (Option<u64>, NonceValue) {
        (Some(self.challenge.address()), self.proof)
    }

    /// The number of the peer's process.
    pub(super) fn peer(&self) -> Pid {
        self.peer
    }

    /// The peer's access to this device, before the introduction has ended.
    pub(super) fn here(&self) -> Option<(Arc<RemoteAccessTable>, Pid)> {
        let admits = self.admits == Some(true);
        let (table, _) = self.tables.own.get().filter(|_| admits)?;
        Some((table.clone(), self.peer))
    }

    /// Reads the peer's disclosure, which has arrived, and as a responder sends one. Returns the
    /// result, and a value that must live as long as the peer may access our memory.
    pub(super) fn conclude(mut self) -> (Reach, Traceable) {
        let reach = self.take_disclosure().unwrap_or_else(|errno| {
            let process = self.peer;
            tracing::debug!(%errno, ?process, "this peer has not introduced itself");
            Reach::default()
        });
        (reach, self.challenge.traceable)
    }

    /// Opens the table that the peer passed, which has shown its permission.
    fn open(&self, message: TableMessage, mut passed: Passed) -> Result<Arc<PeerProcess>, Errno> {
        if message.host_proof.is_none()
            && let Some(there) = passed.known(&self.tables.peers, SharedMemory::check_sealed)
        {
            return (there.number == self.peer).then_some(there).ok_or(Errno::PERM);
        }
        let ((), file) = passed.take(SharedMemory::check_sealed)?;
        let host = match message.host_proof {
            None => None,
            Some(_) => Some(passed.take(|fd| number_of(fd).ok_or(Errno::SRCH))?.1),
        };
        let own_nonce = NonceValue::of(&self.challenge.nonce);
        let table = PassedTable {
            message,
            file: &file,
            host,
            challenge: own_nonce.bytes(),
        };
        let there = self.tables.peers.get(&file, || {
            let life = self.tables.descriptors.adopt(self.socket.peer_pidfd()?)?;
            PeerProcess::open(self.peer, life, table)
        })?;
        // Another process may have had the table, too.
        (there.number == self.peer).then_some(there).ok_or(Errno::PERM)
    }

    fn take_disclosure(&mut self) -> Result<Reach, Errno> {
        let (message, passed) =
            messages::receive::<Disclosure>(&self.socket, true, &self.tables.descriptors)?;
        if self.admits.is_none() {
            let admits = self.challenge.nonce.is_proved_by(message.proof());
            let own = self.tables.own(self.proof).filter(|_| admits);
            let (table, fds) = own.map_or_else(Default::default, |(table, fds)| (Some(table), fds));
            let disclosure = Disclosure::new(NonceValue::default(), table);
            messages::send(&self.socket, &disclosure, &fds)?;
            self.admits = Some(admits);
        }
        let process = self.peer;
        let here = self.here();
        let table = message.table().filter(|_| here.is_some());
        let there = table.map(|table| self.open(table, passed));
        match &there {
            Some(Ok(_)) => tracing::debug!(?process, "the memory of this peer is in reach"),
            Some(Err(errno)) => {
                tracing::debug!(%errno, ?process, "the memory of this peer is out of reach");
            }
            None => tracing::debug!(?process, "this peer may not trace us, or we may not trace it"),
        }
        let there = there.and_then(Result::ok);
        Ok(Reach { there, here })
    }
}

// If Yama's `ptrace_scope` is 1, a process may access another's memory only if that one permits it.

/// A process, and its number of [`Traceable`] values. (A forked child has a copy of the parent's
/// count, but not the permission.)
static COUNT: AtomicU64 = AtomicU64::new(0);

/// While a value exists, processes of this user may trace this one as if Yama were off
/// (`PR_SET_PTRACER`). The kernel has one such permission for each process; it cannot be read, and
/// cannot name several processes. If Yama is off, the call has no effect.
#[derive(Debug)]
pub(super) struct Traceable {
    process: Pid,
}

/// Counts one more, or one less, for this process; returns how many there are.
fn count(process: Pid, change: i32) -> u32 {
    let process = u64::from(process.as_raw_nonzero().get().cast_unsigned()) << 32;
    let mut before = COUNT.load(Ordering::Relaxed);
    loop {
        let own = if before >> 32 << 32 == process {
            before as u32
        } else {
            0
        };
        let now = own.saturating_add_signed(change);
        let changed = process | u64::from(now);
        match COUNT.compare_exchange_weak(before, changed, Ordering::AcqRel, Ordering::Relaxed) {
            Ok(_) => return now,
            Err(other) => before = other,
        }
    }
}

impl Traceable {
    pub(super) fn new() -> Traceable {
        let process = getpid();
        count(process, 1);
        // The call is made each time, because another thread may be about to revoke the permission.
        // It fails if the kernel has no Yama.
        let _ = set_ptracer(PTracer::Any);
        Traceable { process }
    }
}

impl Drop for Traceable {
    fn drop(&mut self) {
        if getpid() != self.process || count(self.process, -1) > 0 {
            return;
        }
        let _ = set_ptracer(PTracer::None);
        // Another thread may have made a value since.
        if count(self.process, 0) > 0 {
            let _ = set_ptracer(PTracer::Any);
        }
    }
}
