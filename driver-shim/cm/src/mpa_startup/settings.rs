//! Settings of one end of a connection.

use std::time::Duration;

use urnic_config::{Mpa, RtrTypes};
use urnic_wire::mpa::startup::RtrKey;

/// The settings of an end for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Request CRCs. The request of one side binds both (RFC 5044 §7.1.1).
    pub crc: bool,
    /// Request markers in the bytes that this end receives (RFC 5044 §4.3).
    pub markers: bool,
    /// The highest supported revision, 1 or 2. With 1 there is no enhanced start-up.
    pub revision: u8,
    /// RTR messages that this end can send and receive; at least one (RFC 6581 §9.2).
    pub rtr: RtrTypes,
    /// The RTR frame proposed in 2007: the spelling of the key that this end sends, or `None`:
    /// disabled. Use it only for peers that support it, since soft-iWARP echoes flags that it does
    /// not support. Revision 2 takes precedence.
    pub rtr_frame: Option<RtrKey>,
    /// The time that an initiator allows for the whole exchange.
    pub initiator_timeout: Duration,
    /// The time that a responder waits for the Request.
    pub responder_timeout: Duration,
    /// The time that a responder waits for the first FPDU after its Reply.
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
