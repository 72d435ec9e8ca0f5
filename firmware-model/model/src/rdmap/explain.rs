//! The log line about a request that is refused: one line for a connection, which ends by it.

use super::requester::Flight;
use super::requester::Requester;
use super::terminate::{OffendingRequest, Received};
use crate::log_limit::LogLimit;
use crate::memory::{MemoryAccess, Need};
use crate::stream::{Ends, Stream};
use crate::transport::Env;
use rustix::io::Errno;
use std::time::Duration;
use urnic_device::vocabulary::{Access, WcStatus};
use urnic_device::wqe::Opcode;
use urnic_wire::ddp::Header;
use urnic_wire::rdmap::{Control, Opcode as Message, Terminate, TerminateError, check_placement};

static LIMIT: LogLimit = LogLimit::new("refused requests");

/// The text that names the queue pair and its connection.
fn subject(env: &Env<'_>, stream: &dyn Stream) -> String {
    let Ends { local, remote } = stream.ends();
    match remote.port() {
        0 => format!("qp {:#x} (no connection)", env.qp.label),
        _ => format!("qp {:#x} ({local} to {remote})", env.qp.label),
    }
}

/// Logs that this side refuses a message of the peer by this Terminate, or ends the connection for
/// another reason.
#[cold]
pub(super) fn refused_here(terminate: &Terminate<'_>, rights: Access, env: &Env<'_>, stream: &dyn Stream) {
    if !LIMIT.may_say(env.now.get()) {
        return;
    }
    let memory = env.memory;
    let error = terminate
        .error()
        .map_or_else(String::new, |error| error.to_string());
    let subject = subject(env, stream);
    let Some((what, memory_of)) = message_of(terminate) else {
        tracing::warn!("{subject}: ends the connection: {error}");
        return;
    };
    let Some(named) = memory_of else {
        tracing::warn!("{subject}: refused the peer's {what}: {error}");
        return;
    };
    let MemoryAccess {
        stag, offset, len, ..
    } = named;
    let (right, name) = named.need.right();
    let is_permitted = memory.check(env.qp.accessor(), named).is_ok();
    let reason = match is_permitted && !rights.contains(right) {
        true => format!("the queue pair's qp_access_flags lack {name}"),
        false => memory.explain(env.qp.accessor(), named),
    };
    tracing::warn!(
        "{subject}: refused the peer's {what} of {len} B at {offset:#x}, STag {stag:#010x}: {reason}"
    );
}

/// The message that a Terminate refuses, and the memory that it names, if that is at fault.
fn message_of(terminate: &Terminate<'_>) -> Option<(String, Option<MemoryAccess>)> {
    let (header, _) = Header::parse(terminate.ddp_header?).ok()?;
    let Ok(Control { opcode }) = Control::parse(header.rsvd_ulp()) else {
        // The error says what is wrong with its version or opcode.
        return Some((format!("message{}", place_of(&header)), None));
    };
    if check_placement(opcode, &header).is_err() {
        return Some((format!("{}{}", message_name(opcode), place_of(&header)), None));
    }
    let segment_len = usize::from(terminate.segment_length.unwrap_or(0));
    let payload = segment_len.saturating_sub(header.buffer_len());
    let named = match (header, terminate.read_request) {
        (Header::Tagged(h), _) if opcode == Message::Write => {
            let is_at_fault = matches!(terminate.layer, 0 | 1) && terminate.etype == 1;
            is_at_fault.then_some(MemoryAccess {
                stag: h.stag,
                offset: h.to,
                len: payload as u64,
                need: Need::RemoteWrite,
            })
        }
        (_, Some(request)) => Some(MemoryAccess {
            stag: request.source_stag,
            offset: request.source_to,
            len: request.size.into(),
            need: Need::RemoteRead,
        }),
        _ => None,
    };
    let name = message_name(opcode);
    Some(match header {
        Header::Untagged(h) if name == "Send" => {
            (format!("Send of at least {} B", h.mo as usize + payload), None)
        }
        _ => (name.to_owned(), named),
    })
}

/// The wrong place of a message, for the log.
fn place_of(header: &Header) -> String {
    match header {
        Header::Tagged(_) => " in a tagged segment".to_owned(),
        Header::Untagged(header) => format!(" on QN {}", header.qn),
    }
}

