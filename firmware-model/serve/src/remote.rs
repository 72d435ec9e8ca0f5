//! Memory that the client cannot give a descriptor for: copied on each access, by the kernel or by
//! messages.

use super::function::MAX_TRANSFER;
use super::link::Link;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Pid, PidfdFlags, geteuid, pidfd_open};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use urnic_model::host::Unreachable;
use urnic_model::host::process_memory;
use urnic_vfio_user::{Capabilities, DmaAccess, Memory, Reply, Request};

/// A way to the client's memory.
#[derive(Debug)]
pub(crate) struct Remote {
    link: Arc<Link>,
    /// Most bytes in one message.
    room: usize,
    /// The client itself, if its DMA addresses are its own and the kernel lets us.
    process: Option<Process>,
}

/// The client's process.
#[derive(Debug)]
struct Process {
    pid: Pid,
    /// While this says that it lives, nobody else has its number.
    fd: OwnedFd,
}

impl Process {
    /// The process that connected, if its memory may be accessed. It must be of the server's own
    /// user: else a client that has died could have us write into whoever got its number.
    fn behind(link: &Link) -> Option<Process> {
        let peer = socket_peercred(link.socket()).ok()?;
        if peer.uid != geteuid() {
            return None;
        }
        let process = Process {
            pid: peer.pid,
            fd: pidfd_open(peer.pid, PidfdFlags::empty()).ok()?,
        };
        // Nothing is mapped at 0: the kernel says so if we may ask at all (Yama may forbid it), and
        // something else if not.
        let probe = process_memory::read(process.pid, 0, &mut [0]);
        (probe == Err(Errno::FAULT) && process.lives()).then_some(process)
    }

    fn lives(&self) -> bool {
        let now = Timespec::default();
        poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&now)) == Ok(0)
    }
}

impl Remote {
    /// The cheapest way that a client allows; by its process only if `process_vm`.
    pub(crate) fn new(link: Arc<Link>, client: &Capabilities, process_vm: bool) -> Remote {
        let identity = client.urnic.is_some_and(|urnic| urnic.identity);
        Remote {
            process: (process_vm && identity).then(|| Process::behind(&link)).flatten(),
            room: client.data_xfer_size().min(MAX_TRANSFER),
            link,
        }
    }

    /// Which way it is.
    pub(crate) fn memory(&self) -> Memory {
        match self.process {
            Some(_) => Memory::ProcessVm,
            None => Memory::Messages,
        }
    }

    fn process(&self) -> Result<Option<&Process>, Unreachable> {
        match &self.process {
            Some(process) if process.lives() => Ok(Some(process)),
            Some(_) => Err(Unreachable),
            None => Ok(None),
        }
    }

    /// Copies bytes out of the client.
    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        if let Some(process) = self.process()? {
            let read = process_memory::read(process.pid, address, into);
            return if read == Ok(into.len()) {
                Ok(())
            } else {
                Err(Unreachable)
            };
        }
        let mut address = address;
        for part in into.chunks_mut(self.room) {
            let access = DmaAccess {
                address,
                count: part.len() as u64,
            };
            let copied = self
                .link
                .ask(&Request::DmaRead(access), |message| match message.reply() {
                    Ok(Reply::DmaRead { data, .. }) if data.len() == part.len() => {
                        part.copy_from_slice(data);
                        Some(())
                    }
                    _ => None,
                });
            copied.ok_or(Unreachable)?;
            address = address.wrapping_add(part.len() as u64);
        }
        Ok(())
    }

    /// Copies bytes into the client. They are there when this returns: a completion that follows
    /// must not overtake them.
    pub(crate) fn write(&self, address: u64, from: &[u8]) -> Result<(), Unreachable> {
        if let Some(process) = self.process()? {
            let written = process_memory::write(process.pid, address, from);
            return if written == Ok(from.len()) {
                Ok(())
            } else {
                Err(Unreachable)
            };
        }
        let mut address = address;
        for data in from.chunks(self.room) {
            let written = self.link.ask(&Request::DmaWrite { address, data }, |_| Some(()));
            written.ok_or(Unreachable)?;
            address = address.wrapping_add(data.len() as u64);
        }
        Ok(())
    }
}
