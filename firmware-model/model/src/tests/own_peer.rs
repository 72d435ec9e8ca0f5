//! A queue pair that is its own peer: its requests complete as they would if the peer were
//! elsewhere.

use super::one_sided;
use crate::testing::mock::{Driver, End, assert_cqe};
use urnic_device::command::Opcode;
use urnic_device::event::EventKind;
use urnic_device::stream::{Attach, attach};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe;

const REGION: u32 = 1 << 20;

fn end(driver: &Driver, flags: u32) -> End {
    let end = End::new(driver);
    let arguments = Attach {
        qid: end.qp.id.into(),
        flags: flags.into(),
        ord: 4.into(),
        ird: 4.into(),
        first_msn: 1.into(),
        ..Attach::default()
    };
    driver.command(Opcode::LoopbackAttach, &arguments).unwrap();
    end
}

fn outcomes(end: &mut End) -> Vec<(u64, WcStatus)> {
    std::iter::from_fn(|| end.send_cq.poll())
        .map(|cqe| (cqe.cookie.get(), WcStatus::from_raw(cqe.status).unwrap()))
        .collect()
}

/// Requests before the refused one succeed, and those after it are flushed, whether they are one
/// FPDU or several.
#[test]
fn a_write_that_it_refuses_completes_with_the_refusal() {
    for len in [0u32, 8, 3000, 1 << 19] {
        for bad_stag in [false, true] {
            let driver = Driver::start();
            let mut end = end(&driver, 0);
            for cookie in 1..=4 {
                let mut write = one_sided(wqe::Opcode::Write, cookie, &end);
                if cookie == 3 && bad_stag {
                    write.stag = (end.region.stag ^ 1).into();
                } else if cookie == 3 {
                    write.remote_offset = (end.region.iova + u64::from(REGION - len) + 1).into();
                }
                // The STag of a Write of zero bytes is not checked, so it is not refused.
                end.qp.post(&driver, write, &[end.region.sge(0, len)]);
            }
            let (third, fourth) = match len {
                0 => (WcStatus::Success, WcStatus::Success),
                _ => (WcStatus::RemAccessErr, WcStatus::WrFlushErr),
            };
            assert_eq!(
                outcomes(&mut end),
                [
                    (1, WcStatus::Success),
                    (2, WcStatus::Success),
                    (3, third),
                    (4, fourth)
                ],
                "{len} bytes, another STag: {bad_stag}"
            );
            if len > 0 {
                driver.await_event(EventKind::QpError, end.qp.id);
                assert_eq!(driver.state(&end.qp), QpState::Err);
            }
        }
    }
}

/// One doorbell for all requests: requests before and after the refused one name the same address.
#[test]
fn a_refusal_names_the_request_and_no_like_one() {
    let driver = Driver::start();
    let mut end = end(&driver, 0);
    let stag = end.region.stag;
    for cookie in 1..=2 {
        let write = one_sided(wqe::Opcode::Write, cookie, &end);
        end.qp.post_unrung(write, &[end.region.sge(0, 8)]);
    }
    // The region is deregistered, and the next Write to it is refused.
    let mut invalidate = one_sided(wqe::Opcode::LocalInv, 3, &end);
    invalidate.stag = stag.into();
    end.qp.post_unrung(invalidate, &[]);
    let other = driver
        .register(end.pd, 4096, urnic_device::vocabulary::Access::LOCAL_WRITE)
        .unwrap();
    for cookie in 4..=5 {
        let write = one_sided(wqe::Opcode::Write, cookie, &end);
        end.qp.post_unrung(write, &[other.sge(0, 8)]);
    }
    end.qp.ring(&driver);
    let statuses: Vec<WcStatus> = outcomes(&mut end).into_iter().map(|(_, s)| s).collect();
    let refused = statuses
        .iter()
        .position(|s| *s == WcStatus::RemAccessErr)
        .unwrap();
    // The first two may be placed before the deregistration, or be refused as on a NIC that places
    // later.
    assert!(statuses[..refused].iter().all(|s| *s == WcStatus::Success));
    assert!(statuses[refused + 1..].iter().all(|s| *s == WcStatus::WrFlushErr));
    assert_eq!(statuses.len(), 5);
}

#[test]
fn a_send_or_read_that_it_refuses_completes_with_the_refusal() {
    let driver = Driver::start();
    let mut one = end(&driver, 0);
    one.qp.post_recv(&driver, 7, &[one.region.sge(0, 8)]);
    one.qp.post_send(&driver, 1, &[one.region.sge(0, 8)]);
    one.qp.post_send(&driver, 2, &[one.region.sge(0, 8)]);
    assert_eq!(
        outcomes(&mut one),
        [(1, WcStatus::Success), (2, WcStatus::RemOpErr)],
        "no receive"
    );
    let mut one = end(&driver, 0);
    one.qp.post_recv(&driver, 7, &[one.region.sge(0, 8)]);
    one.qp.post_send(&driver, 1, &[one.region.sge(0, 9)]);
    assert_eq!(outcomes(&mut one), [(1, WcStatus::RemInvReqErr)], "too long");
    assert_cqe(&one.recv_cq.poll().unwrap(), 7, WcStatus::LocLenErr);
    let mut one = end(&driver, 0);
    let mut read = one_sided(wqe::Opcode::Read, 1, &one);
    read.remote_offset = (one.region.iova + u64::from(REGION)).into();
    one.qp.post(&driver, read, &[one.region.sge(0, 1)]);
    assert_eq!(outcomes(&mut one), [(1, WcStatus::RemAccessErr)]);
}

/// A Send waits for a receive, and completes when it is delivered.
#[test]
fn a_send_completes_when_its_late_receive_is_delivered() {
    let driver = Driver::start();
    let mut one = end(&driver, attach::STALL_ON_EMPTY_RQ);
    for cookie in 1..=3 {
        one.qp.post_send(&driver, cookie, &[one.region.sge(0, 70_000)]);
    }
    assert_eq!(outcomes(&mut one), []);
    for cookie in 1..=2 {
        one.qp
            .post_recv(&driver, cookie, &[one.region.sge(1 << 18, 70_000)]);
        assert_eq!(outcomes(&mut one), [(cookie, WcStatus::Success)]);
        assert_cqe(&one.recv_cq.poll().unwrap(), cookie, WcStatus::Success);
    }
    // The last Send is never delivered.
    driver.modify(&one.qp, QpState::Err).unwrap();
    assert_eq!(outcomes(&mut one), [(3, WcStatus::WrFlushErr)]);
}
