//! Receives packets, checks them, and completes receives.

use super::refused;
use super::{Engine, Ports};
use crate::counters::Counter;
use crate::events::Requests;
use crate::queues::Overflow;
use crate::stream::datagram::{BATCH, DatagramSocket, Incoming, PACKET_ROOM, Refused};
use crate::transport::placement::{Cursor, scatter};
use crate::transport::{Env, RxOutcome};
use crate::tuning::{DATAGRAM_FIRST_BATCH, DATAGRAM_RX_BATCHES};
use std::net::SocketAddr;
use urnic_device::cqe::CqeFlags;
use urnic_device::event::QpFault;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_wire::roce::{
    Body, Deth, Ends, GRH_LEN, Immediate, MULTICAST_QPN, UDP_PORT, grh, parse, parse_numbered,
};

/// The hop limit in the GRH: the socket does not report the packet's hop limit.
const HOP_LIMIT: u8 = 64;

/// What the completion of a receive has of a datagram's headers.
struct Datagram {
    deth: Deth,
    immediate: Option<Immediate>,
    solicited: bool,
}

impl Engine {
    /// Takes all packets that have arrived.
    pub(crate) fn receive(&mut self, env: &mut Env<'_>) -> RxOutcome {
        let mut buffer = env.buffers.take();
        let mut more = self.receive_shared(&mut *buffer, env);
        let groups = match self.ports.groups_have_sockets() {
            true => self.groups.len(),
            false => 0,
        };
        for source in 0..self.ports.own_sockets() + groups {
            more |= self.receive_from(source, &mut *buffer, env);
        }
        env.buffers.give(buffer);
        if let Err(Overflow) = self.recv_cq.flush(env) {
            self.fail(QpFault::CqOverflow, env);
        }
        match more {
            true => RxOutcome::More,
            false => RxOutcome::Drained,
        }
    }

    /// Takes the packets that have arrived at the shared port; returns whether there may be more.
    fn receive_shared(&mut self, buffer: &mut [u8], env: &mut Env<'_>) -> bool {
        let mut incoming = std::mem::take(&mut self.incoming);
        let mut more = false;
        for _ in 0..DATAGRAM_RX_BATCHES {
            let Ports::Shared(shared) = &mut self.ports else {
                break;
            };
            incoming.clear();
            let read = shared.receive(buffer, &mut incoming);
            read.count(env.counters);
            env.counters.add(Counter::RxCalls, 1);
            for qid in read.woken {
                env.effects.kick(qid, Requests::RECEIVE);
            }
            for packet in &incoming {
                let Some(bytes) = packet.bytes(buffer) else {
                    env.counters.add(Counter::RxDatagramErrors, 1);
                    continue;
                };
                env.received(bytes.len() as u64);
                let group = SocketAddr::new(packet.destination, UDP_PORT);
                let group = Some(group).filter(|group| group.ip().is_multicast());
                self.take(bytes, packet, UDP_PORT, group, env);
            }
            // A program that polls has what came before the next call.
            if let Err(Overflow) = self.recv_cq.flush(env) {
                self.fail(QpFault::CqOverflow, env);
            }
            more = read.has_more;
            if !more || env.is_stopped() {
                break;
            }
        }
        self.incoming = incoming;
        more
    }

    /// Takes the packets that have arrived at a socket; returns whether there may be more.
    fn receive_from(&mut self, source: usize, buffer: &mut [u8], env: &mut Env<'_>) -> bool {
        let mut incoming = std::mem::take(&mut self.incoming);
        let qid = env.qp.qid;
        let mut more = true;
        let mut full = false;
        for batch in 0..DATAGRAM_RX_BATCHES {
            incoming.clear();
            let most = if batch == 0 { DATAGRAM_FIRST_BATCH } else { BATCH };
            let Some((socket, group)) = self.source(source) else {
                break;
            };
            let port = socket.local().port();
            for _ in 0..BATCH {
                let Some(Refused { errno, len, .. }) = socket.refused(buffer) else {
                    break;
                };
                refused(qid, errno, buffer.get(..len).unwrap_or_default(), env);
            }
            let room = buffer.get_mut(..most * PACKET_ROOM).unwrap_or_default();
            let is_full = socket.receive(room, &mut incoming);
            env.counters.add(Counter::RxCalls, 1);
            for packet in &incoming {
                let Some(bytes) = packet.bytes(buffer) else {
                    env.counters.add(Counter::RxDatagramErrors, 1);
                    continue;
                };
                env.received(bytes.len() as u64);
                self.take(bytes, packet, port, group, env);
            }
            // A program that polls has what came before the next call.
            if let Err(Overflow) = self.recv_cq.flush(env) {
                self.fail(QpFault::CqOverflow, env);
            }
            let has_more = self.source(source).is_some_and(|(socket, _)| socket.has_more());
            more = is_full || has_more;
            full |= is_full && most == BATCH;
            if !more || env.is_stopped() {
                break;
            }
        }
        // A buffer that was full held more than a batch.
        if full && let Some((socket, _)) = self.source(source) {
            env.counters
                .add(Counter::RxDatagramDrops, socket.dropped().into());
        }
        self.incoming = incoming;
        more
    }

