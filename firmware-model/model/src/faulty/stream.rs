//! A connection where things go wrong.

use crate::host::{Piece, PieceMut};
use crate::stream::{Stream, StreamError};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use urnic_faults::{Action, Kind, Occasion, Plan};

/// A shorter wait is spent on the processor: the kernel's timers are late by about as much.
const SHORTEST_SLEEP: Duration = Duration::from_micros(200);

/// Most reads of a silent connection in one call.
const MOST_LOST: usize = 64;

/// A connection, and what goes wrong there.
#[derive(Debug)]
pub(super) struct FaultyStream {
    stream: Box<dyn Stream>,
    plan: &'static Plan,
    /// Bytes sent, and bytes that passed in either direction.
    sent: u64,
    passed: u64,
    /// The position among the bytes sent up to which damage was decided, and what is damaged.
    decided: u64,
    damaged: Option<u64>,
    condition: Condition,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Condition {
    Well,
    /// It is never established.
    Unanswered,
    /// It passes nothing more, and does not end.
    Silent,
    /// It was reset.
    Reset,
    /// It was closed in order.
    Closed,
}

impl FaultyStream {
    pub(super) fn new(stream: Box<dyn Stream>, plan: &'static Plan, unanswered: bool) -> FaultyStream {
        FaultyStream {
            stream,
            plan,
            sent: 0,
            passed: 0,
            decided: 0,
            damaged: None,
            condition: match unanswered {
                true => Condition::Unanswered,
                false => Condition::Well,
            },
        }
    }

    /// What a connection in this condition answers to an attempt to send; `None`: it sends.
    fn refuses_to_send(&self, len: usize) -> Option<Result<usize, StreamError>> {
        match self.condition {
            Condition::Well => None,
            // As a kernel does while nobody acknowledges.
            Condition::Silent | Condition::Unanswered => Some(Ok(len)),
            Condition::Reset => Some(Err(StreamError::Closed(Errno::CONNRESET))),
            Condition::Closed => Some(Err(StreamError::Closed(Errno::PIPE))),
        }
    }

    /// What a connection in this condition answers to an attempt to receive; `None`: it receives.
    fn refuses_to_receive(&mut self) -> Option<Result<usize, StreamError>> {
        match self.condition {
            Condition::Well => None,
            Condition::Silent | Condition::Unanswered => {
                // What arrives is lost. A peer that sends without end must not keep the thread.
                let mut lost = [0; 4096];
                for _ in 0..MOST_LOST {
                    let Ok(1..) = self.stream.receive_bytes(&mut lost) else {
                        break;
                    };
                }
                Some(Err(StreamError::WouldBlock))
            }
            Condition::Reset => Some(Err(StreamError::Closed(Errno::CONNRESET))),
            Condition::Closed => Some(Ok(0)),
        }
    }

    /// Waits as long as a shaped connection takes.
    fn wait(&self, len: usize) {
        let occasion = Occasion::Send(self.stream.remote().ip(), len);
        for action in self.plan.strikes(&occasion) {
            if let Action::Wait(time) = action {
                let until = Instant::now() + time;
                if time >= SHORTEST_SLEEP {
                    std::thread::sleep(time);
                }
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
        }
    }

    /// The position of the damaged byte among the next `len` bytes to be sent, if one is there.
    fn damage(&mut self, len: usize) -> Option<usize> {
        let end = self.sent + len as u64;
        if end > self.decided {
            let occasion = Occasion::Sending {
                peer: self.stream.remote().ip(),
                from: self.decided.max(self.sent),
                to: end,
            };
            for action in self.plan.strikes(&occasion) {
                if let Action::Do(Kind::Corrupt(at)) = action {
                    self.damaged = Some(at);
                }
            }
            self.decided = end;
        }
        let at = self.damaged?;
        (self.sent..end).contains(&at).then(|| (at - self.sent) as usize)
    }

    /// Bytes have passed.
    fn pass(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        let occasion = Occasion::Passed {
            peer: self.stream.remote().ip(),
            from: self.passed,
            to: self.passed + len as u64,
        };
        self.passed += len as u64;
        for action in self.plan.strikes(&occasion) {
            match action {
                Action::Do(Kind::Reset(_)) => {
                    self.stream.reset();
                    self.condition = Condition::Reset;
                }
                Action::Do(Kind::Close(_)) => {
                    self.stream.finish();
                    self.condition = Condition::Closed;
                }
                Action::Do(Kind::Silence(_)) => self.condition = Condition::Silent,
                _ => {}
            }
        }
    }

    fn note_sent(&mut self, taken: Result<usize, StreamError>) -> Result<usize, StreamError> {
        let taken = taken?;
        self.sent += taken as u64;
        self.pass(taken);
        Ok(taken)
    }
}

impl Stream for FaultyStream {
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let len = pieces.iter().map(Piece::len).sum();
        if let Some(refusal) = self.refuses_to_send(len) {
            return refusal;
        }
        self.wait(len);
        let Some(at) = self.damage(len) else {
            let taken = self.stream.send(pieces);
            return self.note_sent(taken);
        };
        let mut bytes = Vec::with_capacity(len);
        for piece in pieces {
            piece.append_to(&mut bytes).map_err(|_| StreamError::Fault)?;
        }
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 1;
        }
        let taken = self.stream.send_bytes(&bytes);
        self.note_sent(taken)
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        if let Some(refusal) = self.refuses_to_receive() {
            return refusal;
        }
        let n = self.stream.receive(into)?;
        self.pass(n);
        Ok(n)
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        match self.refuses_to_receive() {
            None => self.stream.peek(),
            Some(Ok(_)) => Ok(false),
            Some(Err(error)) => Err(error),
        }
    }

    fn is_cut(&self) -> bool {
        self.stream.is_cut()
    }

    fn enter_full_operation(&mut self, qid: u32) -> Result<(), Errno> {
        self.stream.enter_full_operation(qid)
    }

    fn note_hang_up(&mut self) {
        self.stream.note_hang_up();
    }

    fn finish(&mut self) {
        self.stream.finish();
    }

    fn reset(&mut self) {
        self.stream.reset();
    }

    fn mss(&self) -> u32 {
        self.stream.mss()
    }

    fn established(&mut self) -> Result<bool, Errno> {
        match self.condition {
            Condition::Unanswered => Ok(false),
            _ => self.stream.established(),
        }
    }

    fn unacknowledged(&self) -> u32 {
        match self.condition {
            // What was taken since is never acknowledged.
            Condition::Silent | Condition::Unanswered => 1,
            _ => self.stream.unacknowledged(),
        }
    }

    fn local(&self) -> SocketAddr {
        self.stream.local()
    }

    fn remote(&self) -> SocketAddr {
        self.stream.remote()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.stream.descriptor()
    }
}
