//! The state of a client: its connection, and the calls that wait for answers.

use super::call::Answer;
use crate::adaptive_polling::AdaptivePolling;
use crate::endpoint::{Endpoint, Memory, ReceivedCall};
use crate::error::Error;
use crate::memory::Pool;
use crate::options::Options;
use crate::verbs::Id;
use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};
use urnic_rpc_rdma::engine::{self, Config, Connection, Event, Message, Role, Terms};

/// Pause between two attempts to connect, if no call was answered in between.
const PAUSE: Duration = Duration::from_millis(200);

/// The state of a client, under its lock.
pub(super) struct State {
    pub(super) endpoint: Endpoint,
    /// Whether a thread waits for the device.
    pub(super) has_leader: bool,
    /// Number of threads that wait for the thread that waits for the device.
    pub(super) followers: usize,
    pub(super) adaptive_polling: AdaptivePolling,
    pub(super) phase: Phase,
    /// Whether a call was answered over this connection.
    pub(super) answered: bool,
    /// The time since when there is no connection, or none that brought an answer to the waiting
    /// threads, and the reason.
    pub(super) lost: Option<(Instant, String)>,
    pub(super) answers: HashMap<u32, Result<Answer, Error>>,
    /// Calls of the server without an answer.
    pub(super) incoming_calls: VecDeque<ReceivedCall>,
}

/// The phase of the connection.
pub(super) enum Phase {
    /// Without a connection; the time of the next attempt.
    Idle(Instant),
    /// librdmacm resolves the address, then the route.
    Resolving(Id),
    /// The endpoint has a link, which is being connected.
    Connecting,
    Connected,
}

/// Maximum number of concurrent calls of the server.
pub(super) fn granted(options: &Options) -> Option<u32> {
    options.callbacks.is_some().then(|| options.backward.max(1))
}

impl State {
    pub(super) fn new(options: &Options, pool: &Pool) -> Self {
        let config = Config {
            request: options.credits,
            grant: granted(options).unwrap_or_default(),
            profile: options.profile,
            limits: options.limits,
            ..Config::new(Role::Client)
        };
        let now = Instant::now();
        Self {
            endpoint: Endpoint::new(Connection::new(&config), pool, options.private_data()),
            has_leader: false,
            followers: 0,
            adaptive_polling: AdaptivePolling::default(),
            phase: Phase::Idle(now),
            answered: false,
            lost: Some((now, "not connected yet".into())),
            answers: HashMap::new(),
            incoming_calls: VecDeque::new(),
        }
    }

    pub(super) fn connected(&mut self, terms: Terms) {
        self.phase = Phase::Connected;
        if self.endpoint.engine.outstanding() == 0 {
            self.lost = None;
        }
        self.endpoint.connected(terms);
    }

    /// Whether this end gave up the connection, after an error of the peer or a failure.
    pub(super) fn is_broken(&self) -> bool {
        matches!(self.phase, Phase::Connecting | Phase::Connected) && self.endpoint.broken()
    }

    pub(super) fn connection_lost(&mut self, why: String) {
        tracing::debug!(why, "no connection");
        self.endpoint.detach();
        // The server repeats the calls without an answer.
        self.incoming_calls.clear();
        let now = Instant::now();
        let pause = if std::mem::take(&mut self.answered) {
            Duration::ZERO
        } else {
            PAUSE
        };
        self.phase = Phase::Idle(now + pause);
        match &mut self.lost {
            Some((_, reason)) => *reason = why,
            None => self.lost = Some((now, why)),
        }
    }

    pub(super) fn timeout(&self, connect_timeout: Duration) -> Option<Duration> {
        if self.is_broken() {
            return Some(Duration::ZERO);
        }
        let retry = match self.phase {
            Phase::Idle(then) => Some(then),
            _ => None,
        };
        let end = self.lost.as_ref().map(|(since, _)| *since + connect_timeout);
        let now = Instant::now();
        let until = |then: Instant| then.saturating_duration_since(now);
        [retry, end.filter(|end| *end > now)]
            .into_iter()
            .flatten()
            .map(until)
            .min()
    }

