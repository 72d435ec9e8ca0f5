//! Long Sends that the requester places in receives of a peer on this host.

use super::one_sided;
use super::same_host::{
    completes, connect_prepared, driver, in_host_processes, in_memory, in_memory_with, post,
};
use crate::Counter;
use crate::testing::mock::{Driver, End, Pair, Region, assert_cqe, wait_for};
use proptest::prelude::*;
use urnic_device::command::Opcode;
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::{Access, QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{self, Sge};
use urnic_testkit::request;

/// A Send of this length is placed whatever else is in flight.
const LONG: usize = 24 << 10;

/// A pair whose first message has arrived.
fn ready() -> (Driver, Driver, Pair) {
    started(in_memory())
}

fn started((near, far, mut pair): (Driver, Driver, Pair)) -> (Driver, Driver, Pair) {
    post(&near, &far, &mut pair, 0, 8);
    completes(&mut pair, 0);
    (near, far, pair)
}

fn content(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|n| ((n * 31 + seed * 7) >> 3) as u8 | 1).collect()
}

/// Sends bytes into a receive, and waits until they are there.
fn send(near: &Driver, far: &Driver, pair: &mut Pair, len: usize, seed: usize) {
    let (from, into) = (pair.initiator.region, pair.responder.region);
    let bytes = content(len, seed);
    near.arena.write(from.iova, &bytes);
    far.arena.write(into.iova, &vec![0; len]);
    pair.responder.qp.post_recv(far, 1, &[into.sge(0, len as u32)]);
    pair.initiator.qp.post_send(near, 2, &[from.sge(0, len as u32)]);
    let done = pair.responder.recv_cq.await_completion(far);
    assert_cqe(&done, 1, WcStatus::Success);
    assert_eq!(
        (done.byte_len.get() as usize, done.opcode),
        (len, WcOpcode::Recv as u8)
    );
    assert!(far.arena.read(into.iova, len) == bytes, "{len}");
    let done = pair.initiator.send_cq.await_completion(near);
    assert_cqe(&done, 2, WcStatus::Success);
}

#[test]
fn shm_21_long_sends_are_placed_in_their_receives() {
    for (near, far, mut pair) in [ready(), started(in_host_processes(false))] {
        let before = [Counter::RxBytes, Counter::RxMessages, Counter::RxFpdus].map(|c| far.counter(c));
        let framed = near.counter(Counter::TxFpdus);
        let lens = [3 << 10, 4100, LONG, 70_000, 1 << 20];
        for (n, len) in lens.into_iter().enumerate() {
            send(&near, &far, &mut pair, len, n);
            assert_eq!(near.counter(Counter::DirectSends), n as u64 + 1, "{len}");
        }
        let after = [Counter::RxBytes, Counter::RxMessages, Counter::RxFpdus].map(|c| far.counter(c));
        let [received, messages, fpdus] = std::array::from_fn(|n| after[n] - before[n]);
        assert_eq!((messages, fpdus), (5, 5));
        assert_eq!(near.counter(Counter::TxFpdus) - framed, 5);
        let total: usize = lens.into_iter().sum();
        assert!(
            (total as u64..total as u64 + 500).contains(&received),
            "{received}"
        );
    }
}

