//! The end that requests a connection.

use urnic_wire::mad::{
    About, CONNECT_PRIVATE_DATA, CommIds, ConnectReply, ConnectRequest, ConnectionPath, IP_ADDRESSING_LEN,
    IpAddressing, Message, PERMISSIVE_LID, READY_PRIVATE_DATA, RECEIPT_PRIVATE_DATA, REJECT_PRIVATE_DATA,
    ReadyToUse, ReceiptAck, RejectReason, TransportService,
};

use super::connection::{Agreed, Connection, Remote, Repetition, State};
use super::connections::{CallError, Connections, is_connectable, padded};
use super::event::{Accepted, Event};
use super::peer::{Numbered, Route};
use super::settings::MAX_CODE;
use crate::mpa_startup::Time;
use crate::timeouts::RETRIES;

/// Bytes of private data that a program can give with a request.
const PROGRAM_DATA: usize = CONNECT_PRIVATE_DATA - IP_ADDRESSING_LEN;
/// The default partition, of which every port is a full member.
const DEFAULT_PKEY: u16 = 0xffff;
/// Maximum number of routers between the ends.
const HOP_LIMIT: u8 = 64;
/// `IBV_RATE_10_GBPS`. It is a hint: nothing here limits the rate.
const PACKET_RATE: u8 = 3;

/// A program's request for a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connect {
    /// The service: the port space and the port of the peer's id.
    pub service_id: u64,
    /// The port of the program's id.
    pub source_port: u16,
    /// The program's queue pair.
    pub qpn: u32,
    /// Maximum number of inbound Reads.
    pub responder_resources: u8,
    /// Maximum number of outbound Reads.
    pub initiator_depth: u8,
    /// The program asks for end-to-end flow control.
    pub flow_control: bool,
    /// Retries of requests that are not acknowledged: at most 7.
    pub retry_count: u8,
    /// Retries while no receive is posted: at most 7, which is no limit.
    pub rnr_retry_count: u8,
    /// The queue pair has a shared receive queue.
    pub srq: bool,
    /// Traffic class of the connection's packets.
    pub traffic_class: u8,
    /// Local ACK Timeout of the peer's queue pair; `None`: from the settings.
    pub ack_timeout: Option<u8>,
    /// For the peer's program: at most 56 bytes.
    pub private_data: Vec<u8>,
}

impl Connections {
    /// Requests a connection, and returns its number.
    ///
    /// # Errors
    /// [`CallError`]; nothing was sent.
    pub fn connect(&mut self, now: Time, route: Route, connect: &Connect) -> Result<u32, CallError> {
        let program_data = padded::<PROGRAM_DATA>(&connect.private_data)?;
        if !is_connectable(connect.qpn) {
            return Err(CallError::QueuePair(connect.qpn));
        }
        if !self.table.has_room(route.remote) {
            return Err(CallError::NoRoom);
        }
        let id = self.new_comm_id();
        let connection = Connection {
            route,
            state: State::ReqSent,
            comm_id: id,
            qpn: connect.qpn,
            psn: self.new_psn(),
            remote: None,
            agreed: Agreed {
                path_mtu: self.settings.path_mtu,
                responder_resources: connect.responder_resources,
                initiator_depth: connect.initiator_depth,
                ack_timeout: match connect.ack_timeout {
                    Some(code) => code.min(MAX_CODE),
                    None => self.settings.ack_timeout(self.settings.ack_delay),
                },
                retry_count: connect.retry_count.min(RETRIES),
                rnr_retry_count: connect.rnr_retry_count.min(RETRIES),
            },
            transaction_id: self.new_transaction_id(),
            last: None,
            repetition: Repetition {
                interval: self.settings.interval(self.settings.response_timeout),
                times: self.settings.max_cm_retries,
            },
            left: 0,
            prolonged: false,
            alternate_path: false,
            held: true,
        };
        let mut private_data = [0; CONNECT_PRIVATE_DATA];
        let addressing = IpAddressing {
            source_port: connect.source_port,
            source: route.local,
            destination: route.remote,
        };
        let at = addressing.emit(&mut private_data);
        private_data[at..].copy_from_slice(&program_data);
        let request = self.request(&connection, connect, private_data);
        self.insert(connection);
        self.send_until_answered(now, id, State::ReqSent, Message::Connect(request));
        Ok(id)
    }

    fn request(
        &self,
        connection: &Connection,
        connect: &Connect,
        private_data: [u8; CONNECT_PRIVATE_DATA],
    ) -> ConnectRequest {
        let (local_gid, remote_gid) = connection.route.gids();
        let agreed = &connection.agreed;
        ConnectRequest {
            local_comm_id: connection.comm_id,
            service_id: connect.service_id,
            ca_guid: self.settings.ca_guid,
            qkey: 0,
            qpn: connection.qpn,
            responder_resources: agreed.responder_resources,
            local_eecn: 0,
            initiator_depth: agreed.initiator_depth,
            remote_eecn: 0,
            remote_response_timeout: self.settings.response_timeout,
            transport_service: TransportService::RC,
            flow_control: connect.flow_control,
            starting_psn: connection.psn,
            local_response_timeout: self.settings.response_timeout,
            retry_count: agreed.retry_count,
            pkey: DEFAULT_PKEY,
            path_mtu: agreed.path_mtu,
            rdc_exists: false,
            rnr_retry_count: agreed.rnr_retry_count,
            max_cm_retries: self.settings.max_cm_retries,
            srq: connect.srq,
            extended_transport: 0,
            primary_path: ConnectionPath {
                local_lid: PERMISSIVE_LID,
                remote_lid: PERMISSIVE_LID,
                local_gid,
                remote_gid,
                flow_label: 0,
                packet_rate: PACKET_RATE,
                traffic_class: connect.traffic_class,
                hop_limit: HOP_LIMIT,
                service_level: 0,
                subnet_local: false,
                ack_timeout: agreed.ack_timeout,
            },
            alternate_path: ConnectionPath::default(),
            private_data,
        }
    }

