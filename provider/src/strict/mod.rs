//! The option `strict`: checks of how the program uses verbs. docs/guide/strict.md lists the rules.
//!
//! The checks watch what the program posts, polls, creates and destroys; the device has no part in
//! them. They are called from the verbs, each only if [`current`] is something, and do not change
//! what a verb does or returns. A [`Finding`](findings::Finding) is reported once for each place in
//! the program, and counted.
//!
//! Locks: those of this module are the innermost, and are held for a moment.

mod findings;
mod memory;
mod objects;
mod process;
mod queues;
mod regions;
mod watched_pages;
mod withheld;

pub(crate) use crate::call_site::CallSite;
pub(crate) use findings::{Finding, Rule};
pub(crate) use objects::Kind;
pub(crate) use process::{Strict, after_fork_in_child, current, start};
pub(crate) use queues::{Element, PairCheck, QueueCheck, Request, SharedCheck};
pub(crate) use regions::Region;
pub(crate) use withheld::WithheldMemory;