/// Their receives are of two STags, which have the same offsets; short Sends and lists are among
/// them.
#[test]
fn shm_21_sends_that_are_posted_together_are_each_in_its_receive() {
    const SLOT: usize = 60_000;
    const NUMBER: usize = 32;
    let (near, far, mut pair) = ready();
    let (size, access) = (NUMBER * SLOT, Access::LOCAL_WRITE);
    let from = near.register(pair.initiator.pd, size, access).unwrap();
    let memory = [0, 1].map(|_| far.arena.alloc(size));
    let into = memory.map(|at| far.register_as(pair.responder.pd, 0, at, size, access).unwrap());
    let messages: [(usize, usize); NUMBER] = std::array::from_fn(|n| {
        let len = if n % 7 == 5 { n } else { LONG + n * 1000 };
        (len, usize::from(n % 8 > 5))
    });
    for (n, (len, region)) in messages.into_iter().enumerate() {
        let at = n * SLOT;
        near.arena.write(from.iova + at as u64, &content(len, n));
        far.arena.write(memory[region] + at as u64, &[0; SLOT]);
        let receive = into[region].sge(at as u64, SLOT as u32);
        pair.responder.qp.post_recv(&far, n as u64, &[receive]);
        let header = request(wqe::Opcode::Send, n as u64);
        let (at, len) = (at as u64, len as u32);
        match n % 9 {
            4 => {
                let list = [from.sge(at, 2), from.sge(at + 2, len - 2)];
                pair.initiator.qp.post_unrung(header, &list);
            }
            _ => pair.initiator.qp.post_unrung(header, &[from.sge(at, len)]),
        }
    }
    pair.initiator.qp.ring(&near);
    for (n, (len, region)) in messages.into_iter().enumerate() {
        let done = pair.responder.recv_cq.await_completion(&far);
        assert_cqe(&done, n as u64, WcStatus::Success);
        assert_eq!(done.byte_len.get() as usize, len, "{n}");
        let bytes = far.arena.read(memory[region] + (n * SLOT) as u64, SLOT);
        assert!(bytes[..len] == content(len, n), "{n}");
        assert!(bytes[len..].iter().all(|byte| *byte == 0), "{n}");
        let done = pair.initiator.send_cq.await_completion(&near);
        assert_cqe(&done, n as u64, WcStatus::Success);
    }
    let long = messages.iter().filter(|(len, _)| *len >= LONG).count();
    assert_eq!(near.counter(Counter::DirectSends), long as u64);
}

#[test]
fn shm_21_other_sends_pass_through_the_ring() {
    let (near, far, mut pair) = ready();
    for len in [8, 1024] {
        send(&near, &far, &mut pair, len, 1);
    }
    // Longer than one access.
    let region = |driver: &Driver, pd| driver.register(pd, 2 << 20, Access::LOCAL_WRITE).unwrap();
    let (from, into) = (region(&near, pair.initiator.pd), region(&far, pair.responder.pd));
    pair.responder.qp.post_recv(&far, 1, &[into.sge(0, 2 << 20)]);
    pair.initiator
        .qp
        .post_send(&near, 2, &[from.sge(0, (1 << 20) + 1)]);
    assert_cqe(
        &pair.responder.recv_cq.await_completion(&far),
        1,
        WcStatus::Success,
    );
    assert_eq!(near.counter(Counter::DirectSends), 0);
    // From a process that is not the device's.
    let (near, far, mut pair) = started(in_host_processes(true));
    send(&near, &far, &mut pair, 70_000, 1);
    assert_eq!(near.counter(Counter::DirectSends), 0);
}

/// Receives that a reset dropped count, and the ring begins anew.
#[test]
fn shm_21_receives_are_counted_through_a_reset() {
    let (near, far) = (driver(true), driver(true));
    let mut pair = connect_prepared(&near, &far, 0, |pair| {
        let End { qp, region, .. } = &mut pair.responder;
        for n in 0..7 {
            qp.post_recv(&far, n, &[region.sge(0, 1 << 20)]);
        }
        far.modify(qp, QpState::Reset).unwrap();
        far.ready(qp);
    });
    post(&near, &far, &mut pair, 0, 8);
    completes(&mut pair, 0);
    for n in 0..300 {
        send(&near, &far, &mut pair, LONG + n, n);
    }
    assert_eq!(near.counter(Counter::DirectSends), 300);
}

