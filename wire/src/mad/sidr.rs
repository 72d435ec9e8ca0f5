//! Service ID resolution: the lookup of the queue pair of kind UD that serves a service (§12.11 of
//! the InfiniBand Architecture Specification).

use core::fmt;
use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of private data of a request.
pub const REQUEST_PRIVATE_DATA: usize = 216;
/// Bytes of private data of a reply.
pub const REPLY_PRIVATE_DATA: usize = 136;

const ADDITIONAL_INFORMATION: usize = 72;
/// The QPN is in the upper three bytes of its word.
const QPN_SHIFT: u32 = 8;

/// The service ID of a port of rdma_cm (annex A11.3.1): its port space, and the port.
pub fn service_id(port_space: u16, port: u16) -> u64 {
    u64::from(port_space) << 16 | u64::from(port)
}

/// The query for the queue pair that serves a service: SIDR_REQ, §12.11.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceRequest {
    /// Distinguishes the requests of one sender.
    pub request_id: u32,
    /// The partition.
    pub pkey: u16,
    /// The requested service.
    pub service_id: u64,
    /// For the service.
    pub private_data: [u8; REQUEST_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RequestLayout {
    request_id: U32,
    pkey: U16,
    reserved: U16,
    service_id: U64,
    private_data: [u8; REQUEST_PRIVATE_DATA],
}

impl ServiceRequest {
    pub(super) const LEN: usize = size_of::<RequestLayout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = RequestLayout {
            request_id: self.request_id.into(),
            pkey: self.pkey.into(),
            reserved: 0.into(),
            service_id: self.service_id.into(),
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<ServiceRequest> {
        let layout = RequestLayout::ref_from_bytes(body).ok()?;
        Some(ServiceRequest {
            request_id: layout.request_id.get(),
            pkey: layout.pkey.get(),
            service_id: layout.service_id.get(),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for ServiceRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "SIDR_REQ 0x{:08x} for service 0x{:016x}",
            self.request_id, self.service_id
        )
    }
}

/// The status of a reply (table of §12.11.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceStatus(pub u8);

impl ServiceStatus {
    /// The reply names a queue pair.
    pub const VALID: ServiceStatus = ServiceStatus(0);
    /// Nothing listens for this service.
    pub const UNSUPPORTED: ServiceStatus = ServiceStatus(1);
    /// The service refused the request.
    pub const REJECTED: ServiceStatus = ServiceStatus(2);
}

impl fmt::Display for ServiceStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("valid"),
            1 => f.write_str("service not supported"),
            2 => f.write_str("rejected"),
            3 => f.write_str("no queue pair"),
            4 => f.write_str("redirected"),
            5 => f.write_str("version not supported"),
            other => write!(f, "status {other}"),
        }
    }
}

/// The answer: the queue pair that serves a service, or the reason why there is none. SIDR_REP,
/// §12.11.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceReply {
    /// The request ID of the request.
    pub request_id: u32,
    /// Whether the other fields are valid.
    pub status: ServiceStatus,
    /// The queue pair, 24 bits.
    pub qpn: u32,
    /// The service of the request.
    pub service_id: u64,
    /// The Q_Key for datagrams to the queue pair.
    pub qkey: u32,
    /// From the service.
    pub private_data: [u8; REPLY_PRIVATE_DATA],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReplyLayout {
    request_id: U32,
    status: u8,
    /// Length of the additional information.
    additional_len: u8,
    reserved: U16,
    /// QPN, then 8 bits reserved.
    qpn: U32,
    service_id: U64,
    qkey: U32,
    additional: [u8; ADDITIONAL_INFORMATION],
    private_data: [u8; REPLY_PRIVATE_DATA],
}

impl ServiceReply {
    pub(super) const LEN: usize = size_of::<ReplyLayout>();

    pub(super) fn emit(&self, body: &mut [u8]) {
        let layout = ReplyLayout {
            request_id: self.request_id.into(),
            status: self.status.0,
            additional_len: 0,
            reserved: 0.into(),
            qpn: (self.qpn << QPN_SHIFT).into(),
            service_id: self.service_id.into(),
            qkey: self.qkey.into(),
            additional: [0; ADDITIONAL_INFORMATION],
            private_data: self.private_data,
        };
        body.copy_from_slice(layout.as_bytes());
    }

    pub(super) fn parse(body: &[u8]) -> Option<ServiceReply> {
        let layout = ReplyLayout::ref_from_bytes(body).ok()?;
        Some(ServiceReply {
            request_id: layout.request_id.get(),
            status: ServiceStatus(layout.status),
            qpn: layout.qpn.get() >> QPN_SHIFT,
            service_id: layout.service_id.get(),
            qkey: layout.qkey.get(),
            private_data: layout.private_data,
        })
    }
}

impl fmt::Display for ServiceReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "SIDR_REP 0x{:08x}, {}: service 0x{:016x} is qp 0x{:06x}, qkey 0x{:08x}",
            self.request_id, self.status, self.service_id, self.qpn, self.qkey
        )
    }
}
