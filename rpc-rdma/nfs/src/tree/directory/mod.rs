//! A directory of this machine. A server that runs as root acts with the permissions of its
//! callers. Any other server acts with its own. No name leads out of the directory.

mod impersonation;
mod lists;
mod metadata;
mod nodes;
mod operations;
mod recent;
mod served;

pub use served::Directory;
