//! Starting a program as the environment of the tests requires: with a device in another process,
//! or with a capture of its wire.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::program::{Companion, Ended, Program, Running};
use crate::served::{self, Served};
use crate::wait::TIME_LIMIT;

/// The variable that names a folder: when it is set, each program captures its wire into a file
/// there.
pub const CAPTURES: &str = "URNIC_TEST_PCAP";

impl Program {
    /// A device in another process for this program, if the tests use such devices, the program
    /// could reach it, and the test requests no other device.
    fn device(&self) -> Option<Box<Served>> {
        (served::wanted() && self.is_ordinary() && !self.sets("URNIC_DEVICE"))
            .then(|| Box::new(Served::through(self.place(), "")))
    }

    /// The file for the capture of this program, if all programs capture (`URNIC_TEST_PCAP`) and
    /// the device is in the program's process.
    fn capture(&self) -> Option<PathBuf> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let folder = std::env::var_os(CAPTURES)?;
        let taken = ["URNIC_DEVICE", "URNIC_PCAP"].iter().any(|name| self.sets(name));
        let wanted = self.is_ordinary() && !taken && !served::wanted();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{}-{number}-%p.pcapng", self.name(), std::process::id());
        wanted.then(|| Path::new(&folder).join(name))
    }

    /// Starts the program and keeps its output. All commands of `Program::through` replace
    /// themselves with exec, so the pid is the program's own.
    pub fn spawn(&self) -> Running {
        let device = self.device();
        let program = match (&device, self.capture()) {
            (Some(served), _) => self.clone().env("URNIC_DEVICE", served.device()),
            (None, Some(file)) => self.clone().env("URNIC_PCAP", file),
            (None, None) => self.clone(),
        };
        program.start(device.map(|device| device as Companion))
    }

    /// Starts the program and waits at most [`TIME_LIMIT`] for its end.
    pub fn run(&self) -> Ended {
        self.run_for(TIME_LIMIT)
    }

    /// Starts the program and waits for its end; panics with the output if that takes longer than
    /// `limit`.
    pub fn run_for(&self, limit: Duration) -> Ended {
        self.spawn().wait_for(limit)
    }
}
