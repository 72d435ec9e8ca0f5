//! Many Writes, or Reads, that are posted together, in the memory of a peer on this host.

use super::one_sided;
use super::same_host::{completes, in_memory, post};
use crate::Counter;
use crate::testing::mock::{Driver, Pair, assert_cqe};
use proptest::prelude::*;
use urnic_device::event::EventKind;
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{Opcode, SendFlags};

/// The part of each end's memory that the requests use.
const PART: usize = 200_000;
/// An offset that is in no region.
const OUTSIDE: u64 = 1 << 21;

/// A request: places here and there, its length, and whether its data are inline.
#[derive(Debug, Clone, Copy)]
struct Request {
    here: usize,
    there: usize,
    len: usize,
    inline: bool,
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let len = prop_oneof![4 => 1usize..100, 3 => 1usize..5000, 1 => 1usize..90_000];
    let request = (0..PART - 90_000, 0..PART - 90_000, len, any::<bool>());
    let request = request.prop_map(|(here, there, len, inline)| Request {
        here,
        there,
        len,
        inline: inline && len < 100,
    });
    prop::collection::vec(request, 1..100)
}

/// A pair whose next requests may be direct, with bytes in the memory of both.
fn ready() -> (Driver, Driver, Pair, [Vec<u8>; 2]) {
    let (near, far, mut pair) = in_memory();
    post(&near, &far, &mut pair, 0, 8);
    completes(&mut pair, 0);
    let bytes = [3, 5].map(|step| (0..PART).map(|n| ((n * step) >> 2) as u8).collect::<Vec<u8>>());
    near.arena.write(pair.initiator.region.iova, &bytes[0]);
    far.arena.write(pair.responder.region.iova, &bytes[1]);
    (near, far, pair, bytes)
}

fn post_all(near: &Driver, pair: &mut Pair, opcode: Opcode, requests: &[Request], here: &[u8]) {
    for (n, request) in requests.iter().enumerate() {
        let mut header = one_sided(opcode, n as u64, &pair.responder);
        header.remote_offset = (header.remote_offset.get() + request.there as u64).into();
        let bytes = &here[request.here..][..request.len];
        if request.inline && opcode == Opcode::Write {
            header.flags |= SendFlags::INLINE.bits();
            header.inline_len = (request.len as u32).into();
            pair.initiator.qp.post_inline_unrung(header, bytes);
        } else {
            let sge = pair.initiator.region.sge(request.here as u64, request.len as u32);
            pair.initiator.qp.post_unrung(header, &[sge]);
        }
    }
    pair.initiator.qp.ring(near);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn shm_09_writes_that_are_posted_together_land_in_their_order(requests in requests()) {
        let (near, far, mut pair, [here, mut there]) = ready();
        post_all(&near, &mut pair, Opcode::Write, &requests, &here);
        for (n, request) in requests.iter().enumerate() {
            assert_cqe(&pair.initiator.send_cq.await_completion(&near), n as u64, WcStatus::Success);
            there[request.there..][..request.len].copy_from_slice(&here[request.here..][..request.len]);
        }
        prop_assert!(far.arena.read(pair.responder.region.iova, PART) == there);
        prop_assert_eq!(near.counter(Counter::DirectWrites), requests.len() as u64);
    }

    #[test]
    fn shm_09_reads_that_are_posted_together_fetch_in_their_order(requests in requests()) {
        let (near, _far, mut pair, [mut here, there]) = ready();
        post_all(&near, &mut pair, Opcode::Read, &requests, &here);
        for (n, request) in requests.iter().enumerate() {
            let done = pair.initiator.send_cq.await_completion(&near);
            assert_cqe(&done, n as u64, WcStatus::Success);
            prop_assert_eq!(done.byte_len.get() as usize, request.len);
            here[request.here..][..request.len].copy_from_slice(&there[request.there..][..request.len]);
        }
        prop_assert!(near.arena.read(pair.initiator.region.iova, PART) == here);
        prop_assert_eq!(near.counter(Counter::DirectReads), requests.len() as u64);
    }
}

/// A request of a run that cannot be carried out fails alone: those before it are done, those
/// after it are flushed.
#[test]
fn shm_10_a_request_among_others_that_is_not_permitted_is_refused() {
    for opcode in [Opcode::Write, Opcode::Read] {
        for (wrong, status) in [("there", WcStatus::RemAccessErr), ("here", WcStatus::LocProtErr)] {
            let (near, far, mut pair, [here, there]) = ready();
            let iovas = [pair.initiator.region.iova, pair.responder.region.iova];
            for n in 0..10u64 {
                let mut header = one_sided(opcode, n, &pair.responder);
                header.remote_offset = (header.remote_offset.get() + n * 100).into();
                let mut sge = pair.initiator.region.sge(n * 100, 100);
                match (n, wrong) {
                    (5, "there") => header.remote_offset = (header.remote_offset.get() + OUTSIDE).into(),
                    (5, _) => sge.offset = (sge.offset.get() + OUTSIDE).into(),
                    _ => {}
                }
                pair.initiator.qp.post_unrung(header, &[sge]);
            }
            pair.initiator.qp.ring(&near);
            for n in 0..10 {
                let status = match n {
                    0..5 => WcStatus::Success,
                    5 => status,
                    _ => WcStatus::WrFlushErr,
                };
                let done = pair.initiator.send_cq.await_completion(&near);
                // A Write that the target refuses is complete when the stream has taken it.
                let was_taken = n >= 5 && (opcode, wrong) == (Opcode::Write, "there");
                match WcStatus::from_raw(done.status) {
                    Some(WcStatus::Success) if was_taken => {}
                    _ => assert_cqe(&done, n, status),
                }
            }
            near.await_event(EventKind::QpError, pair.initiator.qp.id);
            let (from, seen, before) = match opcode {
                Opcode::Write => (&here, far.arena.read(iovas[1], 1000), &there),
                _ => (&there, near.arena.read(iovas[0], 1000), &here),
            };
            assert_eq!(seen[..500], from[..500], "{opcode:?}, {wrong}");
            assert_eq!(seen[500..], before[500..1000], "{opcode:?}, {wrong}");
        }
    }
}
