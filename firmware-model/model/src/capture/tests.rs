//! Captures of simulated connections, and files that cannot be written.

use super::tapped::Tapped;
use super::*;
use crate::host::{Piece, PieceMut};
use crate::stream::{Listener, Network, Stream};
use crate::testing::sim::{Conditions, SimNetwork};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU64;
use urnic_testkit::Folder;

const REQUEST: &[u8] = b"MPA ID Req Frame\x40\x01\0\0";
const REPLY: &[u8] = b"MPA ID Rep Frame\x40\x01\0\0";
/// A Send of "hello" (conformance vector F-SEND-hello).
const FPDU: &[u8] = b"\x00\x17\x41\x43\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0hello\0\0\0\xb9\x90\xb1\x0c";

/// The packets of a capture file: interface, sender's port, flags of TCP, payload.
fn packets(path: &Path) -> Vec<(u32, u16, u8, Vec<u8>)> {
    let file = std::fs::read(path).unwrap();
    let mut rest = &file[..];
    let mut found = Vec::new();
    let word = |at: &[u8]| u32::from_le_bytes(*at.first_chunk().unwrap());
    while !rest.is_empty() {
        let (block, later) = rest.split_at(word(&rest[4..]) as usize);
        rest = later;
        if word(block) == 6 {
            let packet = &block[28..28 + word(&block[20..]) as usize];
            let tcp = &packet[20..];
            let data = usize::from(tcp[12] >> 4) * 4;
            found.push((
                word(&block[8..]),
                u16::from_be_bytes([tcp[0], tcp[1]]),
                tcp[13],
                tcp[data..].to_vec(),
            ));
        }
    }
    found
}

/// Payloads by sender.
fn payloads(path: &Path, port: u16) -> Vec<u8> {
    let packets = packets(path).into_iter().filter(|(_, from, ..)| *from == port);
    packets.flat_map(|(.., payload)| payload).collect()
}

struct Connected {
    initiator: Box<dyn Stream>,
    responder: Box<dyn Stream>,
    network: SimNetwork,
}

/// A connection whose ends have these captures.
fn connect(initiator: Option<&Capture>, responder: Option<&Capture>) -> Connected {
    let clock = Arc::new(AtomicU64::new(1));
    let network = SimNetwork::new(
        Conditions {
            latency: std::time::Duration::ZERO,
            ..Conditions::default()
        },
        clock,
    );
    let around = |capture: Option<&Capture>| -> Arc<dyn Network> {
        match capture {
            Some(capture) => Arc::new(Tapped::new(Arc::new(network.clone()), capture.clone())),
            None => Arc::new(network.clone()),
        }
    };
    let mut listener: Box<dyn Listener> = around(responder)
        .listen("10.0.0.2:4791".parse().unwrap(), 1, 0, false)
        .unwrap();
    let local = Some("10.0.0.1:1000".parse().unwrap());
    let mut initiator = around(initiator).connect(listener.local(), local, 0).unwrap();
    assert_eq!(initiator.established(), Ok(true));
    let responder = listener.accept().unwrap().expect("it connected");
    Connected {
        initiator,
        responder,
        network,
    }
}

impl Connected {
    fn start_up(&mut self) {
        pass(&mut self.initiator, &mut self.responder, REQUEST);
        pass(&mut self.responder, &mut self.initiator, REPLY);
    }
}

fn pass(from: &mut Box<dyn Stream>, to: &mut Box<dyn Stream>, bytes: &[u8]) {
    let (front, back) = bytes.split_at(bytes.len() / 2);
    assert_eq!(from.send(&[Piece::of(front), Piece::of(back)]), Ok(bytes.len()));
    let mut into = vec![0; bytes.len() + 7];
    let (front, back) = into.split_at_mut(5);
    assert_eq!(
        to.receive(&mut [PieceMut::of(front), PieceMut::of(back)]),
        Ok(bytes.len())
    );
    assert_eq!(&into[..bytes.len()], bytes);
}

#[test]
fn both_ends_capture_the_same() {
    let folder = Folder::new("capture");
    let [one, two] = ["one", "two"].map(|name| folder.file(name));
    let captures = [&one, &two].map(|path| CaptureFile::new(path.clone(), None).interface("urnic0", ""));
    let mut connected = connect(Some(&captures[0]), Some(&captures[1]));
    connected.start_up();
    pass(&mut connected.initiator, &mut connected.responder, FPDU);
    pass(&mut connected.responder, &mut connected.initiator, FPDU);
    connected.initiator.finish();
    assert_eq!(connected.responder.receive_bytes(&mut [0; 9]), Ok(0));
    connected.responder.finish();
    assert_eq!(connected.initiator.receive_bytes(&mut [0; 9]), Ok(0));
    drop(connected);
    assert_eq!(packets(&one), packets(&two));
    // Three of the handshake, four frames, two FINs and the last ACK.
    assert_eq!(packets(&one).len(), 10);
}

