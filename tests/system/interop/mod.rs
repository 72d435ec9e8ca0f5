//! What `make interop` runs: too long for every day, or with a kernel that takes minutes to build.

mod bindings;
mod captures;
mod commands;
mod containers;
mod mpi;
mod programs;
mod siw;
mod speed;
mod table;
mod vfio;
