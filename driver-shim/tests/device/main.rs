//! The driver over the model in this process: queue pairs connect natively over TCP, with work queue entries written by hand.

mod connecting;
mod objects;
mod program;
