//! libibverbs and librdmacm with owners for what they make. What is unsafe about a device is here,
//! but for the promise that memory stays ([`Link::post`]).

mod cm;
mod device;
mod link;
mod nonblocking;
mod result;

pub(crate) use cm::{Channel, Event, Id};
pub(crate) use device::{Device, Region, Window};
pub(crate) use link::{Batch, Completion, Element, Failure, Link, Work};
