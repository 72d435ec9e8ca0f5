//! MPA start-up (RFC 5044 §7, RFC 6581) as two state machines: bytes and time in; bytes, outcomes
//! and deadlines out.
//!
//! They know no socket and no queue pair. Whoever owns the stream hands an [`Initiator`] or a
//! [`Responder`] what arrives, at most [`wants`](Initiator::wants) bytes at a time if not one byte
//! of an FPDU shall be taken, sends what they give, closes as a [`Failure`] says, and looks in at
//! the [`deadline`](Initiator::deadline). What comes out is [`Negotiated`]: all that the device
//! must be told when the stream is attached to a queue pair.
//!
//! ```text
//! initiator                                        responder
//!   Request ───────────────────────────────────────▶ Request is shown to the ULP
//!   Accepted, or Rejected, or Failure ◀────────────── accept, or reject
//!   [2007 RTR frame] ──────────────────────────────▶ [fence open]
//!   attach; first FPDU: the RTR message ───────────▶ attach; fence opens at the first FPDU
//! ```

mod initiator;
mod negotiate;
mod responder;
#[cfg(test)]
mod tests;

pub use initiator::{Accepted, Answer, Initiator, Rejected};
pub use negotiate::{Depths, Offer, Rtr};
pub use responder::{Heard, Reply, Request, Responder};

use std::time::Duration;

use urnic_wire::ddp::{UNTAGGED_LEN, UntaggedHeader};
use urnic_wire::mpa::fpdu::{self, CrcMode, fpdu_len};
use urnic_wire::mpa::marker::{self, marked_len};
use urnic_wire::rdmap::{Control, Opcode, QN_TERMINATE, TerminateError};

use urnic_wire::mpa::startup::{
    HEADER_LEN, MAX_PRIVATE_DATA, RtrKey, StartupError, StartupFrame, StartupHeader,
};

use urnic_config::{Mpa, RtrTypes};

/// Time as the state machines see it: since an epoch that means nothing.
pub type Time = Duration;

/// What an end wants of every connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Ask for CRCs. One side's wish binds both (RFC 5044 §7.1.1).
    pub crc: bool,
    /// Ask for markers in what we receive (RFC 5044 §4.3).
    pub markers: bool,
    /// Highest revision spoken, 1 or 2. With 1 there is no enhanced start-up.
    pub revision: u8,
    /// RTR messages that this end can send and take; at least one (RFC 6581 §9.2).
    pub rtr: RtrTypes,
    /// The RTR frame proposed in 2007: spelling of the key that we send, or `None`: off. Only for
    /// peers known to speak it, since soft-iWARP echoes flags that it does not know. Revision 2
    /// takes precedence.
    pub rtr_frame: Option<RtrKey>,
    /// Time that an initiator gives to the whole exchange.
    pub initiator_timeout: Duration,
    /// Time that a responder waits for the Request.
    pub responder_timeout: Duration,
    /// Time that a responder waits for the first FPDU behind its Reply.
    pub rtr_timeout: Duration,
}

impl From<&Mpa> for Settings {
    fn from(mpa: &Mpa) -> Settings {
        Settings {
            crc: mpa.crc,
            markers: mpa.markers,
            revision: mpa.revision,
            rtr: mpa.rtr_types,
            rtr_frame: None,
            initiator_timeout: mpa.startup_timeout_initiator,
            responder_timeout: mpa.startup_timeout_responder,
            rtr_timeout: mpa.rtr_timeout,
        }
    }
}

/// What both ends agreed on: the arguments of attaching the stream to a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// This end sent the Request.
    pub initiator: bool,
    /// Revision in force.
    pub revision: u8,
    /// CRCs are generated and checked in both directions.
    pub crc: bool,
    /// The peer requires markers in what we send.
    pub markers_tx: bool,
    /// Markers are in what we receive.
    pub markers_rx: bool,
    /// Our own limits on Reads.
    pub depths: Depths,
    /// RTR message: to send before anything else (initiator), or to expect (responder).
    pub rtr: Option<Rtr>,
    /// Nothing may be sent before the first FPDU arrives: responders, unless an RTR frame came (RFC
    /// 5044 §7.1.2(4)).
    pub fenced: bool,
    /// Control word of the Terminate to send instead of starting (RFC 6581 §9; RFC 5040 §4.8).
    pub terminate: Option<u32>,
}

