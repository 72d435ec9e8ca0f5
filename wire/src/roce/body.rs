//! The opcode of a packet together with the extended headers that it has: a [`Body`].

use super::error::PacketError;
use super::extended::{AethLayout, AtomicEthLayout, DethLayout, Immediate, Layout, RethLayout};
use super::opcode::{Opcode, Service};
use super::{Aeth, AtomicEth, Deth, Reth};
use core::fmt;
use zerocopy::IntoBytes;
use zerocopy::byteorder::big_endian::{U32, U64};

/// Everything of a packet's headers that depends on its opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    /// A request of a reliable connection.
    Request(Request),
    /// A response of a reliable connection.
    Response(Response),
    /// A packet of an unreliable connection.
    Unreliable(Transfer),
    /// A datagram.
    Datagram(Deth, Option<Immediate>),
    /// A congestion notification packet of RoCE v2.
    CongestionNotification,
}

/// A packet of a Send or Write, of a reliable or an unreliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// The first of several packets of a Send.
    SendFirst,
    /// A further packet of a Send.
    SendMiddle,
    /// The last of several packets of a Send.
    SendLast(Option<Immediate>),
    /// A Send of one packet.
    SendOnly(Option<Immediate>),
    /// The first of several packets of a Write.
    WriteFirst(Reth),
    /// A further packet of a Write.
    WriteMiddle,
    /// The last of several packets of a Write.
    WriteLast(Option<Immediate>),
    /// A Write of one packet.
    WriteOnly(Reth, Option<Immediate>),
}

/// A request of a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A packet of a Send or Write.
    Transfer(Transfer),
    /// The last of several packets of a Send that invalidates the key.
    SendLastInvalidate(u32),
    /// A Send of one packet that invalidates the key.
    SendOnlyInvalidate(u32),
    /// A Read.
    Read(Reth),
    /// Compares 8 bytes, and replaces them if they are equal.
    CompareSwap(AtomicEth),
    /// Adds to 8 bytes.
    FetchAdd(AtomicEth),
}

/// A response of a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// The first of several packets that answer a Read.
    ReadFirst(Aeth),
    /// A further packet that answers a Read.
    ReadMiddle,
    /// The last of several packets that answer a Read.
    ReadLast(Aeth),
    /// The only packet that answers a Read.
    ReadOnly(Aeth),
    /// A positive or negative acknowledgement.
    Acknowledge(Aeth),
    /// The answer of an atomic operation: the value before it.
    AtomicAcknowledge(Aeth, u64),
}

impl Transfer {
    const fn opcode(self, service: Service) -> Opcode {
        let (rc, uc) = match self {
            Self::SendFirst => (Opcode::RcSendFirst, Opcode::UcSendFirst),
            Self::SendMiddle => (Opcode::RcSendMiddle, Opcode::UcSendMiddle),
            Self::SendLast(None) => (Opcode::RcSendLast, Opcode::UcSendLast),
            Self::SendLast(Some(_)) => (Opcode::RcSendLastImmediate, Opcode::UcSendLastImmediate),
            Self::SendOnly(None) => (Opcode::RcSendOnly, Opcode::UcSendOnly),
            Self::SendOnly(Some(_)) => (Opcode::RcSendOnlyImmediate, Opcode::UcSendOnlyImmediate),
            Self::WriteFirst(_) => (Opcode::RcWriteFirst, Opcode::UcWriteFirst),
            Self::WriteMiddle => (Opcode::RcWriteMiddle, Opcode::UcWriteMiddle),
            Self::WriteLast(None) => (Opcode::RcWriteLast, Opcode::UcWriteLast),
            Self::WriteLast(Some(_)) => (Opcode::RcWriteLastImmediate, Opcode::UcWriteLastImmediate),
            Self::WriteOnly(_, None) => (Opcode::RcWriteOnly, Opcode::UcWriteOnly),
            Self::WriteOnly(_, Some(_)) => (Opcode::RcWriteOnlyImmediate, Opcode::UcWriteOnlyImmediate),
        };
        match service {
            Service::UnreliableConnection => uc,
            _ => rc,
        }
    }

    /// The header of the memory of a Write, in its first packet.
    pub const fn reth(self) -> Option<Reth> {
        match self {
            Self::WriteFirst(reth) | Self::WriteOnly(reth, _) => Some(reth),
            _ => None,
        }
    }

    /// Immediate data, in the last packet of a message.
    pub const fn immediate(self) -> Option<Immediate> {
        match self {
            Self::SendLast(immediate)
            | Self::SendOnly(immediate)
            | Self::WriteLast(immediate)
            | Self::WriteOnly(_, immediate) => immediate,
            _ => None,
        }
    }

