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
mod refusals;
mod staged;
mod transitions;

use crate::config::ModelConfig;
use crate::queues::{CompletionQueue, ReceiveSource, RecvWqe, SendQueue};
use crate::rdmap::completions::Completions;
use crate::rdmap::params::Identity;
use crate::stream::datagram::{DatagramSocket, Incoming};
use rustix::fd::BorrowedFd;
use staged::Staged;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use urnic_device::command::QpStatus;
use urnic_device::vocabulary::QpState;

/// The parts of a queue pair of kind UD.
pub(crate) struct DatagramParams {
    pub(crate) qid: u32,
    pub(crate) label: u32,
    pub(crate) pd: u32,
    pub(crate) sq: SendQueue,
    pub(crate) send_cq: Arc<CompletionQueue>,
    pub(crate) rq: ReceiveSource,
    pub(crate) recv_cq: Arc<CompletionQueue>,
    /// Sockets of one port: one for all addresses, or one for each.
    pub(crate) sockets: Vec<Box<dyn DatagramSocket>>,
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
    qp: Identity,
    sq: SendQueue,
    send_cq: Completions,
    rq: ReceiveSource,
    recv_cq: Completions,
    state: QpState,
    qkey: u32,
    /// Number of the next packet.
    psn: u32,
    sockets: Vec<Box<dyn DatagramSocket>>,
    groups: Vec<Membership>,
    config: Arc<ModelConfig>,
    /// The receive that a datagram fills.
    wqe: RecvWqe,
    /// Packets that the sockets have not taken.
    staged: Staged,
    incoming: Vec<Incoming>,
}

impl Engine {
    /// An engine in the reset state.
    pub(crate) fn new(params: DatagramParams) -> Engine {
        Engine {
            qp: Identity::of_datagrams(params.qid, params.label, params.pd),
            sq: params.sq,
            send_cq: Completions::new(params.send_cq),
            rq: params.rq,
            recv_cq: Completions::new(params.recv_cq),
            state: QpState::Reset,
            qkey: 0,
            psn: 0,
            sockets: params.sockets,
            groups: Vec::new(),
            config: params.config,
            wqe: RecvWqe::default(),
            staged: Staged::default(),
            incoming: Vec::new(),
        }
        .bound()
    }

    /// Lets go of what ports have for peers that are gone.
    pub(crate) fn tick(&mut self) {
        self.sockets.iter_mut().for_each(|socket| socket.forget_peers());
    }

    /// With ports that know the queue pair.
    fn bound(mut self) -> Engine {
        let qid = self.qp.qid;
        self.sockets.iter_mut().for_each(|socket| socket.bind(qid));
        self
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
        self.sockets
            .iter()
            .chain(groups)
            .filter_map(|socket| socket.descriptor())
    }
}
