//! The request for a connection, REQ (§12.6.5 of the InfiniBand Architecture Specification).

use super::bits::{bits, lower8, placed, upper24, word24};
use super::path::{ConnectionPath, PathLayout};
use core::fmt;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of private data of a request for a connection. Those of rdma_cm begin with an
/// [`IpAddressing`](super::IpAddressing).
pub const CONNECT_PRIVATE_DATA: usize = 92;

/// The kind of queue pair that a connection is for (§12.7.6), 2 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportService(pub u8);

impl TransportService {
    /// Reliable connection.
    pub const RC: TransportService = TransportService(0);
    /// Unreliable connection.
    pub const UC: TransportService = TransportService(1);
}

impl fmt::Display for TransportService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("RC"),
            1 => f.write_str("UC"),
            2 => f.write_str("RD"),
            other => write!(f, "service {other}"),
        }
    }
}

/// The request for a connection: REQ. "Local" is its sender's end.
///
/// A number of n bits is a `u8` or `u32` whose lower n bits are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectRequest {
    /// The sender's number of the connection.
    pub local_comm_id: u32,
    /// The requested service.
    pub service_id: u64,
    /// GUID of the sender's channel adapter.
    pub ca_guid: u64,
    /// Q_Key; reliable connections have none.
    pub qkey: u32,
    /// The sender's queue pair, 24 bits.
    pub qpn: u32,
    /// Number of the recipient's Reads and atomics that the sender accepts at a time.
    pub responder_resources: u8,
    /// The sender's end-to-end context, 24 bits: of the reliable datagram service only.
    pub local_eecn: u32,
    /// Number of Reads and atomics that the sender will have outstanding.
    pub initiator_depth: u8,
    /// The recipient's end-to-end context, 24 bits.
    pub remote_eecn: u32,
    /// The time in which the recipient must answer: 4.096 µs · 2^n, n of 5 bits.
    pub remote_response_timeout: u8,
    /// The kind of queue pair.
    pub transport_service: TransportService,
    /// The sender implements end-to-end flow control.
    pub flow_control: bool,
    /// The first PSN that the recipient sends, 24 bits.
    pub starting_psn: u32,
    /// The time in which the sender will answer: 4.096 µs · 2^n, n of 5 bits.
    pub local_response_timeout: u8,
    /// Retries of requests that are not acknowledged, 3 bits.
    pub retry_count: u8,
    /// The partition.
    pub pkey: u16,
    /// Path MTU: `enum ibv_mtu`, 4 bits.
    pub path_mtu: u8,
    /// A reliable datagram channel exists.
    pub rdc_exists: bool,
    /// Retries while no receive is posted, 3 bits; 7: no limit.
    pub rnr_retry_count: u8,
    /// Number of times that either communication manager repeats a message, 4 bits.
    pub max_cm_retries: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// Extended transport type, 3 bits: 0, or XRC.
    pub extended_transport: u8,
    /// The path.
    pub primary_path: ConnectionPath,
    /// The path to fail over to; zeros if there is none.
    pub alternate_path: ConnectionPath,
    /// For the service.
    pub private_data: [u8; CONNECT_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    local_comm_id: U32,
    reserved: U32,
    service_id: U64,
    ca_guid: U64,
    reserved2: U32,
    qkey: U32,
    /// QPN (24), responder resources (8).
    qpn: U32,
    /// Local EECN (24), initiator depth (8).
    local_eecn: U32,
    /// Remote EECN (24), remote response timeout (5), transport service (2), flow control (1).
    remote_eecn: U32,
    /// Starting PSN (24), local response timeout (5), retry count (3).
    psn: U32,
    pkey: U16,
    /// Path MTU (4), RDC exists (1), RNR retry count (3).
    mtu: u8,
    /// Maximum CM retries (4), SRQ (1), extended transport type (3).
    retries: u8,
    primary_path: PathLayout,
    alternate_path: PathLayout,
    private_data: [u8; CONNECT_PRIVATE_DATA],
}

impl ConnectRequest {
    pub(super) const LEN: usize = size_of::<Layout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let service = placed(self.remote_response_timeout, 3, 5)
            | placed(self.transport_service.0, 1, 2)
            | placed(self.flow_control.into(), 0, 1);
        let timeout = placed(self.local_response_timeout, 3, 5) | placed(self.retry_count, 0, 3);
        let layout = Layout {
            local_comm_id: self.local_comm_id.into(),
            reserved: 0.into(),
            service_id: self.service_id.into(),
            ca_guid: self.ca_guid.into(),
            reserved2: 0.into(),
            qkey: self.qkey.into(),
            qpn: word24(self.qpn, self.responder_resources),
            local_eecn: word24(self.local_eecn, self.initiator_depth),
            remote_eecn: word24(self.remote_eecn, service),
            psn: word24(self.starting_psn, timeout),
            pkey: self.pkey.into(),
            mtu: placed(self.path_mtu, 4, 4)
                | placed(self.rdc_exists.into(), 3, 1)
                | placed(self.rnr_retry_count, 0, 3),
            retries: placed(self.max_cm_retries, 4, 4)
                | placed(self.srq.into(), 3, 1)
                | placed(self.extended_transport, 0, 3),
            primary_path: self.primary_path.layout(),
            alternate_path: self.alternate_path.layout(),
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<ConnectRequest> {
        let layout = Layout::ref_from_bytes(body).ok()?;
        let (service, timeout) = (lower8(layout.remote_eecn), lower8(layout.psn));
        Some(ConnectRequest {
            local_comm_id: layout.local_comm_id.get(),
            service_id: layout.service_id.get(),
            ca_guid: layout.ca_guid.get(),
            qkey: layout.qkey.get(),
            qpn: upper24(layout.qpn),
            responder_resources: lower8(layout.qpn),
            local_eecn: upper24(layout.local_eecn),
            initiator_depth: lower8(layout.local_eecn),
            remote_eecn: upper24(layout.remote_eecn),
            remote_response_timeout: bits(service, 3, 5),
            transport_service: TransportService(bits(service, 1, 2)),
            flow_control: bits(service, 0, 1) == 1,
            starting_psn: upper24(layout.psn),
            local_response_timeout: bits(timeout, 3, 5),
            retry_count: bits(timeout, 0, 3),
            pkey: layout.pkey.get(),
            path_mtu: bits(layout.mtu, 4, 4),
            rdc_exists: bits(layout.mtu, 3, 1) == 1,
            rnr_retry_count: bits(layout.mtu, 0, 3),
            max_cm_retries: bits(layout.retries, 4, 4),
            srq: bits(layout.retries, 3, 1) == 1,
            extended_transport: bits(layout.retries, 0, 3),
            primary_path: ConnectionPath::of(&layout.primary_path),
            alternate_path: ConnectionPath::of(&layout.alternate_path),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for ConnectRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "REQ 0x{:08x} for service 0x{:016x}: {} qp 0x{:06x}, psn 0x{:06x}, mtu code {}, depths {} in {} out",
            self.local_comm_id,
            self.service_id,
            self.transport_service,
            self.qpn,
            self.starting_psn,
            self.path_mtu,
            self.responder_resources,
            self.initiator_depth
        )
    }
}
