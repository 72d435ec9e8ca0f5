//! Everything that a kernel RDMA driver would do, in user space.

mod addressing;
pub mod bus;
mod carrier;
pub mod config;
pub mod driver;
mod lock;
pub mod mpa_startup;
mod native;
mod place;
pub mod presence;
mod program;
mod qp_attr;
mod rdma_cm;
pub mod signals;
mod timers;
pub mod watch;
