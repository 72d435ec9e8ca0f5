//! What the transports of queue pairs have in common.
//!
//! A queue pair has memory protection, work queues, completion queues and states. A transport is a
//! protocol for the messages of queue pairs: [`rdmap`](crate::rdmap) over a byte stream (kinds RC
//! and UC), [`datagram`](crate::datagram) over UDP (kind UD). Each has an engine without thread or
//! clock: it gets the surroundings of a run ([`Env`]), takes requests from the queues and pushes
//! completions. What a queue pair calls of an engine is listed in [`qp`](crate::qp)
//! (`Service`).

#![cfg_attr(not(test), forbid(unsafe_code))]

pub(crate) mod completions;
mod params;
pub(crate) mod placement;

pub use params::{Env, Identity, Moved, QpChange, QpQueues, RxOutcome, TxOutcome, WrongState};
