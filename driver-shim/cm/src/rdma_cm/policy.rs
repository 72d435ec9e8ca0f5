//! The policy of a connection, from the options.

use std::time::Duration;

use super::command::Parameters;
use crate::mpa_startup::{Depths, Settings};
use urnic_config::Config;

/// The options that a `[[peer]]` entry may override.
#[derive(Debug, Clone)]
pub(super) struct ConnPolicy {
    pub(super) settings: Settings,
    pub(super) peer_to_peer: bool,
    pub(super) strict_rtr: bool,
    pub(super) strict_depths: bool,
    pub(super) rnr_grace: Duration,
    /// Local ACK Timeout without `RDMA_OPTION_ID_ACK_TIMEOUT`.
    pub(super) ack_timeout: u8,
    /// Requests complete when the peer has placed or delivered them.
    pub(super) delivered: bool,
    /// Ports of connections are not those of TCP.
    pub(super) own_ports: bool,
}

impl ConnPolicy {
    /// The depths to negotiate for the depths that a program requests: one Read more is for
    /// confirmations of delivery.
    pub(super) fn depths(&self, parameters: &Parameters) -> Depths {
        let spare = u16::from(self.delivered);
        Depths {
            ird: Some(u16::from(parameters.responder_resources) + spare),
            ord: Some(u16::from(parameters.initiator_depth) + spare),
        }
    }
}

impl From<&Config> for ConnPolicy {
    fn from(config: &Config) -> ConnPolicy {
        ConnPolicy {
            settings: Settings {
                rtr_frame: config.mpa.rtr_frame,
                ..Settings::from(&config.mpa)
            },
            peer_to_peer: config.mpa.peer_to_peer,
            strict_rtr: config.mpa.strict_rtr,
            strict_depths: config.mpa.strict_depths,
            rnr_grace: config.cm.rnr_grace,
            ack_timeout: config.cm.ack_timeout,
            delivered: config.completion.is_delivered_on_rdma_cm(config.identity),
            own_ports: config.cm.ports.are_own(config.identity),
        }
    }
}
