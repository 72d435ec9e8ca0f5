//! Connections that fail: the events, and one line of the log for each that says what happened.

use std::fmt::{self, Display};
use std::net::SocketAddr;

use rustix::io::Errno;

use super::messages::{Message, outcome};
use super::{ByMessages, CmEvent, Engine, EventParams, Key, Location, Owner, State, World};
use crate::mpa_startup::{Close, Excerpt, Time};
use crate::startup::Fault;
use urnic_config::Llp;
use urnic_wire::mad::RejectReason;

/// Why a connection failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    /// The network, or this host, refused to connect.
    Refused(Errno, Location),
    /// The peer's connection manager refused the service.
    ServiceRefused(u8),
    /// The peer named an impossible TCP port.
    BadPort(u32),
    /// No answer to the query, or to TCP's SYN, in this time.
    Silent(Time),
    /// TCP connected, but the frame did not arrive in this time; with the bytes that did.
    NoFrame(Time, Excerpt),
    /// The peer ended the TCP connection before the frame was complete; with the bytes that came.
    Ended(Excerpt),
    /// The peer sent something else than the frame.
    Fault(Fault),
    /// Start-up ended with a Terminate, which has this control word.
    Terminate(u32),
    /// The queue pair cannot be attached.
    NotAttached(Errno),
    /// The connection ended before the queue pair was attached, which failed with this error.
    Lost(Errno),
    /// The first FPDU did not arrive in time, or the connection ended before it.
    NoFirstFpdu(Errno),
    /// The initiator ended the TCP connection, or sent data, before the program accepted.
    NotWaiting,
    /// The device is gone.
    DeviceLost,
    /// The peer's connection manager of RoCE sent a REJ with this reason.
    RejectedBy(u16),
    /// The peer answered no message of RoCE's connection manager.
    Unanswered,
}

impl Cause {
    /// The error number of the event.
    pub(super) fn errno(self) -> Errno {
        match self {
            Cause::Refused(errno, _)
            | Cause::NotAttached(errno)
            | Cause::Lost(errno)
            | Cause::NoFirstFpdu(errno) => errno,
            Cause::ServiceRefused(_) | Cause::RejectedBy(_) => Errno::CONNREFUSED,
            Cause::Silent(_) | Cause::NoFrame(..) | Cause::Unanswered => Errno::TIMEDOUT,
            Cause::Ended(_) | Cause::NotWaiting => Errno::CONNRESET,
            Cause::DeviceLost => Errno::NODEV,
            Cause::BadPort(_) | Cause::Terminate(_) => Errno::PROTO,
            Cause::Fault(fault) => fault.errno(),
        }
    }
}

impl Cause {
    /// The cause on a connection over this lower layer, in words.
    pub(super) fn over(self, llp: Llp) -> OverLlp {
        OverLlp { cause: self, llp }
    }
}

impl From<Errno> for Cause {
    /// A queue pair cannot be attached.
    fn from(errno: Errno) -> Cause {
        Cause::NotAttached(errno)
    }
}

