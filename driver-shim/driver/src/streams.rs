//! The device's stream commands, for both connection engines.

use std::net::SocketAddr;
use std::sync::Once;
use std::time::Duration;

use rustix::io::Errno;
use urnic_device::command::{Handle, Nothing, Opcode, features};
use urnic_device::stream::{
    Attach, Close as CloseStream, Connect, Endpoint, Endpoints, Listen, Listening, Receive, attach, input,
    listen, llp, rtr,
};
use urnic_device::vocabulary::QpKind;
use zerocopy::FromZeros;

use crate::command::milliseconds;
use crate::driver::{Driver, Qp};
use crate::manager::Buffers;
use urnic_cm::carrier::{Attachment, Carrier, Inbox, Terms};
use urnic_cm::mpa_startup::{Close, Rtr};
use urnic_cm::timeouts::{MIN_RETRY_TIME, RETRIES, retry_time};
use urnic_config::{Identity, Llp};

/// Accepted streams that the device keeps until the driver takes them.
const BACKLOG: u32 = 1024;
/// The time for the first receive of a queue pair: the program may post it after the event.
const FIRST_RECEIVE_GRACE: Duration = Duration::from_millis(1000);

/// Stream commands, while the lock of the connection engine is held.
pub(super) struct Streams<'a> {
    pub(super) driver: &'a Driver,
    pub(super) buffers: &'a mut Buffers,
}

