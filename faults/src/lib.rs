//! Faults on demand: the faults of this process, and the times at which they strike.
//!
//! A *fault* is a kind ([`CATALOGUE`]) with its values, a filter and a rule of how often: `reset
//! after=64k nth=2`. The layers that can fail ask the [plan] at each [occasion] (a connection
//! reaches a position, a datagram is sent, a call, a completion) which faults strike. They do so in
//! wrappers, as captures do: the wrapped code does not depend on it.
//!
//! A fault has a *window* of time, too. What befalls a device rather than a request
//! ([`DeviceFault`]) needs no occasion: the driver asks the plan what is [due](Plan::due).
//!
//! A decision depends on the seed, the fault and the number of the occasion among those that fit
//! the filter, and on nothing else: where the program is deterministic, so are its faults. Each
//! that strikes is one line of the log.

#![forbid(unsafe_code)]

mod arguments;
mod delay;
mod devices;
mod fault;
mod kinds;
mod network;
pub mod occasion;
mod origins;
mod parse;
mod plan;
mod random;
mod specified;
mod time;
mod wait;
mod window;

pub use arguments::Position;
pub use delay::{Delay, Lateness};
pub use kinds::{
    ByteFault, CATALOGUE, CallFault, CompletionFault, ConnectFault, DatagramFault, DeviceFault, Entry,
    EventFault, Kind, SendingFault, StreamFault,
};
pub use network::Network;
pub use occasion::Occasion;
pub use origins::{Origin, Origins};
pub use plan::{DevicePlan, Plan, fails, is_on, plan};
pub use wait::wait;
