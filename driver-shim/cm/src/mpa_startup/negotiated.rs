//! The result of a start-up that succeeded.

use urnic_wire::ddp::UNTAGGED_LEN;
use urnic_wire::mpa::fpdu::{self, CrcMode, fpdu_len};
use urnic_wire::mpa::marker::{self, marked_len};
use urnic_wire::rdmap::Terminate;

use super::negotiate::{Depths, Rtr};

/// The parameters that both ends agreed on: the arguments of attaching the stream to a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// This end sent the Request.
    pub initiator: bool,
    /// The negotiated revision.
    pub revision: u8,
    /// CRCs are generated and checked in both directions.
    pub crc: bool,
    /// The peer requires markers in the bytes that this end sends.
    pub markers_tx: bool,
    /// Markers are in the bytes that this end receives.
    pub markers_rx: bool,
    /// The limits on Reads of this end.
    pub depths: Depths,
    /// The RTR message: sent before anything else (initiator), or expected (responder).
    pub rtr: Option<Rtr>,
    /// Nothing may be sent before the first FPDU arrives: for responders, unless they received an
    /// RTR frame (RFC 5044 §7.1.2(4)).
    pub fenced: bool,
    /// The control word of the Terminate to send instead of starting (RFC 6581 §9; RFC 5040 §4.8).
    pub terminate: Option<u32>,
}

impl Negotiated {
    /// The FPDU of a Terminate with this control word, for an initiator whose queue pair cannot be
    /// attached. No other FPDU is sent.
    pub fn terminate_frame(&self, control: u32) -> Vec<u8> {
        let mut ulpdu = [0; UNTAGGED_LEN + 4];
        Terminate::header().emit(&mut ulpdu);
        if let Some(payload) = ulpdu.last_chunk_mut() {
            *payload = control.to_be_bytes();
        }
        let crc = if self.crc { CrcMode::On } else { CrcMode::Off };
        let plain = fpdu_len(ulpdu.len());
        let mut bytes = vec![
            0;
            if self.markers_tx {
                marked_len(0, plain)
            } else {
                plain
            }
        ];
        if self.markers_tx {
            marker::emit(0, &ulpdu, crc, &mut bytes);
        } else {
            fpdu::emit(&ulpdu, crc, &mut bytes);
        }
        bytes
    }
}
