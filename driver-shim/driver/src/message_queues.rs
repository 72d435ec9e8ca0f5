//! The queues for messages between connection managers: management datagrams in packets of RoCE v2.
//!
//! Each UDP port of the connection manager has a queue pair of kind UD, as programs have them, but
//! with the number of the general services. All share a receive queue and a completion queue, whose
//! notifications come with the interrupts of asynchronous events.
//!
//! On the wire of RoCE v2 a device has one such queue pair, at the port of all queue pairs. A UDP
//! port of the connection manager then only holds the number of services against others, and has
//! their requests come to this device.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::command::{
    CreateCq, CreateMr, CreateQp, CreateSrq, Handle, ModifyQp, Nothing, Opcode, QueueHandle, cq, create_qp,
    features, modify,
};
use urnic_device::cqe::{Cqe, CqeFlags};
use urnic_device::doorbell::{Doorbell, Kind};
use urnic_device::record::{QueueRecord, publish};
use urnic_device::stream::{BindDatagrams, DatagramPort, Endpoint, bind, ip_of};
use urnic_device::vocabulary::{Access, QpKind, QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{self, BLOCK_LEN, DatagramAddress, OPERANDS, RecvHeader, SendFlags, SendHeader, Sge};
use urnic_wire::mad::{MAD_LEN, MANAGEMENT_QKEY, MANAGEMENT_QPN};
use urnic_wire::roce::GRH_LEN;
use zerocopy::{FromZeros, IntoBytes};

use crate::attributes::Attributes;
use crate::command::CommandQueue;
use crate::dma::{DmaMemory, DmaPool};
use crate::events::EventQueue;
use crate::rings::{CompletionRing, OwnRing, Ring};
use urnic_cm::rdma_cm::Arrival;
use urnic_device::bus::Bus;
use urnic_process::addressing::Gid;

/// Receives of all ports.
const RECEIVES: u32 = 256;
const RECEIVE_LEN: usize = GRH_LEN + MAD_LEN;
/// Bytes of a receive queue entry with one element.
const LOG_STRIDE: u32 = (size_of::<RecvHeader>() + size_of::<Sge>()).ilog2();
/// Entries of the completion queue: for all receives, and for sends that filled a send queue.
const COMPLETIONS: u32 = 16 * RECEIVES;
/// Blocks of a message in the send queue of a port, and of the queue.
const SEND_BLOCKS: usize = wqe::blocks(size_of::<DatagramAddress>() + MAD_LEN);
const LOG_SEND_QUEUE: u32 = 6;
const SEND_QUEUE: u32 = 1 << LOG_SEND_QUEUE;
/// Messages of a port that may wait for room in its send queue.
const MAX_WAITING: usize = 1024;
/// The largest PSN.
const MAX_PSN: u32 = 0xff_ffff;
/// Messages taken in one call; the next call takes further ones.
const BUDGET: usize = 256;

/// The ports of the connection manager, and their common queues.
pub(crate) struct Messages {
    events: EventQueue,
    uar: u32,
    pd: u32,
    /// The region of `buffers`.
    stag: u32,
    buffers: DmaMemory,
    receives: ReceiveQueue,
    completions: CompletionQueue,
    ports: HashMap<u32, Port>,
    /// On the wire of RoCE v2, the one that carries all messages.
    general: Option<u32>,
    /// The upper 16 bits of the numbers in messages on the wire of RoCE v2, or 0.
    member: u16,
}

struct ReceiveQueue {
    id: u32,
    doorbell: u32,
    ring: OwnRing<Ring<QueueRecord>>,
    producer: u32,
}

struct CompletionQueue {
    id: u32,
    doorbell: u32,
    ring: OwnRing<CompletionRing>,
}

/// The send queue of a port.
struct Port {
    qid: u32,
    doorbell: u32,
    ring: OwnRing<Ring<QueueRecord>>,
    producer: u32,
    /// The PSN of the next message.
    psn: u32,
    /// Messages for which the send queue had no room, oldest first. The entry that filled it makes
    /// a completion, after which there is room.
    waiting: VecDeque<(DatagramAddress, [u8; MAD_LEN])>,
}

/// A message that arrived.
pub(crate) struct Received {
    /// The number of the port that it arrived at.
    pub(crate) port: u32,
    pub(crate) arrival: Arrival,
    pub(crate) bytes: [u8; MAD_LEN],
}

/// The parts of the driver that reach the device.
#[derive(Clone, Copy)]
pub(crate) struct Reach<'a> {
    pub(crate) bus: &'a dyn Bus,
    pub(crate) pool: &'a Arc<DmaPool>,
    pub(crate) commands: &'a CommandQueue,
    pub(crate) attributes: &'a Attributes,
    /// The addresses of the device.
    pub(crate) gids: &'a [Gid],
    /// All messages have the port of RoCE v2.
    pub(crate) has_roce_datagrams: bool,
    /// Those of connections of RoCE v2 have.
    pub(crate) has_roce_connections: bool,
}

