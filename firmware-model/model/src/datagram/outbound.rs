//! Makes packets from work requests, and sends them.

use super::Engine;
use super::Packet;
use super::refused;
use crate::config::ModelConfig;
use crate::counters::Counter;
use crate::llp::buffers::Buffer;
use crate::memory::Need;
use crate::queues::{BadWqe, Overflow, SendWqe};
use crate::stream::datagram::{BATCH, Outgoing, PACKET_ROOM};
use crate::transport::placement::Cursor;
use crate::transport::{Env, TxOutcome};
use crate::tuning::DATAGRAM_TX_BUDGET;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use urnic_device::event::QpFault;
use urnic_device::stream::ip_of;
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{DatagramAddress, Opcode, SendFlags};
use urnic_wire::roce::{Body, Deth, Ends, Header, Psn, seal};

/// The bit of a request's Q_Key that selects the Q_Key of the queue pair (IBTA vol. 1 §10.2.5).
const OWN_QKEY: u32 = 1 << 31;

impl Engine {
    /// Sends packets until the sockets take no more or no request is left.
    pub(crate) fn transmit(&mut self, env: &mut Env<'_>) -> TxOutcome {
        let mut made = 0;
        loop {
            match self.state {
                QpState::Rts => {}
                QpState::Sqe => {
                    let (Ok(()) | Err(Overflow)) = self.flush_sends(env);
                    return TxOutcome::Idle;
                }
                QpState::Err => {
                    self.flush(env);
                    return TxOutcome::Idle;
                }
                _ => return TxOutcome::Idle,
            }
            let failed = match self.staged.packets.is_empty() {
                true => self.stage(env),
                false => None,
            };
            if self.staged.packets.is_empty() && failed.is_none() {
                return TxOutcome::Idle;
            }
            made += self.staged.packets.len();
            let blocked = self.hand_over(env);
            if let Some((wqe, status)) = failed.filter(|_| !blocked) {
                self.fail_send(&wqe, status, env);
            }
            if let Err(Overflow) = self.send_cq.flush(env) {
                self.fail(QpFault::CqOverflow, env);
                return TxOutcome::Idle;
            }
            if blocked {
                env.counters.add(Counter::TxStalls, 1);
                return TxOutcome::Blocked;
            }
            if made >= DATAGRAM_TX_BUDGET {
                return TxOutcome::More;
            }
        }
    }

    /// Makes packets from posted requests. Returns an invalid request, if there is one: those
    /// before it are to be sent first.
    fn stage(&mut self, env: &mut Env<'_>) -> Option<(SendWqe, WcStatus)> {
        let mut buffer: Option<Buffer> = None;
        let mut failed = None;
        while self.staged.packets.len() < BATCH {
            let wqe = match self.sq.peek() {
                None => break,
                Some(Ok(wqe)) => wqe,
                Some(Err(BadWqe { cookie })) => {
                    self.sq.discard();
                    self.next_psn();
                    let cqe = env.qp.cqe(cookie, WcOpcode::Send, WcStatus::LocQpOpErr);
                    self.state = QpState::Sqe;
                    let (Ok(()) | Err(Overflow)) = self.send_cq.push(cqe, env);
                    break;
                }
            };
            let at = self.staged.packets.len() * PACKET_ROOM;
            let buffer = buffer.get_or_insert_with(|| env.buffers.take());
            let made = self.packet(&wqe, &mut buffer[at..at + PACKET_ROOM], env);
            self.sq.advance(wqe.blocks);
            match made {
                Ok((mut outgoing, len, socket)) => {
                    outgoing.at = at;
                    self.staged.packets.push(Packet { wqe, len, socket });
                    self.staged.outgoing.push(outgoing);
                }
                Err(status) => {
                    failed = Some((wqe, status));
                    break;
                }
            }
        }
        match (self.staged.packets.is_empty(), buffer) {
            (true, Some(unused)) => env.buffers.give(unused),
            (_, buffer) => self.staged.buffer = buffer,
        }
        failed
    }

