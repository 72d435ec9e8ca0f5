//! The frames of iWARP: MPA (RFC 5044, RFC 6581 and the 2007 RTR frame), DDP (RFC 5041), also over
//! SCTP (RFC 5043), RDMAP (RFC 5040) and its extensions (RFC 7306); the packets of RoCE v2, and the
//! management datagrams of InfiniBand's communication manager that are in its datagrams.
//!
//! This crate contains only formats. A frame is parsed into a `Copy` value of native integers,
//! emitted from it, or shown as one line by its `Display`; no function does I/O, keeps state,
//! starts threads or allocates. Whether a valid frame is *acceptable* (does the STag exist, is the
//! MSN next, is the revision supported) is decided by the engines that use it.
//!
//! ```text
//! TCP stream, full operation:  [marker] FPDU [marker] FPDU …
//! FPDU      ULPDU_Length(2) ULPDU pad(0-3) CRC(4)                     [mpa::fpdu], [mpa::marker]
//! ULPDU     DDP header(14 tagged | 18 untagged) payload               [ddp]
//! payload   ULP data, or a fixed RDMAP header                         [rdmap]
//!
//! SCTP      DDP-SSN(2) ULPDU, or a message that begins or ends a session   [sctp]
//!
//! UDP       BTH(12) extended headers(0-28) payload pad(0-3) ICRC(4)   [roce]
//! payload   management datagram of a communication manager            [mad]
//! ```
//!
//! Two conventions hold everywhere. `parse` reads data from a peer: it returns an error that names
//! the fault and never panics. `emit` writes local data to the front of the buffer, returns the
//! number of bytes written, and panics if the buffer is shorter than `buffer_len()`, as slice
//! indexing does.

#![forbid(unsafe_code)]

mod assigned;
pub mod crc;
pub mod ddp;
pub mod mad;
pub mod mpa;
pub mod rdmap;
pub mod roce;
pub mod sctp;
