//! `urnic run --require`: runs the command as a child, and fails if none of its processes has used
//! the device.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open, set_dumpable_behavior,
};
use urnic_config::Identity;
use urnic_process::usage::{self, Step};
use urnic_sys::processes;
use urnic_sys::signals::{self, Arrived, Signals};

use crate::answer::Failure;
use crate::inherited;

/// The exit status if the command succeeded and did not use the device.
const UNUSED: u8 = 87;
/// The signals that the command gets instead of this process.
const FORWARDED: [i32; 6] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
];
/// How long a child, if a process of its group has sent a signal, may take to end by it before it
/// gets the signal from this process.
const GROUP_SIGNAL: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};
/// Longest text of the file of steps that is read.
const LONGEST: u64 = 1 << 20;

/// Runs the command, which `name` names; `not_run` is the failure of a command that cannot be run.
/// Returns the exit status of the command; [`UNUSED`] if it is 0 and the device was not used.
pub(crate) fn run(
    mut command: Command,
    name: &OsStr,
    identity: Identity,
    not_run: impl FnOnce(&std::io::Error) -> Failure,
) -> Result<ExitCode, Failure> {
    let failed = |error: std::io::Error| Failure::runtime(format!("--require: {error}"));
    let steps =
        rustix::fs::memfd_create("urnic usage", MemfdFlags::CLOEXEC).map_err(|errno| failed(errno.into()))?;
    // The processes of the command find it as long as this process runs.
    let place = usage::variable(&steps).map_err(|errno| failed(errno.into()))?;
    command.env(usage::VARIABLE, place);
    let command = inherited::passed_on(&mut command);
    let signals = Signals::of(&FORWARDED);
    signals.block();
    let arrived = signals.descriptor().map_err(|errno| failed(errno.into()))?;
    // If it is ignored, nobody can wait for a child.
    signals::by_default(libc::SIGCHLD);
    let child = command.spawn().map_err(|error| not_run(&error))?;
    let status = wait(child, &arrived).map_err(failed)?;
    let text = text_of(File::from(steps)).map_err(failed)?;
    usage::pass_on(&text);
    if !Step::ReadyToSend.is_in(&text) {
        let line = format!("{} ended and {}", name.display(), unused(&text, identity));
        if status.success() {
            return Err(Failure {
                message: line,
                status: UNUSED,
            });
        }
        urnic_console::complain("urnic", &line);
    }
    if let Some(signal) = status.signal() {
        end_by(signal);
    }
    Ok(ExitCode::from(code(status)))
}

/// The beginning of the text that the processes wrote. Any of them may have written anything.
fn text_of(mut steps: File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    steps.rewind()?;
    steps.take(LONGEST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// How far the processes came that wrote this text, and the reason if it is known.
fn unused(text: &str, identity: Identity) -> String {
    let step = if Step::Opened.is_in(text) {
        "opened the device, but connected no queue pair"
    } else if Step::Searched.is_in(text) {
        "searched for RDMA devices, but opened none of urnic's"
    } else {
        return "did not search for RDMA devices".to_owned();
    };
    let reason = match (Step::HasUcx.is_in(text), identity) {
        (false, _) => "",
        (true, Identity::Iwarp) => ": UCX takes no iWARP device: --identity roce",
        (true, Identity::Roce) => ": UCX chose other transports: check UCX_TLS and UCX_NET_DEVICES",
    };
    format!("{step}{reason}")
}

/// Waits for the end of the child, and passes signals on to it, as far as the system permits that.
fn wait(mut child: Child, arrived: &OwnedFd) -> std::io::Result<ExitStatus> {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw)
        && let Err(errno) = pass_signals_on(pid, arrived)
    {
        tracing::warn!("--require: cannot forward signals to the command: {errno}");
        // They end this process instead.
        Signals::of(&FORWARDED).unblock();
    }
    child.wait()
}

/// Returns when the child has ended.
fn pass_signals_on(child: Pid, arrived: &OwnedFd) -> Result<(), Errno> {
    let ended = pidfd_open(child, PidfdFlags::empty())?;
    loop {
        let mut sources = [
            PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(arrived.as_fd(), PollFlags::IN),
        ];
        match poll(&mut sources, None) {
            Err(Errno::INTR) => continue,
            polled => polled?,
        };
        if !sources[0].revents().is_empty() {
            return Ok(());
        }
        forward(arrived, child, &ended)?;
    }
}

/// Passes one signal on that the child has not got itself. It gets those of the terminal, except
/// the hang-up if this process leads the session: then only this process gets it. A process of the
/// same group may have sent the signal to the whole group, as timeout(1) does, or to this process
/// alone, as a script does: then the child gets it a while later, if it has not ended.
fn forward(arrived: &OwnedFd, child: Pid, ended: &OwnedFd) -> Result<(), Errno> {
    let arrived = match Arrived::read(arrived) {
        Err(Errno::INTR) => return Ok(()),
        read => read?,
    };
    let leads = processes::session(None).is_ok_and(|leader| leader == Some(getpid()));
    if arrived.by_kernel && !(arrived.signal == libc::SIGHUP && leads) {
        return Ok(());
    }
    let group = |pid: Pid| processes::group(Some(pid)).ok();
    if let Some(sender) = Pid::from_raw(arrived.sender)
        && !arrived.by_kernel
        && group(sender).is_some_and(|sent| Some(sent) == group(child))
    {
        let mut source = [PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN)];
        // An interrupted wait is only shorter.
        let _ = poll(&mut source, Some(&GROUP_SIGNAL));
    }
    if let Some(signal) = Signal::from_named_raw(arrived.signal) {
        // A child that has just ended needs no signal.
        let _ = kill_process(child, signal);
    }
    Ok(())
}

/// Ends this process by the signal that ended the child, so that a shell sees it. Returns if the
/// signal does not end processes, or not this one.
fn end_by(number: i32) {
    let Some(signal) = Signal::from_named_raw(number) else {
        return;
    };
    // The core, or its report, is the child's.
    if set_dumpable_behavior(DumpableBehavior::NotDumpable).is_err() {
        return;
    }
    signals::by_default(number);
    Signals::none().with(number).unblock();
    let _ = kill_process(getpid(), signal);
}

/// The exit status, as a shell shows it.
fn code(status: ExitStatus) -> u8 {
    let code = match status.code() {
        Some(code) => code,
        None => 128 + status.signal().unwrap_or(0),
    };
    u8::try_from(code).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_that_of_the_last_step() {
        let reason = |steps: &[Step], identity| {
            let text: String = steps.iter().map(|step| step.line()).collect();
            unused(&text, identity)
        };
        assert_eq!(reason(&[], Identity::Iwarp), "did not search for RDMA devices");
        let searched = reason(&[Step::Searched], Identity::Roce);
        assert!(searched.starts_with("searched"), "{searched}");
        for last in [Step::Searched, Step::Opened] {
            let with_ucx = [Step::Searched, Step::HasUcx, last];
            assert!(reason(&with_ucx, Identity::Iwarp).ends_with("--identity roce"));
            assert!(reason(&with_ucx, Identity::Roce).contains("UCX_TLS"));
        }
        let opened = reason(&[Step::Searched, Step::Opened], Identity::Iwarp);
        assert!(opened.starts_with("opened"), "{opened}");
    }
}
