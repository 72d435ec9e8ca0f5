//! One end of a connection, without I/O. The engine returns actions for the transport ([`Action`])
//! and events for the consumer ([`Event`]), and takes the results of the actions.
//!
//! ```text
//! consumer ── call, cancel, reply ──▶ ┌────────────┐ ── Action: Receive, Send, Read, Write, Register, Release ──▶ transport
//!          ◀── Event ──────────────── │ Connection │ ◀─ received, registered, released, completed, failed ───────
//!                                     └────────────┘ ◀─ connected, disconnected
//! ```
//!
//! Each end can call and answer. The calls of a client go *forward*. The calls of a server go
//! *backward*, with their own xids and credits (RFC 8167), and without chunks, which few peers
//! support in this direction.
//!
//! The transport answers each [`Action::Register`] and [`Action::Release`] once, even after the
//! connection is lost. Other actions end with the connection. The transport executes actions in
//! their order. `M` is memory of the consumer, which the engine passes on without access to its
//! contents.
//!
//! ```
//! use urnic_rpc_rdma::engine::{Action, Call, Config, Connection, Event, Reply};
//! use urnic_rpc_rdma::engine::{Role, Source, Terms};
//!
//! /// Executes the actions of `from`: delivers its messages to `to`.
//! fn carry(from: &mut Connection<()>, to: &mut Connection<()>) {
//!     for action in from.actions() {
//!         if let Action::Send { work, pieces, .. } = action {
//!             let bytes = |source: &Source<()>| match source {
//!                 Source::Bytes(bytes) => bytes.clone(),
//!                 Source::Memory(()) => unreachable!("no call here has items"),
//!             };
//!             let mut message = Vec::new();
//!             for piece in &pieces {
//!                 message.extend(&bytes(&piece.source)[piece.at..][..piece.len]);
//!             }
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
//! let Some(Event::CallReceived(incoming)) = server.events().pop() else { panic!() };
//! assert_eq!(&incoming.message.unwrap()[8..], b"ping");
//!
//! let message = [0, 0, 0, 7, 0, 0, 0, 1, b'p', b'o', b'n', b'g'].into();
//! server.reply(incoming.call, &Reply { message, results: vec![] })?;
//! carry(&mut server, &mut client);
//! assert!(matches!(client.events()[..], [Event::Answered { xid: 7, outcome: Ok(_), .. }]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod action;
mod call;
mod connection;
mod event;
mod gather;
mod id;
mod incoming;
mod item;
mod outbox;
mod outstanding;
mod plan;
mod requester;
mod responder;
mod terms;

pub use action::{Access, Action, Closing, Exposed};
pub use call::{Answer, Call, CallError, Invalid, Message, Reply};
pub use connection::{Config, Connection, Role};
pub use event::Event;
pub use gather::{Source, Span};
pub use id::{CallId, RegionId, WorkId};
pub use incoming::Incoming;
pub use item::Item;
pub use responder::UnknownCall;
pub use terms::Terms;
