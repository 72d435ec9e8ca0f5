//! The connection manager with no socket: what programs see of it.

mod commands;
mod life;
mod net;
mod options;
mod ports;
mod start_up;

use super::abi::{ConnParam, Name};
use super::command::Parameters;
use super::*;

use super::ids::with_port;
use net::{ELSEWHERE, FREE_PORT, Net, parameters};

const REFUSED: i32 = -111;
const TIMED_OUT: i32 = -110;
