//! The processor time of a message, without system calls. Run it in release mode:
//! `cargo test --release -p urnic-model --lib speed -- --ignored --nocapture`

use crate::host::{Piece, PieceMut};
use crate::rdmap::{Attachment, NoStream};
use crate::stream::{Ends, FullOperation, QpNumbers, Stream, StreamError};
use crate::testing::rig::*;
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};
use urnic_sync::Mutex;

const SLOTS: usize = 1 << 8;

/// A stream that takes all bytes, or returns the bytes that another such stream took.
#[derive(Debug, Clone)]
struct Tape(Arc<Mutex<(Vec<u8>, usize)>>);

impl Stream for Tape {
    fn send(&mut self, pieces: &[Piece<'_>]) -> Result<usize, StreamError> {
        let (bytes, _) = &mut *self.0.lock();
        let before = bytes.len();
        for piece in pieces {
            let at = bytes.len();
            bytes.resize(at + piece.len(), 0);
            // SAFETY: the engines' memory outlives the test.
            unsafe { piece.copy_out(&mut bytes[at..]) };
        }
        Ok(bytes.len() - before)
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let (bytes, at) = &mut *self.0.lock();
        let before = *at;
        for piece in into {
            // SAFETY: the pieces are of this thread's own memory, to which this thread has no
            // reference now.
            *at += unsafe { piece.copy_in(&bytes[*at..]) };
        }
        if *at == before {
            Err(StreamError::WouldBlock)
        } else {
            Ok(*at - before)
        }
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        let (bytes, at) = &*self.0.lock();
        if *at == bytes.len() {
            Err(StreamError::WouldBlock)
        } else {
            Ok(true)
        }
    }

    fn finish(&mut self) {}

    fn reset(&mut self) {}

    fn mss(&self) -> u32 {
        65483
    }

    fn established(&mut self) -> Result<bool, Errno> {
        Ok(true)
    }

    fn unacknowledged(&self) -> u32 {
        0
    }

    fn ends(&self) -> Ends {
        NoStream.ends()
    }

    fn enter_full_operation(self: Box<Self>, _: QpNumbers) -> FullOperation {
        FullOperation::of(self)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

struct Bench {
    sender: Node,
    receiver: Node,
    tape: Tape,
}

impl Bench {
    fn new(crc: bool, len: usize) -> Bench {
        let clock = Arc::new(AtomicU64::new(0));
        let tape = Tape(Arc::new(Mutex::new((Vec::with_capacity(SLOTS * (len + 64)), 0))));
        let shape = Shape {
            sq_log: 9,
            rq_log: 8,
            cq_log: 9,
            ..Shape::default()
        };
        let node = |initiator| {
            let (memory, pd) = table();
            let mut node = Node::new(&shape, memory, pd, &clock);
            node.attach(
                &Attachment {
                    crc,
                    ..agreed(initiator)
                },
                tape.clone(),
            );
            node
        };
        Bench {
            sender: node(true),
            receiver: node(true),
            tape,
        }
    }

    /// Nanoseconds per message to send and to receive `count` messages of `work`.
    fn measure(&mut self, count: usize, work: &Work, receive: Option<&Region>) -> (f64, f64) {
        let (mut tx, mut rx) = (Duration::MAX, Duration::MAX);
        let blocks = work.bytes();
        for _ in 0..500 {
            for _ in 0..count {
                self.sender.post_raw(&blocks);
                if let Some(region) = receive {
                    self.receiver.post_recv(0, &[region.sge(0, region.len)]);
                }
            }
            let start = Instant::now();
            self.sender
                .with(|engine, env, stream| engine.transmit(env, stream));
            tx = tx.min(start.elapsed());
            let start = Instant::now();
            while !matches!(
                self.receiver
                    .with(|engine, env, stream| engine.receive(env, stream)),
                crate::transport::RxOutcome::Drained
            ) {}
            rx = rx.min(start.elapsed());
            assert_eq!(self.sender.sent().len(), count);
            assert_eq!(
                self.receiver.received().len(),
                if receive.is_some() { count } else { 0 }
            );
            let mut tape = self.tape.0.lock();
            tape.0.clear();
            tape.1 = 0;
        }
        let each = |d: Duration| d.as_nanos() as f64 / count as f64;
        (each(tx), each(rx))
    }
}

#[test]
#[ignore = "a measurement"]
fn speed() {
    for crc in [true, false] {
        for len in [64usize, 1024, 65536] {
            let count = if len > 4096 { 32 } else { SLOTS };
            let mut bench = Bench::new(crc, len);
            let source = bench.sender.filled(&pattern(len));
            let sink = bench.receiver.region(len, everything());
            let send = Work::send(1).sge(source.sge(0, len));
            let write = Work::write(1, sink.stag, sink.base).sge(source.sge(0, len));
            let inline = Work::send(1).inline(&pattern(len)[..len.min(900)]);
            let show = |name: &str, (tx, rx): (f64, f64)| {
                let rate = |ns: f64| len as f64 / ns;
                println!(
                    "crc {crc:5} {len:6} {name:7} tx {tx:8.1} ns {:5.2} GB/s   rx {rx:8.1} ns {:5.2} GB/s",
                    rate(tx),
                    rate(rx)
                );
            };
            show("send", bench.measure(count, &send, Some(&sink)));
            if len <= 900 {
                show("inline", bench.measure(count, &inline, Some(&sink)));
            }
            show("write", bench.measure(count, &write, None));
        }
    }
}
