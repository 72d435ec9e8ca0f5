//! NFS version 3 (RFC 1813): types of calls and results.
//!
//! The data of READ and WRITE and the texts of READLINK and SYMLINK are not in these types. The
//! types end after the count of the item, because a transport may carry the item apart.

mod arguments;
mod results;
mod types;

pub use arguments::*;
pub use results::*;
pub use types::*;
