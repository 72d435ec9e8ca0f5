//! RDMAP messages (RFC 5040 §4, RFC 7306).
//!
//! RDMAP puts its control byte and the Invalidate STag into DDP's RsvdULP, and a fixed header in
//! front of the payload of some messages:
//!
//! | opcode | message | T | queue | RDMAP header |
//! |---|---|---|---|---|
//! | 0 | RDMA Write | 1 | | |
//! | 1 | RDMA Read Request | 0 | 1 | [`ReadRequest`] |
//! | 2 | RDMA Read Response | 1 | | |
//! | 3 – 6 | Send; with Invalidate; with SE; with both | 0 | 0 | |
//! | 7 | Terminate | 0 | 2 | [`Terminate`] |
//! | 8, 9 | Immediate Data; with SE | 0 | 0 | [`ImmediateData`] |
//! | 10 | Atomic Request | 0 | 1 | [`AtomicRequest`] |
//! | 11 | Atomic Response | 0 | 3 | [`AtomicResponse`] |

mod control;
mod extensions;
mod read;
mod segment;
mod terminate;
mod terminate_error;

pub use control::{
    Control, ControlError, HeaderError, Opcode, PlacementError, QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND,
    QN_TERMINATE, VERSION, check_placement,
};
pub use extensions::{AtomicOperation, AtomicRequest, AtomicResponse, ImmediateData};
pub use read::ReadRequest;
pub use segment::{Body, Headers, Segment, SegmentError};
pub use terminate::Terminate;
pub use terminate_error::TerminateError;
