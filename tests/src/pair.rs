//! Two ends of one program that connect by a TCP port: ibv_*_pingpong, perftest, our own.

use std::time::Duration;

use crate::program::{Ended, Program, Running};
use crate::wait::{TIME_LIMIT, Wait, free_port, until};

/// How long one end may run after the other has failed: it may need this time to detect the
/// failure.
const PEER_FAILURE_LIMIT: Duration = Duration::from_secs(20);

/// A server and a client that take `-p PORT`, the client with the server's address as its last
/// argument.
#[derive(Debug, Clone)]
pub struct Pair {
    /// The side that listens, without `-p`.
    pub server: Program,
    /// The side that connects, without `-p` and address.
    pub client: Program,
    /// The address at which the client reaches the server.
    pub address: String,
    /// The time limit for both programs.
    pub limit: Duration,
}

/// How often a pair may be restarted because its client connected too early.
pub const CONNECT_ATTEMPTS: usize = 10;

/// The log filter that reports when an id listens, when an id asks where a listener is, and when it
/// connects, and little more.
const LISTEN_AND_CONNECT_LOG: &str = "warn,urnic_cm::rdma_cm::ids=debug,urnic_cm::rdma_cm::active=debug";

/// Whether the output of a perftest client with `-R` shows that its connection was rejected. The
/// client makes a second connection for the queue pair under test, after a message between both
/// ends that means only that the server is about to listen. A rejected client is meant to retry up
/// to ten times, but it then uses the connection in memory that it has freed
/// (`rdma_cm_client_connection` of 4.5 and 25.01), and crashes.
///
/// This alone does not show which side is at fault: [`connected_too_early`] does.
pub fn was_rejected(printed: &str) -> bool {
    // Unreachable: QEMU's user network accepts the TCP connection, and no program in the guest
    // answers.
    let events = ["RDMA_CM_EVENT_REJECTED", "RDMA_CM_EVENT_UNREACHABLE"];
    events.iter().any(|words| printed.contains(words))
        && printed.contains("Failed to connect RDMA CM events.")
}

/// Whether perftest is at fault that its client was rejected. It is if the client's second connect
/// left, or if the client asked where to connect to, before the server listened for the second
/// time, by the times in the logs of both, on one host. If the server did listen, our listener is
/// at fault.
pub fn connected_too_early(server: &str, client: &str) -> bool {
    let listened = times(server, "listens at ");
    let asked = times(client, "asks for ");
    let connects = times(client, "connects to ");
    let Some((first, others)) = connects.split_first().filter(|_| was_rejected(client)) else {
        return false;
    };
    // Over SCTP it does not connect if nothing answers where it asks.
    let second = others.first();
    let is_between = |asked: &&str| asked > first && second.is_none_or(|second| asked < second);
    let called = asked.into_iter().find(is_between).or(second.copied());
    called.is_some_and(|called| listened.get(1).is_none_or(|listened| called < *listened))
}

/// The times at which the log of the connection manager has this event, in order. A line of the log
/// may begin after an unfinished line of another program.
fn times<'a>(printed: &'a str, what: &str) -> Vec<&'a str> {
    const LEN: usize = "2000-01-01T00:00:00.000000Z".len();
    let lines = printed.lines().filter_map(|line| {
        let (before, line) = line.split_once(" DEBUG urnic_cm::rdma_cm::")?;
        // "ids: id 0: listens at …"
        let (_, line) = line.split_once(": id ")?;
        let (_, line) = line.split_once(": ")?;
        let (before, _pid) = before.rsplit_once(" pid ")?;
        line.starts_with(what)
            .then(|| before.get(before.len().checked_sub(LEN)?..))?
    });
    lines.collect()
}

/// The output of both ends.
#[derive(Debug)]
pub struct Both {
    /// The server's end.
    pub server: Ended,
    /// The client's end.
    pub client: Ended,
}

/// The reason why a pair did not finish.
#[derive(Debug)]
struct Failure {
    what: String,
    server: String,
    client: String,
}

