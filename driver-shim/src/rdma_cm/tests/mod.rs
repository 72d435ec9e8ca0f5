//! The connection manager with no socket: what programs see of it.

mod life;
mod net;
mod options;
mod start_up;

use super::abi::{ConnParam, Name};
use super::command::Wishes;
use super::*;

use net::{Net, wishes};

const REFUSED: i32 = -111;
const TIMED_OUT: i32 = -110;
