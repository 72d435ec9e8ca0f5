//! The streams of a device before they belong to queue pairs: the interface between start-up,
//! which does no I/O, and the engines that make connections.

#[cfg(test)]
pub(crate) mod testing;

use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;

use crate::mpa_startup::{Close, Negotiated, ResponderEvent};
use crate::startup::{Failure, Fault, Responder};
use urnic_config::Llp;

/// The state of a stream's receive buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inbox {
    /// No bytes yet.
    Empty,
    /// The buffer has bytes.
    Bytes,
    /// The stream ended.
    End,
}

/// A device's streams, before they belong to queue pairs.
pub trait Carrier {
    /// Sends bytes of an MPA frame, or a message of session control.
    fn send(&mut self, sid: u32, bytes: &[u8]) -> Result<(), Errno>;
    /// Requests at most `len` bytes. The device posts an event when some of them have arrived: over
    /// SCTP, one message.
    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno>;
    /// The state of a stream's receive buffer, whether a receive is outstanding or not.
    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno>;
    /// Closes a stream. Later events of it are ignored.
    fn close(&mut self, sid: u32, how: Close);
}

/// The parameters with which a stream is attached to a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attachment {
    /// The device's number of the queue pair.
    pub qid: u32,
    /// The result of start-up; `None`: the queue pair is its own peer.
    pub negotiated: Option<Negotiated>,
    /// Maximum number of inbound Reads.
    pub ird: u16,
    /// Maximum number of outbound Reads of the program.
    pub ord: u16,
    /// Maximum number of outbound Reads that the peer accepts, the device's own included; 0 =
    /// unknown.
    pub ord_limit: u16,
    /// Requests complete when the peer has placed or delivered them.
    pub delivered: bool,
    /// The parameters that depend on the engine that made the connection.
    pub terms: Terms,
}

/// The parameters that depend on the engine that made a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Terms {
    /// A native connection. If requests complete when they are delivered, the peer may confirm the
    /// same way, and needs one Read more than `ird` for it.
    Native {
        /// The queue pair is of kind UC: nothing waits for its peer.
        unreliable: bool,
        /// The time that a Send of the peer waits for a posted receive; `None` = no limit.
        rnr_timeout: Option<Duration>,
    },
    /// A connection of rdma_cm.
    RdmaCm {
        /// The Local ACK Timeout: `RDMA_OPTION_ID_ACK_TIMEOUT`, or the default.
        ack_timeout: u8,
        /// The device accepts one inbound Read more than `ird`, for the peer's confirmations of
        /// delivery.
        spare_read: bool,
        /// Only the negotiated RTR message opens the fence.
        strict_rtr: bool,
        /// The maximum time that a Send of the peer waits for a posted receive; zero: only for the
        /// first one.
        rnr_grace: Duration,
    },
}

/// An engine that makes connections. It owns streams, listeners and queue pairs, and acts on `W`.
pub trait StreamOwner<W> {
    /// Whether a queue pair is connected by this owner.
    fn has_queue_pair(&self, qid: u32) -> bool;
    /// Whether a listener belongs to this owner.
    fn has_listener(&self, lid: u32) -> bool;
    /// Whether a stream in start-up belongs to this owner.
    fn has_stream(&self, sid: u32) -> bool;
    /// A queue pair received its first FPDU: the fence opens.
    fn first_fpdu(&mut self, world: &mut W, qid: u32);
    /// A listener accepted a stream.
    fn arrived(&mut self, world: &mut W, lid: u32, sid: u32);
    /// A stream is connected, or the connection attempt failed.
    fn connected(&mut self, world: &mut W, sid: u32, outcome: Result<(), Errno>);
    /// Some of the requested bytes of a stream arrived, or none if the peer closed it; or an error.
    fn received(&mut self, world: &mut W, sid: u32, bytes: Result<&[u8], Errno>);
    /// A stream ended.
    fn closed(&mut self, world: &mut W, sid: u32);
}

/// Ports that are tried if the device may choose one, and it must be free over two lower layers.
const PORTS_TO_TRY: u32 = 16;

/// Listens over these lower layers of `device`, at one number of port. Returns the listeners, in
/// the order of `llps`, and the port. `listen` opens one, and `unlisten` closes it.
///
/// # Errors
/// Those of `listen`; no listener is left then.
pub(crate) fn listen_over<D: ?Sized>(
    device: &mut D,
    llps: &[Llp],
    local: SocketAddr,
    listen: impl Fn(&mut D, Llp, SocketAddr) -> Result<(u32, u16), Errno>,
    unlisten: impl Fn(&mut D, u32),
) -> Result<(Vec<(u32, Llp)>, u16), Errno> {
    let mut try_once = || {
        let (mut opened, mut at) = (Vec::new(), local);
        for llp in llps {
            match listen(device, *llp, at) {
                Ok((lid, port)) => {
                    opened.push((lid, *llp));
                    at.set_port(port);
                }
                Err(errno) => {
                    let is_first = opened.is_empty();
                    opened.into_iter().for_each(|(lid, _)| unlisten(device, lid));
                    return Err((errno, is_first));
                }
            }
        }
        Ok((opened, at.port()))
    };
    for _ in 1..PORTS_TO_TRY {
        match try_once() {
            // Another program has the chosen port over this lower layer.
            Err((Errno::ADDRINUSE, false)) if local.port() == 0 => {}
            tried => return tried.map_err(|(errno, _)| errno),
        }
    }
    try_once().map_err(|(errno, _)| errno)
}

/// The next step after received bytes of a Request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestProgress {
    /// The Request is complete: [`Responder::request`].
    Complete,
    /// The Request is incomplete; its next bytes are requested.
    Incomplete,
    /// The Request is invalid: close the stream in this way.
    Invalid(Fault, Close),
    /// The Request cannot arrive: reset the stream.
    Lost,
}

/// Takes bytes of a Request. Requests missing bytes from the carrier, and sends the error frame
/// that an invalid Request requires.
pub fn receive_request<C: Carrier + ?Sized>(
    responder: &mut Responder,
    carrier: &mut C,
    sid: u32,
    bytes: Result<&[u8], Errno>,
) -> RequestProgress {
    match responder.take(bytes) {
        Ok(Some(ResponderEvent::Request)) => RequestProgress::Complete,
        Ok(_) => match carrier.receive(sid, responder.bytes_needed()) {
            Ok(()) => RequestProgress::Incomplete,
            Err(_) => RequestProgress::Lost,
        },
        Err(failure) => {
            tracing::debug!("stream {sid}: {failure}");
            let Failure {
                fault,
                close,
                final_frame,
                ..
            } = failure;
            if let Some(frame) = final_frame {
                let _ = carrier.send(sid, &frame);
            }
            RequestProgress::Invalid(fault, close)
        }
    }
}