    pub(super) fn take_events(&mut self) {
        for event in self.endpoint.events() {
            match event {
                Event::Answered { xid, call, outcome } => {
                    if matches!(outcome, Ok(_) | Err(engine::CallError::Refused(_))) {
                        (self.answered, self.lost) = (true, None);
                    }
                    let answer = self.answer(call, outcome);
                    self.answers.insert(xid, answer);
                }
                Event::CallReceived(incoming) => match self.endpoint.take_call(incoming) {
                    Some(call) => self.incoming_calls.push_back(call),
                    None => self.endpoint.disconnect(),
                },
                Event::Finished(_) => {}
            }
        }
    }

    fn answer(
        &mut self,
        call: engine::Call<Memory>,
        outcome: Result<engine::Answer, engine::CallError>,
    ) -> Result<Answer, Error> {
        let answer = match (outcome, &self.lost) {
            (Ok(answer), _) => answer,
            (Err(engine::CallError::Cancelled), Some((_, why))) => {
                return Err(Error::Unreachable(why.clone()));
            }
            (Err(error), _) => return Err(error.into()),
        };
        let message = match answer.message {
            Message::Short(bytes) => bytes,
            Message::Long { region, len } => {
                let buffer = self.endpoint.long_reply(region);
                let bytes = buffer.as_deref().and_then(|buffer| buffer.get(..len as usize));
                bytes.unwrap_or_default().to_vec()
            }
        };
        let memory = call.results.first().and_then(|item| item.memory.first().cloned());
        // The call holds a reference to the memory.
        drop(call);
        let placed = answer.placed.first().copied().flatten();
        let result = memory.and_then(|memory| memory.unshare().ok()).map(|mut buffer| {
            if let Some(len) = placed {
                buffer.resize(len as usize);
            }
            (buffer, placed.is_some())
        });
        Ok(Answer { message, result })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    /// A client with a call to make, not connected.
    fn waiting() -> State {
        let mut state = State::new(&Options::default(), &Pool::new());
        let call = engine::Call {
            message: words(&[7, 0, 2, 100_003, 3, 0, 0, 0, 0, 0]).into(),
            arguments: Vec::new(),
            results: Vec::new(),
            max_reply: 24,
        };
        assert_eq!(state.endpoint.engine.call(call).ok(), Some(7));
        state
    }

    /// The pause before the next attempt, after the connection broke at `now`.
    fn next(state: &mut State, now: Instant) -> Duration {
        state.connection_lost("it broke".into());
        match state.phase {
            Phase::Idle(then) => then.saturating_duration_since(now),
            _ => panic!("there is no connection"),
        }
    }

    #[test]
    fn connections_that_break_unanswered_are_retried_with_pauses() {
        let mut state = waiting();
        let since = state.lost.as_ref().map(|(since, _)| *since);
        for _ in 0..3 {
            state.connected(Terms::default());
            assert!(next(&mut state, Instant::now()) >= PAUSE);
            assert_eq!(state.lost.as_ref().map(|(since, _)| *since), since);
        }
    }

    #[test]
    fn a_connection_lost_after_an_answer_reconnects_at_once() {
        let mut state = waiting();
        state.connected(Terms::default());
        // RDMA_MSG without chunks, and an RPC reply.
        let reply = words(&[7, 1, 64, 0, 0, 0, 0, 7, 1, 0, 0, 0, 0]);
        state.endpoint.engine.received(&reply, None);
        state.take_events();
        assert!(matches!(state.answers.get(&7), Some(Ok(_))));
        assert!(state.lost.is_none());
        state.connection_lost("it broke".into());
        assert!(matches!(state.phase, Phase::Idle(then) if then <= Instant::now()));
    }
}
