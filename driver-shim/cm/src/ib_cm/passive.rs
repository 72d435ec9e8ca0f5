//! The end that is asked for a connection.

use urnic_wire::mad::{
    About, CONNECT_REPLY_PRIVATE_DATA, CommIds, ConnectReply, ConnectRequest, ConnectionPath, Message,
    RECEIPT_PRIVATE_DATA, REJECT_PRIVATE_DATA, ReadyToUse, ReceiptAck, RejectReason, TransportService,
};

use super::connection::{Agreed, Connection, Remote, Repetition, State};
use super::connections::{Admission, CallError, Connections, is_connectable, padded};
use super::event::{Event, Requested};
use super::peer::{Numbered, Route};
use crate::mpa_startup::Time;
use crate::timeouts::RETRIES;

/// A partition without the bit of full membership.
const PKEY_MASK: u16 = 0x7fff;
/// `IBV_MTU_256`, the smallest.
const MIN_MTU: u8 = 1;
/// The answer to an alternate path.
const FAILOVER_NOT_SUPPORTED: u8 = 1;

/// A program's answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accept {
    /// The program's queue pair.
    pub qpn: u32,
    /// Maximum number of inbound Reads; at most the number that the peer will have outstanding.
    pub responder_resources: u8,
    /// Maximum number of outbound Reads; at most the number that the peer accepts.
    pub initiator_depth: u8,
    /// The program asks for end-to-end flow control.
    pub flow_control: bool,
    /// Retries of the peer while no receive is posted here: at most 7, which is no limit.
    pub rnr_retry_count: u8,
    /// The queue pair has a shared receive queue.
    pub srq: bool,
    /// For the peer's program: at most 196 bytes.
    pub private_data: Vec<u8>,
}

impl Connections {
    /// A REQ arrived.
    pub(super) fn requested(
        &mut self,
        now: Time,
        route: Route,
        (transaction_id, request): (u64, &ConnectRequest),
        admit: &mut dyn FnMut(&Route, &ConnectRequest) -> Admission,
    ) {
        let number = |number| Numbered {
            peer: route.remote,
            ca_guid: request.ca_guid,
            number,
        };
        let requester = number(request.local_comm_id);
        if let Some(known) = self.table.with_remote_id(&requester) {
            return self.requested_again(route, known, transaction_id);
        }
        if let Some(refusal) = self.refusals.find(now, &requester, transaction_id) {
            let refusal = *refusal;
            return self.send_again(route, refusal);
        }
        let refuse = |connections: &mut Connections, reason| {
            let ids = CommIds {
                local: 0,
                remote: request.local_comm_id,
            };
            let why = (reason, [0; REJECT_PRIVATE_DATA]);
            connections.send_reject(route, transaction_id, (ids, About::REQUEST), why);
        };
        if let Some(reason) = self.objection(route, request) {
            return refuse(self, reason);
        }
        let admission = admit(&route, request);
        if admission == Admission::NoListener {
            return refuse(self, RejectReason::INVALID_SERVICE_ID);
        }
        if let Some(stale) = self.table.with_remote_qp(&number(request.qpn)) {
            refuse(self, RejectReason::STALE_CONNECTION);
            return self.end_stale(now, stale);
        }
        if admission == Admission::Full || !self.table.has_room_for_undecided(route.remote) {
            return tracing::debug!("{route}: a request is dropped: too many wait for their program");
        }
        if !self.table.has_room(route.remote) {
            return refuse(self, RejectReason::NO_RESOURCES);
        }
        // As a kernel, whose rdma_cm ends a request that it cannot show.
        let Some(shown) = Requested::new(route, request) else {
            return refuse(self, RejectReason::CONSUMER);
        };
        let id = self.admit(route, transaction_id, request);
        self.tell(id, Event::Requested(Box::new(shown)));
    }

    /// Why a request cannot be for a connection of RoCE's.
    fn objection(&self, route: Route, request: &ConnectRequest) -> Option<RejectReason> {
        let (local_gid, remote_gid) = route.gids();
        let path = &request.primary_path;
        if request.transport_service != TransportService::RC || request.extended_transport != 0 {
            return Some(RejectReason::INVALID_TRANSPORT);
        }
        // Else the packets would go to somebody who has not asked for them.
        if (path.local_gid, path.remote_gid) != (remote_gid, local_gid) {
            return Some(RejectReason::INVALID_GID);
        }
        if !(MIN_MTU..=self.settings.path_mtu).contains(&request.path_mtu) {
            return Some(RejectReason::INVALID_MTU);
        }
        let is_default = request.pkey & PKEY_MASK == PKEY_MASK;
        (!is_connectable(request.qpn) || !is_default).then_some(RejectReason::UNSUPPORTED)
    }

