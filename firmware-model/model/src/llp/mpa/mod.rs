//! MPA (RFC 5044): FPDUs over a byte stream, in full operation. The driver does the start-up.

mod rx;
mod tx;

pub(crate) use rx::{Filled, FpduReceiver};
pub(crate) use tx::{FpduSender, MAX_SHORT, SHORT_FPDU};
use urnic_wire::mpa::fpdu::CrcMode;

/// The negotiated parameters of MPA (RFC 5044 §7.1.1).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Agreed {
    /// CRCs are generated and checked.
    pub(crate) crc: CrcMode,
    /// The peer requested markers in the data that it receives.
    pub(crate) markers_tx: bool,
    /// This side requested markers in the data that it receives.
    pub(crate) markers_rx: bool,
}

/// Both directions of one stream.
#[derive(Debug)]
pub(crate) struct Mpa {
    /// The direction from this side to the peer.
    pub(crate) tx: FpduSender,
    /// The direction from the peer to this side.
    pub(crate) rx: FpduReceiver,
}

impl Mpa {
    /// Begins full operation, at the first byte of each direction.
    pub(crate) fn new(agreed: Agreed) -> Mpa {
        Mpa {
            tx: FpduSender::new(agreed.crc, agreed.markers_tx),
            rx: FpduReceiver::new(agreed.crc, agreed.markers_rx),
        }
    }
}

#[cfg(test)]
mod tests;
