//! A driver that takes no events: the number of events that wait in the device has a limit,
//! whatever causes them.

use super::one_sided;
use crate::config::Limits;
use crate::testing::mock::{Driver, End, config, wait_for};
use std::net::{SocketAddr, TcpListener, TcpStream};
use urnic_device::command::{Command, CreateSrq, Handle, ModifySrq, Opcode, QueueHandle, Status};
use urnic_device::doorbell::Kind;
use urnic_device::event::EventKind;
use urnic_device::stream::Attach;
use urnic_device::vocabulary::QpState;
use urnic_device::wqe;

/// Entries of the driver's event queues.
const RING: usize = 64;
/// Events that may wait.
const LIMIT: u32 = 16;
/// Repetitions of each action.
const TIMES: usize = 2000;
/// Additional events of the existing objects: a few for each object.
const MARGIN: usize = 16;

fn driver() -> Driver {
    Driver::start_with(crate::config::ModelConfig {
        limits: Limits {
            waiting_events: LIMIT,
            ..Limits::default()
        },
        ..config()
    })
}

/// Events that wait in queue 0.
fn waiting(driver: &Driver) -> usize {
    let queue = driver.device.core().async_events.load();
    queue.as_ref().map_or(0, |queue| queue.waiting())
}

/// An address on which no socket listens.
fn unused_address() -> SocketAddr {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap();
    closed.local_addr().unwrap()
}

/// Fills queue 0 and the backlog of events after it; returns the number of events.
fn fill(driver: &Driver) -> usize {
    let unused_address = unused_address();
    let mut connects = 0;
    wait_for("a full queue", || match driver.connect(unused_address) {
        Ok(_) => {
            connects += 1;
            None
        }
        Err(status) => {
            assert_eq!(status, Status::NoResources);
            Some(())
        }
    });
    connects
}

#[test]
fn notifications_of_one_queue_are_merged_while_they_wait() {
    let driver = driver();
    let cqs: Vec<_> = (0..5).map(|_| driver.cq(2)).collect();
    for _ in 0..TIMES {
        for cq in &cqs {
            // The queue has no completion at this index.
            driver.ring(Kind::Arm, cq.id, u32::MAX);
        }
    }
    let waiting = || {
        let queues = driver.device.core().event_queues();
        queues[&driver.eq].waiting()
    };
    assert_eq!(waiting(), cqs.len());
    // Each queue notifies once more, and can then notify again.
    let seen = driver.notifications();
    assert_eq!(seen.len(), RING);
    driver.take_notifications(seen.len());
    wait_for("those that waited", || (waiting() == 0).then_some(()));
    let mut last = driver.notifications();
    last.sort_unstable();
    assert_eq!(last, cqs.iter().map(|cq| cq.id).collect::<Vec<_>>());
    driver.take_notifications(last.len());
    driver.ring(Kind::Arm, cqs[0].id, u32::MAX);
    assert_eq!(driver.notifications(), [cqs[0].id]);
}

#[test]
fn failed_connects_without_room_for_events_are_refused() {
    let driver = driver();
    let connects = fill(&driver);
    assert!(connects >= RING + LIMIT as usize);
    assert!(waiting(&driver) <= LIMIT as usize + MARGIN);
    // No event is lost, and the queue has room again.
    for _ in 0..connects {
        let event = wait_for("an event", || driver.event());
        assert_eq!(event.kind, EventKind::StreamConnected as u8);
    }
    assert!(driver.event().is_none());
    wait_for("room", || driver.connect(unused_address()).ok());
}

