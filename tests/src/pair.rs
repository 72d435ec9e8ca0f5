//! Two ends of one program that find each other by a TCP port: ibv_*_pingpong, perftest, our own.

use std::time::Duration;

use crate::program::{Ended, Program, Running};
use crate::wait::{PATIENCE, Wait, free_port, until};

/// How long one end may go on after the other has failed: it may have to find that out.
const MOURNING: Duration = Duration::from_secs(20);

/// A server and a client that take `-p PORT`, the client with the server's address as its last argument.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The side that listens, without `-p`.
    pub server: Program,
    /// The side that connects, without `-p` and address.
    pub client: Program,
    /// Where the client finds the server.
    pub address: String,
    /// How long both may take.
    pub limit: Duration,
}

/// How often a pair may be started anew because its client called too early.
pub const CALLS: usize = 10;

/// Did the client of a perftest with `-R` call before its server listened? It makes a second connection for the queue pair under test, after
/// a word between both that says no more than that the server is about to listen. A refused client means to try again up to ten times, but
/// then looks for the call in memory that it has freed (`rdma_cm_client_connection` of 4.5 and 25.01), and dies of it.
pub fn called_too_early(said: &str) -> bool {
    // Unreachable: QEMU's user network takes the call, and nobody in the guest answers.
    let nobody = ["RDMA_CM_EVENT_REJECTED", "RDMA_CM_EVENT_UNREACHABLE"];
    nobody.iter().any(|words| said.contains(words)) && said.contains("Failed to connect RDMA CM events.")
}

/// What both ends said.
#[derive(Debug)]
pub struct Both {
    /// The server's end.
    pub server: Ended,
    /// The client's end.
    pub client: Ended,
}

impl Pair {
    /// The same program with the same arguments on both sides, on 127.0.0.1.
    pub fn new(program: &Program) -> Self {
        Self {
            server: program.clone(),
            client: program.clone(),
            address: "127.0.0.1".to_owned(),
            limit: PATIENCE,
        }
    }

    /// A pair from a command line, as it would be typed.
    pub fn line(line: &str) -> Self {
        let (name, args) = line.split_once(' ').unwrap_or((line, ""));
        Self::new(&Program::new(name).line(args))
    }

    /// Where the client finds the server.
    #[must_use]
    pub fn at(mut self, address: &str) -> Self {
        self.address = address.to_owned();
        self
    }

    /// How long both may take.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets a variable of both.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.server = self.server.env(name, value);
        self.client = self.client.env(name, value);
        self
    }

    /// Starts both, the client once the server listens.
    #[track_caller]
    pub fn start(&self) -> (Running, Running) {
        self.try_start().unwrap_or_else(|said| panic!("{said}"))
    }

    /// Starts both, the client once the server listens.
    ///
    /// # Errors
    /// What the server said, if it ended before, or does not listen in time.
    fn try_start(&self) -> Result<(Running, Running), String> {
        let port = free_port().to_string();
        let mut server = self.server.clone().args(["-p", &port]).spawn();
        server.tries_to_listen(port.parse().expect("a port"))?;
        let client = self.client.clone().args(["-p", &port, &self.address]).spawn();
        Ok((server, client))
    }

    /// Runs both to their ends; anew, if the client [called too early](called_too_early).
    ///
    /// # Errors
    /// What both said, if one does not end in time, or not soon after the other failed, or the server before it listened.
    pub fn tries(&self) -> Result<Both, String> {
        self.tries_after(|| {})
    }

    /// As [`Pair::tries`], with something to do before each start, when whoever was started before is gone.
    fn tries_after(&self, mut prepare: impl FnMut()) -> Result<Both, String> {
        for _ in 1..CALLS {
            prepare();
            match self.tries_once() {
                Err(said) if called_too_early(&said) => {}
                verdict => return verdict,
            }
        }
        prepare();
        self.tries_once()
    }

    fn tries_once(&self) -> Result<Both, String> {
        let (mut server, mut client) = self.try_start()?;
        let (mut mourning, mut bereft) = (None, false);
        let over = until(self.limit, || {
            let ends = [server.ended(), client.ended()];
            if ends.iter().flatten().any(|status| !status.success()) {
                let mourning = mourning.get_or_insert_with(|| Wait::new(MOURNING));
                bereft = mourning.is_over();
            }
            let over = ends.iter().all(Option::is_some);
            let alone = ends[1].is_some() && called_too_early(&client.output());
            let hopeless = alone || bereft;
            (over || hopeless).then_some(over && !alone)
        });
        if over == Some(true) {
            return Ok(Both {
                server: server.wait(),
                client: client.wait(),
            });
        }
        let state = |end: &mut Running| {
            end.ended()
                .map_or("still running".to_owned(), |status| status.to_string())
        };
        let (s, c) = (state(&mut server), state(&mut client));
        let (said, answered) = (server.output(), client.output());
        Err(format!(
            "{} did not end in time\n--- server ({s}):\n{said}\n--- client ({c}):\n{answered}",
            self.client
        ))
    }

    /// Runs both to their ends; panics with what both said if one does not end in time, or not soon after the other failed.
    #[track_caller]
    pub fn ends(&self) -> Both {
        self.tries().unwrap_or_else(|said| panic!("{said}"))
    }

    /// Runs both; panics with what both said unless both succeed.
    #[track_caller]
    pub fn succeeds(&self) -> Both {
        self.succeeds_after(|| {})
    }

    /// As [`Pair::succeeds`], with something to do before each start: to do away with what a pair left that [called too early](called_too_early),
    /// and was started anew.
    #[track_caller]
    pub fn succeeds_after(&self, prepare: impl FnMut()) -> Both {
        let both = self.tries_after(prepare).unwrap_or_else(|said| panic!("{said}"));
        assert!(
            both.server.ok() && both.client.ok(),
            "--- server: {}\n--- client: {}",
            both.server,
            both.client
        );
        both
    }
}
