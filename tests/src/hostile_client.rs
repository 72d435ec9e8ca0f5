//! A hostile client of a served device: vfio-user without a library, and a minimal driver, for
//! actions that no library would permit.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use urnic_device::command::{
    COMMAND_LEN, COMPLETION_LEN, Command, Completion, CreateCq, CreateMr, CreateQp, Handle, ModifyQp,
    Nothing, Opcode, QueueHandle, Status, modify,
};
use urnic_device::doorbell::{Doorbell, Kind as Rung};
use urnic_device::registers::{
    CMD_BASE, CMD_COMPLETION_BASE, CMD_DOORBELL, CMD_LOG_SIZE, CONTROL, Control, KICK,
};
use urnic_device::stream::Attach;
use urnic_device::vocabulary::{Access, QpState};
use urnic_device::wqe::{BLOCK_LEN, SendFlags as WorkFlags, SendHeader, Sge, blocks};
use urnic_vfio_user::{
    Capabilities, Decoder, DmaMap, DmaMapFlags, DmaUnmap, DmaUnmapFlags, Kind, Limits, Message, RegionAccess,
    Reply, Request, Version,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::wait::TIME_LIMIT;

/// Where [`HostileClient::enable`] puts the memory of the command queue.
pub const BASE: u64 = 0x1_0000_0000;
/// Length of that memory.
pub const LEN: u64 = 1 << 20;
/// Offsets in the memory of a hostile client. The memory from `FREE` on belongs to the caller.
const COMPLETIONS: u64 = 0x1000;
const CQ_RING: u64 = 0x2000;
const RECORDS: u64 = 0x3000;
const SQ_RING: u64 = 0x4000;
const RQ_RING: u64 = 0x5000;
/// The memory from this offset on belongs to the caller.
pub const FREE: u64 = 0x8000;
const LOG_QUEUE: u32 = 6;
const PAGE_LEN: u64 = 4096;

/// Why an operation failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The server refused the request with this errno.
    Errno(u32),
    /// The device refused the command with this status.
    Status(u16),
    /// The server has closed the connection.
    Closed,
}

/// An answer.
pub type Answer<T> = Result<T, Refused>;

/// Memory that can be lent.
pub fn memory(name: &str, len: u64, flags: MemfdFlags) -> File {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | flags).expect("a memfd");
    ftruncate(&fd, len).expect("it may be that long");
    fd.into()
}

/// A connection.
#[derive(Debug)]
pub struct HostileClient {
    socket: UnixStream,
    decoder: Decoder,
    memory: Option<File>,
    doorbells: Option<File>,
    producer: u32,
}

/// A queue pair that is its own peer.
#[derive(Debug)]
pub struct OwnPeer {
    /// The number of the queue pair.
    pub qid: u32,
    /// The number of the queue pair's completion queue.
    pub cqid: u32,
    /// The protection domain of the queue pair.
    pub pd: u32,
    uar: u32,
    slot: u32,
    producer: u32,
}

impl HostileClient {
    /// Connects and sends nothing.
    ///
    /// # Errors
    /// No server accepts the connection.
    /// No server takes the connection.
    pub fn connect(path: &Path) -> std::io::Result<Self> {
        let socket = UnixStream::connect(path)?;
        socket.set_read_timeout(Some(TIME_LIMIT))?;
        let limits = Limits {
            message: (1 << 20) + 64,
            fds: 16,
        };
        Ok(Self {
            socket,
            decoder: Decoder::new(limits),
            memory: None,
            doorbells: None,
            producer: 0,
        })
    }

    /// Connects and completes the handshake.
    ///
    /// # Errors
    /// The server has no function left.
    pub fn begin(path: &Path) -> Answer<Self> {
        let mut client = Self::connect(path).map_err(|_| Refused::Closed)?;
        let version = Version {
            capabilities: Capabilities {
                max_msg_fds: Some(16),
                ..Capabilities::default()
            },
            ..Version::default()
        };
        client.request(&Request::Version(version), &[])?;
        Ok(client)
    }

