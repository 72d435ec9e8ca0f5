//! The program that urnic runs in, below everything else of the host side: descriptors that are
//! urnic's own ([`fds`]), urnic's threads ([`threads`]) and signals kept out of them ([`signals`]), the
//! host's addresses ([`gids`], [`netlink`]), and what the log says once ([`said`], [`failure`]).

pub mod addressing;
pub mod failure;
pub mod fds;
pub mod gids;
pub mod interrupt_context;
pub mod lock;
pub mod netlink;
pub mod program;
pub mod said;
pub mod signals;
pub mod threads;
