//! Memory for which the client cannot pass a descriptor. Each access copies, by the kernel or by
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

/// A method of access to the client's memory.
#[derive(Debug)]
pub(crate) struct Remote {
    link: Arc<Link>,
    /// Maximum number of data bytes in one message.
    room: usize,
    /// The client's process, if its DMA addresses are its virtual addresses and the kernel permits
    /// access.
    process: Option<Process>,
}

/// The client's process.
#[derive(Debug)]
struct Process {
    pid: Pid,
    /// While this pidfd reports that the process lives, no other process has its number.
    fd: OwnedFd,
}

impl Process {
    /// The process that connected, if its memory may be accessed. It must run as the server's own
    /// user: otherwise, after the client has died, the server could write into an unrelated process
    /// that got the client's number.
    fn behind(link: &Link) -> Option<Process> {
        let peer = socket_peercred(link.socket()).ok()?;
        if peer.uid != geteuid() {
            return None;
        }
        let process = Process {
            pid: peer.pid,
            fd: pidfd_open(peer.pid, PidfdFlags::empty()).ok()?,
        };
        // Nothing is mapped at 0. The kernel returns EFAULT if access is permitted at all (Yama may
        // forbid it), and another error if not.
        let probe = process_memory::read(process.pid, 0, &mut [0]);
        (probe == Err(Errno::FAULT) && process.lives()).then_some(process)
    }

    fn lives(&self) -> bool {
        let now = Timespec::default();
        poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&now)) == Ok(0)
    }
}

impl Remote {
    /// Selects the cheapest method that a client allows; access by its process only if
    /// `process_vm`.
    pub(crate) fn new(link: Arc<Link>, client: &Capabilities, process_vm: bool) -> Remote {
        let identity = client.urnic.is_some_and(|urnic| urnic.identity);
        Remote {
            process: (process_vm && identity).then(|| Process::behind(&link)).flatten(),
            room: client.data_xfer_size().min(MAX_TRANSFER),
            link,
        }
    }

    /// The method that was selected.
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

    /// Copies bytes from the client.
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

    /// Copies bytes to the client. They have arrived when this returns: a completion that follows
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
