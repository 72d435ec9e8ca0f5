//! What an object of the device asks of others, and what it tells the driver: the [`Effects`] of
//! work under a lock, the [`Requests`] to queue pairs, and the [`EventQueue`]s that the driver
//! reads.

#![forbid(unsafe_code)]

mod effects;
mod queue;
mod requests;

pub use effects::Effects;
pub(crate) use effects::{Effect, Next, Object};
pub use queue::EventQueue;
pub(crate) use requests::Requests;
