//! The opcodes of the base transport header (§9.2.1 of the InfiniBand Architecture Specification,
//! table 38) for the services that RoCE v2 has here, and that of congestion notification.

use core::fmt;

/// The transport service, the three most significant bits of an opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// Reliable connection, RC.
    ReliableConnection,
    /// Unreliable connection, UC.
    UnreliableConnection,
    /// Unreliable datagram, UD.
    UnreliableDatagram,
    /// The congestion notification packets of RoCE v2 (annex A17).
    CongestionNotification,
}

/// The place of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The first of several packets.
    First,
    /// Neither the first nor the last packet.
    Middle,
    /// The last of several packets.
    Last,
    /// The only packet of its message.
    Only,
}

bitflags::bitflags! {
    /// The extended headers after the base transport header, in their order on the wire.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Extended: u8 {
        /// Datagram extended transport header, 8 bytes.
        const DETH = 1;
        /// RDMA extended transport header, 16 bytes.
        const RETH = 1 << 1;
        /// Atomic extended transport header, 28 bytes.
        const ATOMIC_ETH = 1 << 2;
        /// Acknowledge extended transport header, 4 bytes.
        const AETH = 1 << 3;
        /// Atomic acknowledge extended transport header, 8 bytes.
        const ATOMIC_ACK_ETH = 1 << 4;
        /// Immediate data, 4 bytes.
        const IMM_DT = 1 << 5;
        /// Invalidate extended transport header, 4 bytes.
        const IETH = 1 << 6;
        /// The 16 reserved bytes of a congestion notification packet.
        const CNP = 1 << 7;
    }
}

impl Extended {
    /// Bytes of these headers.
    pub const fn buffer_len(self) -> usize {
        let lengths = [8, 16, 28, 4, 8, 4, 4, 16];
        let (mut sum, mut bit) = (0, 0);
        while bit < lengths.len() {
            if self.bits() & 1 << bit != 0 {
                sum += lengths[bit];
            }
            bit += 1;
        }
        sum
    }
}

/// The opcodes, one a line: name, value, words for people, place in the message, extended headers.
macro_rules! opcodes {
    ($($name:ident = $value:literal, $words:literal, $position:ident, $($header:ident)|+;)+) => {
        /// An opcode of table 38, or that of a congestion notification packet.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Opcode {
            $(#[doc = $words] $name = $value,)+
        }

        impl Opcode {
            /// All opcodes, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The opcode with this value.
            pub const fn new(value: u8) -> Option<Self> {
                match value {
                    $($value => Some(Self::$name),)+
                    _ => None,
                }
            }

            /// The name of the table.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $words,)+
                }
            }

            /// The place of its packets in their messages.
            pub const fn position(self) -> Position {
                match self {
                    $(Self::$name => Position::$position,)+
                }
            }

            /// The extended headers of its packets.
            pub const fn extended(self) -> Extended {
                match self {
                    $(Self::$name => Extended::empty()$(.union(extended!($header)))+,)+
                }
            }
        }
    };
}

macro_rules! extended {
    (NONE) => {
        Extended::empty()
    };
    ($header:ident) => {
        Extended::$header
    };
}

opcodes! {
    RcSendFirst = 0x00, "RC SEND First", First, NONE;
    RcSendMiddle = 0x01, "RC SEND Middle", Middle, NONE;
    RcSendLast = 0x02, "RC SEND Last", Last, NONE;
    RcSendLastImmediate = 0x03, "RC SEND Last with Immediate", Last, IMM_DT;
    RcSendOnly = 0x04, "RC SEND Only", Only, NONE;
    RcSendOnlyImmediate = 0x05, "RC SEND Only with Immediate", Only, IMM_DT;
    RcWriteFirst = 0x06, "RC RDMA WRITE First", First, RETH;
    RcWriteMiddle = 0x07, "RC RDMA WRITE Middle", Middle, NONE;
    RcWriteLast = 0x08, "RC RDMA WRITE Last", Last, NONE;
    RcWriteLastImmediate = 0x09, "RC RDMA WRITE Last with Immediate", Last, IMM_DT;
    RcWriteOnly = 0x0a, "RC RDMA WRITE Only", Only, RETH;
    RcWriteOnlyImmediate = 0x0b, "RC RDMA WRITE Only with Immediate", Only, RETH | IMM_DT;
    RcReadRequest = 0x0c, "RC RDMA READ Request", Only, RETH;
    RcReadResponseFirst = 0x0d, "RC RDMA READ response First", First, AETH;
    RcReadResponseMiddle = 0x0e, "RC RDMA READ response Middle", Middle, NONE;
    RcReadResponseLast = 0x0f, "RC RDMA READ response Last", Last, AETH;
    RcReadResponseOnly = 0x10, "RC RDMA READ response Only", Only, AETH;
    RcAcknowledge = 0x11, "RC Acknowledge", Only, AETH;
    RcAtomicAcknowledge = 0x12, "RC ATOMIC Acknowledge", Only, AETH | ATOMIC_ACK_ETH;
    RcCompareSwap = 0x13, "RC CmpSwap", Only, ATOMIC_ETH;
    RcFetchAdd = 0x14, "RC FetchAdd", Only, ATOMIC_ETH;
    RcSendLastInvalidate = 0x16, "RC SEND Last with Invalidate", Last, IETH;
    RcSendOnlyInvalidate = 0x17, "RC SEND Only with Invalidate", Only, IETH;
    UcSendFirst = 0x20, "UC SEND First", First, NONE;
    UcSendMiddle = 0x21, "UC SEND Middle", Middle, NONE;
    UcSendLast = 0x22, "UC SEND Last", Last, NONE;
    UcSendLastImmediate = 0x23, "UC SEND Last with Immediate", Last, IMM_DT;
    UcSendOnly = 0x24, "UC SEND Only", Only, NONE;
    UcSendOnlyImmediate = 0x25, "UC SEND Only with Immediate", Only, IMM_DT;
    UcWriteFirst = 0x26, "UC RDMA WRITE First", First, RETH;
    UcWriteMiddle = 0x27, "UC RDMA WRITE Middle", Middle, NONE;
    UcWriteLast = 0x28, "UC RDMA WRITE Last", Last, NONE;
    UcWriteLastImmediate = 0x29, "UC RDMA WRITE Last with Immediate", Last, IMM_DT;
    UcWriteOnly = 0x2a, "UC RDMA WRITE Only", Only, RETH;
    UcWriteOnlyImmediate = 0x2b, "UC RDMA WRITE Only with Immediate", Only, RETH | IMM_DT;
    UdSendOnly = 0x64, "UD SEND Only", Only, DETH;
    UdSendOnlyImmediate = 0x65, "UD SEND Only with Immediate", Only, DETH | IMM_DT;
    CongestionNotification = 0x81, "CNP", Only, CNP;
}

impl Opcode {
    /// The value on the wire.
    pub const fn value(self) -> u8 {
        self as u8
    }

    /// The transport service.
    pub const fn service(self) -> Service {
        match self.value() >> 5 {
            0 => Service::ReliableConnection,
            1 => Service::UnreliableConnection,
            3 => Service::UnreliableDatagram,
            _ => Service::CongestionNotification,
        }
    }

    /// Whether its packets have a payload, perhaps of 0 bytes.
    pub const fn has_payload(self) -> bool {
        !matches!(
            self,
            Self::RcReadRequest
                | Self::RcAcknowledge
                | Self::RcAtomicAcknowledge
                | Self::RcCompareSwap
                | Self::RcFetchAdd
                | Self::CongestionNotification
        )
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
