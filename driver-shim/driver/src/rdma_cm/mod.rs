//! The character device of the connection manager, `/dev/infiniband/rdma_cm`, on top of
//! [`urnic_cm::rdma_cm`].

pub(crate) mod channel;
mod device;
