//! The system tests, one module per topic. Those marked `ignore` are the long forms, for `make soak`, and those of [`interop`].

mod bindings;
mod cleanliness;
mod cli;
mod conformance;
mod devices;
mod install;
mod interop;
mod isolation;
mod netns;
mod perftest;
mod pingpong;
mod plug_in;
mod pyverbs;
mod qemu;
mod rdma_cm;
mod rdma_cm_crowds;
mod rsockets;
mod serve;
mod served;
mod siw;
mod stat;
mod transfer;
mod users;
mod vfio;
mod vfio_user;
mod wire_capture;