    /// Makes the packet of a request in `place`. Returns it with the length of its payload and its
    /// socket.
    fn packet(
        &mut self,
        wqe: &SendWqe,
        place: &mut [u8],
        env: &Env<'_>,
    ) -> Result<(Outgoing, usize, Option<usize>), WcStatus> {
        let psn = self.next_psn();
        let immediate = match wqe.opcode {
            Opcode::Send => None,
            Opcode::SendImm => Some(wqe.immediate),
            _ => return Err(WcStatus::LocQpOpErr),
        };
        let address = self.sq.address(wqe);
        let (source, destination) = self.ends(&address).ok_or(WcStatus::LocQpOpErr)?;
        let socket = self
            .ports
            .sender_from(source)
            .filter(|_| may_send(&self.config, source, destination.ip()));
        let len = self.payload_len(wqe).ok_or(WcStatus::LocLenErr)?;
        let deth = Deth {
            qkey: match address.qkey.get() {
                qkey if qkey & OWN_QKEY == 0 => qkey,
                _ => self.qkey,
            },
            source_qpn: env.qp.label,
        };
        let header = Header {
            solicited: wqe.flags.contains(SendFlags::SOLICITED),
            ..Header::new(address.qpn.get(), psn, Body::Datagram(deth, immediate))
        };
        let at = header.emit(place, len);
        let payload = place.get_mut(at..at + len).ok_or(WcStatus::LocLenErr)?;
        self.gather(wqe, payload, env)?;
        let port = socket.and_then(|n| Some(self.ports.senders().nth(n)?.local().port()));
        let ends = Ends {
            source: SocketAddr::new(source, port.unwrap_or_default()),
            destination,
        };
        let outgoing = Outgoing {
            at: 0,
            len: seal(place, at + len, &ends),
            source,
            destination,
            traffic_class: address.traffic_class,
        };
        Ok((outgoing, len, socket))
    }

    /// The number of the next request's packet. Each request has one, so that the driver knows it.
    fn next_psn(&mut self) -> Psn {
        let psn = self.psn;
        self.psn = psn.after(1);
        psn
    }

