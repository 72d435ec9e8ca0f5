//! Owners for the objects of libibverbs and librdmacm. All unsafe code for devices is in this
//! module. Its callers promise only that memory stays valid ([`Link::post`]).

mod cm;
mod device;
mod link;
mod nonblocking;
mod owned;
mod result;

pub(crate) use cm::{Channel, Event, Id};
pub(crate) use device::{Device, Region, Window};
pub(crate) use link::{Batch, Completion, Element, Failure, Link, Work};
