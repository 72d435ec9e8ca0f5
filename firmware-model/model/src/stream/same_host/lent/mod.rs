//! Large pieces of a stream that the receiver fetches from the sender's memory itself, by one copy
//! in place of the ring's two.
//!
//! The sender writes down where such a piece belongs in the ring, and where it is in its process.
//! The receiver, when it has received all before it, fetches it. Until then the sender reports the
//! piece, and whatever it has sent behind it, as not taken.
//!
//! A piece that the receiver cannot fetch it declines, and the sender passes the bytes through a
//! buffer of the connection's memory. So it also does with pieces that it has withdrawn, because
//! their memory was deregistered. [`Lending::withdraw`] waits for a copy that is under way, as a
//! revocation does ([`crate::memory::Exports`]).

mod fetcher;
mod lender;
mod lending;
mod words;

pub(super) use fetcher::Fetcher;
pub(super) use lender::Lender;
pub(crate) use lending::Lending;
pub(crate) use words::WORTH_LENDING;

#[cfg(test)]
mod tests;
