//! A device that is lost during work: completed requests stay complete, the others are flushed once
//! and in order, and no call blocks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use urnic_bus::inproc::{InprocBus, Options};
use urnic_config::Config;
use urnic_device::bus::{Bus, Mapping, QueueMemory, Signal, SignalHandler};
use urnic_device::registers;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_driver::{Anywhere, AsyncEvent, Driver};
use urnic_process::gids::GidTable;

use crate::program::{DRIVER, Program, TestQp, status, until};

type Errno = rustix::io::Errno;

/// A bus to a device that a test can cut.
struct Cable {
    device: Arc<InprocBus>,
    handler: OnceLock<SignalHandler>,
    /// Doorbells no longer reach the device.
    doorbells_blocked: AtomicBool,
    cut: AtomicBool,
}

impl Cable {
    fn new() -> Arc<Cable> {
        Arc::new(Cable {
            device: InprocBus::start(&GidTable::of_host(), Options::default()).unwrap(),
            handler: OnceLock::new(),
            doorbells_blocked: AtomicBool::new(false),
            cut: AtomicBool::new(false),
        })
    }

    fn cut(&self) {
        // As a device in a killed process, the device no longer accesses memory.
        self.device
            .write32(registers::CONTROL, registers::Control::RESET.bits());
        self.cut.store(true, Ordering::SeqCst);
        self.handler.get().unwrap()(Signal::Lost);
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }
}

impl Bus for Cable {
    fn read32(&self, offset: u32) -> u32 {
        if self.is_cut() {
            return registers::GONE;
        }
        self.device.read32(offset)
    }

    fn write32(&self, offset: u32, value: u32) {
        if !self.is_cut() {
            self.device.write32(offset, value);
        }
    }

    fn doorbell(&self, uar: u32, offset: u32, value: u64) {
        if !self.is_cut() && !self.doorbells_blocked.load(Ordering::SeqCst) {
            self.device.doorbell(uar, offset, value);
        }
    }

    fn progress(&self, queue_pair: u32) {
        if !self.is_cut() {
            self.device.progress(queue_pair);
        }
    }

    fn has_gathered(&self) -> bool {
        false
    }

    fn allocate(&self, len: usize) -> Result<QueueMemory, Errno> {
        self.device.allocate(len)
    }

    unsafe fn free(&self, memory: QueueMemory, len: usize) {
        // SAFETY: the caller promises memory of the device's bus with this length.
        unsafe { self.device.free(memory, len) };
    }

    fn map(&self, ptr: *mut u8, len: usize, write: bool) -> Result<Mapping, Errno> {
        self.device.map(ptr, len, write)
    }

    fn unmap(&self, mapping: &Mapping, len: usize) {
        self.device.unmap(mapping, len);
    }

    fn signals(&self, handler: SignalHandler) {
        let _ = self.handler.set(handler.clone());
        self.device.signals(handler);
    }

    fn memory(&self) -> &'static str {
        "a test's"
    }

    fn shutdown(&self) {
        self.device.shutdown();
    }

    fn abandon_in_child(&self) {
        self.device.abandon_in_child();
    }
}

fn start_on_cable(cq_entries: u32) -> (Arc<Cable>, Program) {
    let cable = Cable::new();
    let driver = Driver::start(cable.clone(), Config::default()).unwrap();
    let program = Program::with_cq(&driver, cq_entries);
    (cable, program)
}

/// Connects two queue pairs.
fn connect_pair(here: &Program, there: &Program) -> (TestQp, TestQp) {
    let (a, b) = (here.qp(), there.qp());
    a.up(&here.driver, 0, (b.qp.qpn, b.psn()));
    b.up(&there.driver, 0, (a.qp.qpn, a.psn()));
    (a, b)
}

/// One end of a pair: program, queue pair, and registered memory.
type End<'a> = (&'a Program, &'a TestQp, &'a urnic_driver::Mr, *const u8);

/// The first end sends four messages to the other. The program has polled all completions.
fn exchange_four((here, a, mine, from): End<'_>, (there, b, theirs, to): End<'_>) {
    for cookie in 0..4 {
        b.receive(cookie, to, 64, theirs);
        a.send(cookie, from, 64, mine);
        assert_eq!(status(&here.completion()), Some(WcStatus::Success));
        assert_eq!(status(&there.completion()), Some(WcStatus::Success));
    }
    a.settle(4, 0);
}

