//! The extended transport headers (§9.3 of the InfiniBand Architecture Specification).
//!
//! ```text
//! RETH          virtual address(64)  R_Key(32)  DMA length(32)
//! AtomicETH     virtual address(64)  R_Key(32)  swap or add(64)  compare(64)
//! AETH          syndrome(8)  MSN(24)
//! AtomicAckETH  original value(64)
//! DETH          Q_Key(32)  reserved(8)  source QP(24)
//! ImmDt         32 bits          IETH  R_Key(32)
//! ```

use core::fmt;
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Immediate data, as the sender's program gave it.
pub type Immediate = [u8; 4];

const LOW_24: u32 = 0xff_ffff;

/// A header of fixed layout at the front of bytes.
pub(super) trait Layout: FromBytes + IntoBytes + KnownLayout + Immutable + Unaligned + Copy {
    /// Takes the header from the front of `bytes`.
    fn take(bytes: &mut &[u8]) -> Option<Self> {
        let (header, rest) = Self::read_from_prefix(bytes).ok()?;
        *bytes = rest;
        Some(header)
    }
}

/// Derives what a header of fixed layout needs.
macro_rules! layouts {
    ($($name:ident { $($field:ident: $type:ty),+ })+) => {
        $(
            #[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
            #[repr(C)]
            pub(super) struct $name {
                $(pub(super) $field: $type),+
            }
            impl Layout for $name {}
        )+
    };
}

layouts! {
    RethLayout { address: U64, rkey: U32, length: U32 }
    AtomicEthLayout { address: U64, rkey: U32, swap_or_add: U64, compare: U64 }
    AethLayout { syndrome_and_msn: U32 }
    DethLayout { qkey: U32, source_qpn: U32 }
}
impl Layout for U64 {}
impl Layout for U32 {}
impl Layout for Immediate {}
/// The reserved bytes of a congestion notification packet.
impl Layout for [u8; 16] {}

/// RDMA extended transport header: the memory of a Write or Read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Address of the first byte.
    pub address: u64,
    /// The key of the memory region or window.
    pub rkey: u32,
    /// Bytes of the whole message, at most 2^31.
    pub length: u32,
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Address of the 8 bytes.
    pub address: u64,
    /// The key of the memory region or window.
    pub rkey: u32,
    /// The new value of a compare-and-swap, or the addend of a fetch-and-add.
    pub swap_or_add: u64,
    /// The value that a compare-and-swap compares with; without meaning for a fetch-and-add.
    pub compare: u64,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// The Q_Key, which must be that of the receiving queue pair.
    pub qkey: u32,
    /// The queue pair that sent it, 24 bits.
    pub source_qpn: u32,
}

/// Acknowledge extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// Whether the packet acknowledges, and what it says of receives.
    pub syndrome: Syndrome,
    /// The message sequence number: how many messages the responder has completed, 24 bits.
    pub msn: u32,
}

/// The syndrome of an [`Aeth`] (§9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// A positive acknowledgement.
    Ack(Credits),
    /// The responder has no receive. The requester waits for a time, whose code of 5 bits is here
    /// ([`rnr_timer_ns`](super::rnr_timer_ns)).
    RnrNak(u8),
    /// A negative acknowledgement.
    Nak(NakCode),
}

/// The number of receives that a responder says it has (§9.7.7.2), as a code of 5 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits(u8);

/// The codes of a negative acknowledgement (§9.7.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum NakCode {
    /// A packet of a later number came than the one expected, which is the acknowledgement's.
    PsnSequenceError = 0,
    /// The request is malformed, out of order in its message, or longer than is permitted.
    InvalidRequest = 1,
    /// The memory or rights of the request do not exist.
    RemoteAccessError = 2,
    /// The responder cannot complete the request.
    RemoteOperationalError = 3,
    /// A reliable datagram's; no reliable connection has it.
    InvalidRdRequest = 4,
}

mod syndrome {
    pub(super) const ACK: u8 = 0b000 << 5;
    pub(super) const RNR_NAK: u8 = 0b001 << 5;
    pub(super) const NAK: u8 = 0b011 << 5;
    pub(super) const VALUE: u8 = 0x1f;
}

impl Credits {
    /// No statement on receives: the requester sends as it likes, and an RNR NAK tells it that a
    /// receive was missing.
    pub const INVALID: Self = Self(0x1f);

    /// The low 5 bits of a code.
    pub const fn new(code: u8) -> Self {
        Self(code & syndrome::VALUE)
    }

    /// The code, 5 bits.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// The number of receives; none if there is no statement.
    pub const fn receives(self) -> Option<u32> {
        match self.0 {
            0x1f => None,
            code @ (0 | 1) => Some(code as u32),
            // Two codes for each power of two: the power, and one and a half times the power.
            code if code % 2 == 0 => Some(1 << (code / 2)),
            code => Some((1 << (code / 2)) / 2 * 3),
        }
    }
}

