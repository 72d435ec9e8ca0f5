//! One end of a connection, with no I/O: what to post comes out ([`Action`]), what happened goes
//! in, and the consumer is told ([`Event`]).
//!
//! ```text
//! consumer ── call, cancel, reply ──▶ ┌────────────┐ ── Action: Receive, Send, Read, Write, Register, Release ──▶ transport
//!          ◀── Event ──────────────── │ Connection │ ◀─ received, registered, released, completed, failed ───────
//!                                     └────────────┘ ◀─ connected, disconnected
//! ```
//!
//! Each end can call and answer. A client's calls go *forward*; a server's go *backward*, with xids
//! and credits of their own (RFC 8167), and without chunks, which few peers take there.
//!
//! The transport answers each [`Action::Register`] and [`Action::Release`] once, even after the
//! connection is lost; other actions are forgotten with the connection. It carries actions out in
//! the order in which they come. Memory of the consumer's is an `M`, which is handed on and never
//! looked into.
//!
//! ```
//! use urnic_rpc_rdma::engine::{Action, Call, Config, Connection, Event, Reply, Role, Source, Terms};
//!
//! /// Carries out what `from` wants, with a wire that is a function call.
//! fn carry(from: &mut Connection<()>, to: &mut Connection<()>) {
//!     for action in from.actions() {
//!         if let Action::Send { work, pieces, .. } = action {
//!             let bytes = |source: &Source<()>| match source {
//!                 Source::Octets(octets) => octets.clone(),
//!                 Source::Memory(()) => unreachable!("no call here has items"),
//!             };
//!             let message: Vec<u8> =
//!                 pieces.iter().flat_map(|piece| bytes(&piece.source)[piece.at..][..piece.len].to_vec()).collect();
//!             to.received(&message, None);
//!             from.completed(work);
//!         }
//!     }
//! }
//!
//! let mut client = Connection::new(&Config::new(Role::Client));
//! let mut server = Connection::new(&Config::new(Role::Server));
//! client.connected(Terms::default());
//! server.connected(Terms::default());
//!
//! // xid 7, CALL, and so on: a program's own words.
//! let message = [0, 0, 0, 7, 0, 0, 0, 0, b'p', b'i', b'n', b'g'].into();
//! client.call(Call { message, arguments: vec![], results: vec![], max_reply: 12 })?;
//! carry(&mut client, &mut server);
//! let Some(Event::Called(incoming)) = server.events().pop() else { panic!() };
//! assert_eq!(&incoming.message.unwrap()[8..], b"ping");
//!
//! let message = [0, 0, 0, 7, 0, 0, 0, 1, b'p', b'o', b'n', b'g'].into();
//! server.reply(incoming.call, &Reply { message, results: vec![] })?;
//! carry(&mut server, &mut client);
//! assert!(matches!(client.events()[..], [Event::Answered { xid: 7, outcome: Ok(_), .. }]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod connection;
mod gather;
mod outstanding;
mod plan;
mod requester;
mod responder;

pub use connection::{Config, Connection, Role};
pub use gather::{Source, Span};
pub use responder::UnknownCall;

use crate::{DEFAULT_INLINE, ErrorBody, PrivateData, Segment};
use std::sync::Arc;

/// A piece of memory that a requester exposed for one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

/// A call that a responder took. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallId(pub u64);

/// A Send or Read whose completion is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkId(pub u64);

/// The access of the peer to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// RDMA Read: arguments and long calls.
    RemoteRead,
    /// RDMA Write: results and long replies.
    RemoteWrite,
}

/// The memory of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exposed<M> {
    /// The consumer's memory: its first `len` bytes.
    Memory(M, u32),
    /// A call that is too long for a Send.
    Octets(Arc<[u8]>),
    /// New memory of so many bytes, for a long reply. It is the transport's; [`Message::Long`]
    /// names it.
    Fresh(u32),
}

