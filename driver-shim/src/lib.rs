//! Everything that a kernel RDMA driver would do, in user space.

pub mod config;
pub mod presence;
