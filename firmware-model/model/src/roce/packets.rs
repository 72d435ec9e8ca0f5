//! Packets on their way to and from the sockets.

use super::arrivals::Arrivals;
use super::machines::Outbound;
use super::path::Path;
use super::requests::Requests;
use crate::counters::Counter;
use crate::events::Requests as Work;
use crate::llp::buffers::Buffer;
use crate::stream;
use crate::stream::datagram::{Incoming, MAX_SEGMENTS, Outgoing, PACKET_ROOM, SEGMENTS_ROOM};
use crate::stream::roce_port::{RocePort, Sources, is_same_host};
use crate::transport::{Env, RxOutcome, TxOutcome};
use crate::tuning::{DATAGRAM_RX_BATCHES, DATAGRAM_TX_BUDGET};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::net::SocketAddr;
use urnic_roce::message::Mtu;
use urnic_roce::responder::{self, Arrival};
use urnic_wire::roce::{
    Body, DEFAULT_PKEY, Ends, Header, ICRC_LEN, Psn, UDP_PORT, parse_numbered, seal, seal_numbered,
    sealed_len,
};

/// What the system says if it does not divide packets: an interface without checksums, or packets
/// longer than its own.
const UNDIVIDED: [Errno; 4] = [Errno::IO, Errno::INVAL, Errno::MSGSIZE, Errno::OPNOTSUPP];

/// The bits of the traffic class for congestion (RFC 3168 §5), and their value in a packet that a
/// congested router has marked.
const ECN: u8 = 0b11;
const CONGESTION_EXPERIENCED: u8 = 0b11;

/// Packets that are made before some go to the system: as many as it divides.
const STAGED: usize = MAX_SEGMENTS;
/// Packets that are received in one run.
const RUN: usize = 256;

/// The sockets of a queue pair, and the packets that they have not taken.
#[derive(Debug)]
pub(super) struct Packets {
    /// None in a destroyed queue pair.
    port: Option<RocePort>,
    path: Option<Path>,
    /// Present while packets wait.
    buffer: Option<Buffer>,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    /// The network makes packets of segments.
    divides: bool,
}

impl Packets {
    pub(super) fn new(port: RocePort) -> Packets {
        Packets {
            divides: port.sender().divides(),
            port: Some(port),
            path: None,
            buffer: None,
            outgoing: Vec::new(),
            incoming: Vec::new(),
        }
    }

    pub(super) fn connect(&mut self, path: Path) {
        self.path = Some(path);
        if let Some(port) = &mut self.port {
            self.divides = port.sender().divides();
            port.keep_from(Sources::Peer(path.destination, path.source));
        }
    }

    pub(super) fn mtu(&self) -> Option<Mtu> {
        Some(self.path?.mtu)
    }

    /// Whether the socket has taken all packets that were made.
    pub(super) fn are_sent(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Both ends: the port at which this one receives is 4791, too.
    pub(super) fn ends(&self) -> Option<stream::Ends> {
        let (path, port) = (self.path.as_ref()?, self.port.as_ref()?);
        Some(stream::Ends {
            local: SocketAddr::new(path.source, port.source()),
            remote: path.destination,
        })
    }

    pub(super) fn close(&mut self) {
        self.port = None;
    }

    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.port.iter().filter_map(RocePort::descriptor)
    }

    /// Sends what the two ends of the connection have to send: answers, then requests, then the
    /// acknowledgement, which is short enough to go as the last segment of a packet.
    pub(super) fn transmit(
        &mut self,
        requests: &mut Requests,
        arrivals: &mut Arrivals,
        env: &mut Env<'_>,
    ) -> TxOutcome {
        let Some(path) = self.path else {
            return TxOutcome::Idle;
        };
        let mut made = 0;
        loop {
            if self.outgoing.is_empty() {
                self.stage(&path, requests, arrivals, env);
            }
            made += self.outgoing.len();
            let is_empty = self.outgoing.is_empty();
            let blocked = !is_empty && self.hand_over(&path, env);
            if self.outgoing.is_empty()
                && let Some(buffer) = self.buffer.take()
            {
                env.buffers.give(buffer);
            }
            match () {
                () if is_empty => return TxOutcome::Idle,
                () if blocked => {
                    env.counters.add(Counter::TxStalls, 1);
                    return TxOutcome::Blocked;
                }
                () if made >= DATAGRAM_TX_BUDGET => return TxOutcome::More,
                () => {}
            }
        }
    }

