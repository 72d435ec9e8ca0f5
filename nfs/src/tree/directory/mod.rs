//! A directory of this machine. Root acts with its callers' rights, others give their own to everybody. No name leads out of it.

mod acting;
mod lists;
mod metadata;
mod nodes;
mod operations;
mod recent;
mod served;

pub use served::Directory;