impl Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Refused(Errno::CONNREFUSED, Location::Silent) => f.write_str(
                "no program listens at its TCP port, and none answers at the UDP port of the same number",
            ),
            Cause::Refused(Errno::CONNREFUSED, Location::Known) => {
                f.write_str("the TCP port that its listener named refuses connections: a firewall may refuse them")
            }
            Cause::Refused(Errno::CONNREFUSED, _) => {
                f.write_str("no program listens there, neither at TCP nor at UDP port of this number")
            }
            Cause::Refused(Errno::ACCESS | Errno::PERM, _) => {
                f.write_str("a firewall, a route or a policy of this host forbids it")
            }
            Cause::Refused(Errno::HOSTUNREACH, _) => f.write_str(
                "the host cannot be reached (EHOSTUNREACH): it is down, or a firewall refuses the packets",
            ),
            Cause::Refused(Errno::NETUNREACH, _) => f.write_str("there is no route to it (ENETUNREACH)"),
            Cause::Refused(Errno::CONNRESET, _) => f.write_str("the host reset the TCP connection"),
            Cause::Refused(Errno::TIMEDOUT, _) => {
                f.write_str("TCP gave up: no answer to its SYN; the host is down, or a firewall drops packets")
            }
            Cause::Refused(Errno::ADDRINUSE, _) => f.write_str("its source port is in use (EADDRINUSE)"),
            Cause::Refused(Errno::ADDRNOTAVAIL, _) => f.write_str(
                "its source address and port cannot be used (EADDRNOTAVAIL): perhaps they have a connection to \
                 this peer",
            ),
            Cause::Refused(errno, _) => write!(f, "{errno}"),
            Cause::ServiceRefused(status) => write!(f, "the peer's connection manager refused it, status {status}"),
            Cause::BadPort(port) => write!(f, "the peer named the impossible TCP port {port}"),
            Cause::Silent(time) => write!(
                f,
                "no answer in {} ms: the host is down, or a firewall drops packets",
                time.as_millis()
            ),
            Cause::NoFrame(time, arrived) if arrived.is_empty() => write!(
                f,
                "TCP connected, but the peer sent nothing in {} ms: another service has the port, or the program \
                 does not accept",
                time.as_millis()
            ),
            Cause::NoFrame(time, arrived) => write!(
                f,
                "TCP connected, but the peer sent only {arrived} in {} ms",
                time.as_millis()
            ),
            Cause::Ended(arrived) if arrived.is_empty() => f.write_str(
                "the peer ended the TCP connection without an answer: its program ended, or another service has \
                 the port",
            ),
            Cause::Ended(arrived) => write!(f, "the peer ended the TCP connection after {arrived}"),
            Cause::Fault(fault) => write!(f, "{fault}"),
            Cause::Terminate(control) => write!(
                f,
                "start-up ended with Terminate {control:#010x}: the ends need other depths or RTR messages"
            ),
            Cause::NotAttached(errno) => write!(f, "its queue pair cannot be used: {errno}"),
            Cause::Lost(errno) => write!(
                f,
                "the connection was lost before its queue pair was attached: {errno}"
            ),
            Cause::NoFirstFpdu(Errno::TIMEDOUT) => f.write_str("the initiator's first message did not arrive"),
            Cause::NoFirstFpdu(_) => f.write_str("the initiator ended the connection before its first message"),
            Cause::NotWaiting => f.write_str(
                "the initiator ended the TCP connection, or sent data, before the program accepted",
            ),
            Cause::DeviceLost => f.write_str("the device is lost"),
            Cause::RejectedBy(reason) => write!(f, "{} (REJ, reason {reason})", why_rejected(*reason)),
            Cause::Unanswered => f.write_str(
                "no answer at UDP port 4791: the host is down, has no device of RoCE v2, or a firewall drops packets",
            ),
        }
    }
}

/// What the reason of a REJ means.
fn why_rejected(reason: u16) -> &'static str {
    match RejectReason(reason) {
        RejectReason::INVALID_SERVICE_ID => "no program listens there",
        RejectReason::NO_RESOURCES => "the peer has no room for another connection",
        RejectReason::TIMEOUT => "the peer got no answer, and gave up",
        RejectReason::STALE_CONNECTION => {
            "the peer had an earlier connection of this queue pair, which it ends now: try again"
        }
        RejectReason::INVALID_TRANSPORT => "the peer does not connect this kind of queue pair",
        RejectReason::INVALID_GID => {
            "the peer sees other addresses than this host: packets pass a NAT, or another route"
        }
        RejectReason::INVALID_MTU => "the peer's path MTU is smaller than that of this port",
        RejectReason::CONSUMER => "its program refused",
        _ => "the peer's connection manager refused",
    }
}

/// A cause in the words of the lower layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct OverLlp {
    cause: Cause,
    llp: Llp,
}

impl Display for OverLlp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.llp == Llp::Tcp {
            return self.cause.fmt(f);
        }
        match self.cause {
            Cause::Refused(Errno::CONNREFUSED, _) => {
                f.write_str("no program listens there over SCTP (the peer must have llp=sctp, too, and an sctp.transport that fits)")
            }
            Cause::Refused(Errno::CONNRESET, _) => f.write_str("the host aborted the SCTP association"),
            Cause::Refused(Errno::TIMEDOUT, _) | Cause::Silent(_) => f.write_str(
                "no answer over SCTP: the host is down, a firewall drops packets, or the peer does not have \
                 llp=sctp and an sctp.transport that fits",
            ),
            Cause::NoFrame(time, _) => write!(
                f,
                "there is an SCTP association, but no message in {} ms: perhaps the program does not accept",
                time.as_millis()
            ),
            Cause::Ended(_) => f.write_str("the SCTP association ended without an answer: perhaps its program ended"),
            Cause::NotWaiting => {
                f.write_str("the initiator ended the DDP session, or sent data, before the program accepted")
            }
            cause => cause.fmt(f),
        }
    }
}

/// The name of an event, for a line.
fn name(kind: CmEvent) -> &'static str {
    match kind {
        CmEvent::Rejected => "RDMA_CM_EVENT_REJECTED",
        CmEvent::Unreachable => "RDMA_CM_EVENT_UNREACHABLE",
        _ => "RDMA_CM_EVENT_CONNECT_ERROR",
    }
}