impl Messages {
    /// # Errors
    /// `EOPNOTSUPP` if the device has no datagrams; the errors of its commands.
    pub(crate) fn new(reach: Reach<'_>, member: u16) -> Result<Messages, Errno> {
        let attributes = reach.attributes;
        if attributes.features & features::DATAGRAMS == 0 || attributes.max_inline < MAD_LEN as u32 {
            return Err(Errno::OPNOTSUPP);
        }
        let (commands, pool) = (reach.commands, reach.pool);
        let number = |opcode| {
            commands
                .call::<_, Handle>(opcode, &Nothing {})
                .map(|handle| handle.id.get())
        };
        let events = EventQueue::create(commands, pool, 2, 0)?;
        let (uar, pd) = (number(Opcode::AllocUar)?, number(Opcode::AllocPd)?);
        let buffers = pool.allocate(RECEIVES as usize * RECEIVE_LEN)?;
        let region = CreateMr {
            base: 0.into(),
            len: (buffers.len() as u64).into(),
            dma: buffers.iova().into(),
            pd: pd.into(),
            access: Access::LOCAL_WRITE.bits().into(),
            log_page: 0.into(),
            reserved: 0.into(),
        };
        let region: Handle = commands.call(Opcode::CreateMr, &region)?;
        let mut messages = Messages {
            receives: ReceiveQueue::new(reach, uar, pd)?,
            completions: CompletionQueue::new(reach, uar, events.id)?,
            events,
            uar,
            pd,
            stag: region.id.get(),
            buffers,
            ports: HashMap::new(),
            general: None,
            member,
        };
        for buffer in 0..RECEIVES {
            messages.post_receive(reach, buffer.into());
        }
        messages.completions.arm(reach, uar);
        Ok(messages)
    }

    /// Binds a UDP port; returns its number and the port.
    ///
    /// # Errors
    /// Those of binding, and of the device's commands.
    pub(crate) fn open(
        &mut self,
        reach: Reach<'_>,
        local: SocketAddr,
        ipv6_only: bool,
    ) -> Result<(u32, u16), Errno> {
        // Without the port of RoCE v2 a listener, or a connection, of that wire is refused later.
        let takes_requests = reach.has_roce_connections && self.open_general(reach).is_ok();
        let flags = [
            (ipv6_only, bind::IPV6_ONLY),
            (!reach.has_roce_datagrams, bind::REPORT_REFUSED),
            (takes_requests, bind::SERVICE),
        ];
        let flags = flags.into_iter().filter(|(given, _)| *given);
        let arguments = BindDatagrams {
            local: Endpoint::from(local),
            flags: flags.fold(0, |flags, (_, flag)| flags | flag).into(),
            reserved: 0.into(),
        };
        let bound: DatagramPort = reach.commands.call(Opcode::BindDatagrams, &arguments)?;
        let id = bound.id.get();
        let number = match reach.has_roce_datagrams {
            true => id,
            false => self.create(reach, id, 0).inspect_err(|_| {
                // The device closed the port if the queue pair had it already.
                let _ = reach.commands.destroy(Opcode::CloseDatagrams, id);
            })?,
        };
        Ok((number, bound.port.get() as u16))
    }