impl Failure {
    fn before_the_client(what: String) -> Self {
        let (server, client) = (String::new(), String::new());
        Self { what, server, client }
    }

    fn into_words(self) -> String {
        let Self { what, server, client } = self;
        format!("{what}\n--- server:\n{server}\n--- client:\n{client}")
    }
}

impl Pair {
    /// A pair that runs the same program with the same arguments on both sides, on 127.0.0.1.
    pub fn new(program: &Program) -> Self {
        Self {
            server: program.clone(),
            client: program.clone(),
            address: "127.0.0.1".to_owned(),
            limit: TIME_LIMIT,
        }
    }

    /// A pair from a command line, as it would be typed.
    pub fn line(line: &str) -> Self {
        let (name, args) = line.split_once(' ').unwrap_or((line, ""));
        Self::new(&Program::new(name).line(args))
    }

    /// Sets the address at which the client reaches the server.
    #[must_use]
    pub fn at(mut self, address: &str) -> Self {
        self.address = address.to_owned();
        self
    }

    /// Sets the time limit for both programs.
    #[must_use]
    pub fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets an environment variable of both.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.server = self.server.env(name, value);
        self.client = self.client.env(name, value);
        self
    }

    /// Starts both, the client once the server listens.
    #[track_caller]
    pub fn start(&self) -> (Running, Running) {
        self.try_start().unwrap_or_else(|printed| panic!("{printed}"))
    }

    /// Starts both, the client once the server listens.
    ///
    /// # Errors
    /// The output of the server, if it ended early or does not listen in time.
    fn try_start(&self) -> Result<(Running, Running), String> {
        let port = free_port().to_string();
        let mut server = self.server.clone().args(["-p", &port]).spawn();
        server.try_wait_until_listening(port.parse().expect("a port"))?;
        let client = self.client.clone().args(["-p", &port, &self.address]).spawn();
        Ok((server, client))
    }

    /// Whether the program is a perftest that connects by rdma_cm.
    fn is_perftest_by_rdma_cm(&self) -> bool {
        [&self.server, &self.client].iter().all(|program| {
            program.name().starts_with("ib_")
                && ["-R", "--rdma_cm"].iter().any(|option| program.has_arg(option))
        })
    }

    /// Runs both to their ends; again, if the client of a perftest [connected too
    /// early](connected_too_early).
    ///
    /// # Errors
    /// The output of both, if one does not end in time, or not soon after the other failed, or if
    /// the server ends before it listens.
    pub fn tries(&self) -> Result<Both, String> {
        self.tries_after(|| {})
    }

    /// Runs both like [`Pair::tries`] and calls `prepare` before each start, after the programs of
    /// the start before have ended.
    fn tries_after(&self, mut prepare: impl FnMut()) -> Result<Both, String> {
        if !self.is_perftest_by_rdma_cm() {
            prepare();
            return self.tries_once().map_err(Failure::into_words);
        }
        let logging = Self {
            server: self
                .server
                .clone()
                .env_unless_set("URNIC_LOG", LISTEN_AND_CONNECT_LOG),
            client: self
                .client
                .clone()
                .env_unless_set("URNIC_LOG", LISTEN_AND_CONNECT_LOG),
            ..self.clone()
        };
        for _ in 1..CONNECT_ATTEMPTS {
            prepare();
            match logging.tries_once() {
                Err(failure) if connected_too_early(&failure.server, &failure.client) => {}
                result => return result.map_err(Failure::into_words),
            }
        }
        prepare();
        logging.tries_once().map_err(Failure::into_words)
    }

    fn tries_once(&self) -> Result<Both, Failure> {
        let (mut server, mut client) = self.try_start().map_err(Failure::before_the_client)?;
        let (mut failure_wait, mut bereft) = (None, false);
        let over = until(self.limit, || {
            let ends = [server.ended(), client.ended()];
            if ends.iter().flatten().any(|status| !status.success()) {
                let failure_wait = failure_wait.get_or_insert_with(|| Wait::new(PEER_FAILURE_LIMIT));
                bereft = failure_wait.is_over();
            }
            let over = ends.iter().all(Option::is_some);
            // The server of such a client waits for ever.
            let alone = ends[1].is_some() && was_rejected(&client.output());
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
        Err(Failure {
            what: format!("{} did not end in time; server: {s}, client: {c}", self.client),
            server: server.output(),
            client: client.output(),
        })
    }

    /// Runs both to their ends; panics with the output of both if one does not end in time, or not
    /// soon after the other failed.
    #[track_caller]
    pub fn ends(&self) -> Both {
        self.tries().unwrap_or_else(|printed| panic!("{printed}"))
    }

    /// Runs both; panics with the output of both unless both succeed.
    #[track_caller]
    pub fn succeeds(&self) -> Both {
        self.succeeds_after(|| {})
    }

    /// Runs both like [`Pair::succeeds`] and calls `prepare` before each start: it removes the
    /// leftovers of a pair that [connected too early](connected_too_early) and is restarted.
    #[track_caller]
    pub fn succeeds_after(&self, prepare: impl FnMut()) -> Both {
        let both = self
            .tries_after(prepare)
            .unwrap_or_else(|printed| panic!("{printed}"));
        assert!(
            both.server.ok() && both.client.ok(),
            "--- server: {}\n--- client: {}",
            both.server,
            both.client
        );
        both
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: &str = "Received: 8 RDMA_CM_EVENT_REJECTED\nFailed to connect RDMA CM events.\n";

    fn server(second: &str) -> String {
        let line = "pid 4711 DEBUG urnic_cm::rdma_cm::ids: id 0: listens at Some(0.0.0.0:1)";
        format!("---\n2026-11-23T13:13:38.007775Z {line}\n...{second} {line}\n")
    }

    fn client(second: &str) -> String {
        let line = "pid 4711 DEBUG urnic_cm::rdma_cm::active: id 0: connects to 127.0.0.1:1 from 127.0.0.1:2";
        format!("2026-11-23T13:13:40.657342Z {line}\n 0.05{second} {line}\n{REFUSED}")
    }

    #[test]
    fn a_connect_before_the_second_listen_is_too_early() {
        let (early, late) = ("2026-11-23T13:13:41.684065Z", "2026-11-23T13:13:41.684066Z");
        assert!(connected_too_early(&server(late), &client(early)));
        assert!(connected_too_early(
            server(late).split_once("...").expect("two").0,
            &client(early)
        ));
    }

    /// The answer that there is no such listener came from before the second listen, too.
    #[test]
    fn a_question_before_the_second_listen_is_too_early() {
        let server = server("2026-11-23T13:13:41.684070Z");
        let asks = |time: &str| {
            let line = "pid 4711 DEBUG urnic_cm::rdma_cm::active: id 1: asks for the TCP port";
            client("2026-11-23T13:13:41.684099Z").replace(" 0.05", &format!("{time} {line}\n 0.05"))
        };
        assert!(connected_too_early(&server, &asks("2026-11-23T13:13:41.684060Z")));
        assert!(!connected_too_early(
            &server,
            &asks("2026-11-23T13:13:41.684080Z")
        ));
        // That was for the first connection.
        assert!(!connected_too_early(
            &server,
            &asks("2026-11-23T13:13:39.000000Z")
        ));
    }

    #[test]
    fn a_rejection_by_a_listening_server_is_a_failure() {
        let (early, late) = ("2026-11-23T13:13:41.684065Z", "2026-11-23T13:13:41.684066Z");
        assert!(!connected_too_early(&server(early), &client(late)));
        // The first connection, another failure, and logs without the events.
        assert!(!connected_too_early(
            "",
            &format!("{}{REFUSED}", client(late).split_once(" 0.05").expect("two").0)
        ));
        assert!(!connected_too_early(
            &server(late),
            &client(early).replace("REJECTED", "DISCONNECTED")
        ));
        assert!(!connected_too_early("", REFUSED));
    }
}
