//! The frames of a stream and their messages, as seen from outside, by what does not take part in
//! the connection: captures, faults and timelines.

mod cutter;
mod follower;

pub(crate) use cutter::Cutter;
pub(crate) use follower::{Follower, Message};
