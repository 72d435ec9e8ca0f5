//! The provider ABI of rdma-core: what libibverbs and a provider plug-in agree on.
//!
//! Two halves:
//!
//! * the public types of `<infiniband/verbs.h>` that cross the boundary ([`objects`],
//!   [`object_attr`], [`attr`], [`consts`]), which are stable for ever;
//! * the private ones of rdma-core's `driver.h` ([`private`], [`ops`], [`level`]), which move from
//!   release to release. One binary serves all releases, so what moves is a table indexed by the
//!   [`Level`] found at run time, never a `#[repr(C)]` struct chosen when we are compiled.
//!
//! Names are rdma-core's own, so that its man pages document them. 64-bit little-endian Linux with
//! glibc only.

#![allow(non_camel_case_types)]

pub mod attr;
pub mod consts;
pub mod level;
pub mod object_attr;
pub mod objects;
pub mod ops;
pub mod private;

pub use attr::*;
pub use consts::*;
pub use level::{Level, Pabi};
pub use object_attr::*;
pub use objects::*;
pub use ops::{ContextOps, OPS};
pub use private::*;