/// Repeats commands that cause events, while the driver takes none.
#[test]
fn no_command_makes_the_backlog_grow() {
    let driver = driver();
    let pd = driver.pd();
    let arguments = CreateSrq {
        ring: driver.arena.alloc(4096).into(),
        record: driver.arena.alloc(4096).into(),
        pd: pd.into(),
        uar: driver.uar.into(),
        log_size: 2.into(),
        log_stride: 4.into(),
    };
    let made: QueueHandle = driver.command(Opcode::CreateSrq, &arguments).unwrap().result();
    let limit = ModifySrq {
        srq: made.id,
        limit: 1.into(),
    };
    let end = End::new(&driver);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sid = driver.connect(listener.local_addr().unwrap()).unwrap();
    driver.await_event(EventKind::StreamConnected, sid);
    drop(listener.accept().unwrap());
    let buffer = driver.arena.alloc(64);
    let mut refused = 0;
    for _ in 0..TIMES {
        // A limit event whose limit is not reached.
        refused += u32::from(driver.command(Opcode::ModifySrq, &limit).is_err());
        // A stream whose peer is gone.
        let mut receive = Command::new(Opcode::StreamReceive, &Handle { id: sid.into() });
        (receive.output, receive.output_len) = (buffer.into(), 4.into());
        refused += u32::from(driver.execute(receive).is_err());
        // A queue pair is created and destroyed. Destruction is never refused.
        let attach = Attach {
            qid: end.qp.id.into(),
            first_msn: 1.into(),
            ..Attach::default()
        };
        refused += u32::from(driver.command(Opcode::LoopbackAttach, &attach).is_err());
        driver.modify(&end.qp, QpState::Err).unwrap();
        driver.modify(&end.qp, QpState::Reset).unwrap();
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            refused += u32::from(driver.modify(&end.qp, state).is_err());
        }
        assert!(waiting(&driver) <= LIMIT as usize + MARGIN);
    }
    assert!(refused > 0);
    // A driver that takes the events can continue.
    wait_for("room", || {
        while driver.event().is_some() {}
        driver.command(Opcode::ModifySrq, &limit).ok()
    });
}

/// Connections from outside wait at the listener, and are taken when the driver takes its events.
#[test]
fn a_listener_waits_while_the_driver_takes_no_events() {
    let driver = driver();
    let (lid, port) = driver.listen("127.0.0.1:0".parse().unwrap(), 1000).unwrap();
    let connects = fill(&driver);
    let before = waiting(&driver);
    let peers: Vec<TcpStream> = (0..50)
        .map(|_| TcpStream::connect(("127.0.0.1", port)).unwrap())
        .collect();
    // The device polls its listeners, and accepts no connection.
    for _ in 0..100 {
        driver.device.progress(0);
    }
    assert!(waiting(&driver) <= before + MARGIN);
    let (mut connected, mut accepted) = (0, 0);
    while connected < connects || accepted < peers.len() {
        let event = wait_for("an event", || driver.event());
        match EventKind::from_raw(event.kind).unwrap() {
            EventKind::StreamConnected => connected += 1,
            EventKind::StreamAccepted if event.object.get() == lid => accepted += 1,
            kind => panic!("{kind:?}"),
        }
    }
    assert!(driver.event().is_none());
}

/// A function that is reset begins with no backlog.
#[test]
fn a_reset_ends_the_backlog() {
    let driver = driver();
    fill(&driver);
    driver.device.reset();
    assert!(!driver.device.core().schedule.is_backed_up());
}

/// A driver that takes its events late does not delay messages.
#[test]
fn messages_pass_while_events_wait() {
    let driver = driver();
    let mut end = End::new(&driver);
    let attach = Attach {
        qid: end.qp.id.into(),
        first_msn: 1.into(),
        ..Attach::default()
    };
    driver.command(Opcode::LoopbackAttach, &attach).unwrap();
    fill(&driver);
    let write = one_sided(wqe::Opcode::Write, 1, &end);
    end.qp.post(&driver, write, &[end.region.sge(0, 8)]);
    assert_eq!(end.send_cq.poll().unwrap().cookie.get(), 1);
    driver.on(Opcode::DestroyQp, end.qp.id).unwrap();
}
