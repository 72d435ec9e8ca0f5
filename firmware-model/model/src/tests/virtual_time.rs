//! Whole devices on a simulated network, with a clock that the test advances.

use crate::faulty::Faulty;
use crate::stream::Network;
use crate::testing::mock::{Driver, Pair, assert_cqe, plan_of};
use crate::testing::sim::{Conditions, SimNetwork};
use crate::time::Nanos;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use urnic_device::command::Opcode;
use urnic_device::event::EventKind;
use urnic_device::stream::attach;
use urnic_device::vocabulary::WcStatus;

pub(super) struct TestBed {
    clock: Arc<AtomicU64>,
    network: SimNetwork,
    pub(super) near: Driver,
    pub(super) far: Driver,
}

impl TestBed {
    pub(super) fn new(conditions: Conditions) -> TestBed {
        Self::with(conditions, |network| Arc::new(network))
    }

    /// Like [`new`](Self::new); the near device uses what `near` makes of the network.
    fn with(conditions: Conditions, near: impl FnOnce(SimNetwork) -> Arc<dyn Network>) -> TestBed {
        let clock = Arc::new(AtomicU64::new(1));
        let network = SimNetwork::new(conditions, clock.clone());
        TestBed {
            near: Driver::start_manual(near(network.clone())),
            far: Driver::start_manual(Arc::new(network.clone())),
            network,
            clock,
        }
    }

    /// A network without a delay of its own, where the near device has these faults.
    fn with_faults(faults: &str) -> TestBed {
        let plan = plan_of(faults);
        let conditions = Conditions {
            latency: Duration::ZERO,
            ..Conditions::default()
        };
        Self::with(conditions, |network| {
            Arc::new(Faulty::new(Arc::new(network), plan, "urnic0"))
        })
    }

    /// The virtual time until `probe` returns a value.
    fn time_until<T>(&self, probe: impl FnMut() -> Option<T>) -> Duration {
        let begin = self.clock.load(Ordering::Relaxed);
        self.pass_until(probe);
        Duration::from_nanos(self.clock.load(Ordering::Relaxed) - begin)
    }

    /// Advances the clock by `by`, and runs both devices once.
    pub(super) fn pass(&self, by: Duration) {
        let now = self.clock.fetch_add(by.as_nanos() as u64, Ordering::Relaxed);
        self.near.device.step(Nanos(now));
        self.far.device.step(Nanos(now));
    }

    pub(super) fn connect(&self) -> Pair {
        self.connect_with(attach::CRC)
    }

    /// Like [`connect`](Self::connect), with these flags of `Attach`.
    pub(super) fn connect_with(&self, flags: u32) -> Pair {
        let pass = || self.pass(Duration::from_micros(10));
        Pair::connect_while(&self.near, &self.far, flags, pass)
    }

    /// Advances the clock until `probe` returns a value, within a virtual minute.
    pub(super) fn pass_until<T>(&self, mut probe: impl FnMut() -> Option<T>) -> T {
        for _ in 0..6_000_000 {
            if let Some(found) = probe() {
                return found;
            }
            self.pass(Duration::from_micros(10));
        }
        panic!("not within a virtual minute")
    }
}

#[test]
fn messages_arrive_however_the_stream_is_cut() {
    for chunk in [1, 7, 1461] {
        let world = TestBed::new(Conditions {
            chunk,
            mss: 1460,
            latency: Duration::from_micros(50),
            seed: chunk as u64,
            ..Conditions::default()
        });
        let Pair {
            mut initiator,
            mut responder,
        } = world.connect();
        for (cookie, size) in [0u32, 1, 1000, 5000, 20_000].into_iter().enumerate() {
            let cookie = cookie as u64;
            let bytes: Vec<u8> = (0..size).map(|i| (i ^ i >> 8) as u8).collect();
            world.near.arena.write(initiator.region.iova, &bytes);
            let into = responder.region.sge(0, 1 << 20);
            responder.qp.post_recv(&world.far, cookie, &[into]);
            let from = initiator.region.sge(0, size);
            initiator.qp.post_send(&world.near, cookie, &[from]);
            let received = world.pass_until(|| responder.recv_cq.poll());
            assert_cqe(&received, cookie, WcStatus::Success);
            assert_eq!(world.far.arena.read(responder.region.iova, size as usize), bytes);
            let sent = world.pass_until(|| initiator.send_cq.poll());
            assert_cqe(&sent, cookie, WcStatus::Success);
        }
    }
}

