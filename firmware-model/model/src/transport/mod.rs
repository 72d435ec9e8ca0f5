//! The types that the transports of queue pairs share.
//!
//! A queue pair has memory protection, work queues, completion queues and states. A transport is a
//! protocol for the messages of queue pairs: [`rdmap`](crate::rdmap) over a byte stream (kinds RC
//! and UC), [`datagram`](crate::datagram) over UDP (kind UD). Each has an engine without thread or
//! clock: its caller passes the surroundings of a run ([`Env`]), and the engine takes requests from
//! the queues and pushes completions. `Service` in [`qp`](crate::qp) lists the calls of a queue
//! pair to its engine.

#![cfg_attr(not(test), forbid(unsafe_code))]

pub(crate) mod completions;
mod params;
pub(crate) mod piggyback;
pub(crate) mod placement;

pub(crate) use params::QPN_MASK;
pub use params::{Env, Identity, Moved, QpChange, QpQueues, RxOutcome, TxOutcome, WrongState};
