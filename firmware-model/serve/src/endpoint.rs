//! The configuration of a socket that is served.

use std::path::PathBuf;
use urnic_model::config::ModelConfig;

/// A socket, and the function that each connection to it gets.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Path of the socket.
    pub path: PathBuf,
    /// Permissions of the socket file.
    pub mode: u32,
    /// Configuration of the function.
    pub config: ModelConfig,
    /// Maximum number of simultaneous connections.
    pub clients: usize,
    /// Whether `process_vm_readv` and `process_vm_writev` may access the memory of a client that
    /// runs as the server's own user.
    pub process_vm: bool,
}
