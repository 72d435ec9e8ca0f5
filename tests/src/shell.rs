//! A shell in a guest, at a TCP port that QEMU's user network forwards: how tests have things done
//! there.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use crate::wait::Wait;

/// How long one thing may take in a machine that is emulated: some twenty times longer than
/// outside.
pub const LIMIT: Duration = Duration::from_secs(300);

/// The port of the guest's shell, inside.
pub const SHELL: u16 = 7;

/// A command line under way in the guest.
#[derive(Debug)]
pub struct Task {
    line: String,
    stream: TcpStream,
}

impl Task {
    /// Starts a command line of the guest's shell, which QEMU's user network has at this port of
    /// 127.0.0.1.
    ///
    /// # Errors
    /// Nobody listens there: the guest is gone.
    pub fn start(port: u16, line: &str) -> std::io::Result<Self> {
        Self::over(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?, line)
    }

    /// Starts a command line of the shell at the other end.
    ///
    /// # Errors
    /// It is gone.
    pub fn over(mut stream: TcpStream, line: &str) -> std::io::Result<Self> {
        stream.write_all(format!("{{ {line}; }} </dev/null 2>&1; echo \"status $?\"; exit\n").as_bytes())?;
        Ok(Task {
            line: line.to_owned(),
            stream,
        })
    }

    /// Waits for its end: did it succeed, and all that it wrote. Panics, with that, if it takes
    /// longer than [`LIMIT`].
    #[track_caller]
    pub fn ends(self) -> (bool, String) {
        self.tries().unwrap_or_else(|said| panic!("{said}"))
    }

    /// Waits for its end: did it succeed, and all that it wrote.
    ///
    /// # Errors
    /// It takes longer than [`LIMIT`], or the guest is gone; with all that it wrote.
    pub fn tries(mut self) -> Result<(bool, String), String> {
        let mut wait = Wait::new(LIMIT);
        let (mut bytes, mut chunk) = (Vec::new(), [0; 65536]);
        let look = Some(Duration::from_millis(100));
        self.stream.set_read_timeout(look).expect("not zero");
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => bytes.extend_from_slice(&chunk[..n]),
                // Interrupted: a machine that was stopped and goes on ends a call that has a time
                // limit (signal(7)).
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock)
                        && !wait.is_over() => {}
                Err(error) => {
                    let said = String::from_utf8_lossy(&bytes);
                    return Err(format!("{} in the guest: {error}\n{said}", self.line));
                }
            }
        }
        let said = String::from_utf8_lossy(&bytes);
        let (output, status) = said.rsplit_once("status ").unwrap_or((&said, "none"));
        let status = status.trim();
        Ok((status == "0", format!("{output}(status {status})\n")))
    }

    /// Waits for its end; panics with its output if it fails.
    #[track_caller]
    pub fn success(self) -> String {
        let line = self.line.clone();
        let (ok, output) = self.ends();
        assert!(ok, "{line} in the guest:\n{output}");
        output
    }
}
