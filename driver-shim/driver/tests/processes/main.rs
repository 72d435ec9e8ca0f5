//! Processes that fork, exit and are killed. This is one test in a separate process, since fork
//! copies only the calling thread.

#![allow(clippy::unwrap_used, reason = "a failure panics and ends the test")]

#[path = "../device/program.rs"]
#[expect(dead_code, reason = "shared with the tests of the device")]
mod program;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use urnic_config::Config;
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_driver::{Anywhere, Driver, QpAttr, QpMask};
use urnic_process::gids::GidTable;

use program::{Program, TestQp, status};

fn open() -> &'static Arc<Driver> {
    Driver::open(0, &Config::default(), &GidTable::of_host()).unwrap()
}

fn loopback(driver: &Driver) -> usize {
    driver.gids().iter().position(|gid| gid.ip.is_loopback()).unwrap()
}

/// Runs `child` in a forked process, which has one end of a pair of pipes. Returns the other end,
/// and the process id.
fn fork(child: impl FnOnce(&mut Pipe)) -> (Pipe, rustix::process::Pid) {
    let ((up_r, up_w), (down_r, down_w)) = (rustix::pipe::pipe().unwrap(), rustix::pipe::pipe().unwrap());
    // SAFETY: the child runs only this closure on its one thread, as a program that forks without
    // exec does.
    match unsafe { libc::fork() } {
        0 => {
            urnic_driver::abandon_in_child();
            drop((up_r, down_w));
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                child(&mut Pipe::new(down_r, up_w))
            }));
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(ended.is_err())) }
        }
        pid => (
            Pipe::new(up_r, down_w),
            rustix::process::Pid::from_raw(pid).unwrap(),
        ),
    }
}

/// The messages between parent and child.
struct Pipe {
    from: std::fs::File,
    to: std::fs::File,
}

impl Pipe {
    fn new(from: OwnedFd, to: OwnedFd) -> Pipe {
        Pipe {
            from: from.into(),
            to: to.into(),
        }
    }

    fn send(&mut self, words: [u32; 2]) {
        let bytes = [words[0].to_le_bytes(), words[1].to_le_bytes()].concat();
        self.to.write_all(&bytes).unwrap();
    }

    fn receive(&mut self) -> [u32; 2] {
        let mut bytes = [0; 8];
        self.from.read_exact(&mut bytes).unwrap();
        let word = |at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        [word(0), word(4)]
    }

    /// Exchanges queue pair numbers and PSNs, and changes the queue pair to RTS.
    fn connect(&mut self, driver: &Driver, qp: &TestQp) {
        self.send([qp.qp.qpn, qp.psn()]);
        let [qpn, psn] = self.receive();
        qp.up(driver, loopback(driver), (qpn, psn));
    }
}

fn wait(pid: rustix::process::Pid) -> Option<i32> {
    let ended = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
    ended.and_then(|(_, status)| status.exit_status())
}

/// Sends one message between two queue pairs of one process.
fn send_message(program: &Program, a: &TestQp, b: &TestQp) {
    let mut memory = vec![3u8; 64];
    let mr = program.register(&mut memory);
    b.receive(1, memory.as_ptr().wrapping_add(32), 32, &mr);
    a.send(2, memory.as_ptr(), 32, &mr);
    for _ in 0..2 {
        assert_eq!(status(&program.completion()), Some(WcStatus::Success));
    }
    program.driver.deregister(&mr).unwrap();
}

fn pair(program: &Program) -> (TestQp, TestQp) {
    let (a, b) = (program.qp(), program.qp());
    let gid = loopback(&program.driver);
    a.up(&program.driver, gid, (b.qp.qpn, b.psn()));
    b.up(&program.driver, gid, (a.qp.qpn, a.psn()));
    (a, b)
}

