//! What other implementations want, as options: the `profile` of a `[[peer]]`.
//!
//! The defaults suit all of them. A profile undoes what would not, wherever else it was set.

/// Options and their values.
type Preset = &'static [(&'static str, &'static str)];

// Nobody of these sends markers, opens a connection by a Send, or knows the RTR frame of 2007
// (soft-iWARP looks as if it did).
const REVISION: (&str, &str) = ("mpa.revision", "2");
const MARKERS: (&str, &str) = ("mpa.markers", "false");
const RTR_FRAME: (&str, &str) = ("mpa.rtr_frame", "off");
const RTR_TYPES: (&str, &str) = ("mpa.rtr_types", "write,read");
const ANY_RTR: (&str, &str) = ("mpa.strict_rtr", "false");
const ANY_DEPTHS: (&str, &str) = ("mpa.strict_depths", "false");
const CRC: (&str, &str) = ("mpa.crc", "true");
const PEER_TO_PEER: (&str, &str) = ("mpa.peer_to_peer", "true");

/// By name.
pub(super) const PROFILES: [(&str, Preset); 4] = [
    // Linux soft-iWARP.
    (
        "siw",
        &[REVISION, MARKERS, RTR_FRAME, RTR_TYPES, ANY_RTR, ANY_DEPTHS],
    ),
    // Chelsio: it ends a connection whose RTR is not its own type, so it must be asked.
    (
        "cxgb4",
        &[
            REVISION,
            MARKERS,
            RTR_FRAME,
            RTR_TYPES,
            ANY_RTR,
            ANY_DEPTHS,
            PEER_TO_PEER,
        ],
    ),
    // Intel: it takes no revision 2 without the peer-to-peer mode, and always wants CRCs.
    (
        "irdma",
        &[
            REVISION,
            MARKERS,
            RTR_FRAME,
            RTR_TYPES,
            ANY_RTR,
            ANY_DEPTHS,
            PEER_TO_PEER,
            CRC,
        ],
    ),
    // To the letter.
    (
        "strict",
        &[
            REVISION,
            RTR_FRAME,
            CRC,
            ("mpa.strict_rtr", "true"),
            ("mpa.strict_depths", "true"),
        ],
    ),
];

/// The options of a profile.
pub(super) fn preset(name: &str) -> Option<Preset> {
    PROFILES
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, preset)| *preset)
}
