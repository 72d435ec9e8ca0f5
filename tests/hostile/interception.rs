//! System calls of a child that wait until this process has decided about them: seccomp_unotify(2).

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use urnic_sys::Plain;

/// The calls that wait.
pub(crate) const CALLS: [libc::c_long; 4] = [
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
];
/// The number of the listener's descriptor in the child.
const PLACE: RawFd = 900;
/// `_IOWR('!', 0, struct seccomp_notif)` and `_IOWR('!', 1, struct seccomp_notif_resp)`.
const RECEIVE: libc::c_ulong = 0xc050_2100;
const ANSWER: libc::c_ulong = 0xc018_2101;

/// A child whose calls wait. It is killed when dropped, or when this thread ends.
#[derive(Debug)]
pub(crate) struct Intercepted {
    child: Child,
    process: OwnedFd,
    listener: OwnedFd,
    memory: File,
}

/// A call that waits.
#[derive(Debug)]
pub(crate) struct Call {
    id: u64,
    /// The thread that made it.
    pub(crate) thread: u32,
    pub(crate) number: libc::c_long,
    pub(crate) arguments: [u64; 6],
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Decision {
    /// The kernel executes it.
    Pass,
    /// It returns this, and is not executed.
    Return(i64),
    /// It fails with this errno.
    Fail(Errno),
}

/// The filter: these calls wait, all others pass.
fn filter() -> Vec<libc::sock_filter> {
    let instruction = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // The number is the first word of struct seccomp_data.
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let give = libc::BPF_RET | libc::BPF_K;
    let mut filter = vec![instruction(load, 0, 0, 0)];
    for (n, call) in CALLS.iter().enumerate() {
        let to_the_last = (CALLS.len() - n) as u8;
        filter.push(instruction(equal, to_the_last, 0, *call as u32));
    }
    filter.push(instruction(give, 0, 0, libc::SECCOMP_RET_ALLOW));
    filter.push(instruction(give, 0, 0, libc::SECCOMP_RET_USER_NOTIF));
    filter
}

/// Installs the filter in the calling process, with its listener at [`PLACE`].
fn install(filter: &mut [libc::sock_filter]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    let check = |result: libc::c_long| match result {
        -1 => Err(io::Error::last_os_error()),
        value => Ok(value as RawFd),
    };
    // SAFETY: these calls take numbers only.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL).into())?;
        check(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0).into())?;
    }
    // SAFETY: `program` and the instructions that it points to live until the call returns.
    let listener = check(unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_NEW_LISTENER,
            &raw const program,
        )
    })?;
    // SAFETY: dup2 takes numbers only. The copy survives exec.
    check(unsafe { libc::dup2(listener, PLACE) }.into()).map(drop)
}

impl Intercepted {
    /// Starts a program.
    pub(crate) fn start(command: &mut Command) -> io::Result<Intercepted> {
        let mut filter = filter();
        // SAFETY: between fork and exec the closure makes system calls only, on memory that it
        // owns.
        unsafe { command.pre_exec(move || install(&mut filter)) };
        let child = command.spawn()?;
        let pid = Pid::from_child(&child);
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        let listener = pidfd_getfd(&process, PLACE, PidfdGetfdFlags::empty())?;
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{}/mem", child.id()))?;
        Ok(Intercepted {
            child,
            process,
            listener,
            memory,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The child's memory, at its addresses.
    pub(crate) fn memory(&self) -> &File {
        &self.memory
    }

    /// The input of the child.
    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// A descriptor of the child's, here.
    pub(crate) fn descriptor(&self, number: u64) -> Result<OwnedFd, Errno> {
        let number = RawFd::try_from(number).map_err(|_| Errno::BADF)?;
        pidfd_getfd(&self.process, number, PidfdGetfdFlags::empty())
    }

    /// Whether the child has ended.
    pub(crate) fn is_over(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for a call.
    pub(crate) fn next(&self, limit: Duration) -> Option<Call> {
        let mut ready = [PollFd::new(&self.listener, PollFlags::IN)];
        let limit = Timespec::try_from(limit).ok()?;
        poll(&mut ready, Some(&limit)).ok()?;
        if !ready[0].revents().contains(PollFlags::IN) {
            return None;
        }
        // The kernel requires zeroes.
        let mut call = libc::seccomp_notif::zeroes();
        const { assert!(size_of::<libc::seccomp_notif>() == 0x50) };
        // SAFETY: the call writes one `seccomp_notif`, which is what the request's number says.
        let received = unsafe { libc::ioctl(self.listener.as_raw_fd(), RECEIVE, &raw mut call) };
        // The thread may have been killed meanwhile.
        (received == 0).then(|| Call {
            id: call.id,
            thread: call.pid,
            number: call.data.nr.into(),
            arguments: call.data.args,
        })
    }

    /// Lets a call go on. Its thread may have ended meanwhile.
    pub(crate) fn decide(&self, call: &Call, decision: Decision) {
        let (val, error, flags) = match decision {
            Decision::Pass => (0, 0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE),
            Decision::Return(value) => (value, 0, 0),
            Decision::Fail(errno) => (0, -errno.raw_os_error(), 0),
        };
        let mut answer = libc::seccomp_notif_resp {
            id: call.id,
            val,
            error,
            flags: flags as u32,
        };
        const { assert!(size_of::<libc::seccomp_notif_resp>() == 0x18) };
        // SAFETY: the call reads one `seccomp_notif_resp`, which is what the request's number says.
        unsafe { libc::ioctl(self.listener.as_raw_fd(), ANSWER, &raw mut answer) };
    }
}

impl Drop for Intercepted {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
