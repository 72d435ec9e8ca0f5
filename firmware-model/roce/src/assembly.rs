//! The message of which packets arrive: where the next payload belongs, and what ends it.

use crate::message::{MAX_MESSAGE_LEN, Mtu};
use urnic_wire::roce::{Immediate, Request, Reth, Transfer};

/// Where the payload of a packet belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The receive of the message, from this offset on.
    Receive {
        /// Bytes from the beginning of the message.
        offset: u32,
    },
    /// Memory that the peer names.
    Memory {
        /// Address of the first byte.
        address: u64,
        /// The key of the memory region or window.
        rkey: u32,
    },
}

/// What the caller does for a packet of a Send or Write, in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// A receive is taken for the message. If none is posted, the packet is refused.
    pub takes_receive: bool,
    /// The first packet of a Write that has bytes: the rights to all of this memory are checked.
    pub whole: Option<Reth>,
    /// Where the payload belongs.
    pub target: Target,
    /// Bytes of payload.
    pub length: u32,
    /// The last packet of a message: the message is complete.
    pub end: Option<End>,
}

/// The end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// Bytes of the message.
    pub length: u32,
    /// A receive completes: the message is a Send, or a Write with immediate data.
    pub completes_receive: bool,
    /// Immediate data of the completion.
    pub immediate: Option<Immediate>,
    /// A key that is invalidated before the receive completes.
    pub invalidated: Option<u32>,
}

/// A packet that does not continue the message, has a wrong length, or begins a message within
/// another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// The message of which packets have arrived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Assembly {
    /// None: the next packet begins a message.
    #[default]
    Idle,
    /// A Send, of which so many bytes have arrived.
    Send(u32),
    /// A Write, of which so many bytes have arrived.
    Write(Reth, u32),
}

impl Assembly {
    pub(crate) fn is_idle(&self) -> bool {
        *self == Self::Idle
    }

    /// The place of a packet's payload, and the state after the packet; none for a request that is
    /// neither a Send nor a Write.
    pub(crate) fn place(
        self,
        request: &Request,
        payload_len: usize,
        mtu: Mtu,
    ) -> Option<Result<(Place, Self), Malformed>> {
        let (transfer, invalidated) = match *request {
            Request::Transfer(transfer) => (transfer, None),
            Request::SendLastInvalidate(rkey) => (Transfer::SendLast(None), Some(rkey)),
            Request::SendOnlyInvalidate(rkey) => (Transfer::SendOnly(None), Some(rkey)),
            Request::Read(_) | Request::CompareSwap(_) | Request::FetchAdd(_) => return None,
        };
        Some(
            self.after(transfer, invalidated, payload_len, mtu)
                .ok_or(Malformed),
        )
    }

    fn after(
        self,
        transfer: Transfer,
        invalidated: Option<u32>,
        payload_len: usize,
        mtu: Mtu,
    ) -> Option<(Place, Self)> {
        let length = u32::try_from(payload_len).ok()?;
        let before = self.before(transfer)?;
        let is_last = !matches!(
            transfer,
            Transfer::SendFirst | Transfer::SendMiddle | Transfer::WriteFirst(_) | Transfer::WriteMiddle
        );
        let is_only = matches!(transfer, Transfer::SendOnly(_) | Transfer::WriteOnly(..));
        // §9.7.4.1: the packets before the last one are full, and the last of several is not
        // empty.
        let fits = match is_last {
            false => length == mtu.bytes(),
            true => length <= mtu.bytes() && (length > 0 || is_only),
        };
        let received = before.received().checked_add(length).filter(|_| fits)?;
        let (target, limit, state) = match before {
            Self::Write(reth, offset) => {
                let target = Target::Memory {
                    address: reth.address.wrapping_add(offset.into()),
                    rkey: reth.rkey,
                };
                (target, reth.length, Self::Write(reth, received))
            }
            _ => {
                let target = Target::Receive {
                    offset: before.received(),
                };
                (target, MAX_MESSAGE_LEN, Self::Send(received))
            }
        };
        let is_write = matches!(before, Self::Write(..));
        // A Write has exactly the bytes of its RETH.
        let ends_short = is_write && is_last && received != limit;
        if received > limit || limit > MAX_MESSAGE_LEN || ends_short {
            return None;
        }
        let immediate = transfer.immediate();
        let first_of_send = matches!(transfer, Transfer::SendFirst | Transfer::SendOnly(_));
        let end = End {
            length: received,
            completes_receive: !is_write || immediate.is_some(),
            immediate,
            invalidated,
        };
        let place = Place {
            takes_receive: first_of_send || is_write && immediate.is_some(),
            whole: transfer.reth().filter(|reth| reth.length > 0),
            target,
            length,
            end: is_last.then_some(end),
        };
        Some((place, if is_last { Self::Idle } else { state }))
    }

    /// The state in front of a packet, which begins a message or continues this one.
    fn before(self, transfer: Transfer) -> Option<Self> {
        Some(match (transfer, self) {
            (Transfer::SendFirst | Transfer::SendOnly(_), Self::Idle) => Self::Send(0),
            (Transfer::WriteFirst(reth) | Transfer::WriteOnly(reth, _), Self::Idle) => Self::Write(reth, 0),
            (Transfer::SendMiddle | Transfer::SendLast(_), Self::Send(_)) => self,
            (Transfer::WriteMiddle | Transfer::WriteLast(_), Self::Write(..)) => self,
            _ => return None,
        })
    }

    fn received(self) -> u32 {
        match self {
            Self::Idle => 0,
            Self::Send(received) | Self::Write(_, received) => received,
        }
    }
}
