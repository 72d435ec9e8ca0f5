//! The device against its datasheet, and `urnic serve`: the device in a process of its own.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use urnic_tests::Running;
use urnic_tests::build::{scratch, urnic};
use urnic_tests::program::Program;
use urnic_tests::wait::TIME_LIMIT;

/// The messages of QEMU 11.1, from `tests/fixtures`: a guest with an IOMMU boots, binds the
/// function to vfio-pci, and runs two checks of `urnic conformance` and `ibv_devinfo`. For each
/// message: the number of descriptors with it, the errno of the reply, for each descriptor the
/// length of its file or `u64::MAX` for an eventfd, the message.
const RECORDED: &[u8] = include_bytes!("../fixtures/qemu-11.1.vfio-user");

/// A served function with address 127.0.0.2; the socket is removed by the server, which ends when
/// dropped.
struct Served {
    running: Running,
    socket: PathBuf,
}

impl Served {
    fn start(name: &str) -> Self {
        let socket = scratch().join(format!("{name}-{}.sock", std::process::id()));
        let mut running = Program::plain(urnic())
            .args(["serve", "--addr", "127.0.0.2/8", "--socket"])
            .arg(&socket)
            .spawn();
        running.wait_for_output("that it serves", |printed| {
            printed.contains("serving").then_some(())
        });
        Self { running, socket }
    }

    fn conforms(&self) {
        conforms(&format!("vfio-user:{}", self.socket.display()));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Checks that the device passes its own test suite.
fn conforms(device: &str) {
    let printed = Program::plain(urnic())
        .args(["conformance", "--device", device])
        .run()
        .success();
    assert!(printed.contains(" 0 failed, 0 not applicable"), "{printed}");
}

#[test]
fn the_device_in_the_process_conforms() {
    conforms("inproc");
}

#[test]
fn a_served_device_conforms() {
    let served = Served::start("conforms");
    served.conforms();
    // The next client gets a device in its initial state.
    served.conforms();
}

/// One message of the recording.
struct Message<'a> {
    errno: u32,
    files: Vec<u64>,
    bytes: &'a [u8],
}

const HEADER: usize = 16;
/// Flags of a message: bits 3:0 are the type, 0 = a command; then these.
const NO_REPLY: u32 = 0x10;
const ERROR: u32 = 0x20;

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

fn messages(mut rest: &[u8]) -> Vec<Message<'_>> {
    let mut all = Vec::new();
    while let [files, errno, tail @ ..] = rest {
        let (sizes, tail) = tail.split_at(usize::from(*files) * 8);
        let files = sizes
            .chunks(8)
            .map(|size| u64::from_le_bytes(size.try_into().expect("eight bytes")));
        let (bytes, tail) = tail.split_at(word(tail, 4) as usize);
        all.push(Message {
            errno: u32::from(*errno),
            files: files.collect(),
            bytes,
        });
        rest = tail;
    }
    all
}

/// QEMU's descriptors: the guest's memory, always the same, and eventfds.
fn descriptor(size: u64, memory: &mut Option<(u64, OwnedFd)>) -> OwnedFd {
    if size == u64::MAX {
        return eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    }
    if memory.as_ref().is_none_or(|(known, _)| *known != size) {
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).expect("a memfd");
        ftruncate(&file, size).expect("it may be that long");
        *memory = Some((size, file));
    }
    let (_, file) = memory.as_ref().expect("made above");
    file.try_clone().expect("a descriptor")
}

#[test]
fn recorded_qemu_messages_get_the_same_answers() {
    let served = Served::start("replay");
    let mut stream = UnixStream::connect(&served.socket).expect("a server");
    stream
        .set_read_timeout(Some(TIME_LIMIT.min(Duration::from_secs(30))))
        .expect("not zero");
    let mut memory = None;
    let recorded = messages(RECORDED);
    assert!(recorded.len() > 3000, "{} messages", recorded.len());
    for (number, message) in recorded.iter().enumerate() {
        let files: Vec<OwnedFd> = message
            .files
            .iter()
            .map(|size| descriptor(*size, &mut memory))
            .collect();
        let borrowed: Vec<_> = files.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !borrowed.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)));
        }
        let sent = sendmsg(
            &stream,
            &[IoSlice::new(message.bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
        assert_eq!(sent, Ok(message.bytes.len()), "message {number}");
        if word(message.bytes, 8) & NO_REPLY != 0 {
            continue;
        }
        let mut header = [0; HEADER];
        stream.read_exact(&mut header).unwrap_or_else(|error| {
            panic!(
                "no answer to message {number}: {error}\n{}",
                served.running.output()
            )
        });
        assert_eq!(
            header[..4],
            message.bytes[..4],
            "id and command of the answer to message {number}"
        );
        let failed = word(&header, 8) & ERROR != 0;
        let errno = if failed { word(&header, 12) } else { 0 };
        assert_eq!(errno, message.errno, "the answer to message {number}");
        let mut body = vec![0; word(&header, 4) as usize - HEADER];
        stream.read_exact(&mut body).expect("the rest of the answer");
    }
    drop(stream);
    served.conforms();
}
