//! Program memory that is inaccessible: unmapped, protected, or in a file that was truncated.
//!
//! A NIC has the pages of a region pinned, and continues. This device copies with the program's own
//! mappings, so such a copy faults. [`access`] has the only instructions that touch registered
//! memory in this process. A signal handler ([`handler`]) recognises a fault there by the program
//! counter, and the access fails with [`Unreachable`]. Every other fault is the program's own and
//! takes the way it would take without us ([`disposition`]); [`install`](mod@install) puts our
//! handler in its place.

pub(crate) mod access;
mod disposition;
mod handler;
mod install;
#[cfg(test)]
mod tests;

pub use access::Unreachable;
pub use disposition::{SetAction, set_action_by};
pub use handler::{Fault, Watch, watch};
pub use install::{after_fork_in_child, install, install_again, is_in_place, replace};
