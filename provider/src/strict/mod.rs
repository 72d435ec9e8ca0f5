//! The option `strict`: checks of how the program uses verbs. docs/guide/strict.md lists the rules.
//!
//! The checks watch what the program posts, polls, creates and destroys; the device has no part in
//! them. They are called from the verbs, each only if [`current`] is something, and do not change
//! what a verb does or returns. A [`Finding`](findings::Finding) is reported once for each place in
//! the program, and counted.
//!
//! Locks: those of this module are the innermost, and are held for a moment.

mod call_site;
mod findings;
mod held;
mod memory;
mod objects;
mod pair;
mod posted;
mod process;
mod queue;
mod regions;
mod rule;
mod shared;
mod suppressions;
mod watched_pages;

pub(crate) use call_site::CallSite;
pub(crate) use findings::Finding;
pub(crate) use held::ARENA;
pub(crate) use objects::Kind;
pub(crate) use pair::PairCheck;
pub(crate) use posted::{Element, Request};
pub(crate) use process::{Strict, after_fork_in_child, current, start};
pub(crate) use queue::QueueCheck;
pub(crate) use regions::Region;
pub(crate) use rule::Rule;
pub(crate) use shared::SharedCheck;