    /// The number of the queue pair that carries all messages on the wire of RoCE v2.
    ///
    /// # Errors
    /// `EADDRINUSE` if the port of RoCE v2 is in use; those of the device's commands.
    pub(crate) fn open_general(&mut self, reach: Reach<'_>) -> Result<u32, Errno> {
        if let Some(general) = self.general {
            return Ok(general);
        }
        let general = self.create(reach, 0, create_qp::ROCE)?;
        self.general = Some(general);
        Ok(general)
    }

    /// Makes a queue pair that is ready to send, at the UDP port with the number `datagrams` or by
    /// the `rules` at another one.
    fn create(&mut self, reach: Reach<'_>, datagrams: u32, rules: u32) -> Result<u32, Errno> {
        let ring: OwnRing<Ring<_>> = OwnRing::new(reach.pool, BLOCK_LEN << LOG_SEND_QUEUE)?;
        let arguments = CreateQp {
            sq_ring: ring.iova().into(),
            rq_ring: 0.into(),
            record: ring.record_iova().into(),
            pd: self.pd.into(),
            send_cq: self.completions.id.into(),
            recv_cq: self.completions.id.into(),
            srq: self.receives.id.into(),
            uar: self.uar.into(),
            label: MANAGEMENT_QPN.into(),
            sq_log_size: LOG_SEND_QUEUE.into(),
            rq_log_size: 0.into(),
            rq_log_stride: 0.into(),
            kind: (QpKind::UnreliableDatagram as u32).into(),
            datagrams: datagrams.into(),
            rules: rules.into(),
            max_datagram: 0.into(),
            member: match rules & create_qp::ROCE {
                0 => 0.into(),
                _ => u32::from(self.member).into(),
            },
        };
        let handle: QueueHandle = reach.commands.call(Opcode::CreateQp, &arguments)?;
        let qid = handle.id.get();
        let port = Port {
            qid,
            doorbell: handle.doorbell.get(),
            ring,
            producer: 0,
            psn: 0,
            waiting: VecDeque::new(),
        };
        self.ports.insert(qid, port);
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            reach
                .commands
                .run(Opcode::ModifyQp, &to_state(qid, state))
                .inspect_err(|_| self.destroy(reach, qid))?;
        }
        Ok(qid)
    }

    /// Closes a port.
    pub(crate) fn close(&mut self, reach: Reach<'_>, port: u32) {
        if !reach.has_roce_datagrams {
            return self.destroy(reach, port);
        }
        if let Err(errno) = reach.commands.destroy(Opcode::CloseDatagrams, port) {
            tracing::debug!("a UDP port was not closed: {errno}");
        }
    }

    fn destroy(&mut self, reach: Reach<'_>, port: u32) {
        if let Err(errno) = reach.commands.destroy(Opcode::DestroyQp, port) {
            tracing::debug!("qid {port}: a port for messages was not closed: {errno}");
        }
        self.ports.remove(&port);
    }

    /// Sends a message from a port, as soon as its send queue has room. Returns the PSN of its
    /// packet.
    ///
    /// # Errors
    /// `EAGAIN` if too many messages wait.
    pub(crate) fn send(
        &mut self,
        reach: Reach<'_>,
        port: u32,
        address: &DatagramAddress,
        message: &[u8; MAD_LEN],
    ) -> Result<u32, Errno> {
        let port = match reach.has_roce_datagrams {
            true => self.open_general(reach)?,
            false => port,
        };
        let port = self.ports.get_mut(&port).ok_or(Errno::INVAL)?;
        if port.waiting.len() >= MAX_WAITING {
            return Err(Errno::AGAIN);
        }
        port.waiting.push_back((*address, *message));
        port.post_waiting(reach, self.uar);
        let psn = port.psn;
        port.psn = (psn + 1) & MAX_PSN;
        Ok(psn)
    }

    /// Takes messages that arrived since the last notification.
    pub(crate) fn receive(&mut self, reach: Reach<'_>) -> Vec<Received> {
        let mut notified = false;
        self.events.drain(|_| notified = true);
        let mut received = Vec::new();
        if !notified {
            return received;
        }
        for _ in 0..BUDGET {
            let Some(cqe) = self.completions.poll() else {
                break;
            };
            if cqe.opcode != WcOpcode::Recv as u8 {
                self.sent(reach, &cqe);
                continue;
            }
            let complete = cqe.byte_len.get() as usize == RECEIVE_LEN;
            if cqe.status == WcStatus::Success as u8 && complete {
                received.extend(self.take(reach, &cqe));
            }
            self.post_receive(reach, cqe.cookie.get());
        }
        // If completions are left, a notification follows at once.
        self.completions.arm(reach, self.uar);
        received
    }

    /// A send completed: its port has room for messages that wait.
    fn sent(&mut self, reach: Reach<'_>, cqe: &Cqe) {
        let qid = cqe.qid.get();
        if cqe.status != WcStatus::Success as u8 {
            // A failed send stopped the queue.
            let _ = reach.commands.run(Opcode::ModifyQp, &to_state(qid, QpState::Rts));
        }
        if let Some(port) = self.ports.get_mut(&qid) {
            port.post_waiting(reach, self.uar);
        }
    }

    /// The message of a receive.
    fn take(&self, reach: Reach<'_>, cqe: &Cqe) -> Option<Received> {
        let at = usize::try_from(cqe.cookie.get()).ok()?.checked_mul(RECEIVE_LEN)?;
        if at > self.buffers.len() - RECEIVE_LEN {
            return None;
        }
        let mut header = [0; GRH_LEN];
        let mut bytes = [0; MAD_LEN];
        self.buffers.copy_out(at, &mut header);
        self.buffers.copy_out(at + GRH_LEN, &mut bytes);
        let flags = CqeFlags::from_bits_retain(cqe.flags);
        let (source, local) = ends(&header, flags.contains(CqeFlags::IPV6))?;
        let port = cqe.source_port.get() as u16;
        let remote = match source {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                let own = reach.gids.iter().find(|gid| gid.ip == local);
                SocketAddrV6::new(ip, port, 0, own.map_or(0, |gid| gid.scope)).into()
            }
            ip => SocketAddr::new(ip, port),
        };
        Some(Received {
            port: cqe.qid.get(),
            arrival: Arrival { local, remote },
            bytes,
        })
    }

    fn post_receive(&mut self, reach: Reach<'_>, buffer: u64) {
        let queue = &mut self.receives;
        let at = (queue.producer as usize) << LOG_STRIDE;
        let element = Sge {
            offset: (buffer * RECEIVE_LEN as u64).into(),
            len: (RECEIVE_LEN as u32).into(),
            stag: self.stag.into(),
        };
        queue.ring.put(at, RecvHeader::new(buffer, 1));
        queue.ring.put(at + size_of::<RecvHeader>(), element);
        let old = queue.producer;
        queue.producer = old.wrapping_add(1);
        let record = queue.ring.record();
        if publish(&record.rq_producer, &record.rq_event, old, queue.producer) {
            let doorbell = Doorbell {
                kind: Kind::SharedReceive,
                queue: queue.id,
                index: queue.producer,
            };
            reach.bus.doorbell(self.uar, queue.doorbell, doorbell.encode());
        }
    }
}