    /// Both ends of a datagram; `None` for invalid addresses, or addresses of two families.
    fn ends(&self, address: &DatagramAddress) -> Option<(IpAddr, SocketAddr)> {
        let source = self.config.addresses.get(usize::from(address.source))?.ip;
        let (ip, port) = (ip_of(&address.ip), address.port.get());
        if source.is_ipv4() != ip.is_ipv4() || ip.is_unspecified() || port == 0 {
            return None;
        }
        let destination = match ip {
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, address.scope.get()).into(),
            ip => SocketAddr::new(ip, port),
        };
        Some((source, destination))
    }

    fn payload_len(&self, wqe: &SendWqe) -> Option<usize> {
        let listed = (0..).map_while(|n| self.sq.element(wqe, n));
        let len = u64::from(wqe.inline_len) + listed.map(|sge| u64::from(sge.len.get())).sum::<u64>();
        usize::try_from(len).ok().filter(|len| *len <= self.max_payload)
    }

    fn gather(&self, wqe: &SendWqe, payload: &mut [u8], env: &Env<'_>) -> Result<(), WcStatus> {
        if wqe.flags.contains(SendFlags::INLINE) {
            self.sq.inline(wqe, 0, payload);
            return Ok(());
        }
        let list = |index| self.sq.element(wqe, index);
        let mut cursor = Cursor::default();
        let mut rest = payload;
        while !rest.is_empty() {
            let access = cursor.access(&list, rest.len(), Need::LocalRead);
            let access = access.ok_or(WcStatus::LocProtErr)?;
            let n = access.len as usize;
            let refused = |_| WcStatus::LocProtErr;
            let window = env.memory.check(env.qp.accessor(), access).map_err(refused)?;
            let (head, tail) = rest.split_at_mut(n);
            window.copy_out(0, head).map_err(|_| WcStatus::LocProtErr)?;
            cursor.advance(n);
            rest = tail;
        }
        Ok(())
    }

    /// Hands staged packets to the sockets; returns whether one waits for room.
    fn hand_over(&mut self, env: &mut Env<'_>) -> bool {
        let mut sent = 0;
        let mut blocked = false;
        while let Some(first) = self.staged.packets.get(sent) {
            let socket = first.socket;
            let same = |packet: &&Packet| packet.socket == socket;
            let count = self.staged.packets.iter().skip(sent).take_while(same).count();
            let run = self.staged.outgoing.get(sent..sent + count).unwrap_or_default();
            let taken = match (socket.and_then(|n| self.ports.sender(n)), &self.staged.buffer) {
                (Some(socket), Some(buffer)) => {
                    env.counters.add(Counter::TxCalls, 1);
                    let sent = socket.send(&**buffer, run);
                    env.counters.add(Counter::DirectDatagrams, socket.direct());
                    sent
                }
                _ => Err(Errno::NETUNREACH),
            };
            match taken {
                Ok(taken) => {
                    env.counters.add(Counter::TxDatagrams, taken as u64);
                    let bytes: usize = run.iter().take(taken).map(|packet| packet.len).sum();
                    env.sent(bytes as u64);
                    sent += taken.max(1);
                }
                Err(Errno::AGAIN) => {
                    blocked = true;
                    break;
                }
                Err(errno) => {
                    tracing::debug!(%errno, "a datagram was dropped");
                    env.counters.add(Counter::TxDatagramDrops, 1);
                    let at = run.first().map_or(0, |packet| packet.at);
                    let packet = self.staged.buffer.as_ref().and_then(|buffer| buffer.get(at..));
                    if self.ports.senders().any(|socket| socket.reports_refused()) {
                        refused(env.qp.qid, errno, packet.unwrap_or_default(), env);
                    }
                    sent += 1;
                }
            }
        }
        let sent = sent.min(self.staged.packets.len());
        self.staged.outgoing.drain(..sent);
        for Packet { wqe, len, .. } in self.staged.packets.drain(..sent) {
            self.sq.retire(wqe.blocks);
            if wqe.flags.contains(SendFlags::SIGNALED) {
                let mut cqe = env.qp.cqe(wqe.cookie, WcOpcode::Send, WcStatus::Success);
                cqe.byte_len = (len as u32).into();
                // An overflow is reported by the flush that follows.
                let (Ok(()) | Err(Overflow)) = self.send_cq.push(cqe, env);
            }
        }
        if self.staged.packets.is_empty()
            && let Some(buffer) = self.staged.buffer.take()
        {
            env.buffers.give(buffer);
        }
        blocked
    }

    /// Handles a failed request: the send queue stops, receives continue (state SQE).
    fn fail_send(&mut self, wqe: &SendWqe, status: WcStatus, env: &mut Env<'_>) {
        self.sq.retire(wqe.blocks);
        self.state = QpState::Sqe;
        let cqe = env.qp.cqe(wqe.cookie, wqe.opcode.completion(), status);
        let (Ok(()) | Err(Overflow)) = self.send_cq.push(cqe, env);
    }

    /// Completes all posted sends in error.
    pub(super) fn flush_sends(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        self.staged.outgoing.clear();
        for packet in std::mem::take(&mut self.staged.packets) {
            self.sq.retire(packet.wqe.blocks);
            let cqe = env
                .qp
                .cqe(packet.wqe.cookie, WcOpcode::Send, WcStatus::WrFlushErr);
            self.send_cq.push(cqe, env)?;
        }
        if let Some(buffer) = self.staged.buffer.take() {
            env.buffers.give(buffer);
        }
        while let Some(next) = self.sq.peek() {
            let cookie = match next {
                Ok(wqe) => {
                    self.sq.advance(wqe.blocks);
                    self.sq.retire(wqe.blocks);
                    wqe.cookie
                }
                Err(BadWqe { cookie }) => {
                    self.sq.discard();
                    cookie
                }
            };
            self.next_psn();
            let cqe = env.qp.cqe(cookie, WcOpcode::Send, WcStatus::WrFlushErr);
            self.send_cq.push(cqe, env)?;
        }
        self.send_cq.flush(env)
    }
}

/// Whether a datagram may go from `source` to `destination`. A device that is confined sends to a
/// group only if it is listed.
fn may_send(config: &ModelConfig, source: IpAddr, destination: IpAddr) -> bool {
    config.may_connect(destination, Some(source))
        && (!destination.is_multicast() || config.allows(destination))
}