    fn parse(opcode: Opcode, bytes: &mut &[u8]) -> Option<Self> {
        Some(match opcode {
            Opcode::RcSendFirst | Opcode::UcSendFirst => Self::SendFirst,
            Opcode::RcSendMiddle | Opcode::UcSendMiddle => Self::SendMiddle,
            Opcode::RcSendLast | Opcode::UcSendLast => Self::SendLast(None),
            Opcode::RcSendLastImmediate | Opcode::UcSendLastImmediate => {
                Self::SendLast(Some(Immediate::take(bytes)?))
            }
            Opcode::RcSendOnly | Opcode::UcSendOnly => Self::SendOnly(None),
            Opcode::RcSendOnlyImmediate | Opcode::UcSendOnlyImmediate => {
                Self::SendOnly(Some(Immediate::take(bytes)?))
            }
            Opcode::RcWriteFirst | Opcode::UcWriteFirst => Self::WriteFirst(reth(bytes)?),
            Opcode::RcWriteMiddle | Opcode::UcWriteMiddle => Self::WriteMiddle,
            Opcode::RcWriteLast | Opcode::UcWriteLast => Self::WriteLast(None),
            Opcode::RcWriteLastImmediate | Opcode::UcWriteLastImmediate => {
                Self::WriteLast(Some(Immediate::take(bytes)?))
            }
            Opcode::RcWriteOnly | Opcode::UcWriteOnly => Self::WriteOnly(reth(bytes)?, None),
            Opcode::RcWriteOnlyImmediate | Opcode::UcWriteOnlyImmediate => {
                Self::WriteOnly(reth(bytes)?, Some(Immediate::take(bytes)?))
            }
            _ => return None,
        })
    }
}

fn reth(bytes: &mut &[u8]) -> Option<Reth> {
    Some(RethLayout::take(bytes)?.into())
}

fn atomic_eth(bytes: &mut &[u8]) -> Option<AtomicEth> {
    Some(AtomicEthLayout::take(bytes)?.into())
}

