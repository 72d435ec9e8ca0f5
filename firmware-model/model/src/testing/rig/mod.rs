//! The surroundings of an engine in tests: host memory, queues as a driver sees them, and the other
//! end of the wire.

#![allow(clippy::unwrap_used, reason = "compiled for tests and fuzzing only")]
#![cfg_attr(
    fuzzing,
    allow(dead_code, unused_imports, reason = "fuzz targets use a part of it")
)]

mod ends;
mod frames;
mod host;
mod hostile;
mod node;
mod queues;

pub(crate) use ends::{Pair, PairOver, Scripted, ScriptedOver, agreed, native};
pub(crate) use frames::{
    be32, fpdu_of, hex, pattern, read_request, send_segment, tagged, untagged, write_segment,
};
pub(crate) use host::{Region, sge};
pub(crate) use hostile::Hostile;
pub(crate) use node::{Node, everything, opcode, status, table};
pub(crate) use queues::{Receives, Shape, Work};
