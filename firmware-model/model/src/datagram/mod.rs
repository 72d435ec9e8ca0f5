//! Queue pairs of kind UD: datagrams, sent and received as packets of RoCE v2 over UDP.
//!
//! An [`Engine`] has the queues and the sockets of one queue pair. As with
//! [`rdmap`](crate::rdmap), its owner serialises the calls. A datagram is copied once on its way
//! out, into a packet whose ICRC is computed there, and once on its way in. Packets go to and come
//! from the kernel in batches.
//!
//! UD has no acknowledgements: a send completes when the socket took or dropped the packet. Drops
//! are counted.

#![cfg_attr(not(test), forbid(unsafe_code))]

mod inbound;
mod outbound;
mod ports;

pub(crate) use ports::Ports;

use crate::config::ModelConfig;
use crate::llp::buffers::Buffer;
use crate::queues::{CompletionQueue, Overflow, ReceiveSource, RecvWqe, SendQueue, SendWqe};
use crate::stream::datagram::{DatagramSocket, Incoming, Outgoing};
use crate::stream::roce_port::ServiceName;
use crate::transport::completions::Completions;
use crate::transport::{Env, QpChange, WrongState};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use urnic_device::command::QpStatus;
use urnic_device::event::{Event, EventKind, QpFault};
use urnic_device::vocabulary::{QpState, WcOpcode, WcStatus};
use urnic_wire::roce::{Psn, psn_of};

/// The parts of a queue pair of kind UD.
pub(crate) struct DatagramParams {
    pub(crate) sq: SendQueue,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) rq: ReceiveSource,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    pub(crate) ports: Ports,
    /// The name of its port's services, which lasts as long as the queue pair.
    pub(crate) service: Option<ServiceName>,
    /// The longest payload that it sends, in bytes.
    pub(crate) max_payload: usize,
    /// It does not receive what it sent to a group itself.
    pub(crate) blocks_own_multicast: bool,
    pub(crate) config: Arc<ModelConfig>,
}

/// A multicast group that the queue pair receives.
#[derive(Debug)]
struct Membership {
    group: SocketAddr,
    interface: IpAddr,
    socket: Box<dyn DatagramSocket>,
}

/// One queue pair of kind UD.
#[derive(Debug)]
pub(crate) struct Engine {
    sq: SendQueue,
    send_cq: Completions,
    rq: ReceiveSource,
    recv_cq: Completions,
    state: QpState,
    qkey: u32,
    /// Number of the next packet.
    psn: Psn,
    ports: Ports,
    service: Option<ServiceName>,
    groups: Vec<Membership>,
    max_payload: usize,
    blocks_own_multicast: bool,
    config: Arc<ModelConfig>,
    /// The receive that a datagram fills.
    wqe: RecvWqe,
    /// Packets that the sockets have not taken.
    staged: Staged,
    incoming: Vec<Incoming>,
}

impl Engine {
    /// An engine in the reset state, of the queue pair with this number.
    pub(crate) fn new(mut params: DatagramParams, qid: u32) -> Engine {
        params.ports.bind(qid);
        Engine {
            sq: params.sq,
            send_cq: Completions::new(params.send_cq),
            rq: params.rq,
            recv_cq: Completions::new(params.recv_cq),
            state: QpState::Reset,
            qkey: 0,
            psn: Psn::default(),
            ports: params.ports,
            service: params.service,
            groups: Vec::new(),
            max_payload: params.max_payload,
            blocks_own_multicast: params.blocks_own_multicast,
            config: params.config,
            wqe: RecvWqe::default(),
            staged: Staged::default(),
            incoming: Vec::new(),
        }
    }

    /// Drops the state that ports have for peers that have ended.
    pub(crate) fn tick(&mut self) {
        self.ports.forget_peers();
    }

    /// The state of the queue pair.
    pub(crate) fn state(&self) -> QpState {
        self.state
    }

    /// The answer to `QueryQp`.
    pub(crate) fn status(&self) -> QpStatus {
        QpStatus {
            state: (self.state as u32).into(),
            ..QpStatus::default()
        }
    }

    /// The send queue, for the state of its doorbells.
    pub(crate) fn send_queue(&mut self) -> &mut SendQueue {
        &mut self.sq
    }

    /// The receive queue, for doorbells.
    pub(crate) fn receive_source(&mut self) -> &mut ReceiveSource {
        &mut self.rq
    }

    /// The descriptors to poll for readiness.
    pub(crate) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let groups = self.groups.iter().map(|membership| &membership.socket);
        let groups = groups.filter_map(|socket| socket.descriptor());
        self.ports.descriptors().chain(groups)
    }
}

// States, groups, and the destruction of a queue pair.

impl Engine {
    /// Returns to the reset state, on the same rings and ports: posted entries are dropped.
    pub(crate) fn reset(&mut self) {
        self.sq = self.sq.anew();
        self.rq = self.rq.anew();
        self.staged = Staged::default();
        self.state = QpState::Reset;
        (self.qkey, self.psn) = (0, Psn::default());
        self.groups.clear();
        self.ports.reset();
    }