    /// Makes packets.
    fn stage(&mut self, path: &Path, requests: &mut Requests, arrivals: &mut Arrivals, env: &mut Env<'_>) {
        let mut buffer = self.buffer.take().unwrap_or_else(|| env.buffers.take());
        let ends = self.ends_on(path);
        let mut at = 0;
        while self.outgoing.len() < STAGED {
            let Some(room) = buffer.get_mut(at..at + PACKET_ROOM) else {
                break;
            };
            let made = match self.next(requests, arrivals, env) {
                None => break,
                Some(Next::CongestionNotification) => {
                    let header = Header {
                        becn: true,
                        ..Header::new(path.qpn, Psn::default(), Body::CongestionNotification)
                    };
                    emit(&header, 0, room, |_| true)
                }
                Some(Next::Response(packet)) => {
                    let body = Body::Response(packet.response);
                    let header = Header::new(path.qpn, packet.psn, body);
                    let gather = |payload: &mut [u8]| arrivals.read(&packet, payload, env);
                    emit(&header, packet.data.length as usize, room, gather)
                }
                Some(Next::Request(packet)) => {
                    let (_, _, len) = packet.payload();
                    let gather = |payload: &mut [u8]| requests.gather(&packet, payload, env);
                    emit(&packet.header(path.qpn), len as usize, room, gather)
                }
            };
            let Some(len) = made else { continue };
            let segment = match self.divides {
                true => next_segment(&self.outgoing, sealed_len(len)),
                false => 0,
            };
            let len = seal_numbered(room, len, &ends, segment);
            self.outgoing.push(Outgoing {
                at,
                len,
                source: path.source,
                destination: ends.destination,
                traffic_class: path.traffic_class,
                segment,
            });
            at += len;
        }
        self.buffer = Some(buffer);
    }

    /// The next packet to make.
    fn next(&self, requests: &mut Requests, arrivals: &mut Arrivals, env: &mut Env<'_>) -> Option<Next> {
        if arrivals.take_congestion() {
            return Some(Next::CongestionNotification);
        }
        if let Some(answer) = arrivals.answer() {
            return Some(Next::Response(answer));
        }
        let staged = self.outgoing.len();
        // The last place is for the acknowledgement.
        if staged + 1 < STAGED
            && let Some(request) = requests.transmit(env.now.get())
        {
            arrivals.request_sent();
            return Some(Next::Request(request));
        }
        arrivals.acknowledge(staged > 0).map(Next::Response)
    }

    /// The ends that packets show.
    fn ends_on(&self, path: &Path) -> Ends {
        let source = self.port.as_ref().map(RocePort::source);
        Ends {
            source: SocketAddr::new(path.source, source.unwrap_or_default()),
            destination: path.destination,
        }
    }

    /// Makes each packet one of its own, now and from now on: the system does not divide packets
    /// on this path.
    fn divide(&mut self, path: &Path) {
        self.divides = false;
        let ends = self.ends_on(path);
        if let Some(buffer) = &mut self.buffer {
            undivide(&mut self.outgoing, &mut buffer[..], &ends);
        }
    }

    /// Hands packets to the socket; returns whether one waits for room.
    fn hand_over(&mut self, path: &Path, env: &mut Env<'_>) -> bool {
        let mut sent = 0;
        let mut blocked = false;
        while let Some(run) = self.outgoing.get(sent..).filter(|run| !run.is_empty()) {
            let taken = match (&mut self.port, &self.buffer) {
                (Some(port), Some(buffer)) => port.sender_mut().send(&**buffer, run),
                _ => Err(Errno::NETUNREACH),
            };
            env.counters.add(Counter::TxCalls, 1);
            match taken {
                Ok(taken) => {
                    let bytes: usize = run.iter().take(taken).map(|packet| packet.len).sum();
                    env.sent(bytes as u64);
                    sent += taken.max(1);
                }
                Err(Errno::AGAIN) => {
                    blocked = true;
                    break;
                }
                Err(errno) if has_segments(run) && UNDIVIDED.contains(&errno) => {
                    tracing::debug!(%errno, "packets are not divided by the system");
                    self.outgoing.drain(..sent);
                    sent = 0;
                    self.divide(path);
                }
                // It is lost with its segments, and sent again as others that are lost.
                Err(errno) => {
                    let segments = run.iter().skip(1).take_while(|packet| packet.segment != 0);
                    let lost = 1 + segments.count();
                    tracing::debug!(%errno, lost, "packets were dropped");
                    env.counters.add(Counter::TxDatagramDrops, lost as u64);
                    sent += lost;
                }
            }
        }
        self.outgoing.drain(..sent.min(self.outgoing.len()));
        blocked
    }

