//! The path of a connection, in a request for it (§12.7 of the InfiniBand Architecture
//! Specification).

use super::bits::{bits, placed};
use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The LID in a path whose ends the GIDs name (§12.7.10): RoCE has no LIDs.
pub const PERMISSIVE_LID: u16 = 0xffff;

const FLOW_LABEL_SHIFT: u32 = 12;
const RATE_MASK: u32 = 0x3f;

/// A path between the ends of a connection. The local end is the sender's of the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConnectionPath {
    /// LID of the sender's port, or [`PERMISSIVE_LID`].
    pub local_lid: u16,
    /// LID of the recipient's port, or [`PERMISSIVE_LID`].
    pub remote_lid: u16,
    /// GID of the sender's port.
    pub local_gid: [u8; 16],
    /// GID of the recipient's port.
    pub remote_gid: [u8; 16],
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Packet rate: a code of 6 bits.
    pub packet_rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Both ends are in one subnet.
    pub subnet_local: bool,
    /// Local ACK Timeout: 4.096 µs · 2^n, n of 5 bits.
    pub ack_timeout: u8,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct PathLayout {
    local_lid: U16,
    remote_lid: U16,
    local_gid: [u8; 16],
    remote_gid: [u8; 16],
    /// Flow label (20), reserved (6), packet rate (6).
    flow: U32,
    traffic_class: u8,
    hop_limit: u8,
    /// Service level (4), subnet local (1), reserved (3).
    level: u8,
    /// Local ACK Timeout (5), reserved (3).
    timeout: u8,
}

const _: () = assert!(size_of::<PathLayout>() == 44);

impl ConnectionPath {
    pub(super) fn layout(&self) -> PathLayout {
        PathLayout {
            local_lid: self.local_lid.into(),
            remote_lid: self.remote_lid.into(),
            local_gid: self.local_gid,
            remote_gid: self.remote_gid,
            flow: (self.flow_label << FLOW_LABEL_SHIFT | u32::from(self.packet_rate) & RATE_MASK).into(),
            traffic_class: self.traffic_class,
            hop_limit: self.hop_limit,
            level: placed(self.service_level, 4, 4) | placed(self.subnet_local.into(), 3, 1),
            timeout: placed(self.ack_timeout, 3, 5),
        }
    }

    pub(super) fn of(layout: &PathLayout) -> ConnectionPath {
        ConnectionPath {
            local_lid: layout.local_lid.get(),
            remote_lid: layout.remote_lid.get(),
            local_gid: layout.local_gid,
            remote_gid: layout.remote_gid,
            flow_label: layout.flow.get() >> FLOW_LABEL_SHIFT,
            packet_rate: (layout.flow.get() & RATE_MASK) as u8,
            traffic_class: layout.traffic_class,
            hop_limit: layout.hop_limit,
            service_level: bits(layout.level, 4, 4),
            subnet_local: bits(layout.level, 3, 1) == 1,
            ack_timeout: bits(layout.timeout, 3, 5),
        }
    }
}
