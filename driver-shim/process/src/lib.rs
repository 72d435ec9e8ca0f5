//! The program that urnic runs in, below everything else of the host side: descriptors that are
//! urnic's own ([`fds`]), the activity of its threads ([`activity`]), urnic's threads ([`threads`])
//! and signals kept out of them ([`signals`]), programs that cannot have urnic ([`executable`]),
//! the limit on files ([`file_length`]), the host's addresses ([`gids`], [`netlink`],
//! [`netlink_attributes`]), the GIDs made from them ([`port_gids`]), the addresses that it reaches
//! ([`reachability`]), the log ([`log`]), error lines that it has once ([`error_log`],
//! [`failure`]), and how far it comes with a device ([`usage`]). The provider's queues have their
//! lock from here, too ([`queue_lock`]).

pub mod activity;
#[forbid(unsafe_code)]
pub mod addressing;
#[forbid(unsafe_code)]
pub mod error_log;
#[forbid(unsafe_code)]
pub mod executable;
#[forbid(unsafe_code)]
pub mod failure;
pub mod fds;
#[forbid(unsafe_code)]
pub mod file_length;
#[forbid(unsafe_code)]
pub mod gids;
#[forbid(unsafe_code)]
pub mod interrupt_context;
#[forbid(unsafe_code)]
pub mod log;
#[forbid(unsafe_code)]
pub mod netlink;
#[forbid(unsafe_code)]
pub mod netlink_attributes;
#[forbid(unsafe_code)]
pub mod port_gids;
#[forbid(unsafe_code)]
pub mod program;
pub mod queue_lock;
#[forbid(unsafe_code)]
pub mod reachability;
pub mod signals;
#[forbid(unsafe_code)]
pub mod threads;
#[forbid(unsafe_code)]
pub mod usage;
