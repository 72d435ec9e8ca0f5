//! The policy of a connection, from the options.

use std::time::Duration;

use crate::mpa_startup::Settings;
use urnic_config::Config;

/// The options that a `[[peer]]` entry may override.
#[derive(Debug, Clone)]
pub(super) struct ConnPolicy {
    pub(super) settings: Settings,
    pub(super) peer_to_peer: bool,
    pub(super) strict_rtr: bool,
    pub(super) strict_depths: bool,
    pub(super) rnr_grace: Duration,
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
        }
    }
}
