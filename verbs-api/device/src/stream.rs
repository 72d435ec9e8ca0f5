//! Streams: the offload of TCP, and of SCTP.
//!
//! The device owns TCP and SCTP. A stream begins in *streaming mode*, in which the host runs MPA
//! start-up over it (RFC 5044 §7, RFC 6581) with small sends and receives of at most n bytes, so
//! that no FPDU byte ever reaches the host. The host then *attaches* the stream to a queue pair
//! with the negotiated parameters, and the device frames, checks, places and completes on its own:
//! the split of RFC 6581 §4.4.3.

use crate::layouts::layouts;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most bytes of one streaming-mode send or receive: an MPA frame with all its private data (RFC
/// 5044 §7.1.1).
pub const MAX_STREAMING: u32 = 20 + 512;

layouts! {
    /// An IP address and TCP port.
    Endpoint {
        /// The address; IPv4 as IPv4-mapped IPv6 (`::ffff:a.b.c.d`), network order. All zero: any.
        ip: [u8; 16],
        /// TCP port; 0 = any.
        port: U16,
        /// Reserved, 0.
        reserved: U16,
        /// IPv6 scope of link-local addresses.
        scope: U32,
    }
    /// An entry of the address table.
    Address {
        /// The address, as in [`Endpoint`].
        ip: [u8; 16],
        /// IPv6 scope.
        scope: U32,
        /// Prefix length in bits, of the IPv4 or IPv6 address.
        prefix_len: U32,
    }
    /// Arguments of `StreamConnect`.
    Connect {
        /// The address to connect to.
        remote: Endpoint,
        /// From where; zero = the device chooses.
        local: Endpoint,
        /// The IP header's traffic class (IPv4: TOS byte) of all it sends, 0 to 255.
        traffic_class: U32,
        /// The lower layer: [`llp`].
        llp: U32,
    }
    /// Arguments of `StreamListen`.
    Listen {
        /// The local address; an all-zero address listens on all, IPv4 and IPv6.
        local: Endpoint,
        /// Connections that may wait.
        backlog: U32,
        /// Traffic class of the accepted streams, as in [`Connect`], and [`listen`]'s flags.
        traffic_class: U32,
    }
    /// Result of `StreamListen`.
    Listening {
        /// Number of the listener.
        lid: U32,
        /// The port it got.
        port: U32,
    }
    /// The output of `StreamQuery`.
    Endpoints {
        /// Ours.
        local: Endpoint,
        /// The peer's.
        remote: Endpoint,
        /// The available input: [`input`].
        input: U32,
    }
    /// Arguments of `StreamReceive`.
    Receive {
        /// The stream.
        sid: U32,
        /// Bytes with which the receive ends: as soon as this many have arrived, with all that
        /// have; 0 = when the output buffer is full.
        least: U32,
    }
    /// Arguments of `StreamClose`.
    Close {
        /// The stream.
        sid: U32,
        /// 1 = reset (RST); 0 = orderly (FIN).
        abort: U32,
    }
    /// Arguments of `BindDatagrams`.
    BindDatagrams {
        /// The local address; an all-zero address binds all, IPv4 and IPv6; port 0 = the device
        /// chooses.
        local: Endpoint,
        /// [`bind`] flags.
        flags: U32,
        /// Reserved, 0.
        reserved: U32,
    }
    /// Result of `BindDatagrams`.
    DatagramPort {
        /// Number of the bound port.
        id: U32,
        /// The UDP port.
        port: U32,
    }
    /// Arguments of `AttachMulticast` and `DetachMulticast`.
    Multicast {
        /// The group and the UDP port to which its datagrams go.
        group: Endpoint,
        /// The queue pair, of kind UD.
        qid: U32,
        /// Index in the address table: the group is joined on the network of that address.
        source: U32,
    }
    /// Arguments of `ConnectPath`: the attributes that `ibv_modify_qp` has at the change to RTR.
    /// The queue pair speaks RoCE v2 from then on, until it is reset.
    Path {
        /// The peer's address; its packets go to UDP port 4791.
        remote: Endpoint,
        /// The queue pair, of kind RC or UC, in the state INIT.
        qid: U32,
        /// Index of the own address in the address table.
        source: U32,
        /// The number of the peer's queue pair, 24 bits.
        remote_qpn: U32,
        /// PSN of the peer's first packet, 24 bits.
        psn: U32,
        /// Path MTU in bytes: 256, 512, 1024, 2048 or 4096.
        mtu: U32,
        /// Code of the time after which the peer tries again if no receive is posted, 0 to 31.
        min_rnr_timer: U32,
        /// Reads and atomic operations of the peer that may wait for their answers.
        reads: U32,
        /// The IP header's traffic class of all it sends, 0 to 255.
        traffic_class: U32,
    }
    /// Arguments of `StartPath`: the attributes that `ibv_modify_qp` has at the change to RTS.
    Retries {
        /// The queue pair, in the state RTR, with a path.
        qid: U32,
        /// PSN of the first packet, 24 bits.
        psn: U32,
        /// Code of the Local ACK Timeout, 0 to 31: 4.096 us times two to this power; 0 = none.
        timeout: U32,
        /// Retries after losses and timeouts in succession, 0 to 7.
        retry_cnt: U32,
        /// Retries in succession after the peer had no receive posted, 0 to 7; 7 = no limit.
        rnr_retry: U32,
        /// Most outstanding Reads and atomic operations.
        reads: U32,
    }
    /// Arguments of `StreamAttach` and `LoopbackAttach`.
    Attach {
        /// The stream; it has no outstanding receive.
        sid: U32,
        /// The queue pair, in the RTR or RTS state.
        qid: U32,
        /// [`attach`] flags.
        flags: U32,
        /// Most outstanding outbound Reads, as negotiated.
        ord: U32,
        /// Most outstanding inbound Reads, as negotiated.
        ird: U32,
        /// First MSN of untagged queue 0 towards the peer: 1 (RFC 5041 §4.3).
        first_msn: U32,
        /// [`rtr`] to send at once, as initiator; 0 = none.
        rtr_send: U32,
        /// [`rtr`] expected first, as responder; 0 = none.
        rtr_expect: U32,
        /// With [`attach::PEER_MAY_CLOSE`]: posted receives are flushed this time after the peer's
        /// FIN, milliseconds. In any case: requests that wait for the peer fail this time after its
        /// FIN, if a message before the FIN waits for a receive.
        fin_grace_ms: U32,
        /// Most outstanding outbound Reads that the peer accepts, the device's own included; 0 = as
        /// many as `ord`.
        ord_limit: U32,
        /// Error to report to the peer by Terminate right away instead of starting (its control
        /// word, RFC 6581 §9); 0 = none.
        terminate: U64,
    }
}

/// Flags of [`Listen`], in the same word as the traffic class.
pub mod listen {
    /// An all-zero address listens on all IPv6 addresses and leaves the port to others on IPv4.
    pub const IPV6_ONLY: u32 = 256;
    /// Sessions over [SCTP](super::llp::SCTP) instead of TCP connections.
    pub const SCTP: u32 = 512;
}

/// Values of `Connect::llp`: the protocol that carries DDP.
pub mod llp {
    /// MPA over TCP (RFC 5044).
    pub const TCP: u32 = 0;
    /// SCTP (RFC 5043), in UDP (RFC 6951) or in IP, which the device's configuration decides; with
    /// feature [`SCTP`](crate::command::features::SCTP). The stream is a pair of SCTP streams, and
    /// what the host sends and receives in streaming mode are messages of session control, each
    /// whole: the device adds and removes their DDP-SSN. The port of the address is SCTP's, and
    /// that of UDP.
    pub const SCTP: u32 = 1;
}

/// Flags of [`BindDatagrams`].
pub mod bind {
    /// Like [`IPV6_ONLY`](super::listen::IPV6_ONLY) of listeners.
    pub const IPV6_ONLY: u32 = 1;
    /// Each datagram that is known not to arrive causes an event `DatagramRefused`.
    pub const REPORT_REFUSED: u32 = 2;
    /// The port's number is that of services of RoCE's connection manager. The device's queue pair
    /// 1 takes the REQ and SIDR_REQ messages to the local address whose service IDs end with it (16
    /// bits), until the port is closed, or the queue pair that got it destroyed. Other devices of
    /// the user that share UDP port 4791 pass these on. Queue pair 1 must exist before, or this has
    /// no effect.
    pub const SERVICE: u32 = 4;
}

/// Flags of [`Attach`].
pub mod attach {
    /// We sent the MPA Request.
    pub const INITIATOR: u32 = 1;
    /// CRCs are generated and checked (RFC 5044 §7.1.1).
    pub const CRC: u32 = 2;
    /// Insert markers into sent data.
    pub const MARKERS_TX: u32 = 4;
    /// Expect markers in received data.
    pub const MARKERS_RX: u32 = 8;
    /// A Send that finds no receive posted waits instead of failing: the stream is not read during
    /// this time.
    pub const STALL_ON_EMPTY_RQ: u32 = 16;
    /// The peer's FIN with nothing outstanding leaves the queue pair in RTS.
    pub const PEER_MAY_CLOSE: u32 = 32;
    /// Another first message than the expected RTR is an error, which a Terminate reports.
    pub const STRICT_RTR: u32 = 64;
    /// We received the MPA Request, and may nevertheless send first: the peer has shown that it is
    /// ready.
    pub const FENCE_OPEN: u32 = 128;
    /// Like [`STALL_ON_EMPTY_RQ`], but only until the queue pair has taken its first receive.
    pub const STALL_AT_FIRST: u32 = 256;
    /// Sends, Writes and immediates complete when the peer has placed or delivered them, which the
    /// answer to a later Read of the same queue pair shows (RFC 5040 §5.5). Where the program posts
    /// none, the device sends Reads of length zero, until the peer shows that it confirms unasked.
    /// Without this flag they complete when the stream has taken them.
    pub const DELIVERED: u32 = 512;
    /// The device accepts one inbound Read more than `ird`, for a peer that attached with
    /// [`DELIVERED`].
    pub const SPARE_READ: u32 = 1024;
}

/// Values of `Endpoints::input`: the result that a receive would have.
pub mod input {
    /// Nothing yet.
    pub const NONE: u32 = 0;
    /// Bytes.
    pub const BYTES: u32 = 1;
    /// The end: the peer sent FIN or RST.
    pub const END: u32 = 2;
}

/// Values of `QpStatus::attached`.
pub mod attached {
    /// No stream is attached.
    pub const NONE: u32 = 0;
    /// A stream is attached.
    pub const STREAM: u32 = 1;
    /// A stream is attached whose bytes pass through memory that the device shares with the peer's.
    pub const MEMORY: u32 = 2;
    /// A stream of SCTP is attached.
    pub const SCTP: u32 = 3;
    /// The queue pair has a path of RoCE v2.
    pub const ROCE: u32 = 4;
}

/// The ready-to-receive indications of RFC 6581 §9.2.
pub mod rtr {
    /// None.
    pub const NONE: u32 = 0;
    /// Zero-length Send (flag B).
    pub const SEND: u32 = 1;
    /// Zero-length RDMA Write (flag C).
    pub const WRITE: u32 = 2;
    /// Zero-length RDMA Read (flag D).
    pub const READ: u32 = 3;
}

impl From<SocketAddr> for Endpoint {
    fn from(address: SocketAddr) -> Endpoint {
        let scope = match address {
            SocketAddr::V4(_) => 0,
            SocketAddr::V6(a) => a.scope_id(),
        };
        Endpoint {
            ip: octets_of(address.ip()),
            port: address.port().into(),
            reserved: 0.into(),
            scope: scope.into(),
        }
    }
}

impl From<Endpoint> for SocketAddr {
    fn from(endpoint: Endpoint) -> SocketAddr {
        let port = endpoint.port.get();
        match ip_of(&endpoint.ip) {
            IpAddr::V4(ip) => SocketAddrV4::new(ip, port).into(),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, endpoint.scope.get()).into(),
        }
    }
}

/// The address in the form that [`ip_of`] reads.
pub fn octets_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The IP address in 16 bytes of an [`Endpoint`] or a GID.
pub fn ip_of(bytes: &[u8; 16]) -> IpAddr {
    let v6 = Ipv6Addr::from(*bytes);
    v6.to_ipv4_mapped()
        .map_or(IpAddr::V6(v6), |v4: Ipv4Addr| IpAddr::V4(v4))
}

const _: () = {
    use std::mem::size_of;
    assert!(size_of::<Endpoint>() == 24);
    assert!(size_of::<Address>() == 24);
    assert!(size_of::<Connect>() == 56);
    assert!(size_of::<Endpoints>() == 52);
    assert!(size_of::<Attach>() == 48);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_name_both_families() {
        for text in ["10.1.2.3:4791", "[2001:db8::1]:20049", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(SocketAddr::from(Endpoint::from(address)), address);
        }
    }
}
