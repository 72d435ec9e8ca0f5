//! The numbers by which the two ends know a connection.

use core::fmt;
use zerocopy::byteorder::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The two ends' numbers of a connection. "Local" is the sender's of the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommIds {
    /// The sender's number.
    pub local: u32,
    /// The recipient's number.
    pub remote: u32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct IdsLayout {
    local: U32,
    remote: U32,
}

impl CommIds {
    pub(super) fn layout(self) -> IdsLayout {
        IdsLayout {
            local: self.local.into(),
            remote: self.remote.into(),
        }
    }

    pub(super) fn of(layout: &IdsLayout) -> CommIds {
        CommIds {
            local: layout.local.get(),
            remote: layout.remote.get(),
        }
    }
}

impl fmt::Display for CommIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:08x} to 0x{:08x}", self.local, self.remote)
    }
}
