//! The parameters and results of a queue pair's engine.

use crate::counters::{Counter, Counters};
use crate::events::Effects;
use crate::llp::buffers::BufferPool;
use crate::memory::{Accessor, Invalidable, MemoryTable, Recent};
use crate::queues::{CompletionQueue, ReceiveSource, SendQueue};
use crate::time::Now;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use urnic_device::command::{ModifyQp, modify};
use urnic_device::cqe::Cqe;
use urnic_device::vocabulary::{Access, QpState, WcOpcode, WcStatus};

/// The queues of a queue pair.
#[derive(Debug)]
pub struct QpQueues {
    /// Send queue.
    pub sq: SendQueue,
    /// The completion queue of the send queue.
    pub send_cq: Arc<CompletionQueue>,
    /// Receive queue.
    pub rq: ReceiveSource,
    /// The completion queue of the receive queue.
    pub recv_cq: Arc<CompletionQueue>,
}

impl QpQueues {
    /// Two queues, with their completion queues.
    pub(crate) fn new(
        (sq, send_cq): (SendQueue, Arc<CompletionQueue>),
        (rq, recv_cq): (ReceiveSource, Arc<CompletionQueue>),
    ) -> QpQueues {
        QpQueues {
            sq,
            send_cq,
            rq,
            recv_cq,
        }
    }
}

/// Attributes to change; `None` = leave.
#[derive(Debug, Clone, Default)]
pub struct QpChange {
    /// State.
    pub state: Option<QpState>,
    /// Remote rights.
    pub access: Option<Access>,
    /// Most outstanding inbound Reads and atomics.
    pub ird: Option<u32>,
    /// Most outstanding outbound Reads and atomics.
    pub ord: Option<u32>,
    /// The time for which a Send may find the receive queue empty; `Duration::MAX` = for ever.
    pub rnr_timeout: Option<Duration>,
    /// The time for which the peer's system may leave data and probes unanswered; zero = TCP
    /// decides.
    pub ack_timeout: Option<Duration>,
    /// The peer cannot be reached.
    pub unreachable: bool,
    /// Q_Key of a queue pair of kind UD.
    pub qkey: Option<u32>,
}

impl QpChange {
    /// The change that a command requests; `None` if there is no such state.
    pub fn parse(arguments: &ModifyQp) -> Option<QpChange> {
        let mask = arguments.mask.get();
        let has = |bit| mask & bit != 0;
        let state = match has(modify::STATE) {
            true => Some(QpState::from_raw(arguments.state.get())?),
            false => None,
        };
        let rnr_timeout = match arguments.rnr_timeout_ms.get() {
            u32::MAX => Duration::MAX,
            ms => Duration::from_millis(ms.into()),
        };
        Some(QpChange {
            state,
            access: has(modify::ACCESS).then(|| Access::from_bits_truncate(arguments.access.get())),
            ird: has(modify::IRD).then(|| arguments.ird.get()),
            ord: has(modify::ORD).then(|| arguments.ord.get()),
            rnr_timeout: has(modify::RNR).then_some(rnr_timeout),
            ack_timeout: has(modify::ACK_TIMEOUT)
                .then(|| Duration::from_millis(arguments.ack_timeout_ms.get().into())),
            unreachable: has(modify::UNREACHABLE),
            qkey: has(modify::QKEY).then(|| arguments.qkey.get()),
        })
    }
}

/// A transition that the state does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not in this state")]
pub struct WrongState;

/// The result of sending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TxOutcome {
    /// Nothing more can be sent before another event: a post, an answer, a first FPDU.
    Idle,
    /// The stream takes no more bytes: call again when it does.
    Blocked,
    /// More can be sent: call again soon, after other queue pairs have run.
    More,
}

/// The result of receiving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RxOutcome {
    /// The last read was short or empty: the stream has no more bytes now. (A FIN may follow the
    /// bytes that were read.)
    Drained,
    /// More bytes may have arrived: call again soon, after other queue pairs have run.
    More,
    /// A message waits for a receive to be posted: call again then. Bytes that have arrived stay in
    /// their buffers.
    Stalled,
    /// The peer sent FIN: no more bytes will arrive. Our direction may still be open.
    Finished,
    /// The stream has ended in both directions, or cannot be used any more: drop it.
    Ended,
}

