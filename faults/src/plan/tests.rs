//! Decisions of a plan.

use super::*;
use crate::delay::Lateness;
use crate::kinds::{CompletionFault, DatagramFault, SendingFault, StreamFault};
use crate::occasion::Passed;
use std::net::{IpAddr, Ipv4Addr};
use urnic_device::vocabulary::WcStatus;

const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// In the heap: a plan is large, and tests have many.
fn of(text: &str) -> Box<Plan> {
    let plan = Box::new(Plan::new());
    plan.add(text).unwrap();
    plan
}

/// The numbers of the occasions, of a hundred, at which something strikes.
fn struck<F>(plan: &Plan, occasion: &Occasion<'_, F>) -> Vec<u32> {
    (1..=100)
        .filter(|_| !plan.strikes("urnic0", occasion).is_empty())
        .collect()
}

#[test]
fn a_fault_strikes_at_its_occasions() {
    let datagram = occasion::datagram(PEER);
    assert_eq!(struck(&of("drop"), &datagram), [1]);
    assert_eq!(struck(&of("drop nth=7"), &datagram), [7]);
    assert_eq!(struck(&of("drop every=30"), &datagram), [30, 60, 90]);
    assert_eq!(struck(&of("drop every=30 count=2"), &datagram), [30, 60]);
    assert_eq!(struck(&of("drop p=1 count=3"), &datagram), [1, 2, 3]);
    assert_eq!(struck(&of("drop p=0"), &datagram), [0u32; 0]);
    assert_eq!(struck(&of("refuse"), &datagram), [0u32; 0]);
    assert_eq!(struck(&of("drop peer=192.0.3.0/24"), &datagram), [0u32; 0]);
}