impl Body {
    /// The opcode of the packet.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Request(request) => match request {
                Request::Transfer(transfer) => transfer.opcode(Service::ReliableConnection),
                Request::SendLastInvalidate(_) => Opcode::RcSendLastInvalidate,
                Request::SendOnlyInvalidate(_) => Opcode::RcSendOnlyInvalidate,
                Request::Read(_) => Opcode::RcReadRequest,
                Request::CompareSwap(_) => Opcode::RcCompareSwap,
                Request::FetchAdd(_) => Opcode::RcFetchAdd,
            },
            Self::Response(response) => match response {
                Response::ReadFirst(_) => Opcode::RcReadResponseFirst,
                Response::ReadMiddle => Opcode::RcReadResponseMiddle,
                Response::ReadLast(_) => Opcode::RcReadResponseLast,
                Response::ReadOnly(_) => Opcode::RcReadResponseOnly,
                Response::Acknowledge(_) => Opcode::RcAcknowledge,
                Response::AtomicAcknowledge(..) => Opcode::RcAtomicAcknowledge,
            },
            Self::Unreliable(transfer) => transfer.opcode(Service::UnreliableConnection),
            Self::Datagram(_, None) => Opcode::UdSendOnly,
            Self::Datagram(_, Some(_)) => Opcode::UdSendOnlyImmediate,
            Self::CongestionNotification => Opcode::CongestionNotification,
        }
    }

    /// Takes the extended headers of a packet with this opcode, which has `packet_len` bytes, from
    /// the front of `bytes`.
    pub(super) fn parse(opcode: Opcode, bytes: &mut &[u8], packet_len: usize) -> Result<Self, PacketError> {
        let short = PacketError::Length(packet_len);
        let aeth = |bytes: &mut &[u8]| {
            let layout = AethLayout::take(bytes).ok_or(short)?;
            Aeth::try_from(layout).map_err(PacketError::Syndrome)
        };
        Ok(match opcode {
            Opcode::RcSendLastInvalidate => {
                Self::Request(Request::SendLastInvalidate(U32::take(bytes).ok_or(short)?.get()))
            }
            Opcode::RcSendOnlyInvalidate => {
                Self::Request(Request::SendOnlyInvalidate(U32::take(bytes).ok_or(short)?.get()))
            }
            Opcode::RcReadRequest => Self::Request(Request::Read(reth(bytes).ok_or(short)?)),
            Opcode::RcCompareSwap => Self::Request(Request::CompareSwap(atomic_eth(bytes).ok_or(short)?)),
            Opcode::RcFetchAdd => Self::Request(Request::FetchAdd(atomic_eth(bytes).ok_or(short)?)),
            Opcode::RcReadResponseFirst => Self::Response(Response::ReadFirst(aeth(bytes)?)),
            Opcode::RcReadResponseMiddle => Self::Response(Response::ReadMiddle),
            Opcode::RcReadResponseLast => Self::Response(Response::ReadLast(aeth(bytes)?)),
            Opcode::RcReadResponseOnly => Self::Response(Response::ReadOnly(aeth(bytes)?)),
            Opcode::RcAcknowledge => Self::Response(Response::Acknowledge(aeth(bytes)?)),
            Opcode::RcAtomicAcknowledge => {
                let aeth = aeth(bytes)?;
                let original = U64::take(bytes).ok_or(short)?.get();
                Self::Response(Response::AtomicAcknowledge(aeth, original))
            }
            Opcode::UdSendOnly | Opcode::UdSendOnlyImmediate => {
                let deth = DethLayout::take(bytes).ok_or(short)?.into();
                let immediate = match opcode {
                    Opcode::UdSendOnlyImmediate => Some(Immediate::take(bytes).ok_or(short)?),
                    _ => None,
                };
                Self::Datagram(deth, immediate)
            }
            Opcode::CongestionNotification => {
                <[u8; 16]>::take(bytes).ok_or(short)?;
                Self::CongestionNotification
            }
            transfer => {
                let packet = Transfer::parse(transfer, bytes).ok_or(short)?;
                match transfer.service() {
                    Service::UnreliableConnection => Self::Unreliable(packet),
                    _ => Self::Request(Request::Transfer(packet)),
                }
            }
        })
    }

    /// Writes the extended headers to the front of `buffer`, which has place for them.
    pub(super) fn emit(&self, buffer: &mut [u8]) {
        let mut at = 0;
        let mut put = |header: &[u8]| {
            buffer[at..at + header.len()].copy_from_slice(header);
            at += header.len();
        };
        match *self {
            Self::Request(Request::Transfer(transfer)) | Self::Unreliable(transfer) => {
                if let Some(reth) = transfer.reth() {
                    put(RethLayout::from(reth).as_bytes());
                }
                if let Some(immediate) = transfer.immediate() {
                    put(&immediate);
                }
            }
            Self::Request(Request::SendLastInvalidate(rkey) | Request::SendOnlyInvalidate(rkey)) => {
                put(&rkey.to_be_bytes());
            }
            Self::Request(Request::Read(reth)) => put(RethLayout::from(reth).as_bytes()),
            Self::Request(Request::CompareSwap(atomic) | Request::FetchAdd(atomic)) => {
                put(AtomicEthLayout::from(atomic).as_bytes());
            }
            Self::Response(Response::ReadMiddle) => {}
            Self::Response(
                Response::ReadFirst(aeth)
                | Response::ReadLast(aeth)
                | Response::ReadOnly(aeth)
                | Response::Acknowledge(aeth),
            ) => put(AethLayout::from(aeth).as_bytes()),
            Self::Response(Response::AtomicAcknowledge(aeth, original)) => {
                put(AethLayout::from(aeth).as_bytes());
                put(&original.to_be_bytes());
            }
            Self::Datagram(deth, immediate) => {
                put(DethLayout::from(deth).as_bytes());
                if let Some(immediate) = immediate {
                    put(&immediate);
                }
            }
            Self::CongestionNotification => put(&[0; 16]),
        }
    }
}

/// The extended headers as one line, each after a comma.
impl fmt::Display for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let immediate = match *self {
            Self::Request(Request::Transfer(transfer)) | Self::Unreliable(transfer) => {
                if let Some(reth) = transfer.reth() {
                    write!(f, ", {reth}")?;
                }
                transfer.immediate()
            }
            Self::Request(Request::SendLastInvalidate(rkey) | Request::SendOnlyInvalidate(rkey)) => {
                return write!(f, ", invalidates 0x{rkey:08x}");
            }
            Self::Request(Request::Read(reth)) => return write!(f, ", {reth}"),
            Self::Request(Request::CompareSwap(atomic) | Request::FetchAdd(atomic)) => {
                return write!(f, ", {atomic}");
            }
            Self::Response(Response::ReadMiddle) | Self::CongestionNotification => return Ok(()),
            Self::Response(
                Response::ReadFirst(aeth)
                | Response::ReadLast(aeth)
                | Response::ReadOnly(aeth)
                | Response::Acknowledge(aeth),
            ) => return write!(f, ", {aeth}"),
            Self::Response(Response::AtomicAcknowledge(aeth, original)) => {
                return write!(f, ", {aeth}, original {original}");
            }
            Self::Datagram(deth, immediate) => {
                write!(f, ", from qp 0x{:06x}, qkey 0x{:08x}", deth.source_qpn, deth.qkey)?;
                immediate
            }
        };
        match immediate {
            Some(immediate) => write!(f, ", immediate 0x{:08x}", u32::from_be_bytes(immediate)),
            None => Ok(()),
        }
    }
}
