//! The device of the connection manager's engine: stream commands, and changes of queue pairs.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::command::{ModifyQp, Opcode, modify};
use urnic_device::stream::attach;
use urnic_device::vocabulary::QpState;
use zerocopy::FromZeros;

use super::source::{source_of_device, source_of_host};
use crate::clock::now;
use crate::connections::RdmaCm;
use crate::driver::Driver;
use crate::streams::{AttachParams, Streams, milliseconds};
use urnic_cm::carrier::{Carrier, Inbox};
use urnic_cm::mpa_startup::{Close, Time};
use urnic_cm::rdma_cm::{Attachment, Device, Engine, Notice, World};
use urnic_presence::token::Token;
use urnic_process::lock::lock;

/// The time for the first receive of a queue pair: the program may post it after the event.
const FIRST_RECEIVE_GRACE: Duration = Duration::from_millis(1000);

impl Driver {
    /// Calls the engine of the connection manager, then applies its notices.
    pub(crate) fn with_rdma_cm<T>(&self, work: impl FnOnce(&mut Engine, &mut World<'_>) -> T) -> T {
        let mut manager = lock(&self.connections.rdma_cm);
        let RdmaCm {
            engine,
            buffers,
            tokens,
        } = &mut *manager;
        let mut device = CmDevice {
            streams: Streams {
                driver: self,
                buffers,
            },
            tokens,
        };
        let before = engine.deadline();
        let result = work(
            engine,
            &mut World {
                now: now(),
                device: &mut device,
            },
        );
        let notices = engine.notices();
        let earlier = engine
            .deadline()
            .filter(|after| before.is_none_or(|before| *after < before));
        drop(manager);
        for Notice::Open(qid) in notices {
            if let Some(qp) = self.qp(qid) {
                qp.open_gate();
            }
        }
        if let Some(at) = earlier {
            self.event_loop.wake_by(at);
        }
        result
    }

    pub(crate) fn cm_tick(&self) -> Option<Time> {
        self.with_rdma_cm(|engine, world| engine.tick(world))
    }

    /// Reports that a queue pair lost its stream.
    pub(crate) fn cm_lost(&self, qid: u32, errno: Errno) {
        self.with_rdma_cm(|engine, world| engine.connection_ended(world, qid, errno));
    }

    /// Reports that the device is lost.
    pub(crate) fn cm_lost_device(&self) {
        self.with_rdma_cm(|engine, world| engine.device_lost(world));
    }

    fn set_state(&self, qid: u32, state: QpState) -> Result<(), Errno> {
        let mut arguments = ModifyQp::new_zeroed();
        arguments.qp = qid.into();
        arguments.mask = modify::STATE.into();
        arguments.state = (state as u32).into();
        self.commands.run(Opcode::ModifyQp, &arguments)
    }
}

/// The device of the engine, while the lock of the connection manager is held.
struct CmDevice<'a> {
    streams: Streams<'a>,
    tokens: &'a HashMap<u64, Token>,
}

impl Carrier for CmDevice<'_> {
    fn send(&mut self, sid: u32, bytes: &[u8]) -> Result<(), Errno> {
        self.streams.send(sid, bytes)
    }

    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno> {
        self.streams.receive(sid, len)
    }

    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno> {
        self.streams.inbox(sid)
    }

    fn close(&mut self, sid: u32, how: Close) {
        self.streams.close(sid, how);
    }
}

impl Device for CmDevice<'_> {
    fn listen(&mut self, local: SocketAddr, traffic_class: u8, ipv6_only: bool) -> Result<(u32, u16), Errno> {
        self.streams.listen(local, traffic_class, ipv6_only)
    }

    fn unlisten(&mut self, lid: u32) {
        self.streams.unlisten(lid);
    }

    fn connect(&mut self, remote: SocketAddr, local: SocketAddr, traffic_class: u8) -> Result<u32, Errno> {
        self.streams.connect(remote, Some(local), traffic_class)
    }

    fn ends(&mut self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno> {
        self.streams.ends(sid)
    }

    fn source(&mut self, remote: SocketAddr) -> Result<SocketAddr, Errno> {
        let driver = self.streams.driver;
        let by_kernel = source_of_host(remote);
        if driver.config.device == urnic_config::Device::Inproc {
            return by_kernel;
        }
        by_kernel
            .ok()
            .filter(|source| driver.gids().iter().any(|gid| gid.ip == source.ip()))
            .or_else(|| source_of_device(driver.gids(), remote))
            .ok_or(Errno::NETUNREACH)
    }

    fn gid_index(&mut self, address: SocketAddr) -> u8 {
        let local_host = &self.streams.driver.local_host;
        local_host.gid_index(address.ip()).unwrap_or_default()
    }

    fn queue_pair(&mut self, qpn: u32) -> Option<u32> {
        self.streams.driver.qid_of(qpn)
    }

    fn awaits_stream(&mut self, qid: u32) -> bool {
        let qp = self.streams.driver.qp(qid);
        qp.is_some_and(|qp| qp.awaits_stream())
    }

    fn attach(&mut self, sid: u32, attachment: &Attachment) -> Result<(), Errno> {
        let qid = attachment.qid;
        let driver = self.streams.driver;
        let qp = driver.qp(qid).ok_or(Errno::INVAL)?;
        let steps: &[QpState] = match qp.device_state()? {
            QpState::Init => &[QpState::Rtr, QpState::Rts],
            QpState::Rtr => &[QpState::Rts],
            QpState::Rts => &[],
            QpState::Reset | QpState::Sqd | QpState::Sqe | QpState::Err => return Err(Errno::INVAL),
        };
        for state in steps {
            driver.set_state(qid, *state)?;
        }
        // With the option, any receive may be late; without it, only the first one.
        let (stall, grace) = match attachment.rnr_grace {
            Duration::ZERO => (attach::STALL_AT_FIRST, FIRST_RECEIVE_GRACE),
            grace => (attach::STALL_ON_EMPTY_RQ, grace),
        };
        driver.modify(&qp, modify::RNR, milliseconds(Some(grace)))?;
        let flag = |on, flag| if on { flag } else { 0 };
        let strict = flag(attachment.strict_rtr, attach::STRICT_RTR);
        let delivered = flag(attachment.delivered, attach::DELIVERED);
        self.streams.attach(&AttachParams {
            sid: Some(sid),
            qid,
            negotiated: Some(&attachment.negotiated),
            policy: stall | strict | delivered,
            ird: attachment.ird.into(),
            ord: attachment.ord.into(),
            ord_limit: 0,
            fin_grace_ms: 0,
        })?;
        qp.set_managed(attachment.ack_timeout);
        Ok(())
    }

    fn drain(&mut self, qid: u32) {
        // A queue pair in another state is disconnecting already.
        let _ = self.streams.driver.set_state(qid, QpState::Sqd);
    }

    fn abort(&mut self, qid: u32) {
        let _ = self.streams.driver.set_state(qid, QpState::Err);
        if let Some(qp) = self.streams.driver.qp(qid) {
            qp.set_last_state(QpState::Err);
        }
    }

    fn signal(&mut self, channel: u64, events: bool) {
        if let Some(token) = self.tokens.get(&channel) {
            token.show(events);
        }
    }
}