    /// Sends any bytes with any descriptors.
    pub fn send_raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Answer<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let sent = rustix::net::sendmsg(
                &self.socket,
                &[IoSlice::new(rest)],
                &mut control,
                SendFlags::NOSIGNAL,
            );
            match sent {
                Ok(sent) => rest = &rest[sent..],
                Err(Errno::INTR) => {}
                Err(_) => return Err(Refused::Closed),
            }
            control = SendAncillaryBuffer::default();
        }
        Ok(())
    }

    /// Sends a command.
    pub fn send(&mut self, request: &Request<'_>, no_reply: bool, fds: &[BorrowedFd<'_>]) -> Answer<()> {
        let mut bytes = Vec::new();
        request.emit(1, no_reply, &mut bytes);
        self.send_raw(&bytes, fds)
    }

    /// The next message of the server.
    pub fn receive(&mut self) -> Answer<Message> {
        loop {
            if let Some(message) = self.decoder.next() {
                return Ok(message.expect("the server's messages make sense"));
            }
            let mut buffer = vec![0; 1 << 16];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut buffer)];
            let flags = RecvFlags::CMSG_CLOEXEC;
            let got = match rustix::net::recvmsg(&self.socket, &mut into, &mut control, flags) {
                Ok(got) if got.bytes > 0 => got.bytes,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => panic!("no message from the server for {TIME_LIMIT:?}"),
                Ok(_) | Err(_) => return Err(Refused::Closed),
            };
            let mut fds = Vec::new();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(brought) = message {
                    fds.extend(brought);
                }
            }
            self.decoder.push(&buffer[..got], fds);
        }
    }

    /// Sends a request and returns the answer.
    pub fn request(&mut self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) -> Answer<Message> {
        self.send(request, false, fds)?;
        let message = self.receive()?;
        match message.header.kind {
            Kind::Reply { error: Some(errno) } => Err(Refused::Errno(errno)),
            Kind::Reply { error: None } => Ok(message),
            Kind::Command { .. } => panic!("unexpected command of the server: {message:?}"),
        }
    }

    /// Waits until the server has closed the connection.
    pub fn expect_end(mut self) {
        while self.receive().is_ok() {}
    }

    /// Lends `len` bytes of a file from `offset` on at an address.
    pub fn map_memory(&mut self, address: u64, size: u64, offset: u64, file: impl AsFd) -> Answer<()> {
        let map = DmaMap {
            flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
            offset,
            address,
            size,
        };
        self.request(&Request::DmaMap(map), &[file.as_fd()]).map(drop)
    }

    /// Withdraws lent memory.
    pub fn unmap_memory(&mut self, address: u64, size: u64) -> Answer<()> {
        let unmap = DmaUnmap {
            flags: DmaUnmapFlags::empty(),
            address,
            size,
        };
        self.request(&Request::DmaUnmap(unmap), &[]).map(drop)
    }

    /// Reads a register.
    pub fn register(&mut self, offset: u32) -> Answer<u32> {
        let access = RegionAccess {
            offset: offset.into(),
            region: 0,
            count: 4,
        };
        let message = self.request(&Request::RegionRead(access), &[])?;
        match message.reply() {
            Ok(Reply::RegionRead { data, .. }) => {
                Ok(data.first_chunk().map_or(0, |word| u32::from_le_bytes(*word)))
            }
            other => panic!("{other:?}"),
        }
    }

    /// Writes a register.
    pub fn set_register(&mut self, offset: u32, value: u32) -> Answer<()> {
        let write = Request::RegionWrite {
            offset: offset.into(),
            region: 0,
            data: &value.to_le_bytes(),
        };
        self.request(&write, &[]).map(drop)
    }

    /// Lends memory for a command queue, and enables the device.
    pub fn enable(&mut self) -> Answer<()> {
        let memory = memory("hostile-client", LEN, MemfdFlags::empty());
        self.map_memory(BASE, LEN, 0, &memory)?;
        self.memory = Some(memory);
        self.producer = 0;
        self.set_register(CMD_LOG_SIZE, 4)?;
        for (register, value) in [(CMD_BASE, BASE), (CMD_COMPLETION_BASE, BASE + COMPLETIONS)] {
            self.set_register(register, value as u32)?;
            self.set_register(register + 4, (value >> 32) as u32)?;
        }
        self.set_register(CONTROL, Control::ENABLE.bits())?;
        let info = Request::RegionInfo { argsz: 64, index: 2 };
        let doorbells: Option<OwnedFd> = self.request(&info, &[])?.fds.pop();
        self.doorbells = doorbells.map(File::from);
        Ok(())
    }

    /// The memory of the command queue.
    pub fn memory(&self) -> &File {
        self.memory.as_ref().expect("enabled before")
    }

    /// Writes into the memory of the command queue.
    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.memory().write_all_at(bytes, at).expect("a file in memory");
    }

    /// Reads from the memory of the command queue.
    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        match self.memory().read_exact_at(&mut bytes, at) {
            Err(error) if error.kind() != ErrorKind::UnexpectedEof => panic!("a file in memory: {error}"),
            _ => bytes,
        }
    }

    /// Executes a command, with an input that was [written](HostileClient::write) before.
    pub fn execute(&mut self, mut command: Command) -> Answer<Completion> {
        let slot = u64::from(self.producer & 15);
        command.tag = (self.producer as u16).into();
        self.write(slot * COMMAND_LEN as u64, command.as_bytes());
        self.producer = self.producer.wrapping_add(1);
        self.set_register(CMD_DOORBELL, self.producer)?;
        let bytes = self.read(COMPLETIONS + slot * COMPLETION_LEN as u64, COMPLETION_LEN);
        let completion = Completion::read_from_bytes(&bytes).expect("as long as one");
        match completion.status.get() {
            0 => Ok(completion),
            status => Err(Refused::Status(status)),
        }
    }

    /// Executes a command without buffers.
    pub fn command<T: IntoBytes + Immutable>(&mut self, opcode: Opcode, arguments: &T) -> Answer<Completion> {
        self.execute(Command::new(opcode, arguments))
    }

    /// Checks that the function works: creates an object with a command and destroys it.
    pub fn works(&mut self) -> Answer<()> {
        let pd: Handle = self.command(Opcode::AllocPd, &Nothing {})?.result();
        self.command(Opcode::FreePd, &pd).map(drop)
    }

    /// Makes a queue pair that is its own peer.
    pub fn own_peer(&mut self) -> Answer<OwnPeer> {
        let pd = self
            .command(Opcode::AllocPd, &Nothing {})?
            .result::<Handle>()
            .id
            .get();
        let uar = self
            .command(Opcode::AllocUar, &Nothing {})?
            .result::<Handle>()
            .id
            .get();
        let cq = CreateCq {
            ring: (BASE + CQ_RING).into(),
            record: (BASE + RECORDS).into(),
            log_size: LOG_QUEUE.into(),
            uar: uar.into(),
            ..CreateCq::default()
        };
        let cqid = self
            .command(Opcode::CreateCq, &cq)?
            .result::<QueueHandle>()
            .id
            .get();
        let qp = CreateQp {
            sq_ring: (BASE + SQ_RING).into(),
            rq_ring: (BASE + RQ_RING).into(),
            record: (BASE + RECORDS + 0x100).into(),
            pd: pd.into(),
            send_cq: cqid.into(),
            recv_cq: cqid.into(),
            uar: uar.into(),
            sq_log_size: LOG_QUEUE.into(),
            rq_log_size: LOG_QUEUE.into(),
            rq_log_stride: 6.into(),
            ..CreateQp::default()
        };
        let handle: QueueHandle = self.command(Opcode::CreateQp, &qp)?.result();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change = ModifyQp {
                qp: handle.id,
                mask: (modify::STATE | modify::ACCESS).into(),
                state: (state as u32).into(),
                access: (Access::REMOTE_READ | Access::REMOTE_WRITE).bits().into(),
                ..ModifyQp::default()
            };
            self.command(Opcode::ModifyQp, &change)?;
        }
        let attach = Attach {
            qid: handle.id,
            ord: 16.into(),
            ird: 16.into(),
            first_msn: 1.into(),
            ..Attach::default()
        };
        self.command(Opcode::LoopbackAttach, &attach)?;
        Ok(OwnPeer {
            qid: handle.id.get(),
            cqid,
            pd,
            uar,
            slot: handle.doorbell.get(),
            producer: 0,
        })
    }

    /// Registers every second page of lent memory from `first` on, as one region: no two of its
    /// pages are neighbours.
    pub fn register_every_second_page(&mut self, pd: u32, first: u64, pages: u64) -> Answer<u32> {
        let list: Vec<u8> = (0..pages)
            .flat_map(|page| (first + 2 * page * PAGE_LEN).to_le_bytes())
            .collect();
        self.write(FREE, &list);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let region = CreateMr {
            len: (pages * PAGE_LEN).into(),
            pd: pd.into(),
            access: access.bits().into(),
            log_page: 12.into(),
            ..CreateMr::default()
        };
        let mut command = Command::new(Opcode::CreateMr, &region);
        command.input = (BASE + FREE).into();
        command.input_len = (list.len() as u32).into();
        Ok(self.execute(command)?.result::<Handle>().id.get())
    }

    /// Posts one request that has no operands besides these pieces of local memory.
    pub fn post(&mut self, peer: &mut OwnPeer, mut header: SendHeader, pieces: &[Sge]) {
        header.flags = WorkFlags::SIGNALED.bits();
        header.num_sge = pieces.len() as u8;
        header.blocks = blocks(size_of_val(pieces)) as u8;
        let mut entry = header.as_bytes().to_vec();
        entry.extend_from_slice(pieces.as_bytes());
        for block in entry.chunks(BLOCK_LEN) {
            let slot = u64::from(peer.producer & ((1 << LOG_QUEUE) - 1));
            self.write(SQ_RING + slot * BLOCK_LEN as u64, block);
            peer.producer = peer.producer.wrapping_add(1);
        }
        self.write(RECORDS + 0x100, &peer.producer.to_le_bytes());
    }

    /// Rings the doorbell for the posted requests.
    pub fn ring(&mut self, peer: &OwnPeer) -> Answer<()> {
        let doorbell = Doorbell {
            kind: Rung::Send,
            queue: peer.qid,
            index: peer.producer,
        };
        self.store(
            u64::from(peer.uar) * PAGE_LEN + u64::from(peer.slot),
            doorbell.encode(),
        );
        let kick = Request::RegionWrite {
            offset: KICK.into(),
            region: 0,
            data: &1u32.to_le_bytes(),
        };
        self.send(&kick, true, &[])
    }

    /// Stores into a doorbell page.
    pub fn store(&self, at: u64, value: u64) {
        if let Some(doorbells) = &self.doorbells {
            // A store outside of the doorbells is ignored.
            let _ = doorbells.write_all_at(&value.to_le_bytes(), at);
        }
    }

    /// The form of a status in [`Refused`].
    pub fn status(status: Status) -> Refused {
        Refused::Status(status as u16)
    }
}