#[test]
fn uncompleted_requests_are_flushed_once_and_in_order() {
    let (cable, here) = start_on_cable(256);
    let there = Program::new(&DRIVER);
    let mut memory = (vec![5u8; 64], vec![0u8; 64]);
    let (mine, theirs) = (here.register(&mut memory.0), there.register(&mut memory.1));
    let (from, to) = (memory.0.as_ptr(), memory.1.as_ptr());
    let (a, b) = connect_pair(&here, &there);
    exchange_four((&here, &a, &mine, from), (&there, &b, &theirs, to));
    for cookie in 100..103 {
        a.receive(cookie, from, 64, &mine);
    }
    // The device does not receive the following doorbells. The state is that of a device that was
    // killed in between: it had freed the blocks of the first two requests, and had not yet written
    // the completion of the first; the second needs none.
    cable.doorbells_blocked.store(true, Ordering::SeqCst);
    a.send(4, from, 64, &mine);
    a.send_silently(5, from, 64, &mine);
    a.send(6, from, 64, &mine);
    a.send_silently(7, from, 64, &mine);
    a.send(8, from, 64, &mine);
    let record = a.qp.record();
    record
        .sq_consumer
        .store(record.sq_consumer.load(Ordering::Relaxed) + 2, Ordering::Release);
    let notified = here.received.completions.load(Ordering::SeqCst);
    cable.cut();

    let flushed = |cookie: u64, opcode: WcOpcode| {
        let cqe = here.completion();
        assert_eq!(status(&cqe), Some(WcStatus::WrFlushErr));
        assert_eq!((cqe.cookie.get(), cqe.opcode), (cookie, opcode as u8));
        assert_eq!((cqe.label.get(), cqe.qid.get()), (a.qp.qpn, a.qp.qid));
    };
    [4, 6, 7, 8]
        .into_iter()
        .for_each(|cookie| flushed(cookie, WcOpcode::Send));
    (100..103).for_each(|cookie| flushed(cookie, WcOpcode::Recv));
    until(&here, "the loss is reported", || {
        let received = here.received.events.lock();
        received.contains(&(AsyncEvent::DeviceFatal, 0))
            && here.received.completions.load(Ordering::SeqCst) > notified
    });
    assert_eq!(a.qp.last_state(), QpState::Err);

    // A request posted now is flushed too, and notifies the armed queue.
    let notified = here.received.completions.load(Ordering::SeqCst);
    here.arm(4 + 7);
    a.send(9, from, 64, &mine);
    flushed(9, WcOpcode::Send);
    a.receive(103, from, 64, &mine);
    flushed(103, WcOpcode::Recv);
    until(&here, "the flush notifies", || {
        here.received.completions.load(Ordering::SeqCst) > notified
    });
    assert!(here.poll().is_none());

    // Afterwards objects cannot be made, and all objects can be destroyed.
    assert_eq!(here.driver.alloc_pd().unwrap_err(), Errno::IO);
    assert!(
        here.driver
            .create_cq(&here.context, 1, 0, 0, true, &Anywhere)
            .is_err()
    );
    assert_eq!(a.qp.query().unwrap_err(), Errno::IO);
    a.qp.destroy().unwrap();
    here.driver.deregister(&mine).unwrap();
    here.close();
    b.qp.destroy().unwrap();
    there.driver.deregister(&theirs).unwrap();
    there.close();
}

#[test]
fn a_late_consumer_index_does_not_flush_a_complete_request() {
    let (cable, here) = start_on_cable(256);
    let there = Program::new(&DRIVER);
    let mut memory = (vec![5u8; 64], vec![0u8; 64]);
    let (mine, theirs) = (here.register(&mut memory.0), there.register(&mut memory.1));
    let (from, to) = (memory.0.as_ptr(), memory.1.as_ptr());
    let (a, b) = connect_pair(&here, &there);
    let record = a.qp.record();
    let start = record.sq_consumer.load(Ordering::Relaxed);
    exchange_four((&here, &a, &mine, from), (&there, &b, &theirs, to));
    cable.doorbells_blocked.store(true, Ordering::SeqCst);
    a.send(4, from, 64, &mine);
    // The device had lost the page of the indices before that of the completions.
    record.sq_consumer.store(start, Ordering::Release);
    cable.cut();
    let cqe = here.completion();
    assert_eq!((status(&cqe), cqe.cookie.get()), (Some(WcStatus::WrFlushErr), 4));
    assert!(here.poll().is_none());

    a.qp.destroy().unwrap();
    here.driver.deregister(&mine).unwrap();
    here.close();
    b.qp.destroy().unwrap();
    there.driver.deregister(&theirs).unwrap();
    there.close();
}

#[test]
fn a_flush_continues_when_the_completion_queue_has_room() {
    let (cable, here) = start_on_cable(4);
    let mut memory = vec![0u8; 64];
    let mr = here.register(&mut memory);
    let qp = here.qp();
    qp.to(QpState::Init, &qp.attr(&here.driver, 0, (0, 0)));
    (0..11).for_each(|cookie| qp.receive(cookie, memory.as_ptr(), 64, &mr));
    cable.cut();
    assert_eq!(here.completion().cookie.get(), 0);
    // The queue pair that uses this completion queue still has to flush to it.
    assert_eq!(
        here.cq.destroy().map_err(|refusal| refusal.errno),
        Err(Errno::BUSY)
    );
    for cookie in 1..11 {
        assert_eq!(here.completion().cookie.get(), cookie);
    }
    qp.qp.destroy().unwrap();
    here.driver.deregister(&mr).unwrap();
    here.close();
}

#[test]
fn a_stopped_device_is_treated_as_lost() {
    let (cable, here) = start_on_cable(4);
    // A device that can no longer access its command queue also clears its ready state.
    cable
        .device
        .write32(registers::CONTROL, registers::Control::RESET.bits());
    assert_eq!(here.driver.alloc_pd().unwrap_err(), Errno::IO);
    until(&here, "the loss is reported", || {
        let received = here.received.events.lock();
        received.contains(&(AsyncEvent::DeviceFatal, 0))
    });
    here.close();
}
