//! A minimal client and a minimal driver.

use super::super::endpoint::Endpoint;
use super::super::function::{LIMITS, Outgoing};
use super::super::server::Server;
use super::TIMEOUT;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use urnic_device::command::{COMMAND_LEN, COMPLETION_LEN, Command, Completion, Opcode, Status};
use urnic_device::registers::*;
use urnic_model::config::{DeviceAddress, Limits, ModelConfig, Reach};
use urnic_vfio_user::*;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A server of one socket, stopped when dropped.
pub(super) struct Served {
    pub(super) path: PathBuf,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

/// The configuration of a function with this one address, confined.
pub(super) fn config(address: &str, host: &[&str]) -> ModelConfig {
    let ip = |text: &str| -> IpAddr { text.parse().unwrap() };
    ModelConfig {
        addresses: vec![DeviceAddress {
            ip: ip(address),
            scope: 0,
            prefix_len: 8,
        }],
        reach: Reach::Confined {
            host: host.iter().map(|text| ip(text)).collect(),
            allow: Vec::new(),
        },
        limits: Limits {
            uars: 64,
            ..Limits::default()
        },
        ..ModelConfig::default()
    }
}

pub(super) fn fresh_path() -> PathBuf {
    static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    std::env::temp_dir().join(format!("urnic-serve-{}-{number}", std::process::id()))
}

impl Served {
    pub(super) fn start(clients: usize) -> Served {
        Served::start_with(config("127.0.0.1", &[]), clients)
    }

    pub(super) fn start_with(config: ModelConfig, clients: usize) -> Served {
        let path = fresh_path();
        let endpoint = Endpoint {
            path: path.clone(),
            mode: 0o600,
            config,
            clients,
            process_vm: true,
        };
        let server = Server::bind(vec![endpoint]).unwrap();
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let of_thread = stop.try_clone().unwrap();
        let thread = std::thread::spawn(move || server.run(of_thread.as_fd()));
        Served {
            path,
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
        let ended = self.thread.take().unwrap().join();
        assert!(std::thread::panicking() || (ended.is_ok() && !self.path.exists()));
    }
}

/// A file of memory that can be lent.
pub(super) fn memory(len: u64) -> std::fs::File {
    named_memory("lent", len)
}

/// A file of memory with a name that appears in a list of mappings.
pub(super) fn named_memory(name: &str, len: u64) -> std::fs::File {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, len).unwrap();
    fd.into()
}

pub(super) fn lend(address: u64, size: u64) -> Request<'static> {
    Request::DmaMap(DmaMap {
        flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
        offset: 0,
        address,
        size,
    })
}

pub(super) fn take_back(address: u64, size: u64) -> Request<'static> {
    Request::DmaUnmap(DmaUnmap {
        flags: DmaUnmapFlags::empty(),
        address,
        size,
    })
}

/// A client's connection.
pub(super) struct Client {
    pub(super) socket: UnixStream,
    decoder: Decoder,
}

impl Client {
    /// Connects without a version exchange.
    pub(super) fn connect(path: &Path) -> Client {
        Client::over(UnixStream::connect(path).unwrap())
    }

    pub(super) fn over(socket: UnixStream) -> Client {
        socket.set_read_timeout(Some(TIMEOUT)).unwrap();
        Client {
            socket,
            decoder: Decoder::new(LIMITS),
        }
    }

    /// Connects and sends the version as QEMU does.
    pub(super) fn begin(path: &Path) -> Client {
        Client::begin_with(
            path,
            Capabilities {
                max_msg_fds: Some(16),
                ..Capabilities::default()
            },
        )
    }

    pub(super) fn begin_with(path: &Path, capabilities: Capabilities) -> Client {
        let mut client = Client::connect(path);
        let version = Version {
            capabilities,
            ..Version::default()
        };
        client.ask(&Request::Version(version), &[]).unwrap();
        client
    }