/// A queue pair has sent, and was destroyed; the peer acknowledges nothing.
fn with_a_silent_peer() -> TestBed {
    let world = TestBed::new(Conditions::default());
    let Pair { mut initiator, .. } = world.connect();
    initiator
        .qp
        .post_send(&world.near, 1, &[initiator.region.sge(0, 64)]);
    let sent = world.pass_until(|| initiator.send_cq.poll());
    assert_cqe(&sent, 1, WcStatus::Success);
    for wire in world.network.wires() {
        wire.silence();
    }
    world.near.on(Opcode::DestroyQp, initiator.qp.id).unwrap();
    world
}

#[test]
fn a_lingering_stream_with_a_silent_peer_times_out() {
    let world = with_a_silent_peer();
    let lingering = || world.near.device.core().schedule.lingering();
    assert_eq!(lingering(), 1);
    world.pass(Duration::from_millis(2900));
    world.pass(Duration::from_millis(50));
    assert_eq!(lingering(), 1);
    world.pass(Duration::from_millis(100));
    world.pass(Duration::ZERO);
    assert_eq!(lingering(), 0);
}

#[test]
fn a_reset_keeps_the_data_of_a_destroyed_queue_pair() {
    let world = with_a_silent_peer();
    let lingering = || world.near.device.core().schedule.lingering();
    // A process that exits destroys its queue pairs, then resets the device.
    world.near.device.reset();
    assert_eq!(lingering(), 1);
    world.pass(Duration::from_millis(3100));
    world.pass(Duration::ZERO);
    assert_eq!(lingering(), 0);
}

#[test]
fn a_reset_keeps_completed_data() {
    let world = TestBed::new(Conditions::default());
    let Pair {
        mut initiator,
        mut responder,
    } = world.connect();
    responder
        .qp
        .post_recv(&world.far, 2, &[responder.region.sge(0, 64)]);
    initiator
        .qp
        .post_send(&world.near, 1, &[initiator.region.sge(0, 64)]);
    let sent = world.pass_until(|| initiator.send_cq.poll());
    assert_cqe(&sent, 1, WcStatus::Success);
    assert!(responder.recv_cq.poll().is_none(), "it is under way");
    // A killed process destroys no objects.
    world.near.device.reset();
    let received = world.pass_until(|| responder.recv_cq.poll());
    assert_cqe(&received, 2, WcStatus::Success);
    world.pass_until(|| (world.near.device.core().schedule.lingering() == 0).then_some(()));
}

#[test]
fn mpa_c_04_a_damaged_byte_ends_the_stream_unplaced() {
    let world = TestBed::new(Conditions::default());
    let Pair {
        mut initiator,
        mut responder,
    } = world.connect();
    let into = responder.region.sge(0, 4096);
    world.near.arena.write(initiator.region.iova, &[0xaa; 512]);
    // The tenth byte of the payload of the second FPDU.
    let fpdu = 2 + 18 + 512 + 4;
    world.network.wires()[0].damage(0, fpdu + 2 + 18 + 10, 0x40);
    for cookie in [1, 2] {
        responder.qp.post_recv(&world.far, cookie, &[into]);
        let from = initiator.region.sge(0, 512);
        initiator.qp.post_send(&world.near, cookie, &[from]);
        let received = world.pass_until(|| responder.recv_cq.poll());
        if cookie == 1 {
            assert_cqe(&received, 1, WcStatus::Success);
            world.far.arena.write(responder.region.iova, &[0; 512]);
        } else {
            assert_cqe(&received, 2, WcStatus::WrFlushErr);
        }
    }
    assert_eq!(world.far.arena.read(responder.region.iova, 512), vec![0; 512]);
    world.pass_until(|| {
        let event = world.near.event();
        event.filter(|e| e.kind == EventKind::QpError as u8)
    });
    assert_eq!(world.far.counter(crate::Counter::RxCrcErrors), 1);
    assert_eq!(world.near.counter(crate::Counter::RxTerminates), 1);
}

#[test]
fn a_manual_device_uses_no_lent_thread() {
    let device = TestBed::new(Conditions::default()).near.device.clone();
    let quiet = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    assert!(!device.lend(Duration::from_secs(60), quiet.as_fd(), &mut || false));
    assert!(device.lend(Duration::from_secs(60), quiet.as_fd(), &mut || true));
}

/// Steps of the simulation that a message takes beside what is tested.
const STEPS: Duration = Duration::from_micros(100);

