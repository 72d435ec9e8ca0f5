//! The served files and directories, which are named by handles.

mod access;
mod acls;
mod data;
mod directory;
mod entry;
mod extents;
mod in_memory;
mod listing;
mod operations;
mod outcome;

pub use crate::acl::Caller;
pub use acls::{Acls, SetAcls};
pub use data::{Data, Found};
pub use directory::Directory;
pub use entry::{New, Numbered, check_name};
pub use in_memory::InMemory;
pub use listing::{Listing, Listings, Name, PARENT, SELF};
pub use operations::Tree;
pub use outcome::{File, Outcome};