impl Engine {
    /// Logs that an address cannot be used: the call on it fails.
    /// `is_source`: it is the source address, not the destination.
    pub(super) fn log_refused(
        &mut self,
        now: Time,
        (call, is_source): (&str, bool),
        address: SocketAddr,
        errno: Errno,
    ) {
        if !self.lines.may_log(now) {
            return;
        }
        let why = match errno {
            Errno::ACCESS if is_source => {
                "the system forbids it: ports below 1024 need CAP_NET_BIND_SERVICE".to_owned()
            }
            Errno::ACCESS | Errno::PERM => {
                "a firewall, a route or a policy of this host forbids it".to_owned()
            }
            Errno::ADDRINUSE => "the port is in use".to_owned(),
            Errno::ADDRNOTAVAIL if address.ip().is_unspecified() => {
                "the port is in use at an address of this host".to_owned()
            }
            Errno::ADDRNOTAVAIL => {
                "this host does not have the address, or the port is in use at any address".to_owned()
            }
            Errno::NODEV => "no device has the address".to_owned(),
            Errno::NETUNREACH => "there is no route to it".to_owned(),
            errno => errno.to_string(),
        };
        tracing::warn!("{call}: {address}: {why} (errno {})", errno.raw_os_error());
    }

    /// Logs that a stream of a listener ended without a Request.
    pub(super) fn log_no_request(&mut self, world: &mut World<'_>, sid: u32, llp: Llp, cause: Cause) {
        let cause = cause.over(llp);
        let request = match llp {
            Llp::Tcp => "MPA Request",
            Llp::Sctp => "DDP session Initiate",
        };
        let may_log = self.peer_lines.may_log(world.now);
        match may_log.then(|| world.device.ends(sid)) {
            Some(Ok((local, remote))) => {
                tracing::warn!("a connection from {remote} to {local} brought no {request}: {cause}");
            }
            _ => tracing::debug!("stream {sid}: {cause}"),
        }
    }

    /// Logs that the queue pair 1 of a device, through which it connects, cannot be opened.
    pub(super) fn log_no_adapter(&mut self, now: Time, (call, address): (&str, SocketAddr), errno: Errno) {
        if errno != Errno::ADDRINUSE {
            return self.log_refused(now, (call, false), address, errno);
        }
        if self.lines.may_log(now) {
            tracing::warn!(
                "{call}: {address}: another process, rdma_rxe or an adapter has UDP port 4791 (wire=roce; errno {})",
                errno.raw_os_error()
            );
        }
    }

    /// Logs that a connection was not made: requested by the program, or by a peer.
    pub(super) fn log_attempt(
        &mut self,
        now: Time,
        handle: u32,
        cause: Cause,
        (kind, status): (CmEvent, i32),
    ) {
        let Some(id) = self.ids.get(&handle) else {
            return;
        };
        if let State::ByMessages(ByMessages { active: true, .. }) = id.state {
            return self.log_failed(now, handle, cause, (kind, status));
        }
        if let Some(remote) = id.remote
            && self.peer_lines.may_log(now)
        {
            let event = name(kind);
            tracing::warn!("rdma_accept of {remote} failed: {cause} ({event}, status {status})");
        }
    }

    /// Logs that an attempt of the program failed.
    fn log_failed(&mut self, now: Time, handle: u32, cause: impl Display, (kind, status): (CmEvent, i32)) {
        let remote = self.ids.get(&handle).and_then(|id| id.remote);
        if let Some(remote) = remote
            && self.lines.may_log(now)
        {
            let event = name(kind);
            tracing::warn!("rdma_connect to {remote} failed: {cause} ({event}, status {status})");
        }
    }

    /// The time that an attempt was allowed.
    pub(super) fn attempt_time(&self, handle: u32) -> Time {
        let remote = self.ids.get(&handle).and_then(|id| id.remote);
        remote.map_or(Time::ZERO, |remote| {
            self.policy(remote.ip()).settings.initiator_timeout
        })
    }

    /// The lower layer of connections with the peer of an id.
    fn llp_of(&self, handle: u32) -> Llp {
        let remote = self.ids.get(&handle).and_then(|id| id.remote);
        remote.map_or(Llp::Tcp, |remote| self.policy(remote.ip()).llp)
    }

    /// The time of an attempt is over.
    pub(super) fn attempt_timed_out(&mut self, world: &mut World<'_>, handle: u32) {
        let time = self.attempt_time(handle);
        let cause = match self.ids.get(&handle).map(|id| &id.state) {
            Some(State::Connecting(connecting)) => match &connecting.initiator {
                None => Cause::Silent(time),
                Some(initiator) => Cause::NoFrame(time, initiator.arrived()),
            },
            _ => return,
        };
        self.connect_failed(world, handle, cause);
    }

    /// The stream of an attempt ended.
    pub(super) fn attempt_closed(&mut self, world: &mut World<'_>, handle: u32) {
        let arrived = match self.ids.get(&handle).map(|id| &id.state) {
            Some(State::Connecting(connecting)) => connecting.initiator.as_ref(),
            _ => None,
        };
        let arrived = arrived.map(|initiator| initiator.arrived()).unwrap_or_default();
        self.connect_failed(world, handle, Cause::Ended(arrived));
    }

