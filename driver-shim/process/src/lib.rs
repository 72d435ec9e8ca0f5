//! The program that urnic runs in, below everything else of the host side: descriptors that are
//! urnic's own ([`fds`]), urnic's threads ([`threads`]) and signals kept out of them ([`signals`]),
//! the host's addresses ([`gids`], [`netlink`]), and error lines that the log has once
//! ([`error_log`], [`failure`]).

pub mod addressing;
pub mod error_log;
pub mod failure;
pub mod fds;
pub mod gids;
pub mod interrupt_context;
pub mod lock;
pub mod netlink;
pub mod program;
pub mod signals;
pub mod threads;
