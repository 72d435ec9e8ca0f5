//! `urnic run --require`: runs the command as a child, and fails if none of its processes has used
//! the device.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use urnic_config::Identity;
use urnic_process::usage::{Step, VARIABLE};
use urnic_sys::signals::Signals;

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
    // The processes of the command open it by this name as long as this process runs.
    let path = format!("/proc/{}/fd/{}", std::process::id(), steps.as_raw_fd());
    command.env(VARIABLE, path);
    let command = inherited::passed_on(&mut command);
    let signals = Signals::of(&FORWARDED);
    signals.block();
    let arrived = signals.descriptor().map_err(|errno| failed(errno.into()))?;
    let child = command.spawn().map_err(|error| not_run(&error))?;
    let status = wait(child, &arrived).map_err(failed)?;
    let status_code = code(status);
    let mut text = String::new();
    let mut steps = File::from(steps);
    let read = steps
        .rewind()
        .and_then(|()| steps.take(LONGEST).read_to_string(&mut text));
    read.map_err(failed)?;
    if Step::ReadyToSend.is_in(&text) {
        return Ok(ExitCode::from(status_code));
    }
    let line = format!("{} ended and {}", name.display(), unused(&text, identity));
    match status_code {
        0 => Err(Failure {
            message: line,
            status: UNUSED,
        }),
        code => {
            urnic_console::complain("urnic", &line);
            Ok(ExitCode::from(code))
        }
    }
}

/// How far the processes came that wrote this text, and the reason if it is known.
fn unused(text: &str, identity: Identity) -> String {
    let step = if Step::OpenedByUcx.is_in(text) && identity == Identity::Iwarp {
        "connected no queue pair: UCX takes no iWARP device: --identity roce"
    } else if Step::OpenedByUcx.is_in(text) {
        "connected no queue pair: UCX chose other transports, as UCX_TLS or UCX_NET_DEVICES says"
    } else if Step::Opened.is_in(text) {
        "opened the device, but connected no queue pair"
    } else if Step::Searched.is_in(text) {
        "searched for RDMA devices, but opened none of urnic\'s"
    } else {
        "did not search for RDMA devices"
    };
    step.to_owned()
}

/// Waits for the end of the child, and passes signals on to it.
fn wait(mut child: Child, arrived: &OwnedFd) -> std::io::Result<ExitStatus> {
    let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) else {
        return child.wait();
    };
    let ended = pidfd_open(pid, PidfdFlags::empty())?;
    loop {
        let mut sources = [
            PollFd::from_borrowed_fd(ended.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(arrived.as_fd(), PollFlags::IN),
        ];
        match poll(&mut sources, None) {
            Err(rustix::io::Errno::INTR) => continue,
            polled => polled?,
        };
        if !sources[0].revents().is_empty() {
            return child.wait();
        }
        forward(arrived, pid)?;
    }
}

/// Passes one signal on. Those of the terminal go to all processes in front of it.
fn forward(arrived: &OwnedFd, to: Pid) -> std::io::Result<()> {
    // `struct signalfd_siginfo`: the number, and at byte 8 the code.
    let mut information = [0; 128];
    rustix::io::read(arrived, &mut information)?;
    let field = |at: usize| i32::from_ne_bytes([0, 1, 2, 3].map(|byte| information[at + byte]));
    let (number, code) = (field(0), field(8));
    const SI_KERNEL: i32 = 0x80;
    if code != SI_KERNEL
        && let Some(signal) = Signal::from_named_raw(number)
    {
        // A child that has just ended needs no signal.
        let _ = kill_process(to, signal);
    }
    Ok(())
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
        let with_ucx = [Step::Searched, Step::OpenedByUcx];
        assert!(reason(&with_ucx, Identity::Iwarp).ends_with("--identity roce"));
        assert!(reason(&with_ucx, Identity::Roce).contains("UCX_TLS"));
        let opened = reason(&[Step::Searched, Step::Opened], Identity::Iwarp);
        assert!(opened.starts_with("opened"), "{opened}");
    }
}
