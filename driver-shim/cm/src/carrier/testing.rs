//! Simulated streams.

use std::cell::Cell;
use std::collections::VecDeque;

use super::Inbox;
use urnic_config::{Config, Llp};

thread_local! {
    /// The lower layer of tests whose configuration names none.
    static LLP: Cell<Llp> = const { Cell::new(Llp::Tcp) };
}

/// The lower layer of the test.
pub(crate) fn llp() -> Llp {
    LLP.get()
}

/// Runs a test over SCTP.
pub(crate) fn run_over_sctp(test: impl FnOnce()) {
    LLP.set(Llp::Sctp);
    test();
    LLP.set(Llp::Tcp);
}

/// The configuration of a process in a test, with the lower layer of the test.
pub(crate) fn with_llp(config: &Config) -> Config {
    Config {
        llp: config.llp.max(llp()),
        ..config.clone()
    }
}

/// Tests that are run over SCTP, too.
macro_rules! over_sctp {
    ($($module:ident: $($test:ident)+;)+) => {
        $($(
            #[test]
            fn $test() {
                crate::carrier::testing::run_over_sctp(super::$module::$test);
            }
        )+)+
    };
}
pub(crate) use over_sctp;

/// What a stream has received and not given to its owner: bytes, or messages over SCTP.
#[derive(Debug, Clone, Default)]
pub(crate) struct Received {
    llp: Llp,
    /// Over TCP at most one.
    messages: VecDeque<Vec<u8>>,
}

impl Received {
    pub(crate) fn new(llp: Llp) -> Received {
        Received {
            llp,
            messages: VecDeque::new(),
        }
    }

    /// Adds what the peer sent at once.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        match self.messages.back_mut() {
            Some(earlier) if self.llp == Llp::Tcp => earlier.extend_from_slice(bytes),
            _ if bytes.is_empty() => {}
            _ => self.messages.push_back(bytes.to_vec()),
        }
    }

    /// Takes what a receive of `len` bytes gets: at most as many bytes, or a message, which is cut.
    pub(crate) fn take(&mut self, len: usize) -> Vec<u8> {
        let Some(mut bytes) = self.messages.pop_front() else {
            return Vec::new();
        };
        let more = bytes.split_off(len.min(bytes.len()));
        if self.llp == Llp::Tcp && !more.is_empty() {
            self.messages.push_front(more);
        }
        bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether all `len` bytes are there, or a message.
    pub(crate) fn has(&self, len: usize) -> bool {
        let first = self.messages.front();
        first.is_some_and(|bytes| self.llp == Llp::Sctp || bytes.len() >= len)
    }

    /// All bytes.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.messages.iter().flatten().copied().collect()
    }

    /// The state of the receive buffer of a stream that has received this, and perhaps its end.
    pub(crate) fn inbox(&self, ended: bool) -> Inbox {
        match (self.is_empty(), ended) {
            (false, _) => Inbox::Bytes,
            (true, true) => Inbox::End,
            (true, false) => Inbox::Empty,
        }
    }
}