impl ReceiveQueue {
    fn new(reach: Reach<'_>, uar: u32, pd: u32) -> Result<ReceiveQueue, Errno> {
        let ring: OwnRing<Ring<_>> = OwnRing::new(reach.pool, (RECEIVES as usize) << LOG_STRIDE)?;
        let arguments = CreateSrq {
            ring: ring.iova().into(),
            record: ring.record_iova().into(),
            pd: pd.into(),
            log_size: RECEIVES.ilog2().into(),
            log_stride: LOG_STRIDE.into(),
            uar: uar.into(),
        };
        let handle: QueueHandle = reach.commands.call(Opcode::CreateSrq, &arguments)?;
        Ok(ReceiveQueue {
            id: handle.id.get(),
            doorbell: handle.doorbell.get(),
            ring,
            producer: 0,
        })
    }
}

impl CompletionQueue {
    fn new(reach: Reach<'_>, uar: u32, eq: u32) -> Result<CompletionQueue, Errno> {
        let ring = OwnRing::completions(reach.pool, COMPLETIONS.ilog2())?;
        let arguments = CreateCq {
            ring: ring.iova().into(),
            record: ring.record_iova().into(),
            log_size: COMPLETIONS.ilog2().into(),
            eq: eq.into(),
            uar: uar.into(),
            flags: cq::UNTIMED.into(),
        };
        let handle: QueueHandle = reach.commands.call(Opcode::CreateCq, &arguments)?;
        Ok(CompletionQueue {
            id: handle.id.get(),
            doorbell: handle.doorbell.get(),
            ring,
        })
    }

