//! Profiles: the options that other implementations need, for the `profile` of a `[[peer]]`.
//!
//! The defaults suit all of them. A profile resets the options that would not, if another source
//! set them.

/// Options and their values.
type Preset = &'static [(&'static str, &'static str)];

// None of these implementations has SCTP, sends markers, opens a connection by a Send, or supports
// the RTR frame of 2007 (soft-iWARP seems to support it, but does not).
const REVISION: (&str, &str) = ("mpa.revision", "2");
const MARKERS: (&str, &str) = ("mpa.markers", "false");
const RTR_FRAME: (&str, &str) = ("mpa.rtr_frame", "off");
const RTR_TYPES: (&str, &str) = ("mpa.rtr_types", "write,read");
const ANY_RTR: (&str, &str) = ("mpa.strict_rtr", "false");
const ANY_DEPTHS: (&str, &str) = ("mpa.strict_depths", "false");
const CRC: (&str, &str) = ("mpa.crc", "true");
const PORTS: (&str, &str) = ("cm.ports", "tcp");
const LLP: (&str, &str) = ("llp", "tcp");
const PEER_TO_PEER: (&str, &str) = ("mpa.peer_to_peer", "true");

/// The profiles by name.
pub(super) const PROFILES: [(&str, Preset); 4] = [
    // Linux soft-iWARP.
    (
        "siw",
        &[
            REVISION, MARKERS, RTR_FRAME, RTR_TYPES, ANY_RTR, ANY_DEPTHS, PORTS, LLP,
        ],
    ),
    // Chelsio: it ends a connection whose RTR is not its own type, so the RTR must be negotiated.
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
            PORTS,
            LLP,
        ],
    ),
    // Intel: it accepts no revision 2 without the peer-to-peer mode, and always requests CRCs.
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
            PORTS,
            LLP,
        ],
    ),
    // Strict adherence to the RFCs.
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

/// The options of the profile `name`.
pub(super) fn preset(name: &str) -> Option<Preset> {
    PROFILES
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, preset)| *preset)
}