impl NakCode {
    const fn new(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::PsnSequenceError,
            1 => Self::InvalidRequest,
            2 => Self::RemoteAccessError,
            3 => Self::RemoteOperationalError,
            4 => Self::InvalidRdRequest,
            _ => return None,
        })
    }
}

impl Syndrome {
    /// The syndrome of this byte; none for a reserved one.
    pub(super) const fn new(byte: u8) -> Option<Self> {
        let value = byte & syndrome::VALUE;
        match byte & !syndrome::VALUE {
            syndrome::ACK => Some(Self::Ack(Credits(value))),
            syndrome::RNR_NAK => Some(Self::RnrNak(value)),
            syndrome::NAK => match NakCode::new(value) {
                Some(code) => Some(Self::Nak(code)),
                None => None,
            },
            _ => None,
        }
    }

    fn byte(self) -> u8 {
        match self {
            Self::Ack(credits) => syndrome::ACK | credits.0,
            Self::RnrNak(timer) => syndrome::RNR_NAK | timer & syndrome::VALUE,
            Self::Nak(code) => syndrome::NAK | code as u8,
        }
    }
}

impl From<RethLayout> for Reth {
    fn from(layout: RethLayout) -> Self {
        Self {
            address: layout.address.get(),
            rkey: layout.rkey.get(),
            length: layout.length.get(),
        }
    }
}

impl From<Reth> for RethLayout {
    fn from(reth: Reth) -> Self {
        Self {
            address: reth.address.into(),
            rkey: reth.rkey.into(),
            length: reth.length.into(),
        }
    }
}

impl From<AtomicEthLayout> for AtomicEth {
    fn from(layout: AtomicEthLayout) -> Self {
        Self {
            address: layout.address.get(),
            rkey: layout.rkey.get(),
            swap_or_add: layout.swap_or_add.get(),
            compare: layout.compare.get(),
        }
    }
}

impl From<AtomicEth> for AtomicEthLayout {
    fn from(atomic: AtomicEth) -> Self {
        Self {
            address: atomic.address.into(),
            rkey: atomic.rkey.into(),
            swap_or_add: atomic.swap_or_add.into(),
            compare: atomic.compare.into(),
        }
    }
}

impl From<DethLayout> for Deth {
    fn from(layout: DethLayout) -> Self {
        Self {
            qkey: layout.qkey.get(),
            source_qpn: layout.source_qpn.get() & LOW_24,
        }
    }
}

impl From<Deth> for DethLayout {
    fn from(deth: Deth) -> Self {
        Self {
            qkey: deth.qkey.into(),
            source_qpn: (deth.source_qpn & LOW_24).into(),
        }
    }
}

impl TryFrom<AethLayout> for Aeth {
    /// The reserved syndrome.
    type Error = u8;

    fn try_from(layout: AethLayout) -> Result<Self, u8> {
        let [byte, ..] = layout.syndrome_and_msn.to_bytes();
        Ok(Self {
            syndrome: Syndrome::new(byte).ok_or(byte)?,
            msn: layout.syndrome_and_msn.get() & LOW_24,
        })
    }
}

impl From<Aeth> for AethLayout {
    fn from(aeth: Aeth) -> Self {
        let syndrome = u32::from(aeth.syndrome.byte()) << 24;
        Self {
            syndrome_and_msn: (syndrome | aeth.msn & LOW_24).into(),
        }
    }
}

impl fmt::Display for Reth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "address 0x{:x}, rkey 0x{:08x}, length {}",
            self.address, self.rkey, self.length
        )
    }
}

impl fmt::Display for AtomicEth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "address 0x{:x}, rkey 0x{:08x}, swap or add {}, compare {}",
            self.address, self.rkey, self.swap_or_add, self.compare
        )
    }
}

impl fmt::Display for Aeth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.syndrome {
            Syndrome::Ack(credits) => match credits.receives() {
                Some(receives) => write!(f, "ACK, credits {receives}")?,
                None => f.write_str("ACK")?,
            },
            Syndrome::RnrNak(timer) => write!(f, "RNR NAK, timer {timer}")?,
            Syndrome::Nak(code) => f.write_str(match code {
                NakCode::PsnSequenceError => "NAK PSN sequence error",
                NakCode::InvalidRequest => "NAK invalid request",
                NakCode::RemoteAccessError => "NAK remote access error",
                NakCode::RemoteOperationalError => "NAK remote operational error",
                NakCode::InvalidRdRequest => "NAK invalid RD request",
            })?,
        }
        write!(f, ", msn {}", self.msn)
    }
}
