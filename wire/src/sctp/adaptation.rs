//! The Adaptation Layer Indication (RFC 5061 §4.2.6, RFC 5043 §5.1): the parameter of INIT and INIT
//! ACK that says which protocol uses an association. DDP is allowed only if both ends say DDP
//! (RFC 5043 §11.1).
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |         Type = 0xC006         |           Length = 8          |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! |                     Adaptation Code Point                     |
//! +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use core::fmt;

/// Bytes of the parameter.
pub const PARAMETER_LEN: usize = 8;

const TYPE: u16 = 0xc006;
/// The Adaptation Code Point of DDP.
pub const DDP: u32 = 1;

/// What an end of an association says of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adaptation {
    /// DDP over SCTP.
    Ddp,
    /// Another protocol, by its code point.
    Other(u32),
    /// Nothing.
    None,
}

impl Adaptation {
    /// Reads the optional parameters of an INIT or INIT ACK: all bytes of the chunk after the
    /// Initial TSN. Of several indications the first counts; a parameter that does not fit ends the
    /// search, and what follows it says nothing.
    pub fn of_parameters(parameters: &[u8]) -> Self {
        let mut all = super::packet::parameters(parameters);
        let Some((_, value)) = all.find(|(kind, _)| *kind == TYPE) else {
            return Self::None;
        };
        value
            .try_into()
            .map_or(Self::None, |code| match u32::from_be_bytes(code) {
                DDP => Self::Ddp,
                other => Self::Other(other),
            })
    }

    /// The parameter that says so; `None` if nothing is said.
    pub const fn parameter(self) -> Option<[u8; PARAMETER_LEN]> {
        let [c0, c1, c2, c3] = match self {
            Self::Ddp => DDP.to_be_bytes(),
            Self::Other(code) => code.to_be_bytes(),
            Self::None => return None,
        };
        let [t0, t1] = TYPE.to_be_bytes();
        Some([t0, t1, 0, PARAMETER_LEN as u8, c0, c1, c2, c3])
    }
}

impl fmt::Display for Adaptation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ddp => f.write_str("adaptation DDP"),
            Self::Other(code) => write!(f, "adaptation 0x{code:08x}"),
            Self::None => f.write_str("no adaptation"),
        }
    }
}
