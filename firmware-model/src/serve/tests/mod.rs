//! The server against scripted clients.

mod client;
mod functions;
mod sessions;
