//! Completion queues that overflow, and the queue pairs that end because of it.

use crate::Counter;
use crate::testing::mock::{Cq, Driver, Qp, assert_cqe};
use urnic_device::command::{CreateCq, CreateQp, Handle, Opcode, QueueHandle};
use urnic_device::event::{EventKind, QpFault};
use urnic_device::stream::Attach;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{self, SendFlags, SendHeader};

/// Queue pairs of the long chain: a recursion with a few hundred bytes of stack for each would
/// exceed the stack of a test's thread.
const CHAIN: usize = 10_000;

/// A queue pair that is its own peer.
fn own_peer(driver: &Driver, pd: u32, send_cq: &Cq, recv_cq: &Cq) -> Qp {
    let qp = driver.qp(pd, send_cq, recv_cq);
    driver.ready(&qp);
    let attach = Attach {
        qid: qp.id.into(),
        ord: 4.into(),
        ird: 4.into(),
        first_msn: 1.into(),
        ..Attach::default()
    };
    driver.command(Opcode::LoopbackAttach, &attach).unwrap();
    qp
}

/// A signalled Write of no bytes.
fn write(cookie: u64) -> SendHeader {
    SendHeader {
        opcode: wqe::Opcode::Write as u8,
        flags: SendFlags::SIGNALED.bits(),
        cookie: cookie.into(),
        ..SendHeader::default()
    }
}

/// Receives of each queue pair of the chain: one more than the completion queue has entries.
const POSTED: u32 = 2;

/// Makes `CHAIN` queue pairs with completion queues of one entry: the receives of each complete on
/// the queue on which the sends of the next complete. They share all memory, so that the test needs
/// little. Returns the numbers of queue pairs and completion queues.
fn chain(driver: &Driver) -> (Vec<u32>, Vec<u32>) {
    let memory = driver.arena.alloc(16384);
    // The receives are published in the record; their entries are all zeroes: empty lists.
    driver.arena.write(memory + 4, &POSTED.to_le_bytes());
    let arguments = CreateCq {
        ring: (memory + 4096).into(),
        record: (memory + 1024).into(),
        log_size: 0.into(),
        eq: 0.into(),
        uar: driver.uar.into(),
        ..CreateCq::default()
    };
    let id = |opcode, arguments: &CreateCq| -> u32 {
        let made: QueueHandle = driver.command(opcode, arguments).unwrap().result();
        made.id.get()
    };
    let cqs: Vec<u32> = (0..=CHAIN).map(|_| id(Opcode::CreateCq, &arguments)).collect();
    let pd = driver.pd();
    let qps = cqs.windows(2).map(|pair| {
        let arguments = CreateQp {
            sq_ring: (memory + 8192).into(),
            rq_ring: (memory + 12288).into(),
            record: memory.into(),
            pd: pd.into(),
            send_cq: pair[0].into(),
            recv_cq: pair[1].into(),
            uar: driver.uar.into(),
            rq_log_size: POSTED.ilog2().into(),
            rq_log_stride: 4.into(),
            ..CreateQp::default()
        };
        let made: QueueHandle = driver.command(Opcode::CreateQp, &arguments).unwrap().result();
        made.id.get()
    });
    (qps.collect(), cqs)
}

fn state(driver: &Driver, qid: u32) -> QpState {
    let handle = Handle { id: qid.into() };
    let status: urnic_device::command::QpStatus = driver.command(Opcode::QueryQp, &handle).unwrap().result();
    QpState::from_raw(status.state.get()).unwrap()
}

/// One command flushes all queue pairs, one after the other: the driver chooses the length of the
/// chain.
#[test]
fn sec_05_a_chain_of_overflows_takes_no_stack() {
    let driver = Driver::start();
    let (qps, _) = chain(&driver);
    driver.modify_to(qps[0], QpState::Err).unwrap();
    assert!(qps.iter().all(|qid| state(&driver, *qid) == QpState::Err));
    assert_eq!(driver.counter(Counter::CqOverflows), CHAIN as u64);
}

/// The queue pairs that use the queue, for sends or receives, end. Others continue, though they
/// share all other objects.
#[test]
fn sec_05_all_pairs_of_a_shared_queue_end_and_no_other() {
    let driver = Driver::start();
    let pd = driver.pd();
    let (small, mut beside) = (driver.cq(1), driver.cq(8));
    let mut sender = own_peer(&driver, pd, &small, &beside);
    let by_sends = own_peer(&driver, pd, &small, &small);
    let mut by_receives = own_peer(&driver, pd, &beside, &small);
    let mut other = own_peer(&driver, pd, &beside, &beside);
    let region = driver.register(pd, 4096, Access::LOCAL_WRITE).unwrap();
    by_receives.post_recv(&driver, 9, &[region.sge(0, 8)]);
    for cookie in 0..3 {
        sender.post(&driver, write(cookie), &[]);
    }
    for qp in [&sender, &by_sends, &by_receives] {
        assert_eq!(driver.state(qp), QpState::Err);
        let event = driver.await_event(EventKind::QpError, qp.id);
        assert_eq!(event.code.get(), QpFault::CqOverflow as u16);
    }
    driver.await_event(EventKind::CqError, small.id);
    assert_eq!(driver.counter(Counter::CqOverflows), 1);
    // The other queue got no completions, and still works.
    assert_eq!(driver.state(&other), QpState::Rts);
    other.post(&driver, write(7), &[]);
    assert_cqe(&beside.poll().unwrap(), 7, WcStatus::Success);
    assert!(beside.poll().is_none());
}

/// A flush into a queue with enough room causes no overflow, so the chain ends there.
#[test]
fn sec_05_a_chain_ends_where_a_queue_has_room() {
    let driver = Driver::start();
    let pd = driver.pd();
    let (first, second, mut third) = (driver.cq(0), driver.cq(0), driver.cq(2));
    let region = driver.register(pd, 4096, Access::LOCAL_WRITE).unwrap();
    let pairs = [(&first, &second), (&second, &third), (&third, &third)];
    let mut qps = pairs.map(|(send_cq, recv_cq)| own_peer(&driver, pd, send_cq, recv_cq));
    for qp in &mut qps {
        for cookie in 0..2 {
            qp.post_recv(&driver, cookie, &[region.sge(0, 8)]);
        }
    }
    for cookie in 0..2 {
        qps[0].post(&driver, write(cookie), &[]);
    }
    for cq in [&first, &second] {
        driver.await_event(EventKind::CqError, cq.id);
    }
    assert_eq!(driver.state(&qps[1]), QpState::Err);
    assert_eq!(driver.state(&qps[2]), QpState::Rts);
    for cookie in 0..2 {
        assert_cqe(&third.poll().unwrap(), cookie, WcStatus::WrFlushErr);
    }
    assert!(third.poll().is_none());
    assert_eq!(driver.counter(Counter::CqOverflows), 2);
}
