//! The device as its driver sees it.

#[cfg(target_arch = "x86_64")]
mod alone;
mod backlog;
mod commands;
mod completions;
mod datagrams;
#[cfg(target_arch = "x86_64")]
mod direct;
mod fill;
mod gather;
mod large;
mod nonsense;
mod overflow;
mod own_peer;
mod pairs;
mod revocation;
mod runs;
mod same_device;
mod same_host;
mod solicited;
mod streams;
mod unmapped;
mod virtual_time;

use crate::testing::mock::End;
use urnic_device::wqe::{Opcode, SendFlags, SendHeader};

/// A signalled request that accesses the region of `end`, the peer's, from its beginning.
fn one_sided(opcode: Opcode, cookie: u64, end: &End) -> SendHeader {
    SendHeader {
        opcode: opcode as u8,
        flags: SendFlags::SIGNALED.bits(),
        cookie: cookie.into(),
        remote_offset: end.region.iova.into(),
        stag: end.region.stag.into(),
        ..SendHeader::default()
    }
}
