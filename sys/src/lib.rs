//! Safe forms of system calls and structures of C for which neither the standard library nor rustix
//! has one. Each is checked here once, and its users need no unsafe code.
//!
//! The plug-in interposes functions of the C library, so memory and descriptors are reached through
//! rustix, which makes system calls directly. Functions that the C library must know about, such as
//! those for signal masks, are the C library's.

pub mod descriptors;
pub mod errno;
pub mod loader;
mod pages;
mod plain;
pub mod processes;
pub mod resident;
pub mod signals;

pub use pages::Pages;
pub use plain::{Numbers, Plain, Unpadded};
