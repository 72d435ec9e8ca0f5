//! Commands on the connections of queue pairs that speak RoCE v2.

use super::Job;
use super::answer::{Answer, Check as _, argument, done};
use super::streams::traffic_class;
use crate::roce;
use crate::runtime::Core;
use crate::runtime::streaming::status;
use crate::schedule::{Interest, Token};
use crate::stream::roce_port::RocePort;
use rustix::fd::BorrowedFd;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use urnic_device::command::Status;
use urnic_device::stream::{Path, Retries};
use urnic_roce::message::Mtu;
use urnic_roce::{requester, responder};
use urnic_wire::roce::{Psn, UDP_PORT};

/// Numbers of queue pairs and PSNs have 24 bits.
const MASK_24: u32 = 0xff_ffff;
/// All addresses, IPv4 and IPv6.
const ANYWHERE: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
/// The largest code of a timer.
const MAX_TIMER: u32 = 31;
/// The largest number of retries.
const MAX_RETRIES: u32 = 7;
/// Packets that are acknowledged together if the peer does not ask for more.
const ACK_EVERY: u32 = 16;
/// Messages for which a requester has room from the beginning.
const DEPTH: usize = 128;
/// Packets in flight at most. A loss, as of a socket's buffer that is smaller, makes it fewer.
const WINDOW: u32 = 512;

impl Job<'_> {
    pub(super) fn connect_path(&mut self) -> Answer {
        let arguments: Path = self.arguments();
        let own = self.core.config.addresses.get(arguments.source.get() as usize);
        let source = own.ok_or(Status::InvalidArgument).of(argument!(Path.source))?.ip;
        let mut destination = SocketAddr::from(arguments.remote);
        destination.set_port(UDP_PORT);
        let remote = destination.ip();
        let fits = remote.is_ipv4() == source.is_ipv4() && !remote.is_unspecified() && !remote.is_multicast();
        fits.of(argument!(Path.remote))?;
        if !self.core.config.may_connect(remote, Some(source)) {
            return Err(Status::Denied.into());
        }
        let bytes = arguments.mtu.get();
        let mtu = Mtu::ALL.into_iter().find(|mtu| mtu.bytes() == bytes);
        let mtu = mtu.ok_or(Status::InvalidArgument).of(argument!(Path.mtu))?;
        let timer = arguments.min_rnr_timer.get();
        (timer <= MAX_TIMER).of(argument!(Path.min_rnr_timer))?;
        let class = traffic_class(arguments.traffic_class).of(argument!(Path.traffic_class))?;
        let path = roce::Path {
            source,
            destination,
            qpn: arguments.remote_qpn.get() & MASK_24,
            traffic_class: class,
            mtu,
        };
        let attributes = responder::Attributes {
            mtu,
            first_psn: Psn::new(arguments.psn.get()),
            min_rnr_timer: timer as u8,
            max_dest_rd_atomic: arguments.reads.get().min(u8::MAX.into()) as u8,
            ack_every: ACK_EVERY,
        };
        let qp = self.core.qps.find(arguments.qid.get()).of(argument!(Path.qid))?;
        let port = || open_port(self.core, (qp.identity.qpn(), None), qp.id);
        qp.connect_path(self.core, (path, attributes), port, self.effects)?;
        done()
    }

    pub(super) fn start_path(&mut self) -> Answer {
        let arguments: Retries = self.arguments();
        let timeout = arguments.timeout.get();
        (timeout <= MAX_TIMER).of(argument!(Retries.timeout))?;
        let [retry_cnt, rnr_retry] = [arguments.retry_cnt.get(), arguments.rnr_retry.get()];
        (retry_cnt <= MAX_RETRIES).of(argument!(Retries.retry_cnt))?;
        (rnr_retry <= MAX_RETRIES).of(argument!(Retries.rnr_retry))?;
        let attributes = |mtu| requester::Attributes {
            mtu,
            first_psn: Psn::new(arguments.psn.get()),
            timeout: timeout as u8,
            retry_cnt: retry_cnt as u8,
            rnr_retry: rnr_retry as u8,
            max_rd_atomic: arguments.reads.get().min(u8::MAX.into()) as u8,
            window: WINDOW,
            depth: DEPTH,
        };
        let qp = self
            .core
            .qps
            .find(arguments.qid.get())
            .of(argument!(Retries.qid))?;
        qp.start_path(attributes, self.effects)?;
        done()
    }
}

/// Opens the port of RoCE v2, for the queue pair with this number on the wire. Queue pair 1 may
/// name the member.
pub(super) fn open_port(
    core: &Core,
    (qpn, member): (u32, Option<u16>),
    qid: u32,
) -> Result<RocePort, Status> {
    let addresses = core.config.listen_addresses(ANYWHERE, false);
    let addresses = addresses.ok_or(Status::Denied)?;
    let (port, is_new) = core.roce.open(&addresses, (qpn, member), qid).map_err(status)?;
    if is_new {
        let watch = |fd: BorrowedFd<'_>| core.schedule.watch(fd, Token::RocePort, Interest::Input);
        core.roce.watch(watch).map_err(|_| Status::NoResources)?;
    }
    Ok(port)
}
