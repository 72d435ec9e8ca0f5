//! Messages, and how they are cut into packets.

use urnic_wire::roce::{AtomicEth, Immediate, Request, Reth, Transfer};

/// Most bytes of a message (§9.7 of the InfiniBand Architecture Specification): 2^31.
pub const MAX_MESSAGE_LEN: u32 = 1 << 31;

/// Bytes of the operand and of the result of an atomic operation.
pub const ATOMIC_LEN: u32 = 8;

/// Path MTU: bytes of payload in each packet of a message but the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mtu {
    /// 256 bytes.
    Bytes256,
    /// 512 bytes.
    Bytes512,
    /// 1024 bytes.
    Bytes1024,
    /// 2048 bytes.
    Bytes2048,
    /// 4096 bytes.
    Bytes4096,
}

impl Mtu {
    /// All path MTUs, the shortest first.
    pub const ALL: [Self; 5] = [
        Self::Bytes256,
        Self::Bytes512,
        Self::Bytes1024,
        Self::Bytes2048,
        Self::Bytes4096,
    ];

    /// The number of bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bytes256 => 256,
            Self::Bytes512 => 512,
            Self::Bytes1024 => 1024,
            Self::Bytes2048 => 2048,
            Self::Bytes4096 => 4096,
        }
    }

    /// Packets of a message or Read response of `length` bytes: at least one.
    pub const fn packets(self, length: u32) -> u32 {
        match length.div_ceil(self.bytes()) {
            0 => 1,
            packets => packets,
        }
    }

    /// The offset and length of packet number `index` of a message of `length` bytes.
    pub(crate) const fn piece(self, length: u32, index: u32) -> (u32, u32) {
        let offset = index * self.bytes();
        let rest = length - offset;
        (offset, if rest < self.bytes() { rest } else { self.bytes() })
    }
}

/// Memory of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Address of the first byte.
    pub address: u64,
    /// The key of the memory region or window.
    pub rkey: u32,
}

/// An operation, with the operands that its packets carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Fills a receive of the peer.
    Send,
    /// A Send with immediate data.
    SendImmediate(Immediate),
    /// A Send that invalidates a key of the peer.
    SendInvalidate(u32),
    /// Writes memory of the peer.
    Write(Remote),
    /// A Write with immediate data, which takes a receive of the peer.
    WriteImmediate(Remote, Immediate),
    /// Reads memory of the peer.
    Read(Remote),
    /// Compares 8 bytes of the peer, and replaces them if they are equal.
    CompareSwap {
        /// The 8 bytes.
        remote: Remote,
        /// The value to compare with.
        compare: u64,
        /// The new value.
        swap: u64,
    },
    /// Adds to 8 bytes of the peer.
    FetchAdd {
        /// The 8 bytes.
        remote: Remote,
        /// The addend.
        add: u64,
    },
}

impl Kind {
    /// Whether the operation needs one of the responder's resources for Reads and atomics.
    pub const fn needs_resource(self) -> bool {
        matches!(self, Self::Read(_)) || self.is_atomic()
    }

    /// Whether the operation is compare-and-swap or fetch-and-add.
    pub const fn is_atomic(self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// Whether the peer may get an event for the message: it takes a receive there.
    pub(crate) const fn takes_receive(self) -> bool {
        !matches!(self, Self::Write(_)) && !self.needs_resource()
    }

    /// The memory of a Read that is requested from `offset` on, or the operand of an atomic.
    pub(crate) fn resource_request(self, offset: u32, length: u32) -> Option<Request> {
        let atomic = |remote: Remote, swap_or_add, compare| AtomicEth {
            address: remote.address,
            rkey: remote.rkey,
            swap_or_add,
            compare,
        };
        Some(match self {
            Self::Read(remote) => Request::Read(Reth {
                address: remote.address.wrapping_add(offset.into()),
                rkey: remote.rkey,
                length,
            }),
            Self::CompareSwap {
                remote,
                compare,
                swap,
            } => Request::CompareSwap(atomic(remote, swap, compare)),
            Self::FetchAdd { remote, add } => Request::FetchAdd(atomic(remote, add, 0)),
            _ => return None,
        })
    }

    /// Packet number `index` of `packets` of a Send or Write of `length` bytes, and the key that a
    /// Send invalidates; none for other operations.
    pub(crate) fn transfer(self, length: u32, index: u32, packets: u32) -> Option<(Transfer, Option<u32>)> {
        let (first, last) = (index == 0, index + 1 == packets);
        let reth = |remote: Remote| Reth {
            address: remote.address,
            rkey: remote.rkey,
            length,
        };
        let (memory, immediate, invalidated) = match self {
            Self::Send => (None, None, None),
            Self::SendImmediate(immediate) => (None, Some(immediate), None),
            Self::SendInvalidate(rkey) => (None, None, Some(rkey)),
            Self::Write(remote) => (Some(reth(remote)), None, None),
            Self::WriteImmediate(remote, immediate) => (Some(reth(remote)), Some(immediate), None),
            _ => return None,
        };
        let transfer = match (memory, first, last) {
            (None, true, true) => Transfer::SendOnly(immediate),
            (None, true, false) => Transfer::SendFirst,
            (None, false, true) => Transfer::SendLast(immediate),
            (None, false, false) => Transfer::SendMiddle,
            (Some(reth), true, true) => Transfer::WriteOnly(reth, immediate),
            (Some(reth), true, false) => Transfer::WriteFirst(reth),
            (Some(_), false, true) => Transfer::WriteLast(immediate),
            (Some(_), false, false) => Transfer::WriteMiddle,
        };
        Some((transfer, invalidated.filter(|_| last)))
    }

    /// Packet number `index` of `packets` of a Send or Write of a reliable connection.
    pub(crate) fn request(self, length: u32, index: u32, packets: u32) -> Option<Request> {
        let (transfer, invalidated) = self.transfer(length, index, packets)?;
        Some(match (invalidated, transfer) {
            (Some(rkey), Transfer::SendOnly(_)) => Request::SendOnlyInvalidate(rkey),
            (Some(rkey), _) => Request::SendLastInvalidate(rkey),
            (None, transfer) => Request::Transfer(transfer),
        })
    }
}

/// A message that a program posts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// The caller's name of the message, which its packets and its completion have.
    pub id: u64,
    /// The operation.
    pub kind: Kind,
    /// Bytes of the message; 8 for an atomic operation.
    pub length: u32,
    /// The peer gets an event, if it waits for solicited ones.
    pub solicited: bool,
    /// The message begins only when all Reads and atomic operations before it are complete.
    pub fence: bool,
}

/// Why a message cannot be posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The message is longer than [`MAX_MESSAGE_LEN`].
    #[error("the message has {0} bytes, more than 2^31")]
    Length(u32),
    /// A Read or atomic operation on a connection that has no resources for them, or that is
    /// unreliable.
    #[error("the connection permits no Reads and no atomic operations")]
    NoResources,
    /// A Send that invalidates, on an unreliable connection.
    #[error("an unreliable connection does not invalidate")]
    Invalidate,
}

impl Message {
    /// Checks the length; returns the number of packets, of the request or of the response.
    pub(crate) fn packets(&self, mtu: Mtu) -> Result<u32, PostError> {
        match self.length {
            length if length > MAX_MESSAGE_LEN => Err(PostError::Length(length)),
            _ if self.kind.is_atomic() => Ok(1),
            length => Ok(mtu.packets(length)),
        }
    }
}
