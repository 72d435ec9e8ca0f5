//! The two contracts that urnic stands between: the device's programming interface ([`device`]) and rdma-core's
//! provider ABI ([`rdma_core`]), with the vocabulary they share.

pub mod device;
pub mod rdma_core;
pub mod vocabulary;
