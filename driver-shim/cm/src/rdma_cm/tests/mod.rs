//! Tests of the connection manager's commands and events, without sockets.

mod commands;
mod datagrams;
mod lifecycle;
mod net;
mod options;
mod over_sctp;
mod own_ports;
mod parsing;
mod ports;
mod roce;
mod roce_wire;
mod sctp;
mod start_up;
mod states;
mod ud_net;

use super::abi::{CmAddress, ConnParam, EventResponse};
use super::addresses::with_port;
use super::command::Parameters;
use super::*;
use crate::carrier::Carrier;
use crate::mpa_startup::{Close, Negotiated, Time};
use net::{FREE_PORT, Net, OTHER_HOST, OWN_GID, parameters};
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use urnic_config::{Config, Llp};

const REFUSED: i32 = -111;
const TIMED_OUT: i32 = -110;