    fn admit(&mut self, route: Route, transaction_id: u64, request: &ConnectRequest) -> u32 {
        let id = self.new_comm_id();
        let connection = Connection {
            route,
            state: State::ReqRcvd,
            comm_id: id,
            qpn: 0,
            psn: self.new_psn(),
            remote: Some(Remote {
                comm_id: request.local_comm_id,
                ca_guid: request.ca_guid,
                qpn: request.qpn,
                psn: request.starting_psn,
            }),
            agreed: Agreed {
                path_mtu: request.path_mtu,
                responder_resources: request.initiator_depth,
                initiator_depth: request.responder_resources,
                ack_timeout: request.primary_path.ack_timeout,
                retry_count: request.retry_count,
                rnr_retry_count: request.rnr_retry_count,
            },
            transaction_id,
            last: None,
            repetition: Repetition {
                interval: self.settings.interval(request.local_response_timeout),
                times: request.max_cm_retries,
            },
            left: 0,
            prolonged: false,
            alternate_path: request.alternate_path != ConnectionPath::default(),
            held: true,
        };
        self.insert(connection);
        id
    }

    /// A REQ of a known connection: repeated, because the answer was lost or is late.
    fn requested_again(&mut self, route: Route, id: u32, transaction_id: u64) {
        let service_timeout = self.settings.service_timeout;
        let Some(connection) = self.table.get(id) else {
            return;
        };
        // The addresses of this host may differ: then it is another request with the same number.
        if connection.route != route || connection.transaction_id != transaction_id {
            return;
        }
        let ids = connection.ids();
        match (connection.state, connection.last) {
            (State::ReqRcvd, _) => {
                let receipt = ReceiptAck {
                    ids,
                    about: About::REQUEST,
                    service_timeout,
                    private_data: [0; RECEIPT_PRIVATE_DATA],
                };
                self.send(route, transaction_id, Message::Receipt(receipt));
            }
            (State::RepSent, Some(reply)) => self.send_again(route, reply),
            (State::TimeWait, _) => {
                let why = (RejectReason::STALE_CONNECTION, [0; REJECT_PRIVATE_DATA]);
                self.send_reject(route, transaction_id, (ids, About::REQUEST), why);
            }
            _ => {}
        }
    }

    /// Accepts a request. The program's queue pair is in RTR, so that it receives as soon as the
    /// peer sends.
    ///
    /// # Errors
    /// [`CallError`]; the request is still undecided.
    pub fn accept(&mut self, now: Time, id: u32, accept: &Accept) -> Result<(), CallError> {
        let private_data = padded::<CONNECT_REPLY_PRIVATE_DATA>(&accept.private_data)?;
        let (ca_guid, target_ack_delay) = (self.settings.ca_guid, self.settings.ack_delay);
        let connection = self.table.get_mut(id).ok_or(CallError::Unknown(id))?;
        if connection.state != State::ReqRcvd {
            return Err(CallError::State(connection.state));
        }
        if !is_connectable(accept.qpn) {
            return Err(CallError::QueuePair(accept.qpn));
        }
        connection.qpn = accept.qpn;
        let agreed = &mut connection.agreed;
        agreed.responder_resources = agreed.responder_resources.min(accept.responder_resources);
        agreed.initiator_depth = agreed.initiator_depth.min(accept.initiator_depth);
        let reply = ConnectReply {
            ids: connection.ids(),
            qkey: 0,
            qpn: accept.qpn,
            eecn: 0,
            starting_psn: connection.psn,
            responder_resources: connection.agreed.responder_resources,
            initiator_depth: connection.agreed.initiator_depth,
            target_ack_delay,
            failover_accepted: match connection.alternate_path {
                true => FAILOVER_NOT_SUPPORTED,
                false => 0,
            },
            flow_control: accept.flow_control,
            rnr_retry_count: accept.rnr_retry_count.min(RETRIES),
            srq: accept.srq,
            ca_guid,
            private_data,
        };
        self.send_until_answered(now, id, State::RepSent, Message::ConnectReply(reply));
        Ok(())
    }

    /// An RTU arrived.
    pub(super) fn peer_is_ready(&mut self, route: Route, ready: &ReadyToUse) {
        let connection = self.table.find(route, ready.ids);
        if let Some(connection) = connection.filter(|connection| connection.state == State::RepSent) {
            let id = connection.comm_id;
            self.establish(id, ready.private_data.to_vec());
        }
    }

    /// The device received the first message at the queue pair (`IBV_EVENT_COMM_EST`), so the peer
    /// has got the REP, whatever became of its RTU.
    ///
    /// # Errors
    /// [`CallError`] in states in which no message can arrive.
    pub fn communication_established(&mut self, id: u32) -> Result<(), CallError> {
        match self.state(id).ok_or(CallError::Unknown(id))? {
            State::RepSent => self.establish(id, Vec::new()),
            State::Established => {}
            other => return Err(CallError::State(other)),
        }
        Ok(())
    }

    fn establish(&mut self, id: u32, private_data: Vec<u8>) {
        self.set_timer(id, None);
        self.table.enter(id, State::Established);
        if let Some(connection) = self.table.get_mut(id) {
            connection.last = None;
        }
        self.tell(id, Event::Established(private_data));
    }
}
