//! Starting a program as the environment of the tests asks: with a device in another process, or
//! with a capture of its wire.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::program::{Companion, Ended, Program, Running};
use crate::served::{self, Served};
use crate::wait::PATIENCE;

/// The variable that names a folder, if each program shall capture its wire into a file there.
pub const CAPTURES: &str = "URNIC_TEST_PCAP";

impl Program {
    /// A device of its own in another process, if the tests shall use such ones and it could be
    /// reached, and no other device is asked for.
    fn device(&self) -> Option<Box<Served>> {
        (served::wanted() && self.is_ordinary() && !self.sets("URNIC_DEVICE"))
            .then(|| Box::new(Served::through(self.place(), "")))
    }

    /// Where it shall capture its wire, if all programs shall (`URNIC_TEST_PCAP`), and its device
    /// is inside.
    fn capture(&self) -> Option<PathBuf> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let folder = std::env::var_os(CAPTURES)?;
        let taken = ["URNIC_DEVICE", "URNIC_PCAP"].iter().any(|name| self.sets(name));
        let wanted = self.is_ordinary() && !taken && !served::wanted();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{}-{number}-%p.pcapng", self.name(), std::process::id());
        wanted.then(|| Path::new(&folder).join(name))
    }

    /// Starts it, with its output kept. All of `Program::through`'s words replace themselves, so
    /// its pid is the program's own.
    pub fn spawn(&self) -> Running {
        let device = self.device();
        let program = match (&device, self.capture()) {
            (Some(served), _) => self.clone().env("URNIC_DEVICE", served.device()),
            (None, Some(file)) => self.clone().env("URNIC_PCAP", file),
            (None, None) => self.clone(),
        };
        program.start(device.map(|device| device as Companion))
    }

    /// Starts it and waits for its end, for at most [`PATIENCE`].
    pub fn run(&self) -> Ended {
        self.run_for(PATIENCE)
    }

    /// Starts it and waits for its end; panics, with its output, if that takes longer than `limit`.
    pub fn run_for(&self, limit: Duration) -> Ended {
        self.spawn().wait_for(limit)
    }
}
