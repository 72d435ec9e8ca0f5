//! Who is served what.

use std::path::PathBuf;
use urnic_model::config::ModelConfig;

/// A socket, and the function that is behind each connection to it.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Where it is.
    pub path: PathBuf,
    /// Permissions of the socket file.
    pub mode: u32,
    /// The function.
    pub config: ModelConfig,
    /// Connections at a time.
    pub clients: usize,
    /// Whether the memory of a client of our own user may be reached by `process_vm_readv` and
    /// `process_vm_writev`.
    pub process_vm: bool,
}
