use super::record::{Message, Room, Source, receive};
use crate::memory::{MAX_BUFFER, Pool};
use proptest::prelude::*;
use std::io::{self, Read};
use std::net::Ipv4Addr;
use urnic_rpc_rdma_verbs::shares::{Account, Charge, Shares};

fn account(shares: &Shares) -> Account {
    shares.account(Ipv4Addr::LOCALHOST.into())
}

fn charging(account: &Account) -> impl Fn(u64) -> io::Result<Charge> {
    |bytes| {
        account
            .take(bytes)
            .ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }
}

/// A record in one fragment, or in fragments of a thousand bytes.
fn records(bytes: &[u8]) -> [Vec<u8>; 2] {
    let whole = [&(bytes.len() as u32 | 1 << 31).to_be_bytes()[..], bytes].concat();
    let mut pieces = Vec::new();
    for piece in bytes.chunks(1000) {
        pieces.extend((piece.len() as u32).to_be_bytes());
        pieces.extend(piece);
    }
    pieces.extend((1_u32 << 31).to_be_bytes());
    [whole, pieces]
}

/// A WRITE of at most `count` bytes, including the RPC header (RFC 1813 §3.3.7).
fn write_call(count: usize) -> Vec<u8> {
    let words = [
        7,
        0,
        2,
        100_003,
        3,
        7,
        0,
        0,
        0,
        0,
        8,
        1,
        2,
        0,
        0,
        count as u32,
        0,
        count as u32,
    ];
    let mut call = words.map(u32::to_be_bytes).concat();
    call.extend((0..count).map(|n| (n * 7) as u8));
    call.resize(call.len().next_multiple_of(4), 0);
    call
}

#[test]
fn long_records_of_any_fragments_take_memory_of_the_pool() {
    let (pool, shares) = (Pool::limited(MAX_BUFFER as u64), Shares::new(MAX_BUFFER as u64));
    let account = account(&shares);
    let room = Room {
        pool: &pool,
        charge: &charging(&account),
    };
    let bytes: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
    for record in records(&bytes) {
        let received = receive(&mut &record[..], &room).expect("a record");
        assert!(matches!(received.message, Message::Long(_)));
        assert!(*received.message == bytes[..] && received.item.is_none());
        let most = pool.take(MAX_BUFFER);
        assert!(most.is_none(), "a part of it is in use");
        assert!(account.held() >= 100_000);
        drop(received);
        assert_eq!(shares.used(), 0);
    }
}

/// The first bytes of a record. Before the end of the stream, the memory in use is recorded.
struct Cut<'a> {
    bytes: &'a [u8],
    account: &'a Account,
    most: &'a mut u64,
    ready: usize,
}

impl Read for Cut<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        *self.most = (*self.most).max(self.account.held());
        self.bytes.read(into)
    }
}

impl Source for Cut<'_> {
    fn ready(&self) -> usize {
        self.ready.min(self.bytes.len())
    }
}

#[test]
fn memory_is_taken_for_received_not_announced_bytes() {
    const LEN: usize = 1 << 20;
    let (pool, shares) = (Pool::new(), Shares::new(1 << 30));
    let account = account(&shares);
    let room = Room {
        pool: &pool,
        charge: &charging(&account),
    };
    let most_for = |record: &[u8], ready| {
        let mut most = 0;
        let mut cut = Cut {
            bytes: record,
            account: &account,
            most: &mut most,
            ready,
        };
        let received = receive(&mut cut, &room);
        (most, received)
    };
    let call = write_call(LEN);
    let [whole, pieces] = records(&call);
    let announced = [&(LEN as u32).to_be_bytes()[..], &call].concat();
    for (what, record) in [("whole", &whole), ("pieces", &pieces), ("announced", &announced)] {
        for came in [4, 5, 100, 3000, 10_000, 70_000, 300_000] {
            let (most, received) = most_for(&record[..came], 0);
            assert!(received.is_err(), "{what} of {came}");
            // The previous buffer still exists while its bytes move to the next one.
            let share = (4 * came as u64).next_power_of_two().max(64 << 10);
            let limit = if came <= 2048 { 0 } else { share + share / 4 };
            assert!(most <= limit, "{what} of {came} bytes take {most}");
            assert_eq!(shares.used(), 0);
        }
    }
    for ready in [0, 1000, 100_000, LEN] {
        let (_, received) = most_for(&whole, ready);
        let received = received.expect("a record");
        let item = received.item.expect("apart");
        assert_eq!((item.len(), item.footprint()), (LEN, LEN));
        assert!(*item == call[call.len() - LEN..]);
    }
}

#[test]
fn fragments_without_an_end_are_limited() {
    let (pool, shares) = (Pool::new(), Shares::new(1 << 30));
    let account = account(&shares);
    let room = Room {
        pool: &pool,
        charge: &charging(&account),
    };
    for fragment in [&[0, 0, 0, 0][..], &[0, 0, 0, 1, 9]] {
        let mut stream = io::repeat(0)
            .take(0)
            .chain(io::Cursor::new(fragment.repeat(100_000)));
        struct Endless<'a, R>(&'a mut R);
        impl<R: Read> Read for Endless<'_, R> {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.0.read(into)
            }
        }
        impl<R: Read> Source for Endless<'_, R> {}
        let received = receive(&mut Endless(&mut stream), &room).map(drop);
        assert_eq!(
            received.map_err(|error| error.kind()),
            Err(io::ErrorKind::InvalidData)
        );
        let left = stream.read_to_end(&mut Vec::new()).expect("bytes");
        assert!(left > fragment.len() * 90_000, "{left} bytes left");
    }
}

proptest! {
    /// The memory in use is at most a few times the number of bytes that arrived, for any contents
    /// of the stream.
    #[test]
    fn any_bytes_take_memory_in_proportion_to_their_number(
        fragments in prop::collection::vec((any::<bool>(), 0..200_000_usize, 0..300_000_usize), 1..6),
        call in any::<bool>(),
    ) {
        let (pool, shares) = (Pool::new(), Shares::new(1 << 30));
        let account = account(&shares);
        let room = Room {
            pool: &pool,
            charge: &charging(&account),
        };
        let mut bytes = Vec::new();
        for (last, announced, there) in fragments {
            bytes.extend((announced as u32 | u32::from(last) << 31).to_be_bytes());
            if call {
                bytes.extend(write_call(there));
            } else {
                bytes.resize(bytes.len() + there, 5);
            }
        }
        let mut most = 0;
        let mut cut = Cut {
            bytes: &bytes,
            account: &account,
            most: &mut most,
            ready: 0,
        };
        while receive(&mut cut, &room).is_ok() {}
        let came = bytes.len() as u64;
        let limit = (10 * came).max(64 << 10);
        prop_assert!(most <= limit, "{} bytes take {}", came, most);
        prop_assert_eq!(shares.used(), 0);
    }
}
