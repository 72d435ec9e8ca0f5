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
mod roce;
mod roce_unreliable;
mod runs;
mod same_device;
mod same_host;
mod sctp;
mod solicited;
mod streams;
mod unmapped;
mod virtual_time;

use crate::testing::mock::{Driver, End, assert_cqe};
use urnic_device::vocabulary::WcStatus;
use urnic_device::wqe::{Opcode, SendFlags, SendHeader};

/// Sends `size` bytes from the beginning of one end's region to that of the other's, and checks the
/// completions and the bytes.
fn send_between(from: (&Driver, &mut End), to: (&Driver, &mut End), cookie: u64, size: u32) {
    let ((sender, near), (receiver, far)) = (from, to);
    let bytes: Vec<u8> = (0..u64::from(size)).map(|b| (b * 7 + cookie) as u8).collect();
    sender.arena.write(near.region.iova, &bytes);
    receiver.arena.write(far.region.iova, &vec![0; bytes.len()]);
    far.qp.post_recv(receiver, cookie, &[far.region.sge(0, 1 << 20)]);
    near.qp.post_send(sender, cookie, &[near.region.sge(0, size)]);
    assert_cqe(&near.send_cq.await_completion(sender), cookie, WcStatus::Success);
    let received = far.recv_cq.await_completion(receiver);
    assert_cqe(&received, cookie, WcStatus::Success);
    assert_eq!(received.byte_len.get(), size);
    assert_eq!(receiver.arena.read(far.region.iova, size as usize), bytes);
}

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
