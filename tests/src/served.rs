//! A device in a separate process: `urnic serve`, at all addresses of this host unless the options
//! name others.

use std::ffi::OsString;
use std::path::PathBuf;

use urnic_testkit::Folder;

use crate::build;
use crate::program::{Program, Running};
use crate::wait::{TIME_LIMIT, until};

/// A server, ended when dropped, and its socket.
#[derive(Debug)]
pub struct Served {
    server: Running,
    folder: Folder,
    place: Vec<OsString>,
    options: String,
}

impl Served {
    /// Starts a server.
    pub fn start() -> Self {
        Self::with("")
    }

    /// Starts a server with these options, too.
    pub fn with(options: &str) -> Self {
        Self::through(&[], options)
    }

    /// Starts a server with this command in front.
    pub fn through(place: &[OsString], options: &str) -> Self {
        let folder = Folder::new("served");
        Self {
            server: serve(folder.path(), place, options),
            folder,
            place: place.to_vec(),
            options: options.to_owned(),
        }
    }

    /// The option that names the device.
    pub fn device(&self) -> String {
        format!("vfio-user:{}", socket(self.folder.path()).display())
    }

    /// A program with this device.
    pub fn program(&self, name: &str) -> Program {
        Program::new(name).env("URNIC_DEVICE", self.device())
    }

    /// The server.
    pub fn server(&self) -> &Running {
        &self.server
    }

    /// Starts another server at the same socket, after the first was killed.
    pub fn again(&mut self) {
        // A killed process loses its descriptors one by one, and the listening descriptor perhaps
        // last.
        let ended = until(TIME_LIMIT, || self.server.ended());
        assert!(
            ended.is_some(),
            "the earlier server did not end:\n{}",
            self.server.output()
        );
        self.server = serve(self.folder.path(), &self.place, &self.options);
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Data that the clients sent still arrives when the server receives SIGTERM.
        self.server.signal(rustix::process::Signal::TERM);
        until(TIME_LIMIT, || self.server.ended());
    }
}

fn socket(folder: &std::path::Path) -> PathBuf {
    folder.join("urnic")
}

fn serve(folder: &std::path::Path, place: &[OsString], options: &str) -> Running {
    let addresses = match options.contains("--addr") {
        true => "",
        false => "--addr host",
    };
    let mut server = Program::plain(build::urnic())
        .line(&format!("serve {addresses} --socket"))
        .arg(socket(folder))
        .line(options)
        .through(place)
        .start(None);
    server.wait_for_output("that it serves", |printed| {
        printed.contains("serving").then_some(())
    });
    server
}

/// Whether the tests use devices in other processes wherever they would use the device in the
/// process: `URNIC_TEST_DEVICE=vfio-user`.
pub fn wanted() -> bool {
    match std::env::var("URNIC_TEST_DEVICE").as_deref() {
        Ok("vfio-user") => true,
        Ok("inproc") | Err(_) => false,
        Ok(other) => panic!("URNIC_TEST_DEVICE={other}: inproc or vfio-user"),
    }
}

/// For tests of properties that only the device in the program's own process has or shows: these
/// tests are left out where all devices are in other processes.
///
/// # Errors
/// The reason, which `scripts/test` distinguishes from the reasons for a skip.
pub fn in_process(why: &str) -> Result<(), String> {
    match wanted() {
        true => Err(format!("in process only: {why}")),
        false => Ok(()),
    }
}
