//! Reports of datagrams that did not arrive.

use crate::rdmap::env::Env;
use rustix::io::Errno;
use urnic_device::event::{Event, EventKind};
use urnic_wire::roce::psn_of;

/// Reports that a packet, of which perhaps only the beginning is left, did not arrive.
pub(super) fn refused(qid: u32, errno: Errno, packet: &[u8], env: &mut Env<'_>) {
    // Some routers return less of a packet.
    let Some(psn) = psn_of(packet) else {
        return;
    };
    let code = u16::try_from(errno.raw_os_error()).unwrap_or_default();
    let event = Event::new(EventKind::DatagramRefused, qid);
    env.effects.event(event.with_code(code).with_data(psn.into()));
}
