//! Why bytes are not a packet.

/// Why bytes are not a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketError {
    /// The packet ends within its headers, has a payload that its opcode does not permit, is no
    /// multiple of four bytes long, or its pad is longer than its payload.
    #[error("the packet has {0} bytes, which its headers do not permit")]
    Length(usize),
    /// An opcode that [`Opcode`](super::Opcode) does not have.
    #[error("opcode {0:#04x} is unknown")]
    Opcode(u8),
    /// A reserved syndrome of an acknowledgement.
    #[error("syndrome {0:#04x} is reserved")]
    Syndrome(u8),
    /// Another transport version than 0.
    #[error("transport version {0} instead of 0")]
    Version(u8),
    /// The invariant CRC is wrong.
    #[error("the ICRC is wrong")]
    Icrc,
}
