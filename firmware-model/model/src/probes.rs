//! Static probes (USDT) of the device: `sent`, `received` and `complete` of the provider `urnic`. A
//! probe is one `nop` until a tracer attaches to it; docs/guide/probes.md lists all of them.

use probe::probe;

/// A connection has taken this many bytes of a queue pair.
#[inline(always)]
pub(crate) fn sent(qpn: u32, bytes: u64) {
    probe!(urnic, sent, qpn, bytes);
}

/// This many bytes of a connection have come.
#[inline(always)]
pub(crate) fn received(qpn: u32, bytes: usize) {
    probe!(urnic, received, qpn, bytes);
}

/// A completion is in its queue.
#[inline(always)]
pub(crate) fn complete(qpn: u32, status: u8, bytes: u32) {
    probe!(urnic, complete, qpn, status, bytes);
}
