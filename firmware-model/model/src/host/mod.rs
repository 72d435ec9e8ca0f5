//! Host memory: the one module that turns addresses into loads and stores.
//!
//! Memory that a program or guest owns changes at any time under the device, as it does under real
//! DMA. So nothing here makes a lasting reference to it: it is copied, or named by a raw [`Piece`]
//! that only the kernel reads. Registered memory may even become inaccessible; an access to it then
//! fails ([`fault`](crate::host::fault)). Rings and records stay until they are destroyed.

pub mod fault;
mod host_memory;
mod host_process;
mod mapping;
mod own_process;
mod piece;
pub mod process_memory;
pub(crate) mod revocable;
mod shared_memory;

pub use fault::Unreachable;
pub use host_memory::Word64;
pub use host_memory::{HostMemory, RemoteMemory, RemoteWord};
pub use host_process::HostProcess;
pub(crate) use host_process::{lives, may_be_accessed, number_of, proof_of_access};
pub use mapping::{Mapping, Record, SharedRecord};
pub use own_process::OwnProcess;
pub(crate) use piece::PieceRoom;
pub use piece::{Piece, PieceMut};
pub(crate) use shared_memory::{SharedMemory, SharedWords};
