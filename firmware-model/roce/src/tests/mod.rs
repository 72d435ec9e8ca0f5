//! Tests of both ends.

mod network;
mod pair;
mod properties;
mod requester;
mod responder;
mod unreliable;