/// An action for the transport.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action<M> {
    /// Post so many receives, each of the bytes that the private data promised.
    Receive(usize),
    /// Give the peer access to memory, for this connection alone if that can be; answer with
    /// [`Connection::registered`], or [`Connection::register_failed`]. Handles should not be
    /// guessable (RFC 8166 §8.1).
    Register {
        /// The name of the new region.
        region: RegionId,
        /// The memory.
        what: Exposed<M>,
        /// The access of the peer.
        access: Access,
    },
    /// Take the access away; answer with [`Connection::released`] when the peer can no longer touch
    /// the memory, or with [`Connection::release_failed`].
    Release {
        /// The region.
        region: RegionId,
        /// The peer has invalidated this handle of it already, with its Send.
        invalidated: Option<u32>,
        /// It is [`Exposed::Fresh`] memory with a reply in it, which [`Message::Long`] will name.
        /// Other such memory can be freed once it is released.
        keep: bool,
    },
    /// Post a Send of these pieces; answer with [`Connection::completed`].
    Send {
        /// The number of the work request.
        work: WorkId,
        /// The message.
        pieces: Vec<Span<M>>,
        /// Send with Invalidate of this handle of the peer's.
        invalidate: Option<u32>,
    },
    /// Post an RDMA Read; answer with [`Connection::completed`] or [`Connection::failed`].
    Read {
        /// The number of the work request.
        work: WorkId,
        /// The call whose item this is a part of. All of the item has `length` bytes, for which the
        /// transport provides memory.
        call: CallId,
        /// Item: index among the call's Read chunks.
        item: usize,
        /// Bytes of the whole item.
        length: u64,
        /// Where in the item the bytes go.
        at: u64,
        /// Where they are.
        remote: Segment,
    },
    /// Post an RDMA Write. The Send behind it completes it.
    Write {
        /// The bytes.
        pieces: Vec<Span<M>>,
        /// Where they go.
        remote: Segment,
    },
    /// End the connection; answer with [`Connection::disconnected`].
    Close(Closing),
}

/// Why a connection is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Closing {
    /// Access could not be taken away, so the connection must be (RFC 8166 §4.5.4).
    #[error("memory could not be invalidated")]
    Release,
    /// A reply could not be made: the requester is told so by this (RFC 8166 §4.5.4).
    #[error("a call was dropped")]
    Dropped,
    /// The peer calls beyond the credits it was granted, into receives that are for replies (RFC
    /// 8166 §3.3.1).
    #[error("calls beyond the credits granted")]
    Credits,
    /// The peer sends nonsense faster than it takes the answers.
    #[error("too many faulty messages")]
    Faults,
    /// The peer invalidated memory of a call other than the one it answered (RFC 8797 §4.1).
    #[error("the peer invalidated another call's memory")]
    ForeignInvalidation,
}

/// An event for the consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event<M> {
    /// A call of ours is over. The peer has no access any more to its memory, which is handed back.
    Answered {
        /// Transaction.
        xid: u32,
        /// The call.
        call: Call<M>,
        /// How it ended.
        outcome: Result<Answer, CallError>,
    },
    /// The peer calls. To be answered with [`Connection::reply`] or [`Connection::drop_call`].
    Called(Incoming),
    /// The memory of a call of the peer's, arguments and results alike, is not in use any more: it
    /// was answered, or the connection is gone.
    Finished(CallId),
}

/// Memory for, or with, an item that may go by a chunk (DDP-eligible, RFC 8166 §3.4.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item<M> {
    /// Where it is left out of the message: bytes of the message before it. Behind its count, if it
    /// has one.
    pub offset: usize,
    /// The memory, of which the item is the first `len` bytes.
    pub memory: M,
    /// Bytes.
    pub len: u32,
}