    /// The time for the Request of a stream is over.
    pub(super) fn request_due(&mut self, world: &mut World<'_>, sid: u32) {
        if let Some(Owner::Listener(_, responder)) = self.streams.get(&sid) {
            let time = self.default_policy.settings.responder_timeout;
            let cause = Cause::NoFrame(time, responder.arrived());
            self.log_no_request(world, sid, responder.llp(), cause);
        }
    }

    /// The time for the RTR frame is over.
    pub(super) fn rtr_frame_due(&mut self, world: &mut World<'_>, handle: u32) {
        self.answer_failed(world, handle, Cause::NoFirstFpdu(Errno::TIMEDOUT));
    }

    /// Ends a connection attempt that failed, and reports the error.
    pub(super) fn connect_failed(&mut self, world: &mut World<'_>, handle: u32, cause: Cause) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        let known_peer = id.known_peer;
        let (sid, llp) = match std::mem::replace(&mut id.state, State::Over) {
            State::LookingUp(lookup) => {
                self.forget_lookup(&lookup);
                (None, lookup.connecting.map(|connecting| connecting.llp))
            }
            State::Connecting(connecting) => (Some(connecting.sid), Some(connecting.llp)),
            State::Answered(answered) => (Some(answered.sid), Some(answered.accepted.negotiated.llp)),
            _ => (None, None),
        };
        let llp = llp.unwrap_or_else(|| self.llp_of(handle));
        self.timers.set(Key::Id(handle), None);
        if let Some(sid) = sid.filter(|sid| self.streams.contains_key(sid)) {
            self.close_stream(world, sid, Close::Abort);
        }
        let (kind, status) = outcome(self.identity, cause.errno(), known_peer);
        self.log_failed(world.now, handle, cause.over(llp), (kind, status));
        let mut params = EventParams::default();
        if kind == CmEvent::Rejected && self.identity.is_roce() {
            Message::Reject.pad(&mut params.private_data);
        }
        self.report(world, handle, kind, status, params);
    }

    /// Reports that the program's queue pair could not be attached after the Reply.
    pub(super) fn establish_failed(&mut self, world: &mut World<'_>, handle: u32, cause: Cause) {
        let status = -cause.errno().raw_os_error();
        let outcome = (CmEvent::ConnectError, status);
        self.log_failed(world.now, handle, cause, outcome);
        self.report(world, handle, outcome.0, status, EventParams::default());
    }

    /// Logs that the program's own queue pair could not be attached after the Reply; returns the
    /// error of its call.
    pub(super) fn not_established(&mut self, now: Time, handle: u32, cause: Cause) -> Errno {
        let outcome = (CmEvent::ConnectError, -cause.errno().raw_os_error());
        self.log_failed(now, handle, cause, outcome);
        cause.errno()
    }

    /// Ends an accepted connection that failed, and reports the error.
    pub(super) fn answer_failed(&mut self, world: &mut World<'_>, handle: u32, cause: Cause) {
        let Some(id) = self.ids.get_mut(&handle) else {
            return;
        };
        if let State::AwaitingRtrFrame(awaiting) = std::mem::replace(&mut id.state, State::Over) {
            self.close_stream(world, awaiting.acceptance.sid, Close::Abort);
        }
        self.timers.set(Key::Id(handle), None);
        let errno = cause.errno();
        let (kind, status) = match errno {
            // The initiator of a RoCE NIC that ends instead sends REJ.
            Errno::CONNRESET if self.identity.is_roce() => outcome(self.identity, errno, true),
            Errno::TIMEDOUT => (CmEvent::Unreachable, -errno.raw_os_error()),
            _ => (CmEvent::ConnectError, -errno.raw_os_error()),
        };
        let remote = self.ids.get(&handle).and_then(|id| id.remote);
        if let Some(remote) = remote
            && self.peer_lines.may_log(world.now)
        {
            let event = name(kind);
            tracing::warn!("rdma_accept of {remote} failed: {cause} ({event}, status {status})");
        }
        let mut params = EventParams::default();
        if kind == CmEvent::Rejected {
            Message::Reject.pad(&mut params.private_data);
        }
        self.report(world, handle, kind, status, params);
    }

    /// Reports that a lookup of a queue pair failed. `status`: that of the reply, if there was one.
    pub(super) fn lookup_failed(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        cause: Cause,
        params: EventParams,
    ) {
        let status = match cause {
            Cause::ServiceRefused(status) => status.into(),
            cause => -cause.errno().raw_os_error(),
        };
        let outcome = (CmEvent::Unreachable, status);
        self.log_failed(world.now, handle, cause, outcome);
        self.report(world, handle, outcome.0, status, params);
    }
}
