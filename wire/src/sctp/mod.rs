//! DDP over SCTP (RFC 5043, RFC 6581 §7): what the user data of SCTP's DATA chunks contains, and
//! the parameter of INIT and INIT ACK by which two ends agree on DDP.
//!
//! ```text
//! DATA chunk, PPID 16   DDP-SSN(2) DDP Segment                         [chunk], crate::ddp
//! DATA chunk, PPID 17   DDP-SSN(2) Function Code(2) Private Data       [chunk], [session]
//! INIT, INIT ACK        … Adaptation Indication(8) …                   [adaptation]
//! ```
//!
//! A DDP stream is the pair of SCTP streams with one Stream Identifier. All its chunks are sent
//! unordered (RFC 5043 §10); the DDP-SSN has their order. Of SCTP itself there is only what an
//! endpoint does before a library has the association ([packet]).

pub mod adaptation;
pub mod chunk;
pub mod packet;
pub mod session;