/// A call to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call<M> {
    /// The RPC message from its xid on, without the arguments and their padding.
    pub message: Arc<[u8]>,
    /// Arguments that may go by Read chunk, by ascending offset. They may also be sent inline, if
    /// there is room.
    pub arguments: Vec<Item<M>>,
    /// Memory for results that may come by Write chunk, each long enough for its longest (RFC 8166
    /// §3.4.6), in the order of the results. `offset` counts for nothing here.
    pub results: Vec<Item<M>>,
    /// Bytes of the longest reply, without those results. The peer's memory need not be trusted
    /// with more.
    pub max_reply: usize,
}

/// A reply to be sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply<M> {
    /// The RPC message from its xid on, without the results and their padding.
    pub message: Arc<[u8]>,
    /// Results that may go by Write chunk, by ascending offset.
    pub results: Vec<Item<M>>,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The RPC message, without the results that were placed.
    pub message: Message,
    /// For each item of [`Call::results`] the bytes placed in its memory, 0 if it was not used.
    /// `None` where it was not offered: its result is in the message.
    pub placed: Vec<Option<u32>>,
}

/// Where an RPC message is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Here.
    Short(Vec<u8>),
    /// In the memory made for this region, so many bytes.
    Long {
        /// [`Exposed::Fresh`].
        region: RegionId,
        /// Bytes.
        len: u32,
    },
}

/// Why a call has no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// [`Connection::cancel`].
    #[error("cancelled")]
    Cancelled,
    /// The peer sent RDMA_ERROR; sending the call again will not help.
    #[error(transparent)]
    Refused(#[from] ErrorBody),
    /// Its memory could not be registered.
    #[error("memory could not be registered")]
    Register,
    /// It does not fit into a Send, and chunks are not allowed in this direction; or not even its
    /// chunk lists do.
    #[error("the call does not fit into a message")]
    TooLong,
}

/// Why a call was not taken at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    /// The message is no RPC call: xid, then CALL.
    #[error("the message is no RPC call")]
    NotACall,
    /// Another call with this xid has not ended yet.
    #[error("xid {0:#010x} is in use")]
    XidInUse(u32),
    /// Arguments go backwards, or lie behind the message or at no multiple of four; or there is a
    /// result with no memory.
    #[error("the items do not lie within the message")]
    Items,
}

/// A call of the peer's, all of it fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    /// To answer it with.
    pub call: CallId,
    /// Transaction.
    pub xid: u32,
    /// The RPC message, without what came by chunks: inline, or as the first fetched item.
    pub message: Option<Vec<u8>>,
    /// What was fetched: Position and bytes of each Read chunk, by ascending Position.
    /// [`Action::Read`] numbered them in this order.
    pub items: Vec<(u32, u64)>,
    /// Bytes that the requester has room for in each Write chunk; `None` asks for that result
    /// inline.
    pub results: Vec<Option<u64>>,
    /// Bytes that it has room for in the Reply chunk.
    pub reply: Option<u64>,
}

/// The terms that both ends agreed on at the connection's set-up, as seen by this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Bytes of the longest Send from here.
    pub send: usize,
    /// Bytes of the longest Send from there.
    pub receive: usize,
    /// Replies may invalidate.
    pub remote_invalidation: bool,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            send: DEFAULT_INLINE,
            receive: DEFAULT_INLINE,
            remote_invalidation: false,
        }
    }
}

impl Terms {
    /// The terms that follow from the private data of both ends (RFC 8797 §4).
    pub fn agreed(ours: &PrivateData, theirs: &PrivateData) -> Self {
        Self {
            send: ours.threshold(theirs),
            receive: theirs.threshold(ours),
            remote_invalidation: ours.remote_invalidation && theirs.remote_invalidation,
        }
    }
}

/// Actions and events that were not taken yet.
struct Outbox<M> {
    actions: Vec<Action<M>>,
    events: Vec<Event<M>>,
    works: u64,
}

impl<M> Outbox<M> {
    fn work(&mut self) -> WorkId {
        self.works += 1;
        WorkId(self.works)
    }
}
