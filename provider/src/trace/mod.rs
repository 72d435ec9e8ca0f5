//! The option `trace`: a file with the life of each work request, for Perfetto, Chrome's viewer and
//! `urnic trace` (docs/guide/trace.md).
//!
//! The queues of a process with the option show it what is posted, published and polled; the time
//! of completion is that in the completion queue entry, from the same clock. Everything else is
//! derived when the completion is polled.

mod array;
mod file;
mod pair;

pub(crate) use file::{Instant, start, trace};
pub(crate) use pair::{Outcome, PairTrace};
