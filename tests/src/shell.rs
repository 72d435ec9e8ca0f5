//! A shell in a guest, at a TCP port that QEMU's user network forwards. Tests run commands through
//! it.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use crate::wait::Wait;

/// The time limit for one command in an emulated machine, which is some twenty times slower.
pub const LIMIT: Duration = Duration::from_secs(300);

/// The port of the shell inside the guest.
pub const SHELL: u16 = 7;

/// A running command line of the guest.
#[derive(Debug)]
pub struct Task {
    line: String,
    stream: TcpStream,
}

impl Task {
    /// Starts a command line in the guest's shell, which QEMU's user network forwards from this
    /// port of 127.0.0.1.
    ///
    /// # Errors
    /// No process listens there, because the guest has ended.
    pub fn start(port: u16, line: &str) -> std::io::Result<Self> {
        Self::over(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?, line)
    }

    /// Starts a command line in the shell at the other end of the stream.
    ///
    /// # Errors
    /// The shell has closed the connection.
    pub fn over(mut stream: TcpStream, line: &str) -> std::io::Result<Self> {
        stream.write_all(format!("{{ {line}; }} </dev/null 2>&1; echo \"status $?\"; exit\n").as_bytes())?;
        Ok(Task {
            line: line.to_owned(),
            stream,
        })
    }

    /// Waits for the end of the command; returns whether it succeeded, and its output. Panics with
    /// the output if the command takes longer than [`LIMIT`].
    #[track_caller]
    pub fn ends(self) -> (bool, String) {
        self.tries().unwrap_or_else(|printed| panic!("{printed}"))
    }

    /// Waits for the end of the command; returns whether it succeeded, and its output.
    ///
    /// # Errors
    /// The command takes longer than [`LIMIT`], or the guest has ended; with the output so far.
    pub fn tries(mut self) -> Result<(bool, String), String> {
        let mut wait = Wait::new(LIMIT);
        let (mut bytes, mut chunk) = (Vec::new(), [0; 65536]);
        let look = Some(Duration::from_millis(100));
        self.stream.set_read_timeout(look).expect("not zero");
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => break,
                Ok(n) => bytes.extend_from_slice(&chunk[..n]),
                // Interrupted: when a stopped machine continues, a system call with a time limit
                // ends with EINTR (signal(7)).
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock)
                        && !wait.is_over() => {}
                Err(error) => {
                    let printed = String::from_utf8_lossy(&bytes);
                    return Err(format!("{} in the guest: {error}\n{printed}", self.line));
                }
            }
        }
        let printed = String::from_utf8_lossy(&bytes);
        let (output, status) = printed.rsplit_once("status ").unwrap_or((&printed, "none"));
        let status = status.trim();
        Ok((status == "0", format!("{output}(status {status})\n")))
    }

    /// Waits for the end of the command and returns the output; panics with the output if the
    /// command fails.
    #[track_caller]
    pub fn success(self) -> String {
        let line = self.line.clone();
        let (ok, output) = self.ends();
        assert!(ok, "{line} in the guest:\n{output}");
        output
    }
}
