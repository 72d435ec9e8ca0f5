//! Memory for which the client cannot pass a descriptor. Each access copies, by the kernel or by
//! messages.

use super::function::MAX_TRANSFER;
use super::link::Link;
use rustix::fd::AsFd;
use rustix::process::geteuid;
use std::sync::Arc;
use urnic_model::host::{HostProcess, Unreachable, process_memory};
use urnic_sys::processes;
use urnic_vfio_user::{Capabilities, DmaAccess, Memory, Reply, Request};

/// A method of access to the client's memory.
#[derive(Debug)]
pub(crate) struct Remote {
    link: Arc<Link>,
    /// Maximum number of data bytes in one message.
    room: usize,
    /// The client's process, if its DMA addresses are its virtual addresses and the kernel permits
    /// access.
    process: Option<Arc<HostProcess>>,
}

/// The process that connected, if its memory may be accessed. It must run as the server's own user.
fn client_process(link: &Link) -> Option<Arc<HostProcess>> {
    let peer = processes::peer(link.socket().as_fd()).ok()?;
    let is_own = peer.user == geteuid().as_raw();
    is_own
        .then(|| HostProcess::of_peer(link.socket().as_fd()).ok())?
        .map(Arc::new)
}

impl Remote {
    /// Selects the cheapest method that a client allows; access by its process only if
    /// `process_vm`.
    pub(crate) fn new(link: Arc<Link>, client: &Capabilities, process_vm: bool) -> Remote {
        let identity = client.urnic.is_some_and(|urnic| urnic.identity);
        Remote {
            process: (process_vm && identity).then(|| client_process(&link)).flatten(),
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

    /// The client's process, if its addresses are the DMA addresses.
    pub(crate) fn process(&self) -> Option<&Arc<HostProcess>> {
        self.process.as_ref()
    }

    fn living_process(&self) -> Result<Option<&HostProcess>, Unreachable> {
        match &self.process {
            Some(process) if process.lives() => Ok(Some(process.as_ref())),
            Some(_) => Err(Unreachable),
            None => Ok(None),
        }
    }

    /// Copies bytes from the client.
    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> Result<(), Unreachable> {
        if let Some(process) = self.living_process()? {
            let read = process_memory::read(process.number(), address, into);
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
        if let Some(process) = self.living_process()? {
            let written = process_memory::write(process.number(), address, from);
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