/// In the child, the parent's objects fail without blocking, and the child can open a new device.
fn a_child_has_no_device_and_can_open_one() {
    let parent = Program::new(open());
    let (a, b) = pair(&parent);
    send_message(&parent, &a, &b);
    let (_, pid) = fork(|_| {
        let dead = Some(Errno::IO);
        let old = &parent.driver;
        assert_eq!(old.alloc_pd().err(), dead);
        assert_eq!(
            old.create_cq(&parent.context, 16, 0, 0, true, &Anywhere)
                .err()
                .map(|refusal| refusal.errno),
            dead
        );
        assert_eq!(a.qp.query().err(), dead);
        let changed = a.qp.modify(&QpAttr::default(), QpMask::STATE);
        assert_eq!(changed.map_err(|refusal| refusal.errno).err(), dead);
        assert_eq!(a.qp.destroy().err(), dead);
        assert_eq!(parent.cq.destroy().map_err(|refusal| refusal.errno).err(), dead);
        old.ring(a.qp.send_doorbell(1));
        old.ring(a.qp.receive_doorbell(1));
        parent.arm(0);
        parent.cq.progress(0);
        old.shutdown();

        let program = Program::new(open());
        assert!(!Arc::ptr_eq(&program.driver, old));
        let (c, d) = pair(&program);
        send_message(&program, &c, &d);
        urnic_driver::exit();
    });
    assert_eq!(wait(pid), Some(0));
    send_message(&parent, &a, &b);
    a.qp.destroy().unwrap();
    b.qp.destroy().unwrap();
    parent.close();
}

/// Messages whose sends completed arrive although the process exits right after the last
/// completion.
fn completed_messages_arrive_after_exit() {
    const MESSAGES: u64 = 50;
    const LEN: usize = 100_000;
    let (mut pipe, pid) = fork(|pipe| {
        let program = Program::new(open());
        let qp = program.qp();
        pipe.connect(&program.driver, &qp);
        let mut memory = vec![8u8; LEN];
        let mr = program.register(&mut memory);
        for n in 0..MESSAGES {
            qp.send(n, memory.as_ptr(), LEN, &mr);
            assert_eq!(status(&program.completion()), Some(WcStatus::Success));
        }
        urnic_driver::exit();
    });
    let program = Program::new(open());
    let qp = program.qp();
    let mut memory = vec![0u8; LEN];
    let mr = program.register(&mut memory);
    pipe.connect(&program.driver, &qp);
    (0..4).for_each(|n| qp.receive(n, memory.as_ptr(), LEN, &mr));
    for n in 0..MESSAGES {
        let done = program.completion();
        assert_eq!(
            (status(&done), done.byte_len.get()),
            (Some(WcStatus::Success), LEN as u32),
            "message {n}"
        );
        qp.receive(n + 4, memory.as_ptr(), LEN, &mr);
    }
    assert_eq!(wait(pid), Some(0));
    // The end was orderly and nothing was outstanding, so only the next send fails.
    assert_eq!(qp.state(), QpState::Rts);
    qp.qp.destroy().unwrap();
    program.driver.deregister(&mr).unwrap();
    program.close();
}

/// The queue pair of the peer fails within seconds after a process is killed, even if the process
/// has children.
fn the_peer_of_a_killed_process_fails() {
    let (mut pipe, pid) = fork(|pipe| {
        let program = Program::new(open());
        let qp = program.qp();
        pipe.connect(&program.driver, &qp);
        let mut memory = vec![8u8; 64];
        let mr = program.register(&mut memory);
        qp.send(1, memory.as_ptr(), 64, &mr);
        assert_eq!(status(&program.completion()), Some(WcStatus::Success));
        // A child of the killed process must not keep the connection open.
        let (_, grandchild) = fork(|pipe| {
            let _ = pipe.from.read(&mut [0]);
        });
        pipe.send([grandchild.as_raw_nonzero().get() as u32, 0]);
        loop {
            std::thread::park();
        }
    });
    let program = Program::new(open());
    let qp = program.qp();
    let mut memory = vec![0u8; 64];
    let mr = program.register(&mut memory);
    pipe.connect(&program.driver, &qp);
    qp.receive(1, memory.as_ptr(), 64, &mr);
    qp.receive(2, memory.as_ptr(), 64, &mr);
    assert_eq!(status(&program.completion()), Some(WcStatus::Success));
    pipe.receive();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    let flushed = program.completion();
    assert_eq!(
        (flushed.cookie.get(), status(&flushed)),
        (2, Some(WcStatus::WrFlushErr))
    );
    assert_eq!(wait(pid), None, "killed");
    qp.qp.destroy().unwrap();
    program.driver.deregister(&mr).unwrap();
    program.close();
}

#[test]
fn processes_fork_exit_and_are_killed() {
    // The first children are forked before this process has a device, the others while it has one.
    completed_messages_arrive_after_exit();
    the_peer_of_a_killed_process_fails();
    a_child_has_no_device_and_can_open_one();
    completed_messages_arrive_after_exit();
}
