//! Valid answers, and other messages that may arrive.

use std::io::Read as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use proptest::prelude::*;
use rustix::fs::{Mode, OFlags, ftruncate, open};
use rustix::net::sockopt::set_socket_linger;
use urnic_presence::HwCounter;

use super::*;
use crate::watch::{Failure, QueuePair, Snapshot};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn memory(content: &[u8], seals: SealFlags) -> OwnedFd {
    let file = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::io::pwrite(&file, content, 0).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// The reader's result for these descriptors.
fn received<T: DeserializeOwned>(owned: Vec<OwnedFd>) -> Option<T> {
    let (ours, theirs) = ends().unwrap();
    let fds: Vec<BorrowedFd<'_>> = owned.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::DONTWAIT;
    sendmsg(&theirs, &[IoSlice::new(b"!")], &mut ancillary, flags).unwrap();
    // The reader has the last descriptors then.
    drop(owned);
    receive(ours, soon())
}

#[test]
fn an_answer_arrives_whole() {
    let text = vec!["a".repeat(1 << 20), "\u{1b}".to_owned()];
    let (ours, theirs) = ends().unwrap();
    send(&theirs, &text).unwrap();
    assert_eq!(receive(ours, soon()), Some(text));
}

#[test]
fn a_process_that_does_not_answer_is_left_out() {
    let (ours, theirs) = ends().unwrap();
    assert_eq!(receive::<u64>(ours, Instant::now()), None);
    drop(theirs);
    let (ours, _) = ends().unwrap();
    assert_eq!(receive::<u64>(ours, soon()), None, "it has closed its end");
}

#[test]
fn only_a_sealed_file_of_a_moderate_length_is_read() {
    let opened = |path| open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let long = memory(b"7", SealFlags::empty());
    ftruncate(&long, MAX_ANSWER + 1).unwrap();
    fcntl_add_seals(&long, SEALS).unwrap();
    let others = [
        ("/dev/zero", opened("/dev/zero")),
        ("a file", opened("/proc/self/maps")),
        ("a folder", opened("/")),
        ("a pipe", pipe),
        ("a socket", UnixStream::pair().unwrap().0.into()),
        ("no seals", memory(b"7", SealFlags::empty())),
        ("one seal", memory(b"7", SealFlags::SHRINK | SealFlags::GROW)),
        ("long", long),
        ("no JSON", memory(b"seven", SEALS)),
    ];
    assert_eq!(received::<u64>(vec![memory(b"7", SEALS)]), Some(7));
    for (what, other) in others {
        assert_eq!(received::<u64>(vec![other]), None, "{what}");
    }
    let two = vec![memory(b"7", SEALS), memory(b"7", SEALS)];
    assert_eq!(received::<u64>(two), None, "two files");
    assert_eq!(received::<u64>(Vec::new()), None, "no file");
}

/// Whether a thread closes refused descriptors.
fn closes() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut names = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.any(|name| name.trim() == "urnic-closer")
}

#[test]
fn a_descriptor_whose_close_waits_delays_no_thread() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut reader, _) = listener.accept().unwrap();
    slow.set_nonblocking(true).unwrap();
    while rustix::io::write(&slow, &[0; 1 << 16]).is_ok() {}
    set_socket_linger(&slow, Some(Duration::from_secs(10_000))).unwrap();
    assert_eq!(received::<u64>(vec![slow.into()]), None);
    assert!(closes(), "another thread waits");
    // Its buffer empties, so the close ends.
    reader.read_to_end(&mut Vec::new()).unwrap();
    while closes() {
        std::thread::yield_now();
    }
}

/// Root can be another user for a moment.
#[test]
fn an_answer_of_another_user_is_not_taken() {
    use rustix::process::Uid;
    let (ours, theirs) = ends().unwrap();
    let sent = std::thread::spawn(move || {
        let stranger = Uid::from_raw(61234);
        // This thread alone.
        rustix::thread::set_thread_res_uid(stranger, stranger, stranger)?;
        send(&theirs, &7)
    });
    match sent.join().unwrap() {
        Err(Errno::PERM) => {}
        sent => {
            sent.unwrap();
            assert_eq!(sender(ours.as_fd()), Ok(61234));
            assert_eq!(receive::<u64>(ours, soon()), None);
        }
    }
}

fn snapshot(name: &str, count: u64) -> Snapshot {
    let counters = [("tx_bytes".to_owned(), count), (name.to_owned(), count)];
    Snapshot {
        pid: 7,
        command: name.to_owned(),
        name: name.to_owned(),
        device: name.to_owned(),
        memory: name.to_owned(),
        contexts: count,
        completion_queues: count,
        counters: counters.into_iter().collect(),
        failures: vec![
            Failure {
                opcode: name.to_owned(),
                status: "WR_FLUSH_ERR".to_owned(),
                vendor_err: u32::MAX,
                count,
            };
            2
        ],
        last_refusal: None,
        queue_pairs: vec![QueuePair {
            qpn: u32::MAX,
            state: name.to_owned(),
            rdma_cm: false,
            bytes: Some(name.to_owned()),
            local: None,
            remote: Some(name.to_owned()),
            terminate_sent: u32::MAX,
            terminate_received: 0,
            send_blocks: u32::MAX,
            receives: u32::MAX,
            transfer_len: 0,
            transfer_done: u32::MAX,
            counters: std::collections::BTreeMap::new(),
        }],
    }
}

proptest! {
    #[test]
    fn every_snapshot_is_read_back(name in any::<String>(), count in any::<u64>()) {
        let snapshot = snapshot(&name, count);
        let (ours, theirs) = ends().unwrap();
        send(&theirs, &snapshot).unwrap();
        prop_assert_eq!(receive(ours, soon()), Some(snapshot));
    }

    #[test]
    fn any_bytes_are_a_snapshot_or_refused(
        name in any::<String>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = serde_json::to_vec(&snapshot(&name, u64::MAX)).unwrap();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let cut = cut.index(2 * bytes.len());
        bytes.truncate(cut);
        let Some(read) = received::<Snapshot>(vec![memory(&bytes, SEALS)]) else {
            return Ok(());
        };
        for counter in HwCounter::all() {
            read.value(counter);
        }
    }
}