/// A message, by its opcode and not by its queue: it may be refused because its queue is wrong.
fn message_name(opcode: Message) -> &'static str {
    match opcode {
        Message::Write => "RDMA Write",
        Message::ReadRequest => "RDMA Read",
        Message::ReadResponse => "answer to an RDMA Read",
        Message::Send
        | Message::SendInvalidate
        | Message::SendSolicited
        | Message::SendSolicitedInvalidate => "Send",
        Message::Immediate | Message::ImmediateSolicited => "immediate data",
        Message::AtomicRequest => "atomic",
        Message::AtomicResponse => "answer to an atomic",
        Message::Terminate => "Terminate",
    }
}

fn name(opcode: Opcode) -> &'static str {
    match opcode {
        Opcode::Send | Opcode::SendInv | Opcode::SendImm => "Send",
        Opcode::Write => "RDMA Write",
        Opcode::WriteImm => "RDMA Write with immediate data",
        Opcode::Read | Opcode::ReadInv => "RDMA Read",
        Opcode::CompareSwap | Opcode::FetchAdd => "atomic",
        Opcode::LocalInv => "invalidation",
        Opcode::BindMw => "bind",
    }
}

/// The cause of a lost connection: one that ended without a Terminate and not in order.
#[derive(Debug, Clone, Copy)]
pub(super) enum Lost {
    /// TCP reports the loss.
    Stream(Errno),
    /// The peer closed, although requests were in flight.
    Closed,
    /// The peer had closed before a request was posted.
    ClosedBefore,
    /// The peer could not be reached.
    Unreachable,
    /// The peer's system has not answered for this time.
    Silent(Duration),
    /// The peer sent a malformed Terminate, which no Terminate answers.
    MalformedTerminate,
}

/// Logs that the connection is lost, if that has an effect on requests.
#[cold]
pub(super) fn lost(how: Lost, requester: &Requester, env: &Env<'_>, stream: &dyn Stream) {
    let (count, oldest) = requester.in_flight();
    if count == 0 && !requester.sq.has_posted() || !LIMIT.may_say(env.now.get()) {
        return;
    }
    let subject = subject(env, stream);
    let how = match how {
        Lost::Stream(errno) => format!("the connection is lost: {errno}"),
        Lost::Closed => "the peer closed the connection".to_owned(),
        Lost::ClosedBefore => "a request was posted after the peer had closed the connection".to_owned(),
        Lost::Unreachable => "the peer cannot be reached".to_owned(),
        Lost::Silent(time) => format!("the peer has not answered for {:.1} s", time.as_secs_f64()),
        Lost::MalformedTerminate => "the peer sent a malformed Terminate".to_owned(),
    };
    match oldest {
        Some(opcode) => tracing::warn!(
            "{subject}: {how}; requests in flight: {count}, the oldest {}",
            name(opcode)
        ),
        None => tracing::warn!("{subject}: {how}"),
    }
}

/// Logs that the peer refuses a request, or ends the connection, by its Terminate.
#[cold]
pub(super) fn refused_there(received: &Received, requester: &Requester, env: &Env<'_>, stream: &dyn Stream) {
    if !LIMIT.may_say(env.now.get()) {
        return;
    }
    let error = match TerminateError::of_control(received.control) {
        Some(error) => format!("{error} ({:#010x})", received.control),
        None => format!("{:#010x}", received.control),
    };
    let subject = subject(env, stream);
    let Some(offending) = received.offending else {
        tracing::warn!("{subject}: the peer ended the connection: {error}");
        return;
    };
    let what = match (requester.flights.named_by(offending), offending) {
        (Some(Flight { wqe, len, .. }), _) => match wqe.opcode {
            Opcode::Send | Opcode::SendInv | Opcode::SendImm => format!("a Send of {len} B"),
            opcode => {
                let (at, stag) = (wqe.remote_offset, wqe.stag);
                format!("{} of {len} B at {at:#x}, STag {stag:#010x}", name(opcode))
            }
        },
        (None, OffendingRequest::Write { stag, to }) => format!("RDMA Write at {to:#x}, STag {stag:#010x}"),
        (None, OffendingRequest::Send(msn) | OffendingRequest::Request(msn)) => {
            let what = received.message.map_or("message", message_name);
            format!("{what} with MSN {msn}, which is not in flight")
        }
    };
    tracing::warn!("{subject}: the peer refused {what}: {error}");
}