/// The properties of a queue pair that never change: for checks, completions and events.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The number of the queue pair.
    pub qid: u32,
    /// The driver's name for the queue pair, put into completions.
    pub label: u32,
    /// Protection domain.
    pub pd: u32,
    /// Whether RFC 7306 messages are understood; without, they are unexpected opcodes.
    pub extensions: bool,
    /// Errors are those of InfiniBand
    /// ([`INFINIBAND`](urnic_device::command::create_qp::INFINIBAND)).
    pub infiniband: bool,
    /// Kind UC: messages may be dropped, and the queue pair outlives its stream.
    pub unreliable: bool,
    /// [`ModelConfig::last_first`](crate::ModelConfig::last_first).
    pub last_first: bool,
}

/// The bits of a queue pair's number on the wire of datagrams and of RoCE v2.
pub(crate) const QPN_MASK: u32 = 0xff_ffff;

impl Identity {
    /// The number of the queue pair on the wire of RoCE v2.
    pub(crate) fn qpn(&self) -> u32 {
        self.label & QPN_MASK
    }

    /// What may be invalidated through the queue pair.
    pub(crate) fn invalidable(&self) -> Invalidable {
        match self.infiniband {
            false => Invalidable::All,
            true => Invalidable::OwnWindows,
        }
    }

    /// The accessor for memory accesses of this queue pair, and of its peer.
    #[inline]
    pub(crate) fn accessor(&self) -> Accessor {
        Accessor {
            pd: self.pd,
            qid: self.qid,
        }
    }

    /// A completion with no flags and no bytes.
    #[inline]
    pub(crate) fn cqe(&self, cookie: u64, opcode: WcOpcode, status: WcStatus) -> Cqe {
        Cqe::new(cookie, self.label, self.qid, opcode, status)
    }
}

// The parts of the device that an engine needs for one run.

/// The surroundings of one run of a queue pair's engine.
#[derive(Debug)]
pub struct Env<'a> {
    /// The queue pair.
    pub qp: &'a Identity,
    /// Registered memory.
    pub memory: &'a MemoryTable,
    /// The memory that the last short messages accessed.
    pub recent: Recent,
    /// The time of this run.
    pub now: Now<'a>,
    /// Receive buffers.
    pub buffers: &'a BufferPool,
    /// The queue pair's own counters.
    pub counters: &'a Counters,
    /// Actions to carry out after the queue pair's lock is dropped.
    pub effects: &'a mut Effects,
    /// Bytes and progress that this run has moved so far.
    pub moved: Moved,
    /// Set when the host's memory has wrong contents
    /// ([`HostMemory::stopped`](crate::host::HostMemory::stopped)).
    pub stopped: &'a AtomicBool,
}

/// Bytes and progress that a run of a queue pair has moved.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Moved {
    /// Bytes arrived from the peer.
    pub received: bool,
    /// The stream, or the local peer's memory, took bytes.
    pub sent: bool,
    /// The local peer has processed more of our messages.
    pub confirmed: bool,
}

impl<'a> Env<'a> {
    /// Counts bytes that arrived from the peer.
    #[inline]
    pub(crate) fn received(&mut self, bytes: u64) {
        self.counters.add(Counter::RxBytes, bytes);
        self.moved.received |= bytes > 0;
    }

    /// Counts bytes that were sent to the peer.
    #[inline]
    pub(crate) fn sent(&mut self, bytes: u64) {
        self.counters.add(Counter::TxBytes, bytes);
        self.moved.sent |= bytes > 0;
    }

    /// Registered memory, for a thread that is about to revoke some of it. The thread first forgets
    /// its own recent accesses, so that the revocation does not wait for them.
    #[inline]
    pub(crate) fn memory_to_revoke(&self) -> &'a MemoryTable {
        self.recent.forget();
        self.memory
    }

    /// Whether all work must stop: checked before each segment.
    #[inline]
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}
