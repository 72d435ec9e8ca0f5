//! Completion queues: wrap, overflow, arming, moving to another ring.

use crate::events::{Effect, Effects};
use crate::queues::Overflow;
use crate::testing::mock::{Cq, Driver};
use crate::testing::sim::{Conditions, SimNetwork};
use crate::time::{Nanos, Now};
use std::sync::Arc;
use urnic_device::command::{Opcode, Status};
use urnic_device::cqe::{Cqe, CqeFlags};
use urnic_device::doorbell::Kind;
use urnic_device::event::EventKind;
use urnic_device::vocabulary::WcStatus;

fn cqe(cookie: u64, status: WcStatus) -> Cqe {
    let mut cqe = Cqe::default();
    cqe.cookie = cookie.into();
    cqe.status = status as u8;
    cqe
}

/// Makes the device push a completion.
fn push(driver: &Driver, cq: &Cq, cookie: u64, status: WcStatus, solicited: bool) -> Result<(), Overflow> {
    let core = driver.device.core();
    let mut effects = Effects::default();
    let mut cqe = cqe(cookie, status);
    if solicited {
        cqe.flags = CqeFlags::SOLICITED.bits();
    }
    let queue = core.cqs.find(cq.id).unwrap();
    let pushed = queue.push(&[cqe], &Now::at(Nanos(cookie + 1)), &mut effects);
    core.raise(effects);
    pushed
}

fn push_well(driver: &Driver, cq: &Cq, cookie: u64) {
    push(driver, cq, cookie, WcStatus::Success, false).unwrap();
}

#[test]
fn vrb_c_06_an_overflow_is_reported_once_and_keeps_earlier_ones() {
    let driver = Driver::start();
    let mut cq = driver.cq(1);
    push_well(&driver, &cq, 0);
    push_well(&driver, &cq, 1);
    for _ in 0..3 {
        assert_eq!(push(&driver, &cq, 2, WcStatus::Success, false), Err(Overflow));
    }
    driver.await_event(EventKind::CqError, cq.id);
    assert!(driver.event().is_none());
    assert_eq!(cq.poll().unwrap().cookie.get(), 0);
    assert_eq!(cq.poll().unwrap().cookie.get(), 1);
    assert!(cq.poll().is_none());
    assert!(push(&driver, &cq, 3, WcStatus::Success, false).is_err());
}

#[test]
fn arming_notifies_at_once_of_unseen_completions() {
    let driver = Driver::start();
    let mut cq = driver.cq(4);
    push_well(&driver, &cq, 0);
    cq.arm(&driver, true);
    assert!(driver.notifications().is_empty(), "not solicited");
    cq.arm(&driver, false);
    assert_eq!(driver.notifications(), [cq.id]);
    cq.poll().unwrap();
    cq.arm(&driver, false);
    assert!(driver.notifications().is_empty());
    push_well(&driver, &cq, 1);
    assert_eq!(driver.notifications(), [cq.id]);
}

/// The driver rings, takes more completions than the queue has entries, and the device reads the
/// ring only then.
#[test]
fn an_arm_that_the_device_reads_late_notifies_at_once() {
    let driver = Driver::start();
    let mut cq = driver.cq(1);
    let armed_at = cq.consumer();
    for cookie in 0..5 {
        push(&driver, &cq, cookie, WcStatus::Success, true).unwrap();
        cq.poll().unwrap();
    }
    push_well(&driver, &cq, 5);
    for kind in [Kind::Arm, Kind::ArmSolicited] {
        driver.ring(kind, cq.id, armed_at);
        assert_eq!(driver.notifications(), [cq.id], "{kind:?}");
    }
}

#[test]
fn vrb_c_05_solicited_arming_wakes_for_solicited_and_failed() {
    let driver = Driver::start();
    let mut cq = driver.cq(4);
    cq.arm(&driver, true);
    push_well(&driver, &cq, 0);
    assert!(driver.notifications().is_empty());
    push(&driver, &cq, 1, WcStatus::Success, true).unwrap();
    assert_eq!(driver.notifications(), [cq.id]);
    while cq.poll().is_some() {}
    cq.arm(&driver, true);
    push_well(&driver, &cq, 2);
    assert!(driver.notifications().is_empty());
    push(&driver, &cq, 3, WcStatus::WrFlushErr, false).unwrap();
    assert_eq!(driver.notifications(), [cq.id]);
    // A weaker request does not replace a stronger one.
    while cq.poll().is_some() {}
    cq.arm(&driver, false);
    cq.arm(&driver, true);
    push_well(&driver, &cq, 4);
    assert_eq!(driver.notifications(), [cq.id]);
}