/// Logs that a request of this end fails here.
#[cold]
pub(super) fn failed_here(requester: &Requester, env: &Env<'_>, stream: &dyn Stream) {
    if !LIMIT.may_say(env.now.get()) {
        return;
    }
    let memory = env.memory;
    let subject = subject(env, stream);
    let Some((wqe, status)) = requester.flights.failed() else {
        tracing::warn!("{subject}: a work request is malformed");
        return;
    };
    let what = name(wqe.opcode);
    let need = match wqe.opcode {
        Opcode::Read | Opcode::ReadInv | Opcode::CompareSwap | Opcode::FetchAdd => Need::LocalWrite,
        _ => Need::LocalRead,
    };
    let elements = (0..).map_while(|n| requester.sq.element(wqe, n).map(|sge| (n, sge)));
    let wrong = elements
        .filter(|(_, sge)| sge.len.get() > 0)
        .find_map(|(n, sge)| {
            let access = MemoryAccess::of_element(&sge, need);
            let MemoryAccess {
                stag, offset, len, ..
            } = access;
            let refused = memory.check(env.qp.accessor(), access).is_err();
            refused.then(|| {
                let reason = memory.explain(env.qp.accessor(), access);
                format!("element {n}: {len} B at {offset:#x}, lkey {stag:#010x}: {reason}")
            })
        });
    match wrong {
        Some(wrong) if status == WcStatus::LocProtErr => {
            tracing::warn!("{subject}: {what} failed: {wrong}")
        }
        _ => {
            let hint = match (status, need) {
                (WcStatus::LocQpOpErr, Need::LocalWrite) => ": max_rd_atomic is 0",
                (WcStatus::LocLenErr, _) => ": it is longer than 2 GiB",
                (WcStatus::MwBindErr, _) => {
                    ": the region lacks MW_BIND or the rights, or the window is bound"
                }
                _ => "",
            };
            tracing::warn!("{subject}: {what} failed: {}{hint}", status.verbs_name());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::rig::{read_request, tagged, untagged, write_segment};

    /// The text about a refusal of this ULPDU for its queue or its opcode.
    fn refused(ulpdu: &[u8]) -> String {
        let terminate = Terminate::for_segment(TerminateError::DdpInvalidQueue, ulpdu, None);
        message_of(&terminate).unwrap().0
    }

    #[test]
    fn a_refused_message_is_named_by_its_opcode() {
        let request = read_request(1, (1, 0), 8, (2, 0));
        for (ulpdu, expected) in [
            (untagged(0x41, 0x43, 0, 0, 1, 0, b"hello"), "Send of at least 5 B"),
            (
                untagged(0x41, 0x46, 7, 0, 1, 64, b"hello"),
                "Send of at least 69 B",
            ),
            (untagged(0x41, 0x43, 0, 1, 1, 0, b"hello"), "Send on QN 1"),
            (untagged(0x41, 0x43, 0, 9, 1, 0, b"hello"), "Send on QN 9"),
            (
                untagged(0x41, 0x41, 0, 0, 1, 0, &request[18..]),
                "RDMA Read on QN 0",
            ),
            (request, "RDMA Read"),
            (untagged(0x41, 0x4a, 0, 1, 1, 0, &[0; 52]), "atomic"),
            (untagged(0x41, 0x4a, 0, 0, 1, 0, &[0; 52]), "atomic on QN 0"),
            (untagged(0x41, 0x4b, 0, 3, 1, 0, &[0; 12]), "answer to an atomic"),
            (untagged(0x41, 0x49, 0, 0, 1, 0, &[0; 8]), "immediate data"),
            (untagged(0x41, 0x40, 0, 0, 1, 0, b"x"), "RDMA Write on QN 0"),
            (untagged(0x41, 0x4f, 0, 1, 1, 0, b"x"), "message on QN 1"),
            (write_segment(1, 0, b"x"), "RDMA Write"),
            (tagged(0xc1, 0x42, 1, 0, b"x"), "answer to an RDMA Read"),
            (tagged(0xc1, 0x43, 1, 0, b"x"), "Send in a tagged segment"),
        ] {
            assert_eq!(refused(&ulpdu), expected);
        }
    }
}