    /// A REP arrived.
    pub(super) fn replied(&mut self, now: Time, route: Route, transaction_id: u64, reply: &ConnectReply) {
        let ids = reply.ids;
        let Some(connection) = self.table.find_requested(route, ids.remote) else {
            return self.replied_again(route, transaction_id, ids);
        };
        let id = connection.comm_id;
        let remote = Remote {
            comm_id: ids.local,
            ca_guid: reply.ca_guid,
            qpn: reply.qpn,
            psn: reply.starting_psn,
        };
        let number = |number| Numbered {
            peer: route.remote,
            ca_guid: reply.ca_guid,
            number,
        };
        let stale = self.table.with_remote_qp(&number(reply.qpn));
        if !is_connectable(reply.qpn) || self.table.with_remote_id(&number(ids.local)).is_some() {
            return self.fail(id, transaction_id, reply, RejectReason::UNSUPPORTED);
        }
        if let Some(stale) = stale {
            self.fail(id, transaction_id, reply, RejectReason::STALE_CONNECTION);
            return self.end_stale(now, stale);
        }
        let ack_timeout = self.settings.ack_timeout(reply.target_ack_delay);
        self.table.learn(id, remote);
        self.table.enter(id, State::RepRcvd);
        self.set_timer(id, None);
        if let Some(connection) = self.table.get_mut(id) {
            connection.last = None;
            let agreed = &mut connection.agreed;
            agreed.responder_resources = agreed.responder_resources.min(reply.initiator_depth);
            agreed.initiator_depth = agreed.initiator_depth.min(reply.responder_resources);
            agreed.rnr_retry_count = reply.rnr_retry_count;
            agreed.ack_timeout = ack_timeout;
        }
        self.tell(id, Event::Accepted(Box::new(Accepted::from(reply))));
    }

    /// A REP that is not the answer to a REQ: repeated, because the RTU was lost or is late; or of
    /// a connection that this end has given up.
    fn replied_again(&mut self, route: Route, transaction_id: u64, ids: CommIds) {
        let own = CommIds {
            local: ids.remote,
            remote: ids.local,
        };
        if self.table.get(ids.remote).is_none() {
            let why = (RejectReason::INVALID_COMM_ID, [0; REJECT_PRIVATE_DATA]);
            self.send_reject(route, transaction_id, (own, About::REPLY), why);
            return;
        }
        let service_timeout = self.settings.service_timeout;
        let Some(connection) = self.table.find(route, ids) else {
            return;
        };
        match (connection.state, connection.last) {
            (State::Established, Some(ready)) => self.send_again(route, ready),
            (State::RepRcvd, _) => {
                let receipt = ReceiptAck {
                    ids: own,
                    about: About::REPLY,
                    service_timeout,
                    private_data: [0; RECEIPT_PRIVATE_DATA],
                };
                self.send(route, transaction_id, Message::Receipt(receipt));
            }
            _ => {}
        }
    }

    /// The peer's REP is refused, and so the attempt is over.
    fn fail(&mut self, id: u32, transaction_id: u64, reply: &ConnectReply, reason: RejectReason) {
        let Some(connection) = self.table.get(id) else {
            return;
        };
        let ids = CommIds {
            local: id,
            remote: reply.ids.local,
        };
        let why = (reason, [0; REJECT_PRIVATE_DATA]);
        self.send_reject(connection.route, transaction_id, (ids, About::REPLY), why);
        let private_data = Vec::new();
        self.tell(id, Event::Rejected { reason, private_data });
        self.remove(id);
    }

    /// The program's queue pair is ready: it may send.
    ///
    /// # Errors
    /// [`CallError`]; the connection is as before.
    pub fn ready(&mut self, id: u32, private_data: &[u8]) -> Result<(), CallError> {
        let private_data = padded::<READY_PRIVATE_DATA>(private_data)?;
        let connection = self.table.get(id).ok_or(CallError::Unknown(id))?;
        if connection.state != State::RepRcvd {
            return Err(CallError::State(connection.state));
        }
        let (route, transaction_id, ids) = (connection.route, connection.transaction_id, connection.ids());
        let ready = self.send(
            route,
            transaction_id,
            Message::Ready(ReadyToUse { ids, private_data }),
        );
        self.table.enter(id, State::Established);
        if let Some(connection) = self.table.get_mut(id) {
            connection.last = Some(ready);
        }
        Ok(())
    }
}
