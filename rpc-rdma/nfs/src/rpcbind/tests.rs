//! Tests of rpcbind's calls, whose bytes are written here by hand, and of peers that are no
//! rpcbind.

use super::*;
use std::os::unix::net::UnixStream;
use std::thread;

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn mapping(transport: Transport, address: &str) -> Mapping {
    Mapping {
        program: (100_003, 3),
        transport,
        address: address.parse().expect("an address"),
    }
}

/// A connection, and its other end.
fn pair(time: Duration) -> (Rpcbind, UnixStream) {
    let (ours, theirs) = UnixStream::pair().expect("two sockets");
    let end = Instant::now() + time;
    let socket = ours.into();
    (Rpcbind(Timed { socket, end }), theirs)
}

#[test]
fn rpc_b_01_rdma_and_rdma6_are_the_netids() {
    let netids = [
        (Transport::Tcp, "10.77.0.1:2049", "tcp", "10.77.0.1.8.1"),
        (Transport::Tcp, "[::]:2049", "tcp6", "::.8.1"),
        (Transport::Rdma, "0.0.0.0:20049", "rdma", "0.0.0.0.78.81"),
        (Transport::Rdma, "[fd77::1]:20049", "rdma6", "fd77::1.78.81"),
    ];
    for (transport, address, netid, universal) in netids {
        let mapping = mapping(transport, address);
        assert_eq!(
            (mapping.netid(), &*mapping.universal_address()),
            (netid, universal)
        );
    }
}

/// RPCBPROC_SET of version 4, with `rpcb` as its argument (RFC 1833 §2.2).
#[test]
fn a_mapping_is_set_by_one_call() {
    let (mut rpcbind, mut peer) = pair(TIMEOUT);
    let answers = thread::spawn(move || {
        let mut call = vec![0; 4 + 40 + 8 + 8 + 20 + 16];
        peer.read_exact(&mut call).expect("a call");
        peer.write_all(&words(&[0x8000_001c, 1, 1, 0, 0, 0, 0, 1]))
            .expect("a socket");
        call
    });
    let set = rpcbind.change(SET, &mapping(Transport::Rdma, "0.0.0.0:20049"));
    assert!(set.expect("an answer"));
    let call = answers.join().expect("the other end");
    let header = words(&[0x8000_005c, 1, 0, 2, 100_000, 4, 1, 0, 0, 0, 0]);
    let arguments = [
        &words(&[100_003, 3])[..],
        b"\0\0\0\x04rdma",
        b"\0\0\0\x0d0.0.0.0.78.81\0\0\0",
        b"\0\0\0\x09urnic-nfs\0\0\0",
    ];
    assert_eq!(call, [&header[..], &arguments.concat()].concat());
}

/// The outcome of a call whose answer is these bytes.
fn answered(answer: &[u8]) -> Result<bool, Error> {
    let (mut rpcbind, mut peer) = pair(TIMEOUT);
    peer.write_all(answer).expect("a socket");
    peer.shutdown(std::net::Shutdown::Write).expect("a socket");
    rpcbind.change(SET, &mapping(Transport::Tcp, "0.0.0.0:2049"))
}

#[test]
fn answers_that_are_none_are_errors() {
    const LAST: u32 = 1 << 31;
    // FALSE is a refusal, in one fragment or in two.
    let whole = words(&[LAST | 28, 1, 1, 0, 0, 0, 0, 0]);
    let parts = words(&[8, 1, 1, LAST | 20, 0, 0, 0, 0, 0]);
    assert!(matches!(answered(&whole), Ok(false)));
    assert!(matches!(answered(&parts), Ok(false)));
    for (answer, expected) in [
        (words(&[]), io::ErrorKind::UnexpectedEof),
        (words(&[LAST | 28, 1, 1]), io::ErrorKind::UnexpectedEof),
        (
            words(&[LAST | 28, 2, 1, 0, 0, 0, 0, 1]),
            io::ErrorKind::InvalidData,
        ),
        (words(&[u32::MAX]), io::ErrorKind::InvalidData),
        (
            words(&[LAST | (MAX_REPLY as u32 + 1)]),
            io::ErrorKind::InvalidData,
        ),
        (words(&[0; 100]), io::ErrorKind::InvalidData),
    ] {
        match answered(&answer) {
            Err(Error::Io(error)) => assert_eq!(error.kind(), expected, "{answer:02x?}"),
            other => panic!("{other:?} to {answer:02x?}"),
        }
    }
    for answer in [
        words(&[LAST | 24, 1, 1, 0, 0, 0, 0]),
        words(&[LAST | 24, 1, 1, 0, 0, 0, 2]),
        words(&[LAST | 20, 1, 1, 1, 1, 1]),
        words(&[LAST | 4, 1]),
        words(&[LAST | 24, 1, 1, 0, 0, u32::MAX, 0]),
    ] {
        assert!(matches!(answered(&answer), Err(Error::Rpc(_))), "{answer:02x?}");
    }
}

/// The time is one for all bytes: a peer that sends one byte at a time gains nothing.
#[test]
fn an_answer_that_does_not_end_ends_the_call() {
    let (mut rpcbind, mut peer) = pair(Duration::from_millis(300));
    let sender = thread::spawn(move || {
        // Up to a reply of the maximum length, which would take ten seconds.
        peer.write_all(&words(&[MAX_REPLY as u32])).expect("a socket");
        for _ in 0..1000 {
            thread::sleep(Duration::from_millis(10));
            if peer.write_all(&[0]).is_err() {
                return true;
            }
        }
        false
    });
    match rpcbind.change(SET, &mapping(Transport::Tcp, "0.0.0.0:2049")) {
        Err(Error::Io(error)) => assert_eq!(error.kind(), io::ErrorKind::TimedOut),
        other => panic!("{other:?}"),
    }
    drop(rpcbind);
    assert!(sender.join().expect("the other end"), "all bytes were read");
}

proptest::proptest! {
    #[test]
    fn any_answer_is_taken_or_refused(answer: Vec<u8>) {
        let _ = answered(&answer);
    }
}