    /// Changes attributes, then the state.
    pub(crate) fn modify(&mut self, change: &QpChange, env: &mut Env<'_>) -> Result<(), WrongState> {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqe};
        if let Some(to) = change.state {
            let allowed = match (self.state, to) {
                (_, Err) | (Reset, Init) | (Init, Rtr) | (Rtr | Sqe, Rts) => true,
                (from, to) => from == to && matches!(to, Init | Rts),
            };
            if !allowed {
                return Result::Err(WrongState);
            }
        }
        if let Some(qkey) = change.qkey {
            self.qkey = qkey;
        }
        match change.state {
            Some(Err) => self.fail(QpFault::Requested, env),
            Some(state) => self.state = state,
            None => {}
        }
        Ok(())
    }

    /// Ends the queue pair: all work is flushed.
    pub(crate) fn fail(&mut self, fault: QpFault, env: &mut Env<'_>) {
        if self.state != QpState::Err {
            self.state = QpState::Err;
            if let ReceiveSource::Shared(_) = self.rq {
                env.effects.event(Event::new(EventKind::LastWqe, env.qp.qid));
            }
            if fault != QpFault::Requested {
                env.effects.qp_error(env.qp.qid, fault, 0);
            }
        }
        self.flush(env);
    }

    /// Flushes the requests that were posted in the error state.
    pub(crate) fn flush(&mut self, env: &mut Env<'_>) {
        if self.state != QpState::Err || env.is_stopped() {
            return;
        }
        // The effects name a queue that overflowed; nothing is left to end here.
        let (Ok(()) | Err(Overflow)) = self.flush_sends(env);
        let (Ok(()) | Err(Overflow)) = self.flush_receives(env);
    }

    fn flush_receives(&mut self, env: &mut Env<'_>) -> Result<(), Overflow> {
        // Entries of a shared queue do not belong to a queue pair yet.
        if let crate::queues::ReceiveSource::Own(_) = self.rq {
            while self.rq.take(&mut self.wqe, env.effects).is_some() {
                self.complete_receive(WcStatus::WrFlushErr, env)?;
            }
        }
        self.recv_cq.flush(env)
    }

    /// Completes the receive that was taken, in error.
    fn complete_receive(&mut self, status: WcStatus, env: &mut Env<'_>) -> Result<(), Overflow> {
        let cqe = env.qp.cqe(self.wqe.cookie, WcOpcode::Recv, status);
        self.recv_cq.push(cqe, env)
    }

    /// The place at which a socket is bound for a group.
    pub(crate) fn place_of(&self, group: SocketAddr) -> SocketAddr {
        self.ports.place_of(group)
    }

    /// Joins a group: receives its datagrams by a socket that is bound at [its
    /// place](Self::place_of), or by the shared port while this socket exists.
    pub(crate) fn enter_group(
        &mut self,
        group: SocketAddr,
        interface: IpAddr,
        socket: Box<dyn DatagramSocket>,
    ) {
        self.groups.push(Membership {
            group,
            interface,
            socket,
        });
        self.keep_groups();
    }

    fn keep_groups(&mut self) {
        let groups = self.groups.iter().map(|membership| membership.group.ip());
        self.ports.keep_groups(groups);
    }

    /// Whether the queue pair receives a group on the network of this address.
    pub(crate) fn is_in_group(&self, group: SocketAddr, interface: IpAddr) -> bool {
        let same = |known: &Membership| (known.group, known.interface) == (group, interface);
        self.groups.iter().any(same)
    }

    /// Leaves a group.
    pub(crate) fn leave_group(&mut self, group: SocketAddr, interface: IpAddr) {
        self.groups
            .retain(|known| (known.group, known.interface) != (group, interface));
        self.keep_groups();
    }

    /// Closes the ports of a destroyed queue pair.
    pub(crate) fn abandon(&mut self) {
        self.ports = Ports::Own(Vec::new());
        self.service = None;
        self.groups.clear();
    }
}

// Reports of datagrams that did not arrive.

/// Reports that a packet, of which perhaps only the beginning is left, did not arrive.
fn refused(qid: u32, errno: Errno, packet: &[u8], env: &mut Env<'_>) {
    // Some routers return less of a packet.
    let Some(psn) = psn_of(packet) else {
        return;
    };
    let code = u16::try_from(errno.raw_os_error()).unwrap_or_default();
    let event = Event::new(EventKind::DatagramRefused, qid);
    env.effects
        .event(event.with_code(code).with_data(psn.number().into()));
}

// Packets that wait for the sockets, and their requests.

/// The request of a packet.
#[derive(Debug)]
struct Packet {
    wqe: SendWqe,
    /// Bytes of payload.
    len: usize,
    /// The socket that sends the packet; `None` if it is dropped.
    socket: Option<usize>,
}

/// Packets that wait for the sockets.
#[derive(Debug, Default)]
struct Staged {
    /// Present while packets wait.
    buffer: Option<Buffer>,
    packets: Vec<Packet>,
    /// The packets themselves, by the same index.
    outgoing: Vec<Outgoing>,
}