#[test]
fn a_moved_queue_keeps_unconsumed_entries() {
    let driver = Driver::start();
    let mut cq = driver.cq(2);
    for cookie in 0..7 {
        push_well(&driver, &cq, cookie);
        if cookie < 4 {
            cq.poll().unwrap();
        }
    }
    assert_eq!(cq.resize(&driver, 1), Err(Status::InvalidArgument));
    for log_size in [3, 5, 4] {
        let first = u64::from(cq.consumer());
        assert_eq!(cq.resize(&driver, log_size), Ok(3));
        // Fills the queue, then takes all completions except three.
        let mut pushed = 0;
        while push(&driver, &cq, 1000 + pushed, WcStatus::Success, false).is_ok() {
            pushed += 1;
            if pushed == (1 << log_size) - 3 {
                break;
            }
        }
        assert_eq!(pushed, (1 << log_size) - 3);
        let mut seen = Vec::new();
        for _ in 0..pushed {
            seen.push(cq.poll().unwrap().cookie.get());
        }
        assert_eq!(u64::from(cq.consumer()), first + pushed);
        assert_eq!(seen[3..], (1000..1000 + pushed - 3).collect::<Vec<_>>());
    }
    let rest: Vec<u64> = std::iter::from_fn(|| cq.poll()).map(|c| c.cookie.get()).collect();
    assert_eq!(rest.len(), 3);
    driver.on(Opcode::DestroyCq, cq.id).unwrap();
}

#[test]
fn moderated_notifications_wait_for_others_but_not_for_ever() {
    let network = SimNetwork::new(Conditions::default(), Arc::default());
    let driver = Driver::start_manual(Arc::new(network));
    let mut cq = driver.cq(4);
    cq.moderate(&driver, 3, 100).unwrap();
    cq.arm(&driver, false);
    push_well(&driver, &cq, 0);
    push_well(&driver, &cq, 1);
    assert!(driver.notifications().is_empty());
    push_well(&driver, &cq, 2);
    assert_eq!(driver.notifications(), [cq.id], "the requested number");
    while cq.poll().is_some() {}
    // The time starts with the first of these completions, regardless of earlier requests.
    cq.arm(&driver, false);
    push_well(&driver, &cq, 3);
    driver.device.step(Nanos(4 + 99_999));
    assert!(driver.notifications().is_empty());
    driver.device.step(Nanos(4 + 100_000));
    assert_eq!(driver.notifications(), [cq.id], "the requested time");
    driver.device.step(Nanos(1_000_000));
    assert!(driver.notifications().is_empty());
    while cq.poll().is_some() {}
    cq.arm(&driver, false);
    push(&driver, &cq, 5, WcStatus::WrFlushErr, false).unwrap();
    assert_eq!(driver.notifications(), [cq.id], "failures do not wait");
    while cq.poll().is_some() {}
    cq.arm(&driver, false);
    push_well(&driver, &cq, 6);
    cq.moderate(&driver, 0, 0).unwrap();
    assert_eq!(
        driver.notifications(),
        [cq.id],
        "what waits comes when the settings change"
    );
}

#[test]
fn moderation_has_bounds_and_takes_one_timer() {
    let network = SimNetwork::new(Conditions::default(), Arc::default());
    let driver = Driver::start_manual(Arc::new(network));
    let mut cq = driver.cq(4);
    for (count, period) in [(0x1_0000, 1), (1, 0x1_0000)] {
        assert_eq!(
            cq.moderate(&driver, count, period),
            Err(Status::InvalidArgument),
            "{count} {period}"
        );
    }
    cq.moderate(&driver, 2, 0xffff).unwrap();
    let queue = driver.device.core().cqs.find(cq.id).unwrap();
    let mut effects = Effects::default();
    for n in 0..100 {
        cq.arm(&driver, false);
        let well = || cqe(n, WcStatus::Success);
        queue
            .push(&[well(), well()], &Now::at(Nanos(n)), &mut effects)
            .unwrap();
        while cq.poll().is_some() {}
    }
    let list = effects.into_list();
    let checks = list.iter().filter(|effect| matches!(effect, Effect::Cq(..)));
    assert_eq!(checks.count(), 1, "every notification came early");
}