#[test]
fn one_seed_has_one_run() {
    let run = |seed: u64| {
        struck(
            &of(&format!("drop p=0.3; seed={seed}")),
            &occasion::datagram(PEER),
        )
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
    assert!((10..50).contains(&run(5).len()));
}

#[test]
fn only_occasions_that_fit_count() {
    let plan = of("complete status=REM_OP_ERR opcode=RDMA_READ nth=2");
    assert!(
        plan.strikes("urnic0", &occasion::completion("RDMA_READ", 1))
            .is_empty()
    );
    assert!(
        plan.strikes("urnic0", &occasion::completion("SEND", 1))
            .is_empty()
    );
    let strikes = plan.strikes("urnic0", &occasion::completion("RDMA_READ", 1));
    assert_eq!(strikes, [CompletionFault::Complete(WcStatus::RemOpErr)]);
    assert_eq!(
        plan.list(),
        ["fault 1: complete status=REM_OP_ERR nth=2 opcode=RDMA_READ: struck 1 times at 2 occasions"]
    );
}

#[test]
fn a_position_is_passed_once() {
    let plan = of("reset after=100 every=1");
    let origins = Origins::beginning(1);
    let passed = |bytes| {
        let passed = Passed {
            bytes,
            messages: 0..0,
            origins: &origins,
        };
        occasion::passed(PEER, passed)
    };
    assert!(plan.strikes("urnic0", &passed(0..100)).is_empty());
    assert_eq!(plan.strikes("urnic0", &passed(100..130)), [StreamFault::Reset]);
    assert!(plan.strikes("urnic0", &passed(130..200)).is_empty());
}

#[test]
fn messages_are_counted_by_their_ends() {
    let plan = of("silence after=3msg every=1");
    let origins = Origins::beginning(1);
    let passed = |bytes, messages| {
        let passed = Passed {
            bytes,
            messages,
            origins: &origins,
        };
        occasion::passed(PEER, passed)
    };
    assert!(plan.strikes("urnic0", &passed(0..100, 0..0)).is_empty());
    assert!(plan.strikes("urnic0", &passed(100..200, 0..2)).is_empty());
    let silence = plan.strikes("urnic0", &passed(200..300, 2..5));
    assert_eq!(silence, [StreamFault::Silence]);
    assert!(plan.strikes("urnic0", &passed(300..400, 5..6)).is_empty());
    let at_once = of("close after=0msg").strikes("urnic0", &passed(0..20, 0..0));
    assert_eq!(at_once, [StreamFault::Close]);
}

#[test]
fn a_delay_has_a_time_a_jitter_and_a_rate() {
    let plan = of("delay time=10us jitter=2us rate=8gbit");
    for _ in 0..100 {
        let strikes = plan.strikes("urnic0", &occasion::sending(PEER));
        let [SendingFault::Delay(delay)] = strikes[..] else {
            panic!("{strikes:?}")
        };
        let Lateness { transfer, time } = delay.lateness(1000);
        assert_eq!(transfer, Duration::from_micros(1));
        assert!((8..=12).contains(&time.as_micros()), "{time:?}");
    }
}

#[test]
fn faults_of_the_network_need_a_network_that_queries() {
    let plan = Plan::new();
    let refused = plan.change("reset", false).unwrap_err();
    assert!(refused.contains("--faults none"), "{refused}");
    plan.change("lose-event", false).unwrap();
    plan.note_network();
    plan.change("reset", false).unwrap();
    assert_eq!(plan.list().len(), 2);
}

#[test]
fn a_fault_may_be_of_one_device() {
    let plan = of("drop device=urnic1 nth=1");
    let occasion = occasion::datagram(PEER);
    assert!(plan.strikes("urnic0", &occasion).is_empty());
    assert_eq!(plan.strikes("urnic1", &occasion), [DatagramFault::Drop]);
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn a_fault_strikes_in_its_window() {
    let plan = of("drop every=1 at=10s until=20s; refuse at=10s");
    let start = plan.faults[0].get().unwrap().since;
    let times = [0, 9, 10, 19, 20, 30].map(seconds);
    let drop = occasion::datagram(PEER);
    let drops = times.map(|time| !plan.strikes_at(start + time, "urnic0", &drop).is_empty());
    assert_eq!(drops, [false, false, true, true, false, false]);
    // What comes before the window is no occasion.
    let refuse = occasion::connect(PEER);
    let refusals = times.map(|time| !plan.strikes_at(start + time, "urnic0", &refuse).is_empty());
    assert_eq!(refusals, [false, false, true, false, false, false]);
}

#[test]
fn a_fault_of_a_device_strikes_by_itself() {
    let plan = of("port-down for=5s at=2s device=1; gid-change at=3s");
    let start = plan.faults[0].get().unwrap().since;
    let down = DeviceFault::PortDown(seconds(5));
    let due = |time, device| plan.due_at(start + time, device);
    assert_eq!(due(seconds(1), "urnic1"), (vec![], Some(seconds(1))));
    assert_eq!(due(seconds(2), "urnic1"), (vec![down], Some(seconds(1))));
    assert_eq!(due(seconds(2), "urnic1"), (vec![], Some(seconds(1))), "once");
    let change = || vec![DeviceFault::GidChange];
    // Devices of which it was not said, too, and later if it was not asked in time.
    assert_eq!(due(seconds(3), "urnic0"), (change(), None));
    assert_eq!(due(seconds(9), "urnic1"), (change(), None));
    assert_eq!(plan.devices.down_until("urnic1"), start + seconds(7));
    assert_eq!(plan.devices.down_until("urnic0"), Duration::ZERO);
    assert_eq!(
        plan.list(),
        [
            "fault 1: port-down for=5s at=2s device=1: struck 1 times at 1 occasions",
            "fault 2: gid-change at=3s: struck 2 times at 2 occasions"
        ]
    );
}

#[test]
fn a_fault_of_a_device_that_is_added_later_strikes_at_once() {
    let plan = Plan::new();
    plan.change("port-down for=1000s device=urnic1; gid-change nth=7", false)
        .unwrap();
    assert_eq!(plan.due("urnic0"), (vec![], None));
    assert_eq!(plan.due("urnic1").0.len(), 1);
    assert!(plan.port_down_for("urnic1").unwrap() > seconds(900));
    assert_eq!(plan.port_down_for("urnic0"), None);
}

#[test]
fn a_fault_of_a_device_that_is_cleared_is_not_due() {
    let plan = Plan::new();
    plan.change("port-down for=1000s", false).unwrap();
    assert_eq!(plan.list().len(), 1);
    assert_eq!(plan.due("urnic0").0.len(), 1);
    plan.change("gid-change at=1000s", false).unwrap();
    plan.change("", true).unwrap();
    // Neither on a device that was not asked yet, nor at its time.
    assert_eq!(plan.due("urnic1"), (vec![], None));
    assert!(
        plan.port_down_for("urnic0").is_some(),
        "what has struck is not undone"
    );
}

#[test]
fn a_port_whose_connections_pass_by_is_not_taken_down() {
    let plan = Plan::new();
    plan.change("port-down", false).unwrap();
    plan.note_passed_by();
    let error = plan.change("port-down", false).unwrap_err();
    assert!(error.ends_with("start it with --faults none"), "{error}");
    plan.change("gid-change", false).unwrap();
}

#[test]
fn cleared_faults_strike_no_more() {
    let plan = of("drop every=1; refuse");
    let datagram = occasion::datagram(PEER);
    assert_eq!(plan.strikes("urnic0", &datagram), [DatagramFault::Drop]);
    plan.note_network();
    plan.change("", true).unwrap();
    assert!(plan.strikes("urnic0", &datagram).is_empty());
    assert!(plan.list().is_empty());
    plan.change("duplicate every=1", false).unwrap();
    plan.change("reorder every=1 count=2", true).unwrap();
    assert_eq!(plan.strikes("urnic0", &datagram), [DatagramFault::Reorder]);
    let listed = "fault 4: reorder every=1 count=2: struck 1 times at 1 occasions";
    assert_eq!(plan.list(), [listed]);
}

#[test]
fn a_change_that_is_wrong_clears_nothing() {
    let plan = of("lose-event");
    for wrong in ["rest", "reset"] {
        plan.change(wrong, true).unwrap_err();
        assert_eq!(plan.list().len(), 1);
    }
}

#[test]
fn there_is_a_limit_of_faults_in_force() {
    let plan = Plan::new();
    let error = (0..=MOST).find_map(|_| plan.add("drop").err()).unwrap();
    assert_eq!(error, "more than 64 faults");
    plan.note_network();
    assert_eq!(plan.change("drop", false).unwrap_err(), error);
    plan.change("drop", true).unwrap();
    assert_eq!(plan.list().len(), 1);
}

#[test]
fn there_is_a_limit_of_faults_in_a_life() {
    let plan = Plan::new();
    let changes = (0..).map(|_| plan.change("lose-event", true));
    let well = changes.take_while(Result::is_ok).count();
    assert_eq!(well, MOST_EVER);
    let error = plan.change("lose-event", true).unwrap_err();
    assert!(error.contains("1024 faults since the process began"), "{error}");
    plan.change("", true).unwrap();
    assert!(plan.list().is_empty());
}
