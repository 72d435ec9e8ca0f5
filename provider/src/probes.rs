//! Static probes (USDT) at the program's side of the queues: `post_send`, `post_recv`, `doorbell`,
//! `poll` and `qp_state` of the provider `urnic`. A probe is one `nop` until a tracer attaches to
//! it. The device has its own probes (`urnic_model`); docs/guide/probes.md lists all of them.

use probe::probe;

/// A request was written to a send queue.
#[inline(always)]
pub(crate) fn post_send(qpn: u32, wr_id: u64, opcode: u8) {
    probe!(urnic, post_send, qpn, wr_id, opcode);
}

/// A request was written to a receive queue. `qpn`: 0 for a shared queue.
#[inline(always)]
pub(crate) fn post_recv(qpn: u32, wr_id: u64) {
    probe!(urnic, post_recv, qpn, wr_id);
}

/// A doorbell tells the device of requests up to this index of the send queue.
#[inline(always)]
pub(crate) fn doorbell(qpn: u32, index: u32) {
    probe!(urnic, doorbell, qpn, index);
}

/// The program got a completion.
#[inline(always)]
pub(crate) fn poll(qpn: u32, wr_id: u64, status: u8, bytes: u32) {
    probe!(urnic, poll, qpn, wr_id, status, bytes);
}

/// The program changed the state of a queue pair.
#[inline(always)]
pub(crate) fn qp_state(qpn: u32, state: u32) {
    probe!(urnic, qp_state, qpn, state);
}
