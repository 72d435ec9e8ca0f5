//! The provider ABI of rdma-core, between libibverbs and a provider plug-in.
//!
//! Two parts:
//!
//! * the public types of `<infiniband/verbs.h>` that cross the boundary ([`objects`],
//!   [`object_attr`], [`attr`], [`consts`]), which never change;
//! * the private types of rdma-core's `driver.h` ([`private`], [`ops`], [`level`]), which change
//!   from release to release. One binary supports all releases, so a changing layout is a table
//!   indexed by the [`Level`] found at run time, never a `#[repr(C)]` struct chosen at compile
//!   time.
//!
//! Names are rdma-core's own, so that its man pages document them. The crate supports only 64-bit
//! little-endian Linux with glibc.

#![allow(non_camel_case_types)]

pub mod attr;
pub mod consts;
pub mod level;
pub mod object_attr;
pub mod objects;
pub mod ops;
mod plain;
pub mod private;

pub use attr::*;
pub use consts::*;
pub use level::{Level, Pabi};
pub use object_attr::*;
pub use objects::*;
pub use ops::{ContextOps, OPS};
pub use private::*;