#[test]
fn a_connection_between_local_ends_is_captured_once() {
    let folder = Folder::new("capture");
    let path = folder.file("file");
    let file = CaptureFile::new(path.clone(), None);
    let (near, far) = (file.interface("near", ""), file.interface("far", ""));
    let mut connected = connect(Some(&near), Some(&far));
    connected.start_up();
    pass(&mut connected.responder, &mut connected.initiator, FPDU);
    assert_eq!(payloads(&path, 1000), REQUEST);
    assert_eq!(payloads(&path, 4791), [REPLY, FPDU].concat());
    let interfaces: Vec<u32> = packets(&path).iter().map(|(interface, ..)| *interface).collect();
    assert!(
        interfaces.contains(&0) && interfaces.contains(&1),
        "{interfaces:?}"
    );
    // The same addresses again are another connection.
    drop(connected);
    let before = packets(&path).len();
    let _again = connect(Some(&near), Some(&far));
    assert_eq!(packets(&path).len(), before + 3);
}

#[test]
fn untaken_bytes_are_not_captured() {
    let folder = Folder::new("capture");
    let path = folder.file("file");
    let capture = CaptureFile::new(path.clone(), None).interface("urnic0", "");
    let mut connected = connect(Some(&capture), None);
    connected.network.wires()[0].set_capacity(0, 26);
    assert_eq!(connected.initiator.send_bytes(REQUEST), Ok(20));
    assert_eq!(connected.initiator.send(&[Piece::of(FPDU)]), Ok(6));
    assert_eq!(
        connected.initiator.send(&[Piece::of(&FPDU[6..])]),
        Err(crate::stream::StreamError::WouldBlock)
    );
    drop(connected);
    assert_eq!(payloads(&path, 1000), [REQUEST, &FPDU[..6]].concat());
}

#[test]
fn a_reset_is_seen_at_either_end() {
    let folder = Folder::new("capture");
    for (which, port) in [(0, 1000), (1, 4791)] {
        let path = folder.file(&format!("reset-{which}"));
        let capture = CaptureFile::new(path.clone(), None).interface("urnic0", "");
        let mut connected = connect(Some(&capture), None);
        match which {
            0 => connected.initiator.reset(),
            _ => {
                connected.responder.reset();
                assert!(connected.initiator.receive_bytes(&mut [0; 9]).is_err());
            }
        }
        drop(connected);
        let (_, from, flags, _) = packets(&path).pop().unwrap();
        assert_eq!((from, flags), (port, pcapng::RST | pcapng::ACK));
    }
}

#[test]
fn a_file_that_is_taken_or_not_empty_is_left_alone() {
    let folder = Folder::new("capture");
    let path = folder.file("wire.pcapng");
    CaptureFile::prepare(&path).unwrap();
    let capture = || CaptureFile::new(path.clone(), None).interface("urnic0", "");
    let first = connect(Some(&capture()), None);
    let beside = format!("wire-{}.pcapng", std::process::id());
    assert_eq!(folder.names(), ["wire.pcapng"]);
    let second = connect(Some(&capture()), None);
    assert_eq!(folder.names(), [beside.clone(), "wire.pcapng".to_owned()]);
    // The file of a running capture is not truncated.
    CaptureFile::prepare(&path).unwrap();
    assert_eq!(packets(&path).len(), 3);
    drop((first, second));
    let third = connect(Some(&capture()), None);
    assert_eq!(packets(&folder.file(&beside)).len(), 3);
    drop(third);
    CaptureFile::prepare(&path).unwrap();
    assert_eq!(packets(&path), []);
}

#[test]
fn a_name_may_have_the_number_of_its_process() {
    let folder = Folder::new("capture");
    let capture = CaptureFile::new(folder.file("%p-%p"), None).interface("urnic0", "");
    drop(connect(Some(&capture), None));
    let number = std::process::id();
    assert_eq!(folder.names(), [format!("{number}-{number}")]);
}

#[test]
fn traffic_continues_when_the_capture_cannot_be_written() {
    let folder = Folder::new("capture");
    for path in [folder.file("no/such/folder"), PathBuf::from("/dev/null")] {
        assert!(CaptureFile::prepare(&path).is_err());
        let capture = CaptureFile::new(path, None).interface("urnic0", "");
        let mut connected = connect(Some(&capture), Some(&capture));
        connected.start_up();
        pass(&mut connected.initiator, &mut connected.responder, FPDU);
    }
}

#[test]
fn a_file_that_cannot_grow_ends_with_a_whole_packet() {
    let file = memfd_create("full", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let capture = CaptureFile::new(path.clone(), None).interface("urnic0", "");
    let mut connected = connect(Some(&capture), None);
    fcntl_add_seals(&file, SealFlags::GROW).unwrap();
    connected.start_up();
    pass(&mut connected.initiator, &mut connected.responder, FPDU);
    assert_eq!(packets(&path).len(), 3);
}

#[test]
fn a_link_under_the_name_of_a_process_is_not_followed() {
    let folder = Folder::new("capture-link");
    let precious = folder.file("precious");
    std::fs::write(&precious, "content").unwrap();
    let own = folder.file(&format!("a-{}.pcapng", std::process::id()));
    std::os::unix::fs::symlink(&precious, &own).unwrap();
    std::fs::write(folder.file("a.pcapng"), "of another process").unwrap();
    for name in ["a.pcapng", "a-%p.pcapng"] {
        assert_eq!(claim(&folder.file(name)).unwrap_err(), Errno::LOOP, "{name}");
    }
    assert_eq!(std::fs::read(&precious).unwrap(), b"content");
    std::fs::remove_file(&own).unwrap();
    std::fs::write(&own, "of an earlier process").unwrap();
    let (file, path) = claim(&folder.file("a.pcapng")).unwrap();
    assert_eq!((path, rustix::fs::fstat(&file).unwrap().st_size), (own, 0));
}