    pub(super) fn send(&mut self, request: &Request<'_>, no_reply: bool, fds: &[BorrowedFd<'_>]) {
        let mut out = Outgoing::default();
        request.emit(1, no_reply, &mut out.bytes);
        self.send_raw(&out.bytes, fds);
    }

    /// Sends bytes. If the server has closed the connection, the next read reports it.
    pub(super) fn send_raw(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let pieces = [IoSlice::new(bytes)];
        let sent = rustix::net::sendmsg(&self.socket, &pieces, &mut control, SendFlags::NOSIGNAL);
        let rest = sent
            .map_err(Error::from)
            .and_then(|sent| self.socket.write_all(&bytes[sent..]));
        if let Err(error) = rest {
            assert!(
                matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
                "{error}"
            );
        }
    }

    /// The next message; `None` if the server has closed the connection.
    pub(super) fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(message) = self.decoder.next() {
                return Some(message.unwrap());
            }
            let mut buffer = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut into = [IoSliceMut::new(&mut buffer)];
            let got =
                match rustix::net::recvmsg(&self.socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
                    Ok(got) if got.bytes > 0 => got.bytes,
                    // A machine that was stopped and continues ends a call that has a time limit
                    // (signal(7)).
                    Err(rustix::io::Errno::INTR) => continue,
                    Ok(_) | Err(rustix::io::Errno::CONNRESET) => return None,
                    Err(errno) => panic!("no message from the server: {errno}"),
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

    /// Sends a request and returns the reply or the errno.
    pub(super) fn ask(&mut self, request: &Request<'_>, fds: &[BorrowedFd<'_>]) -> Result<Message, u32> {
        self.send(request, false, fds);
        let message = self.next().expect("a reply");
        match message.header.kind {
            Kind::Reply { error: None } => Ok(message),
            Kind::Reply { error: Some(errno) } => Err(errno),
            Kind::Command { .. } => panic!("unexpected command of the server: {message:?}"),
        }
    }

    /// Waits until the server has closed the connection without a message.
    pub(super) fn expect_end(mut self) {
        assert!(self.next().is_none());
    }

    pub(super) fn read32(&mut self, offset: u32) -> u32 {
        let access = RegionAccess {
            offset: offset.into(),
            region: 0,
            count: 4,
        };
        let message = self.ask(&Request::RegionRead(access), &[]).unwrap();
        match message.reply().unwrap() {
            Reply::RegionRead { data, .. } => u32::from_le_bytes(data.try_into().unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn write32(&mut self, offset: u32, value: u32) {
        let offset = offset.into();
        let data = &value.to_le_bytes();
        self.ask(
            &Request::RegionWrite {
                offset,
                region: 0,
                data,
            },
            &[],
        )
        .unwrap();
    }

    /// Lends `file` at `address` and puts the command queue at its beginning.
    pub(super) fn enable(&mut self, file: &std::fs::File, address: u64) -> Commands {
        let size = file.metadata().unwrap().len();
        self.ask(&lend(address, size), &[file.as_fd()]).unwrap();
        self.write32(CMD_LOG_SIZE, 4);
        self.write32(CMD_BASE, address as u32);
        self.write32(CMD_BASE + 4, (address >> 32) as u32);
        self.write32(CMD_COMPLETION_BASE, address as u32 + 4096);
        self.write32(CMD_COMPLETION_BASE + 4, (address >> 32) as u32);
        self.write32(CONTROL, Control::ENABLE.bits());
        assert_eq!(self.read32(STATUS), 1, "the device is ready");
        Commands {
            memory: file.try_clone().unwrap(),
            producer: 0,
        }
    }
}

/// A command queue of 16 entries at the beginning of a file, completions in its second page.
pub(super) struct Commands {
    memory: std::fs::File,
    pub(super) producer: u32,
}

impl Commands {
    /// Executes a command.
    pub(super) fn execute<T: IntoBytes + Immutable>(
        &mut self,
        client: &mut Client,
        opcode: Opcode,
        arguments: &T,
    ) -> Result<Completion, Status> {
        let slot = u64::from(self.producer & 15);
        let command = Command::new(opcode, arguments);
        self.memory
            .write_all_at(command.as_bytes(), slot * COMMAND_LEN as u64)
            .unwrap();
        self.producer += 1;
        client.write32(CMD_DOORBELL, self.producer);
        let mut bytes = [0; COMPLETION_LEN];
        self.memory
            .read_exact_at(&mut bytes, 4096 + slot * COMPLETION_LEN as u64)
            .unwrap();
        let completion = Completion::read_from_bytes(&bytes).unwrap();
        match Status::from_raw(completion.status.get()).unwrap() {
            Status::Ok => Ok(completion),
            status => Err(status),
        }
    }
}
