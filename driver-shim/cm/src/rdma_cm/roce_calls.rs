//! What programs do with connections of `wire=roce`.

use std::net::SocketAddr;

use rustix::io::Errno;
use urnic_wire::mad::service_id;
use zerocopy::{FromZeros, IntoBytes};

use super::abi::{PORT, QpAttrResponse};
use super::attributes::address_vector;
use super::command::Parameters;
use super::ids::{COMMUNICATION_ESTABLISHED, PATH_MIGRATED};
use super::messages::Message;
use super::roce_connections::route;
use super::{ByMessages, Engine, Id, State, World};
use crate::ib_cm::{Accept, CallError, Connect, State as Cm};
use urnic_device::vocabulary::QpState;

impl Id {
    /// The service of the id's port space at a port.
    pub(super) fn service(&self, port: u16) -> u64 {
        service_id(self.port_space, port)
    }
}

/// The error number of a call that had no effect.
fn errno_of(error: CallError) -> Errno {
    match error {
        CallError::NoRoom => Errno::NOMEM,
        CallError::Unknown(_)
        | CallError::State(_)
        | CallError::PrivateData { .. }
        | CallError::QueuePair(_) => Errno::INVAL,
    }
}

impl Engine {
    /// Requests a connection of a peer. An event reports the result.
    ///
    /// # Errors
    /// `EINVAL` for a number that no queue pair has, `EOPNOTSUPP` for a queue pair of kind UC,
    /// `ENOMEM` beyond the limits; those of opening queue pair 1 of the device.
    pub(super) fn connect_by_messages(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        parameters: &Parameters,
    ) -> Result<(), Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let (Some(local), Some(remote)) = (id.local, id.remote) else {
            return Err(Errno::INVAL);
        };
        let default = self.policy(remote.ip()).ack_timeout;
        let connect = Connect {
            service_id: id.service(remote.port()),
            source_port: local.port(),
            qpn: parameters.qpn,
            responder_resources: parameters.responder_resources,
            initiator_depth: parameters.initiator_depth,
            flow_control: parameters.flow_control,
            retry_count: parameters.retry_count,
            rnr_retry_count: parameters.rnr_retry_count,
            srq: parameters.srq,
            traffic_class: id.traffic_class,
            ack_timeout: Some(id.ack_timeout.unwrap_or(default)),
            private_data: parameters.private_data.clone(),
        };
        let qid = world.device.queue_pair(local, parameters.qpn);
        if qid.is_some_and(|qid| world.device.is_unreliable(qid)) {
            return Err(Errno::OPNOTSUPP);
        }
        let opened = world.device.device_of(local).and_then(|device| {
            self.open_adapter(world, device)?;
            Ok(device)
        });
        let device =
            opened.inspect_err(|errno| self.log_no_adapter(world.now, ("rdma_connect", remote), *errno))?;
        let adapter = self.adapters.opened.get_mut(&device).ok_or(Errno::NODEV)?;
        let route = route(local.ip(), remote.ip());
        let number = adapter.connections.connect(world.now, route, &connect);
        let number = number.map_err(errno_of)?;
        adapter.ids.insert(number, handle);
        tracing::debug!("id {handle}: requests a connection of {remote}, number {number:#010x}");
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::ByMessages(ByMessages {
                device,
                number,
                qid,
                active: true,
            });
        }
        self.note_queue_pair(handle, qid);
        self.carry_out(world, device);
        Ok(())
    }

    /// The connection of an id ends with the queue pair.
    fn note_queue_pair(&mut self, handle: u32, qid: Option<u32>) {
        if let Some(qid) = qid {
            self.queue_pairs.insert(qid, handle);
        }
    }

    /// Accepts a peer's request; or, at the end that requested, says that the program's queue pair
    /// is ready.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state, or for a number that no queue pair has; `EOPNOTSUPP` for a
    /// queue pair of kind UC. A request is then refused, as in a kernel.
    pub(super) fn accept_by_messages(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        of: ByMessages,
        parameters: Option<&Parameters>,
    ) -> Result<(), Errno> {
        let state = self.adapters.state(of);
        let local = self.ids.get(&handle).and_then(|id| id.local);
        let adapter = self.adapters.opened.get_mut(&of.device).ok_or(Errno::INVAL)?;
        match (state, parameters) {
            (Some(Cm::RepRcvd), _) => {
                let ready = adapter.connections.ready(of.number, &[]);
                self.carry_out(world, of.device);
                ready.map_err(errno_of)
            }
            (Some(Cm::ReqRcvd), Some(parameters)) => {
                let accept = Accept {
                    qpn: parameters.qpn,
                    responder_resources: parameters.responder_resources,
                    initiator_depth: parameters.initiator_depth,
                    flow_control: parameters.flow_control,
                    rnr_retry_count: parameters.rnr_retry_count,
                    srq: parameters.srq,
                    private_data: parameters.private_data.clone(),
                };
                let qid = local.and_then(|local| world.device.queue_pair(local, parameters.qpn));
                let accepted = match qid.is_some_and(|qid| world.device.is_unreliable(qid)) {
                    // The peer's is of kind RC, as its REQ said.
                    true => Err(Errno::OPNOTSUPP),
                    false => (adapter.connections)
                        .accept(world.now, of.number, &accept)
                        .map_err(errno_of),
                };
                if accepted.is_err() {
                    self.end_by_messages(world, handle, of);
                    return accepted;
                }
                if let Some(id) = self.ids.get_mut(&handle) {
                    id.state = State::ByMessages(ByMessages { qid, ..of });
                }
                self.note_queue_pair(handle, qid);
                self.carry_out(world, of.device);
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// Ends what an id has of a connection, without an event.
    fn end_by_messages(&mut self, world: &mut World<'_>, handle: u32, of: ByMessages) {
        if let Some(id) = self.ids.get_mut(&handle) {
            id.state = State::Over;
        }
        self.release(world, handle, of);
    }

    /// Refuses a peer's request or acceptance, takes back an own one, or gives up an attempt.
    ///
    /// # Errors
    /// `EINVAL` with too much private data, and for a connection that is established or over.
    pub(super) fn reject_by_messages(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        of: ByMessages,
        private_data: &[u8],
    ) -> Result<(), Errno> {
        Message::Reject.check(self.identity, private_data)?;
        match self.adapters.state(of) {
            Some(Cm::ReqRcvd | Cm::RepRcvd | Cm::RepSent) => {
                if let Some(adapter) = self.adapters.opened.get_mut(&of.device) {
                    let rejected = adapter.connections.reject(world.now, of.number, private_data);
                    rejected.map_err(errno_of)?;
                }
                let remote = self.ids.get(&handle).and_then(|id| id.remote);
                self.carry_out_towards(world, of.device, remote);
            }
            Some(Cm::ReqSent) => {}
            _ => return Err(Errno::INVAL),
        }
        self.end_by_messages(world, handle, of);
        Ok(())
    }

    /// Ends a connection; an event follows when the peer has answered. A connection that is not
    /// established, or over, stays as it is: as in a kernel, that is no error.
    pub(super) fn disconnect_by_messages(&mut self, world: &mut World<'_>, of: ByMessages) {
        if let Some(adapter) = self.adapters.opened.get_mut(&of.device)
            && adapter.connections.disconnect(world.now, of.number).is_ok()
        {
            self.carry_out(world, of.device);
        }
    }

    /// The program received an asynchronous event of its queue pair.
    ///
    /// # Errors
    /// Those of [`notify`](Engine::notify).
    pub(super) fn notify_by_messages(
        &mut self,
        world: &mut World<'_>,
        of: ByMessages,
        event: u32,
    ) -> Result<(), Errno> {
        match (self.adapters.state(of), event) {
            (Some(Cm::Established), COMMUNICATION_ESTABLISHED) => Err(Errno::ISCONN),
            (Some(Cm::Established), PATH_MIGRATED) => Ok(()),
            // The peer has got the REP, so its RTU was lost.
            (Some(Cm::RepSent), COMMUNICATION_ESTABLISHED) => {
                if let Some(adapter) = self.adapters.opened.get_mut(&of.device) {
                    let established = adapter.connections.communication_established(of.number);
                    established.map_err(errno_of)?;
                }
                self.carry_out(world, of.device);
                Ok(())
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// Adds what a connection determines of its queue pair's attributes in RTR or RTS.
    ///
    /// # Errors
    /// `EINVAL` while the peer's are not known, and after the connection's end.
    pub(super) fn attributes_by_messages(
        &mut self,
        world: &mut World<'_>,
        handle: u32,
        state: QpState,
    ) -> Result<QpAttrResponse, Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        let (State::ByMessages(of), Some(local), Some(remote)) = (&id.state, id.local, id.remote) else {
            return Err(Errno::INVAL);
        };
        let adapter = self.adapters.opened.get(&of.device).ok_or(Errno::INVAL)?;
        let (attr, mask) = match state {
            QpState::Rtr => adapter.connections.rtr(of.number),
            _ => adapter.connections.rts(of.number),
        }
        .ok_or(Errno::INVAL)?;
        let default = of.active.then(|| self.policy(remote.ip()).ack_timeout);
        let mut response = QpAttrResponse::new_zeroed();
        (response.mask, response.state, response.cur_state) = (mask.bits(), attr.state, attr.state);
        response.port = PORT;
        if state == QpState::Rtr {
            response.path_mtu = attr.path_mtu;
            response.dest_qp_num = attr.dest_qpn;
            response.rq_psn = attr.rq_psn;
            response.max_dest_rd_atomic = attr.max_dest_rd_atomic;
            let vector = self.vector_of(world, handle, (local, remote))?;
            let bytes = vector.as_bytes();
            response.address_vectors[..bytes.len()].copy_from_slice(bytes);
            return Ok(response);
        }
        response.sq_psn = attr.sq_psn;
        response.timeout = id.ack_timeout.or(default).unwrap_or(attr.timeout);
        response.retry_cnt = attr.retry_cnt;
        response.rnr_retry = attr.rnr_retry;
        response.max_rd_atomic = attr.max_rd_atomic;
        Ok(response)
    }

    fn vector_of(
        &self,
        world: &mut World<'_>,
        handle: u32,
        (local, remote): (SocketAddr, SocketAddr),
    ) -> Result<super::abi::AhAttr, Errno> {
        let id = self.ids.get(&handle).ok_or(Errno::NOENT)?;
        Ok(address_vector(world, local, remote.ip(), id.traffic_class))
    }
}