    /// Takes the packets that have arrived.
    pub(super) fn receive(
        &mut self,
        requests: &mut Requests,
        arrivals: &mut Arrivals,
        env: &mut Env<'_>,
    ) -> RxOutcome {
        self.take_all(env, |packet, (ends, is_marked), path, env| {
            let parsed = parse_numbered(packet, ends).ok();
            let is_ours = |header: &Header| {
                let from_peer =
                    is_same_host(ends.source, path.destination) && ends.destination.ip() == path.source;
                from_peer && header.destination_qpn == env.qp.qpn() && header.pkey == DEFAULT_PKEY
            };
            let Some((header, payload)) = parsed.filter(|(header, _)| is_ours(header)) else {
                env.counters.add(Counter::RxDatagramErrors, 1);
                return;
            };
            if is_marked && !matches!(header.body, Body::CongestionNotification) {
                arrivals.congestion_experienced(env.now.get());
            }
            match header.body {
                Body::Request(request) => {
                    let arrival = Arrival {
                        psn: header.psn,
                        request,
                        payload_len: payload.len(),
                        ack_request: header.ack_request,
                    };
                    arrivals.request(&arrival, header.solicited, payload, env);
                }
                Body::Response(response) => requests.receive(header.psn, &response, payload, env),
                Body::CongestionNotification => requests.congestion_notified(),
                Body::Unreliable(transfer) => {
                    arrivals.unreliable(header.psn, transfer, (payload, header.solicited), env);
                }
                Body::Datagram(..) => {
                    env.counters.add(Counter::RxDatagramErrors, 1);
                }
            }
        })
    }

    /// Drops the packets that have arrived: the queue pair does not receive.
    pub(super) fn discard(&mut self, env: &mut Env<'_>) -> RxOutcome {
        self.take_all(env, |_, _, _, env| env.counters.add(Counter::RxDatagramDrops, 1))
    }