/// What the peer's receive does not permit is refused by the peer, as it is without memory.
#[test]
fn shm_21_the_owner_refuses_what_a_receive_forbids() {
    type Receive = fn(&Driver, &Pair) -> Sge;
    let cases: [(&str, Receive, WcStatus); 5] = [
        (
            "too short",
            |_, pair| pair.responder.region.sge(0, LONG as u32 - 1),
            WcStatus::LocLenErr,
        ),
        (
            "another domain",
            |far, _| {
                let region = far.register(far.pd(), LONG, Access::LOCAL_WRITE).unwrap();
                region.sge(0, LONG as u32)
            },
            WcStatus::LocProtErr,
        ),
        (
            "no right to write",
            |far, pair| {
                let region = far
                    .register(pair.responder.pd, LONG, Access::REMOTE_READ)
                    .unwrap();
                region.sge(0, LONG as u32)
            },
            WcStatus::LocProtErr,
        ),
        (
            "beyond the end",
            |far, pair| {
                let region = far
                    .register(pair.responder.pd, LONG, Access::LOCAL_WRITE)
                    .unwrap();
                region.sge(1, LONG as u32)
            },
            WcStatus::LocProtErr,
        ),
        (
            "deregistered",
            |far, pair| {
                let region = far
                    .register(pair.responder.pd, LONG, Access::LOCAL_WRITE)
                    .unwrap();
                far.on(Opcode::DestroyMr, region.stag).unwrap();
                region.sge(0, LONG as u32)
            },
            WcStatus::LocProtErr,
        ),
    ];
    for (case, receive, status) in cases {
        let (near, far, mut pair) = ready();
        let element = receive(&far, &pair);
        pair.responder.qp.post_recv(&far, 1, &[element]);
        let from = pair.initiator.region.sge(0, LONG as u32);
        pair.initiator.qp.post_send(&near, 2, &[from]);
        let done = pair.responder.recv_cq.await_completion(&far);
        assert_eq!(WcStatus::from_raw(done.status), Some(status), "{case}");
        far.await_event(EventKind::QpError, pair.responder.qp.id);
        near.await_event(EventKind::QpError, pair.initiator.qp.id);
        assert_eq!(near.counter(Counter::DirectSends), 0, "{case}");
    }
}

/// How receives are taken from their owner while the peer fills them.
#[derive(Debug, Clone, Copy)]
enum Revocation {
    Deregistered,
    Unmapped,
    Error,
    Reset,
}

