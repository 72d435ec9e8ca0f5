//! NFS version 3 (RFC 1813): what calls and results are made of.
//!
//! The data of READ and WRITE and the texts of READLINK and SYMLINK are not in these types: they end where the item begins, behind its
//! count, because it travels apart where the transport can.

mod arguments;
mod results;
mod types;

pub use arguments::*;
pub use results::*;
pub use types::*;