    /// A socket, and the group that it receives.
    fn source(&mut self, index: usize) -> Option<(&mut dyn DatagramSocket, Option<SocketAddr>)> {
        match index.checked_sub(self.ports.own_sockets()) {
            None => Some((self.ports.sender(index)?, None)),
            Some(index) => {
                let membership = self.groups.get_mut(index)?;
                Some((membership.socket.as_mut(), Some(membership.group)))
            }
        }
    }

    /// Takes a packet that arrived at `port`, from a socket of `group`.
    fn take(
        &mut self,
        packet: &[u8],
        incoming: &Incoming,
        port: u16,
        group: Option<SocketAddr>,
        env: &mut Env<'_>,
    ) {
        if !matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqe) {
            env.counters.add(Counter::RxDatagramDrops, 1);
            return;
        }
        let ends = Ends {
            source: incoming.source,
            destination: SocketAddr::new(incoming.destination, port),
        };
        let expected = match group {
            // Another group's packets arrive at the same port.
            Some(group) if group.ip() != incoming.destination => return,
            Some(_) => MULTICAST_QPN,
            None => env.qp.label,
        };
        let parsed = match self.ports.is_shared() {
            true => parse_numbered(packet, &ends),
            false => parse(packet, &ends),
        };
        let Ok((header, payload)) = parsed else {
            env.counters.add(Counter::RxDatagramErrors, 1);
            return;
        };
        let (Body::Datagram(deth, immediate), true) = (header.body, header.destination_qpn == expected)
        else {
            env.counters.add(Counter::RxDatagramErrors, 1);
            return;
        };
        let datagram = Datagram {
            deth,
            immediate,
            solicited: header.solicited,
        };
        if deth.qkey != self.qkey {
            env.counters.add(Counter::QkeyViolations, 1);
            return;
        }
        let is_to_group = group.is_some() && self.blocks_own_multicast;
        if is_to_group && deth.source_qpn == env.qp.label && self.is_own(incoming.source) {
            return;
        }
        let route = grh(
            ends.source.ip(),
            ends.destination.ip(),
            packet.len(),
            HOP_LIMIT,
            incoming.traffic_class,
        );
        if let Err(Overflow) = self.deliver(&datagram, &route, payload, ends.source, env) {
            self.fail(QpFault::CqOverflow, env);
        }
    }

    /// Whether an address is that of the queue pair's own port.
    fn is_own(&self, source: SocketAddr) -> bool {
        let mut senders = self.ports.senders();
        let own_port = senders.any(|socket| socket.local().port() == source.port());
        own_port && self.config.addresses.iter().any(|own| own.ip == source.ip())
    }

    /// Puts a datagram into the next receive.
    fn deliver(
        &mut self,
        datagram: &Datagram,
        route: &[u8; GRH_LEN],
        payload: &[u8],
        source: SocketAddr,
        env: &mut Env<'_>,
    ) -> Result<(), Overflow> {
        match self.rq.take(&mut self.wqe, env.effects) {
            Some(Ok(())) => {}
            Some(Err(_)) => {
                self.complete_receive(WcStatus::LocQpOpErr, env)?;
                self.fail(QpFault::LocalWork, env);
                return Ok(());
            }
            None => {
                env.counters.add(Counter::RxDatagramDrops, 1);
                return Ok(());
            }
        }
        let len = GRH_LEN + payload.len();
        if self.wqe.room() < len as u64 {
            env.counters.add(Counter::RxDatagramDrops, 1);
            return self.complete_receive(WcStatus::LocLenErr, env);
        }
        let sges = self.wqe.sges();
        let list = |n: usize| sges.get(n).copied();
        let pd = self.rq.pd(env.qp.pd);
        let mut cursor = Cursor::default();
        let placed = scatter(pd, env, list, &mut cursor, route)
            .and_then(|()| scatter(pd, env, list, &mut cursor, payload));
        if placed.is_err() {
            self.complete_receive(WcStatus::LocProtErr, env)?;
            self.fail(QpFault::LocalWork, env);
            return Ok(());
        }
        let mut cqe = env.qp.cqe(self.wqe.cookie, WcOpcode::Recv, WcStatus::Success);
        let mut flags = CqeFlags::DATAGRAM;
        flags.set(CqeFlags::IPV6, source.is_ipv6());
        if let Some(immediate) = datagram.immediate {
            cqe.extra = immediate;
            flags |= CqeFlags::WITH_IMM;
        }
        if datagram.solicited {
            flags |= CqeFlags::SOLICITED;
        }
        cqe.flags = flags.bits();
        cqe.byte_len = (len as u32).into();
        cqe.source_qpn = datagram.deth.source_qpn.into();
        cqe.source_port = u32::from(source.port()).into();
        env.counters.add(Counter::RxDatagrams, 1);
        self.recv_cq.push(cqe, env)
    }
}