/// One thread sends many messages, each of other bytes, while another takes the receives, or their
/// memory, away.
#[test]
fn shm_21_a_receive_that_is_the_programs_again_is_not_filled() {
    const LEN: usize = 100_000;
    const PARTS: usize = 10;
    let hows = [
        Revocation::Deregistered,
        Revocation::Unmapped,
        Revocation::Error,
        Revocation::Reset,
    ];
    for round in 0..24 {
        let how = hows[round % 4];
        let (near, far, mut pair) = ready();
        let region = far.register(pair.responder.pd, LEN, Access::LOCAL_WRITE).unwrap();
        for n in 0..200 {
            pair.responder.qp.post_recv(&far, n, &[region.sge(0, LEN as u32)]);
        }
        let from = pair.initiator.region;
        for part in 0..PARTS {
            let iova = from.iova + (part * LEN) as u64;
            near.arena.write(iova, &vec![part as u8 + 1; LEN]);
        }
        std::thread::scope(|scope| {
            let near = &near;
            let (qp, cq) = (&mut pair.initiator.qp, &mut pair.initiator.send_cq);
            let sender = scope.spawn(move || {
                for n in 0..200 {
                    let part = (n % PARTS * LEN) as u64;
                    let header = request(wqe::Opcode::Send, n as u64);
                    qp.post_unrung(header, &[from.sge(part, LEN as u32)]);
                }
                qp.ring(near);
                for _ in 0..200 {
                    cq.await_completion(near);
                }
            });
            let last = region.iova + (round * LEN / 24) as u64;
            wait_for("some payload", || (far.arena.read(last, 1) != [0]).then_some(()));
            match how {
                Revocation::Deregistered => far.on(Opcode::DestroyMr, region.stag).unwrap(),
                Revocation::Unmapped => far.device.unmapped(far.dma(region.iova), 1),
                Revocation::Error => far.modify(&pair.responder.qp, QpState::Err).unwrap(),
                Revocation::Reset => far.modify(&pair.responder.qp, QpState::Reset).unwrap(),
            }
            let before = far.arena.read(region.iova, LEN);
            sender.join().unwrap();
            assert!(
                far.arena.read(region.iova, LEN) == before,
                "round {round}: {how:?}"
            );
        });
        assert!(near.counter(Counter::DirectSends) > 0);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    SendImm,
    WriteImm,
}

/// A message, and the receive that is posted for it.
#[derive(Debug, Clone, Copy)]
struct Message {
    kind: Kind,
    len: usize,
    /// The payload is in two places.
    gathered: bool,
    /// Room of the receive's first element; the second has the rest.
    first: usize,
}

/// Longest message, and the part of the responder's memory for each.
const MOST: usize = 60_000;
const SLOT: usize = 64 << 10;

fn message() -> impl Strategy<Value = Message> {
    let kind = prop_oneof![4 => Just(Kind::Send), 1 => Just(Kind::SendImm), 1 => Just(Kind::WriteImm)];
    let len = prop_oneof![1 => 1usize..200, 1 => 200usize..LONG, 3 => LONG..MOST];
    let first = prop_oneof![3 => Just(MOST), 1 => 0..MOST];
    (kind, len, any::<bool>(), first).prop_map(|(kind, len, gathered, first)| Message {
        kind,
        len,
        gathered,
        first,
    })
}

fn post_receive(far: &Driver, pair: &mut Pair, slots: Region, n: usize, message: Message) {
    let at = |at: usize, len: usize| slots.sge((n * SLOT + at) as u64, len as u32);
    let list = [at(0, message.first), at(message.first, MOST - message.first)];
    pair.responder.qp.post_recv(far, n as u64, &list);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(32) })]

    /// Whatever is sent, and whenever receives are posted, each message is in its receive.
    #[test]
    fn shm_21_messages_are_in_the_receives_that_they_take(
        messages in prop::collection::vec(message(), 1..60),
        early in 0usize..60,
    ) {
        let (near, far, mut pair) = started(in_memory_with(attach::STALL_ON_EMPTY_RQ));
        let slots = far.register(pair.responder.pd, messages.len() * SLOT, Access::LOCAL_WRITE).unwrap();
        let early = early.min(messages.len());
        for (n, message) in messages[..early].iter().enumerate() {
            post_receive(&far, &mut pair, slots, n, *message);
        }
        let from = pair.initiator.region;
        let bytes = content(1 << 20, 3);
        near.arena.write(from.iova, &bytes);
        // Where message `n` begins; its second half may be elsewhere.
        let place = |n: usize| (n * 5077) % 400_000;
        for (n, message) in messages.iter().enumerate() {
            let opcode = match message.kind {
                Kind::Send => wqe::Opcode::Send,
                Kind::SendImm => wqe::Opcode::SendImm,
                Kind::WriteImm => wqe::Opcode::WriteImm,
            };
            let mut header = match message.kind {
                Kind::WriteImm => one_sided(opcode, n as u64, &pair.responder),
                _ => request(opcode, n as u64),
            };
            header.immediate = (n as u32).to_ne_bytes();
            let half = if message.gathered { message.len / 2 } else { message.len };
            let list = [(place(n), half), (500_000 + place(n), message.len - half)];
            let list = list.map(|(at, len)| from.sge(at as u64, len as u32));
            pair.initiator.qp.post_unrung(header, &list);
        }
        pair.initiator.qp.ring(&near);
        for (n, message) in messages.iter().enumerate().skip(early) {
            post_receive(&far, &mut pair, slots, n, *message);
        }
        for (n, message) in messages.iter().enumerate() {
            let done = pair.responder.recv_cq.await_completion(&far);
            assert_cqe(&done, n as u64, WcStatus::Success);
            prop_assert_eq!(done.byte_len.get() as usize, message.len);
            if message.kind != Kind::Send {
                prop_assert_eq!(done.extra, (n as u32).to_ne_bytes());
            }
            if message.kind == Kind::WriteImm {
                continue;
            }
            let half = if message.gathered { message.len / 2 } else { message.len };
            let rest = &bytes[500_000 + place(n)..][..message.len - half];
            let expected = [&bytes[place(n)..][..half], rest].concat();
            let found = far.arena.read(slots.iova + (n * SLOT) as u64, message.len);
            prop_assert!(found == expected, "message {}", n);
        }
        for n in 0..messages.len() {
            assert_cqe(&pair.initiator.send_cq.await_completion(&near), n as u64, WcStatus::Success);
        }
        let placed = |message: &&Message| {
            message.kind != Kind::WriteImm && message.len >= LONG && message.first >= message.len
        };
        let placed = messages[..early].iter().filter(placed).count() as u64;
        prop_assert!(near.counter(Counter::DirectSends) >= placed);
    }
}