fn is_about(time: Duration, expected: Duration) {
    assert!(
        time >= expected && time < expected + STEPS,
        "{time:?} instead of {expected:?}"
    );
}

/// What a connection sends is late, in the device's time; nothing waits for it.
#[test]
fn a_delay_is_of_the_devices_time() {
    let world = TestBed::with_faults("delay time=20ms");
    // Start-up is a request of the near end, and an answer.
    let Pair {
        mut initiator,
        mut responder,
    } = world.connect();
    let into = responder.region.sge(0, 1 << 20);
    for cookie in 0..5 {
        responder.qp.post_recv(&world.far, cookie, &[into]);
    }
    // They are all on the way at once.
    for cookie in 0..5 {
        initiator
            .qp
            .post_send(&world.near, cookie, &[initiator.region.sge(0, 64)]);
    }
    is_about(
        world.time_until(|| responder.recv_cq.poll()),
        Duration::from_millis(20),
    );
    for cookie in 1..5 {
        let received = world.pass_until(|| responder.recv_cq.poll());
        assert_cqe(&received, cookie, WcStatus::Success);
    }
    assert!(world.time_until(|| initiator.send_cq.poll()) < STEPS);
    // The other direction is not late.
    initiator
        .qp
        .post_recv(&world.near, 9, &[initiator.region.sge(0, 64)]);
    responder
        .qp
        .post_send(&world.far, 9, &[responder.region.sge(0, 64)]);
    assert!(world.time_until(|| initiator.recv_cq.poll()) < STEPS);
}

#[test]
fn a_rate_holds_for_all_that_is_sent() {
    // A byte a microsecond.
    let world = TestBed::with_faults("delay rate=8Mbit");
    let Pair {
        mut initiator,
        mut responder,
    } = world.connect();
    let into = responder.region.sge(0, 1 << 20);
    for cookie in 0..3 {
        responder.qp.post_recv(&world.far, cookie, &[into]);
    }
    for cookie in 0..3 {
        initiator
            .qp
            .post_send(&world.near, cookie, &[initiator.region.sge(0, 300_000)]);
    }
    let mut total = Duration::ZERO;
    for _ in 0..3 {
        let time = world.time_until(|| responder.recv_cq.poll());
        // With headers and CRCs, and whole portions.
        assert!((230..380).contains(&time.as_millis()), "{time:?}");
        total += time;
    }
    assert!((900..930).contains(&total.as_millis()), "{total:?}");
}

#[test]
fn late_bytes_arrive_before_the_end_of_the_connection() {
    let world = TestBed::with_faults("delay time=20ms jitter=10ms");
    let Pair {
        mut initiator,
        mut responder,
    } = world.connect();
    let into = responder.region.sge(0, 1 << 20);
    for cookie in 0..6 {
        responder.qp.post_recv(&world.far, cookie, &[into]);
    }
    for cookie in 0..6 {
        initiator
            .qp
            .post_send(&world.near, cookie, &[initiator.region.sge(0, 64)]);
    }
    world.near.on(Opcode::DestroyQp, initiator.qp.id).unwrap();
    for cookie in 0..6 {
        let received = world.pass_until(|| responder.recv_cq.poll());
        assert_cqe(&received, cookie, WcStatus::Success);
    }
    world.pass_until(|| {
        let event = world.far.event();
        event.filter(|e| e.object.get() == responder.qp.id)
    });
}

/// A poller looks at the queue pair that its own queue served last, whatever this thread found
/// last.
#[test]
fn a_poller_finds_its_queues_completion_at_the_first_poll() {
    let world = TestBed::new(Conditions {
        latency: Duration::ZERO,
        ..Conditions::default()
    });
    let mut pairs = [world.connect(), world.connect()];
    for cookie in 0..10 {
        for Pair { initiator, responder } in &mut pairs {
            let (from, into) = (initiator.region.sge(0, 8), responder.region.sge(0, 8));
            responder.qp.post_recv(&world.far, cookie, &[into]);
            initiator.qp.post_send(&world.near, cookie, &[from]);
        }
        // A program that never polls has its sends gathered.
        world.near.device.progress(0);
        for Pair { responder, .. } in &mut pairs {
            world.far.device.progress(responder.qp.id);
            let received = responder.recv_cq.poll().expect("found at the first look");
            assert_cqe(&received, cookie, WcStatus::Success);
        }
    }
}
