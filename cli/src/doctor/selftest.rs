//! A connection between two programs of the distribution, as the last check of `urnic doctor`.

use std::ffi::OsStr;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::finding::Finding;
use super::fixes;
use crate::environment::Environment;
use crate::program::find;

const SUBJECT: &str = "self-test";
const PROGRAM: &str = "ibv_rc_pingpong";
const EXCHANGES: &str = "1000";

/// The timeout of the test. A loaded machine may be slow; after this time the test counts as stuck.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The pause before a client starts: a server needs about as long until it listens.
const PAUSE: Duration = Duration::from_millis(50);

/// The program's output if no server listens.
const REFUSED: &str = "Couldn't connect";

/// The program's output if another process took the port since it was free.
const TAKEN: &str = "Couldn't listen";
/// The number of ports that are tried. The kernel gives a port to another process now and then; if
/// each one is taken, there is another reason.
const PORTS: u32 = 4;

/// Runs both ends of ibv_rc_pingpong on 127.0.0.1.
pub(super) fn run(env: &Environment) -> Finding {
    if find(OsStr::new(PROGRAM)).is_none() {
        let text = format!("not run: {PROGRAM} is not installed");
        return Finding::note(SUBJECT, text, Some("apt-get install ibverbs-utils"));
    }
    let deadline = Instant::now() + TIMEOUT;
    let mut tested = pingpong(env, deadline);
    for _ in 1..PORTS {
        if tested.as_ref().is_err_and(|text| text.contains(TAKEN)) {
            tested = pingpong(env, deadline);
        }
    }
    match tested {
        Ok(()) => Finding::good(
            SUBJECT,
            format!("{PROGRAM} exchanged {EXCHANGES} messages with itself"),
        ),
        Err(text) => {
            let again = format!("URNIC_LOG=debug urnic run -- {PROGRAM} & urnic run -- {PROGRAM} 127.0.0.1");
            let fix = fixes::named_in(&text, &again);
            Finding::wrong(SUBJECT, text, fix)
        }
    }
}

/// Opens the device, as any program would.
pub(super) fn answers(env: &Environment) -> Finding {
    let ran = Command::new("/proc/self/exe")
        .args(["info", "--inside"])
        .envs(env.variables())
        .stdin(Stdio::null())
        .output();
    match ran {
        Ok(output) if output.status.success() => Finding::good(SUBJECT, "the device opens and answers"),
        Ok(output) => {
            let stderr = String::from_utf8_lossy(&output.stderr);
            let text = fixes::first_error(&stderr).to_owned();
            let fix = fixes::named_in(&text, "URNIC_LOG=debug urnic info");
            Finding::wrong(SUBJECT, text, fix)
        }
        Err(error) => Finding::wrong(SUBJECT, error, "urnic info"),
    }
}

fn pingpong(env: &Environment, deadline: Instant) -> Result<(), String> {
    let port = free_port()?;
    let mut server = End::spawn(env, &["-p", &port.to_string(), "-n", EXCHANGES])?;
    loop {
        std::thread::sleep(PAUSE);
        server.check("server")?;
        let mut client = End::spawn(env, &["-p", &port.to_string(), "-n", EXCHANGES, "127.0.0.1"])?;
        match client.finish("client", deadline) {
            // The server does not listen yet. /proc/net, which would tell, may be hidden.
            Err(text) if text.contains(REFUSED) && Instant::now() < deadline => {}
            finished => break finished?,
        }
    }
    server.finish("server", deadline)
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16, String> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|error| format!("cannot listen: {error}"))?;
    listener
        .local_addr()
        .map(|address| address.port())
        .map_err(|error| error.to_string())
}

/// One end of the test; the process is ended on drop.
struct End(Child);

impl End {
    fn spawn(env: &Environment, args: &[&str]) -> Result<Self, String> {
        let child = Command::new(PROGRAM)
            .args(args)
            .envs(env.variables())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        child
            .map(Self)
            .map_err(|error| format!("cannot run {PROGRAM}: {error}"))
    }

    /// An error if the process has ended with a failure.
    fn check(&mut self, which: &str) -> Result<bool, String> {
        match self.0.try_wait() {
            Ok(None) => Ok(false),
            Ok(Some(status)) if status.success() => Ok(true),
            Ok(Some(status)) => Err(format!("the {which} failed ({status}): {}", self.complaint())),
            Err(error) => Err(format!("lost sight of the {which}: {error}")),
        }
    }

    fn finish(&mut self, which: &str, deadline: Instant) -> Result<(), String> {
        while !self.check(which)? {
            if Instant::now() > deadline {
                return Err(format!("the {which} did not finish in {} s", TIMEOUT.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn complaint(&mut self) -> String {
        let mut text = String::new();
        let _ = self
            .0
            .stderr
            .take()
            .map(|mut pipe| pipe.read_to_string(&mut text));
        fixes::first_error(&text).to_owned()
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