impl Streams<'_> {
    pub(super) fn listen(
        &self,
        over: Llp,
        local: SocketAddr,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<(u32, u16), Errno> {
        self.require(over)?;
        let sctp = if over == Llp::Sctp { listen::SCTP } else { 0 };
        let flags = sctp | if ipv6_only { listen::IPV6_ONLY } else { 0 };
        let arguments = Listen {
            local: Endpoint::from(local),
            backlog: BACKLOG.into(),
            traffic_class: (u32::from(traffic_class) | flags).into(),
        };
        let listening: Listening = self.driver.commands().call(Opcode::StreamListen, &arguments)?;
        Ok((listening.lid.get(), listening.port.get() as u16))
    }

    pub(super) fn unlisten(&self, lid: u32) {
        if let Err(errno) = self.driver.commands().on(Opcode::StreamUnlisten, lid) {
            tracing::debug!("listener {lid}: not closed: {errno}");
        }
    }

    pub(super) fn connect(
        &self,
        over: Llp,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<u32, Errno> {
        self.require(over)?;
        let arguments = Connect {
            remote: Endpoint::from(remote),
            local: local.map_or_else(Endpoint::new_zeroed, Endpoint::from),
            traffic_class: u32::from(traffic_class).into(),
            llp: match over {
                Llp::Tcp => llp::TCP,
                Llp::Sctp => llp::SCTP,
            }
            .into(),
        };
        let handle: Handle = self.driver.commands().call(Opcode::StreamConnect, &arguments)?;
        Ok(handle.id.get())
    }

    /// Checks that the device has streams over this lower layer. One line says if it does not.
    ///
    /// # Errors
    /// `EOPNOTSUPP`.
    fn require(&self, over: Llp) -> Result<(), Errno> {
        static WITHOUT_SCTP: Once = Once::new();
        if over == Llp::Tcp || self.driver.attributes().features & features::SCTP != 0 {
            return Ok(());
        }
        WITHOUT_SCTP.call_once(|| {
            tracing::warn!(
                "llp=sctp: the device {} has no streams over SCTP, so connections and listeners that need them \
                 fail with EOPNOTSUPP; set llp=tcp",
                self.driver.config().device
            );
        });
        Err(Errno::OPNOTSUPP)
    }

    /// The addresses of both ends of a stream, the local one first.
    pub(super) fn ends(&self, sid: u32) -> Result<(SocketAddr, SocketAddr), Errno> {
        let ends = self.query(sid)?;
        Ok((ends.local.into(), ends.remote.into()))
    }

    fn query(&self, sid: u32) -> Result<Endpoints, Errno> {
        let (buffer, _) = self.driver.commands().fetch::<_, Nothing>(
            Opcode::StreamQuery,
            &Handle { id: sid.into() },
            size_of::<Endpoints>(),
        )?;
        Ok(buffer.read(0))
    }

    /// Attaches a stream to a queue pair at RTS; without a stream the queue pair is its own peer.
    pub(super) fn attach(&self, sid: Option<u32>, attachment: &Attachment) -> Result<(), Errno> {
        let qp = self.driver.qp(attachment.qid).ok_or(Errno::INVAL)?;
        let mut arguments = Attach::new_zeroed();
        let mut flags = match attachment.terms {
            Terms::Native {
                unreliable,
                rnr_timeout,
            } => self.apply_native_terms(&qp, unreliable, attachment.delivered, rnr_timeout)?,
            Terms::RdmaCm {
                ack_timeout,
                spare_read,
                strict_rtr,
                rnr_grace,
            } => {
                let stall = self.apply_rdma_cm_terms(&qp, ack_timeout, rnr_grace)?;
                let flag = |on, flag| if on { flag } else { 0 };
                stall
                    | flag(strict_rtr, attach::STRICT_RTR)
                    | flag(attachment.delivered, attach::DELIVERED)
                    | flag(spare_read, attach::SPARE_READ)
            }
        };
        if let Some(negotiated) = &attachment.negotiated {
            let mut set = |on, flag| flags |= if on { flag } else { 0 };
            set(negotiated.initiator, attach::INITIATOR);
            set(negotiated.crc, attach::CRC);
            set(negotiated.markers_tx, attach::MARKERS_TX);
            set(negotiated.markers_rx, attach::MARKERS_RX);
            set(!negotiated.initiator && !negotiated.fenced, attach::FENCE_OPEN);
            let message = match negotiated.rtr {
                None => rtr::NONE,
                Some(Rtr::Send) => rtr::SEND,
                Some(Rtr::Write) => rtr::WRITE,
                Some(Rtr::Read) => rtr::READ,
            };
            let rtr = if negotiated.initiator {
                &mut arguments.rtr_send
            } else {
                &mut arguments.rtr_expect
            };
            *rtr = message.into();
            arguments.terminate = u64::from(negotiated.terminate.unwrap_or(0)).into();
        }
        arguments.sid = sid.unwrap_or(0).into();
        arguments.qid = attachment.qid.into();
        arguments.flags = flags.into();
        arguments.ord = u32::from(attachment.ord).into();
        arguments.ord_limit = u32::from(attachment.ord_limit).into();
        arguments.ird = u32::from(attachment.ird).into();
        arguments.first_msn = 1.into();
        arguments.fin_grace_ms = milliseconds(Some(self.driver.config().native.fin_grace)).into();
        let opcode = if sid.is_some() {
            Opcode::StreamAttach
        } else {
            Opcode::LoopbackAttach
        };
        self.driver.commands().run(opcode, &arguments)
    }

    /// Sets the limits of a queue pair that connects natively; returns flags of [`attach`].
    fn apply_native_terms(
        &self,
        qp: &Qp,
        unreliable: bool,
        delivered: bool,
        rnr_timeout: Option<Duration>,
    ) -> Result<u32, Errno> {
        self.driver.set_rnr_timeout(qp, rnr_timeout)?;
        if unreliable {
            // Kind UC has no such attribute. A stream whose peer is silent would block the sends.
            self.driver.limit_silence(qp, Some(MIN_RETRY_TIME))?;
            return Ok(0);
        }
        // Programs that connect their queue pairs without a connection manager were written for
        // InfiniBand.
        let reliable = attach::STALL_ON_EMPTY_RQ | attach::PEER_MAY_CLOSE;
        Ok(match delivered {
            false => reliable,
            true => reliable | attach::DELIVERED | attach::SPARE_READ,
        })
    }

    /// Sets the limits of a queue pair that rdma_cm connects; returns flags of [`attach`].
    fn apply_rdma_cm_terms(&self, qp: &Qp, ack_timeout: u8, rnr_grace: Duration) -> Result<u32, Errno> {
        // With the option, any receive may be late; without it, only the first one.
        let (stall, grace) = match rnr_grace {
            Duration::ZERO => (attach::STALL_AT_FIRST, FIRST_RECEIVE_GRACE),
            grace => (attach::STALL_ON_EMPTY_RQ, grace),
        };
        self.driver.set_rnr_timeout(qp, Some(grace))?;
        match (qp.kind, self.driver.identity()) {
            (QpKind::UnreliableConnected, _) => self.driver.limit_silence(qp, Some(MIN_RETRY_TIME))?,
            (_, Identity::Iwarp) => self.driver.limit_silence(qp, retry_time(ack_timeout, RETRIES))?,
            // The program of a RoCE NIC has set the attributes.
            (_, Identity::Roce) => {}
        }
        Ok(stall)
    }
}

impl Carrier for Streams<'_> {
    fn send(&mut self, sid: u32, bytes: &[u8]) -> Result<(), Errno> {
        self.driver
            .commands()
            .send::<_, Nothing>(Opcode::StreamSend, &Handle { id: sid.into() }, bytes)
            .map(drop)
    }

    fn receive(&mut self, sid: u32, len: usize) -> Result<(), Errno> {
        let buffer = self.driver.pool().allocate(len)?;
        let arguments = Receive {
            sid: sid.into(),
            least: 1.into(),
        };
        self.driver
            .commands()
            .output(Opcode::StreamReceive, &arguments, &buffer, len)?;
        self.buffers.insert(sid, buffer);
        Ok(())
    }

    fn inbox(&mut self, sid: u32) -> Result<Inbox, Errno> {
        match self.query(sid)?.input.get() {
            input::NONE => Ok(Inbox::Empty),
            input::BYTES => Ok(Inbox::Bytes),
            input::END => Ok(Inbox::End),
            _ => Err(Errno::IO),
        }
    }

    fn close(&mut self, sid: u32, how: Close) {
        let abort = u32::from(how == Close::Abort);
        let closed = self.driver.commands().run(
            Opcode::StreamClose,
            &CloseStream {
                sid: sid.into(),
                abort: abort.into(),
            },
        );
        if let Err(errno) = closed {
            tracing::debug!("stream {sid}: not closed: {errno}");
        }
        // A closed stream receives no more.
        self.buffers.remove(&sid);
    }
}