    fn poll(&mut self) -> Option<Cqe> {
        if !self.ring.has_front() {
            return None;
        }
        let cqe = self.ring.front();
        self.ring.advance();
        self.ring.publish();
        Some(cqe)
    }

    fn arm(&self, reach: Reach<'_>, uar: u32) {
        let doorbell = Doorbell {
            kind: Kind::Arm,
            queue: self.id,
            index: self.ring.consumer(),
        };
        reach.bus.doorbell(uar, self.doorbell, doorbell.encode());
    }
}

impl Port {
    /// Posts messages that wait, as long as there is room.
    fn post_waiting(&mut self, reach: Reach<'_>, uar: u32) {
        while self.room() > 0
            && let Some((address, message)) = self.waiting.pop_front()
        {
            self.post(reach, uar, &address, &message);
        }
    }

    /// The number of messages for which the send queue has room.
    fn room(&self) -> u32 {
        let taken = self.ring.record().sq_consumer.load(Ordering::Acquire);
        let used = self.producer.wrapping_sub(taken);
        SEND_QUEUE.saturating_sub(used) / SEND_BLOCKS as u32
    }

    fn post(&mut self, reach: Reach<'_>, uar: u32, address: &DatagramAddress, message: &[u8; MAD_LEN]) {
        // The last message for which there is room makes a completion.
        let signaled = match self.room() {
            0 | 1 => SendFlags::SIGNALED,
            _ => SendFlags::empty(),
        };
        let header = SendHeader {
            opcode: wqe::Opcode::Send as u8,
            flags: (SendFlags::INLINE | signaled).bits(),
            blocks: SEND_BLOCKS as u8,
            inline_len: (message.len() as u32).into(),
            ..SendHeader::default()
        };
        let operands = self.producer as usize * BLOCK_LEN + OPERANDS;
        self.ring.copy_in(operands - OPERANDS, header.as_bytes());
        self.ring.copy_in(operands, address.as_bytes());
        self.ring
            .copy_in(operands + size_of::<DatagramAddress>(), message);
        let old = self.producer;
        self.producer = old.wrapping_add(SEND_BLOCKS as u32);
        let record = self.ring.record();
        if publish(&record.sq_producer, &record.sq_event, old, self.producer) {
            let doorbell = Doorbell {
                kind: Kind::Send,
                queue: self.qid,
                index: self.producer,
            };
            reach.bus.doorbell(uar, self.doorbell, doorbell.encode());
        }
    }
}

const _: () = assert!(OPERANDS + size_of::<DatagramAddress>() + MAD_LEN <= SEND_BLOCKS * BLOCK_LEN);
const _: () = assert!(1 << LOG_STRIDE == size_of::<RecvHeader>() + size_of::<Sge>());

/// The command that moves the queue pair of a port to a state, with its Q_Key.
fn to_state(qid: u32, state: QpState) -> ModifyQp {
    let mut arguments = ModifyQp::new_zeroed();
    arguments.qp = qid.into();
    arguments.mask = (modify::STATE | modify::QKEY).into();
    arguments.state = (state as u32).into();
    arguments.qkey = MANAGEMENT_QKEY.into();
    arguments
}

/// The source and the destination in the GRH of a datagram.
fn ends(header: &[u8; GRH_LEN], ipv6: bool) -> Option<(IpAddr, IpAddr)> {
    if ipv6 {
        let address = |at: usize| Some(ip_of(header.get(at..)?.first_chunk()?));
        return Some((address(8)?, address(24)?));
    }
    let address = |at: usize| Some(IpAddr::from(*header.get(at..)?.first_chunk::<4>()?));
    Some((address(GRH_LEN - 8)?, address(GRH_LEN - 4)?))
}