impl Negotiated {
    /// The FPDU of a Terminate with this control word, for an initiator whose queue pair cannot be
    /// attached: the first and last that it sends.
    pub fn last_words(&self, control: u32) -> Vec<u8> {
        let header = UntaggedHeader {
            last: true,
            rsvd_ulp: Control::from(Opcode::Terminate).octet(),
            rsvd_ulp_word: 0,
            qn: QN_TERMINATE,
            msn: 1,
            mo: 0,
        };
        let mut ulpdu = [0; UNTAGGED_LEN + 4];
        header.emit(&mut ulpdu);
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

/// Control words of the Terminates of RFC 6581 §8: layer 2 (LLP), error type 0.
pub mod terminate {
    /// An error of this end that has no code of its own.
    pub const LOCAL: u32 = 0x2005_0000;
    /// This end cannot hold as many inbound Reads as the responder wants to send.
    pub const INSUFFICIENT_IRD: u32 = 0x2006_0000;
    /// None of the responder's RTR messages can be sent by this end.
    pub const NO_MATCHING_RTR: u32 = 0x2007_0000;
}

/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The peer sent something that is no frame, or not the one that was due.
    #[error(transparent)]
    Frame(#[from] StartupError),
    /// Bytes behind the Request: an initiator is silent until the Reply (RFC 5044 §7.1.2).
    #[error("{0} octets behind the MPA Request, where an initiator has to wait for the Reply")]
    Trailing(usize),
    /// The Reply to an enhanced Request is not enhanced (RFC 6581 §10).
    #[error("the MPA Reply to an enhanced Request is of revision {0} without IRD/ORD word")]
    NotEnhanced(u8),
    /// The peer speaks revision 0, the RDMA Consortium's (RFC 5044 appendix C).
    #[error("the peer speaks MPA revision 0")]
    Rdmac,
    /// Time is up (RFC 5044 §7.1.2(8, 10)).
    #[error("MPA start-up did not end in time")]
    Timeout,
    /// The connection ended first.
    #[error("the TCP connection ended during MPA start-up")]
    Closed,
}

impl Fault {
    /// The error of RFC 5044 §8 that this is: code 4 for a frame that is wrong, code 1 for a stream
    /// that ended or stayed silent.
    pub const fn mpa_error(self) -> TerminateError {
        match self {
            Fault::Frame(_) | Fault::Trailing(_) | Fault::NotEnhanced(_) | Fault::Rdmac => {
                TerminateError::MpaStartup
            }
            Fault::Timeout | Fault::Closed => TerminateError::MpaConnectionLost,
        }
    }
}

/// How to end the TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// By a reset: also what makes cxgb4 and irdma fall back to revision 1.
    Abort,
    /// In an orderly way, once what is to be sent is sent.
    Orderly,
}

/// The end of a start-up that failed. There is nobody to send a Terminate to, so the code of RFC
/// 5044 §8 is in the message alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("MPA error {}: {fault}", .fault.mpa_error().code())]
pub struct Failure {
    /// Why.
    pub fault: Fault,
    /// How to end the connection.
    pub close: Close,
    /// Bytes to send first.
    pub last_words: Option<Vec<u8>>,
    /// The peer may be one that knows only revision 1: a new connection with an unenhanced Request
    /// may succeed, if the ULP can do without what enhanced start-up settles (RFC 6581 §10).
    pub fall_back: bool,
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Failure {
        Failure {
            fault,
            close: Close::Abort,
            last_words: None,
            fall_back: false,
        }
    }
}

impl From<StartupError> for Failure {
    fn from(error: StartupError) -> Failure {
        Fault::from(error).into()
    }
}

/// A frame on its way in.
#[derive(Debug, Default)]
struct Incoming {
    bytes: Vec<u8>,
    header: Option<StartupHeader>,
}

impl Incoming {
    /// Bytes missing to the end of what is known of the frame.
    fn wants(&self) -> usize {
        self.len() - self.bytes.len()
    }

    fn len(&self) -> usize {
        HEADER_LEN + self.header.map_or(0, |header| header.private_data_len)
    }

    /// Takes bytes as far as they belong to the frame; `check` looks at the header as soon as it is
    /// there, so that a wrong peer is known by its first 20 bytes. Returns how many were taken.
    fn take(
        &mut self,
        mut bytes: &[u8],
        check: impl Fn(StartupHeader) -> Result<StartupHeader, Failure>,
    ) -> Result<usize, Failure> {
        let all = bytes.len();
        loop {
            let (now, rest) = bytes.split_at(self.wants().min(bytes.len()));
            self.bytes.extend_from_slice(now);
            bytes = rest;
            if self.header.is_some() || self.wants() > 0 {
                return Ok(all - bytes.len());
            }
            if let Some(fixed) = self.bytes.first_chunk() {
                self.header = Some(check(StartupHeader::parse(fixed)?)?);
            }
        }
    }

    /// Header and private data, once all is there.
    fn whole(&self) -> Option<(StartupHeader, &[u8])> {
        let header = self.header.filter(|_| self.wants() == 0)?;
        Some((header, self.bytes.get(HEADER_LEN..)?))
    }
}

/// The ULP's private data is too long for the frame (512 bytes, 508 behind an enhanced word: RFC
/// 6581 §9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("private data of {0} octets is too long; with the IRD/ORD word it must fit {MAX_PRIVATE_DATA}")]
pub struct PrivateDataTooLong(pub usize);

/// The bytes of a frame.
fn frame(frame: &StartupFrame<'_>) -> Result<Vec<u8>, PrivateDataTooLong> {
    let mut bytes = vec![0; frame.buffer_len()];
    frame
        .emit(&mut bytes)
        .map_err(|_| PrivateDataTooLong(frame.private_data.len()))?;
    Ok(bytes)
}
