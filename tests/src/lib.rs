//! The harness of the system tests: real programs under the plug-in, in pairs, in network
//! namespaces, as other users, in another Debian; captures of their wire, dissected by tshark; and
//! a raw TCP peer.
//!
//! Everything here cleans up when dropped, runs beside other tests, and waits for conditions under
//! a generous limit. When the limit passes, the test fails with all output of the programs. A test
//! that cannot run on a machine reports that: see [`skip`].

pub mod build;
pub mod capture;
pub mod debian;
#[cfg(test)]
mod folders;
pub mod forwarder;
pub mod framing;
pub mod guest;
pub mod hostile_client;
#[cfg(test)]
mod layers;
pub mod leftovers;
#[cfg(test)]
mod lengths;
#[cfg(test)]
mod links;
#[cfg(test)]
mod mentions;
#[cfg(test)]
mod module_cycles;
pub mod netns;
pub mod page;
pub mod pair;
pub mod pci_guest;
pub mod peer;
pub mod program;
pub mod random;
pub mod realigned;
#[cfg(test)]
mod rows;
pub mod served;
pub mod shape;
pub mod shell;
pub mod skip;
#[cfg(test)]
mod sources;
pub mod spawn;
pub mod startup;
pub mod target_process;
pub mod ulpdu;
pub mod user;
#[cfg(test)]
mod uses;
pub mod wait;

pub use build::{compiled, plugin};
pub use pair::Pair;
pub use program::{Ended, Program, Running};
pub use urnic_testkit::Folder;