    fn take_all(
        &mut self,
        env: &mut Env<'_>,
        mut each: impl FnMut(&[u8], (&Ends, bool), &Path, &mut Env<'_>),
    ) -> RxOutcome {
        let mut buffer = env.buffers.take();
        let mut more = false;
        let mut received = 0;
        for _ in 0..DATAGRAM_RX_BATCHES {
            let Some(port) = &mut self.port else { break };
            self.incoming.clear();
            let read = port.receive(&mut buffer[..], &mut self.incoming);
            read.count(env.counters);
            env.counters.add(Counter::RxCalls, 1);
            for qid in read.woken {
                env.effects.kick(qid, Work::RECEIVE);
            }
            received += self.incoming.len();
            for packet in &self.incoming {
                let (Some(bytes), Some(path)) = (packet.bytes(&buffer[..]), &self.path) else {
                    env.counters.add(Counter::RxDatagramErrors, 1);
                    continue;
                };
                env.received(bytes.len() as u64);
                let is_marked = packet.traffic_class & ECN == CONGESTION_EXPERIENCED;
                let ends = Ends {
                    source: packet.source,
                    destination: SocketAddr::new(packet.destination, UDP_PORT),
                };
                each(bytes, (&ends, is_marked), path, env);
            }
            more = read.has_more;
            // What has arrived is acknowledged in between.
            if !more || received >= RUN || env.is_stopped() {
                break;
            }
        }
        env.buffers.give(buffer);
        match more {
            true => RxOutcome::More,
            false => RxOutcome::Drained,
        }
    }
}

/// A packet to make.
enum Next {
    CongestionNotification,
    Response(responder::Packet),
    Request(Outbound),
}

/// The number of a packet of `len` bytes among the segments of the packet that ends `before`, or 0:
/// it is none of them.
fn next_segment(before: &[Outgoing], len: usize) -> u16 {
    let Some(last) = before.last() else { return 0 };
    let head = before.len().checked_sub(1 + usize::from(last.segment));
    let Some(head) = head.and_then(|at| before.get(at)) else {
        return 0;
    };
    // Only the last one may be shorter than the others.
    let segment = last.segment + 1;
    let count = usize::from(segment) + 1;
    let fits = count <= MAX_SEGMENTS && count * head.len <= SEGMENTS_ROOM;
    match last.len == head.len && len <= head.len && fits {
        true => segment,
        false => 0,
    }
}

/// Makes each of the packets in `buffer` one of its own: its ICRC has another identification then.
fn undivide(packets: &mut [Outgoing], buffer: &mut [u8], ends: &Ends) {
    for packet in packets {
        packet.segment = 0;
        if let Some(bytes) = buffer.get_mut(packet.at..packet.at + packet.len) {
            seal(bytes, packet.len - ICRC_LEN, ends);
        }
    }
}

/// Whether the first of these packets has segments.
fn has_segments(packets: &[Outgoing]) -> bool {
    packets.get(1).is_some_and(|second| second.segment != 0)
}

/// Writes headers and payload of a packet; returns their length, or none if the payload cannot be
/// gathered.
fn emit(
    header: &Header,
    payload_len: usize,
    room: &mut [u8],
    gather: impl FnOnce(&mut [u8]) -> bool,
) -> Option<usize> {
    let at = header.emit(room, payload_len);
    let payload = room.get_mut(at..at + payload_len)?;
    gather(payload).then_some(at + payload_len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};
    use urnic_wire::roce::{Psn, Request, Transfer, parse};

    const IP: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const ENDS: Ends = Ends {
        source: SocketAddr::new(IP, 50_000),
        destination: SocketAddr::new(IP, UDP_PORT),
    };

    /// Packets of these lengths, and which segments they are.
    fn segments(lengths: &[usize]) -> Vec<u16> {
        let mut packets: Vec<Outgoing> = Vec::new();
        for len in lengths {
            packets.push(Outgoing {
                at: 0,
                len: *len,
                source: IP,
                destination: ENDS.destination,
                traffic_class: 0,
                segment: next_segment(&packets, *len),
            });
        }
        packets.iter().map(|packet| packet.segment).collect()
    }

    #[test]
    fn packets_of_one_length_and_a_shorter_one_go_together() {
        assert_eq!(segments(&[]), [0u16; 0]);
        // The first packet of a Write is longer than those after it.
        assert_eq!(segments(&[1056, 1040, 1040, 1040, 516]), [0, 1, 0, 1, 2]);
        assert_eq!(segments(&[1040, 1040, 516, 1040, 1040]), [0, 1, 2, 0, 1]);
        assert_eq!(segments(&[16, 1040, 1040]), [0, 0, 1]);
        let full = segments(&[4112; 17]);
        assert_eq!(full[14..], [14, 0, 1], "UDP carries no more");
    }

    #[test]
    fn packets_that_the_system_does_not_divide_get_icrcs_of_their_own() {
        let mut buffer = vec![0; 3 * PACKET_ROOM];
        let mut packets = Vec::new();
        let mut at = 0;
        for index in 0..3 {
            let room = &mut buffer[at..];
            let body = Body::Request(Request::Transfer(Transfer::SendMiddle));
            let len = Header::new(7, Psn::new(index), body).emit(room, 9) + 9;
            let segment = next_segment(&packets, sealed_len(len));
            let len = seal_numbered(room, len, &ENDS, segment);
            packets.push(Outgoing {
                at,
                len,
                source: IP,
                destination: ENDS.destination,
                traffic_class: 0,
                segment,
            });
            at += len;
        }
        let are_whole = |packets: &[Outgoing], buffer: &[u8]| -> Vec<bool> {
            let parses = |packet: &Outgoing| parse(&buffer[packet.at..][..packet.len], &ENDS).is_ok();
            packets.iter().map(parses).collect()
        };
        assert!(has_segments(&packets));
        assert_eq!(are_whole(&packets, &buffer), [true, false, false]);
        undivide(&mut packets, &mut buffer, &ENDS);
        assert!(!has_segments(&packets));
        assert_eq!(are_whole(&packets, &buffer), [true; 3]);
    }
}
