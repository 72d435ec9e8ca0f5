//! Streams from the function to its own addresses, and queue pairs at both ends of one.

use std::net::SocketAddr;
use std::rc::Rc;

use urnic_device::command::{Count, Nothing, Opcode};
use urnic_device::event::EventKind;
use urnic_device::stream::{Address, Attach, Connect, Endpoint, Listen, Listening, attach, ip_of};
use urnic_device::vocabulary::QpKind;

use crate::outcome::{Failure, Outcome, ensure};
use crate::queues::{ALL_RIGHTS, Cq, Qp, Region};
use crate::rig::{EventQueue, Rig};

/// Bytes of each end's region.
pub(crate) const REGION: usize = 256 << 10;

/// The function's addresses.
pub(crate) fn addresses(rig: &Rig) -> Outcome<Vec<Address>> {
    const MAX_ADDRESSES: usize = 256;
    let len = MAX_ADDRESSES * size_of::<Address>();
    let output = rig.memory(len)?;
    let count: Count = rig
        .with_output(Opcode::QueryAddresses, &Nothing {}, output.iova(), len)?
        .result();
    let count = (count.count.get() as usize).min(MAX_ADDRESSES);
    Ok((0..count)
        .map(|index| output.load(index * size_of::<Address>()))
        .collect())
}

/// One of the function's addresses, with port 0.
pub(crate) fn own(rig: &Rig) -> Outcome<SocketAddr> {
    let addresses = addresses(rig)?;
    let usable = |address: &&Address| address.scope.get() == 0;
    let first = addresses.iter().find(usable);
    first
        .map(|address| SocketAddr::new(ip_of(&address.ip), 0))
        .ok_or_else(|| Failure::NotHere("the function has no address".to_owned()))
}

pub(crate) fn listen(rig: &Rig, local: SocketAddr) -> Outcome<(u32, u16)> {
    let arguments = Listen {
        local: local.into(),
        backlog: 8.into(),
        ..Listen::default()
    };
    let listening: Listening = rig.command(Opcode::StreamListen, &arguments)?.result();
    Ok((listening.lid.get(), listening.port.get() as u16))
}

pub(crate) fn connect_arguments(remote: SocketAddr) -> Connect {
    Connect {
        remote: remote.into(),
        local: Endpoint::default(),
        ..Connect::default()
    }
}

/// A connected stream: the sid of the initiator's end, and that of the responder's end.
pub(crate) fn stream(rig: &Rig) -> Outcome<(u32, u32)> {
    let mut address = own(rig)?;
    let (lid, port) = listen(rig, address)?;
    address.set_port(port);
    let connecting = rig.create(Opcode::StreamConnect, &connect_arguments(address))?;
    let connected = rig.event(EventKind::StreamConnected, connecting)?;
    ensure!(
        connected.code.get() == 0,
        "the function cannot connect to its own address {address}: errno {}",
        connected.code.get()
    );
    let accepted = rig.event(EventKind::StreamAccepted, lid)?.data.get() as u32;
    rig.on(Opcode::StreamUnlisten, lid)?;
    Ok((connecting, accepted))
}

/// Valid arguments to attach a stream, with CRCs.
pub(crate) fn attachment(sid: u32, qp: &Qp, initiator: bool) -> Attach {
    let role = if initiator { attach::INITIATOR } else { 0 };
    Attach {
        sid: sid.into(),
        qid: qp.id.into(),
        flags: (attach::CRC | role).into(),
        ord: 4.into(),
        ird: 4.into(),
        first_msn: 1.into(),
        ..Attach::default()
    }
}

/// A queue pair with its protection domain and a region.
pub(crate) struct End {
    pub(crate) pd: u32,
    pub(crate) qp: Qp,
    pub(crate) region: Region,
}

impl End {
    /// An end whose queue pair is ready and has no stream.
    pub(crate) fn new(rig: &Rig) -> Outcome<End> {
        let cq = || Cq::new(rig, 8).map(Rc::new);
        End::with(rig, &cq()?, &cq()?)
    }

    /// An end whose completion queues notify through the event queue `queue`.
    pub(crate) fn with_event_queue(rig: &Rig, queue: &EventQueue) -> Outcome<End> {
        let cq = || Cq::with_event_queue(rig, 8, queue.id).map(Rc::new);
        End::with(rig, &cq()?, &cq()?)
    }

    pub(crate) fn with(rig: &Rig, send_cq: &Rc<Cq>, recv_cq: &Rc<Cq>) -> Outcome<End> {
        End::of_kind(rig, QpKind::ReliableConnected, send_cq, recv_cq)
    }

    /// An end whose queue pair is of kind UC.
    pub(crate) fn unreliable(rig: &Rig) -> Outcome<End> {
        let cq = || Cq::new(rig, 8).map(Rc::new);
        End::of_kind(rig, QpKind::UnreliableConnected, &cq()?, &cq()?)
    }

    fn of_kind(rig: &Rig, kind: QpKind, send_cq: &Rc<Cq>, recv_cq: &Rc<Cq>) -> Outcome<End> {
        let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
        let (mut arguments, memory) = Qp::arguments(rig, pd, send_cq, recv_cq)?;
        arguments.kind = (kind as u32).into();
        let qp = Qp::with(rig, &arguments, memory, send_cq, recv_cq)?;
        let region = Region::new(rig, pd, REGION, ALL_RIGHTS)?;
        qp.ready(rig)?;
        Ok(End { pd, qp, region })
    }
}

/// Two connected queue pairs of the device. The first may send at once, the second only after it
/// has received.
pub(crate) fn pair(rig: &Rig) -> Outcome<(End, End)> {
    let (near, far) = (End::new(rig)?, End::new(rig)?);
    join(rig, &near.qp, &far.qp, 0)?;
    Ok((near, far))
}

/// Connects two queue pairs, with additional flags for both.
pub(crate) fn join(rig: &Rig, near: &Qp, far: &Qp, flags: u32) -> Outcome {
    let (connecting, accepted) = stream(rig)?;
    for (sid, qp, initiator) in [(accepted, far, false), (connecting, near, true)] {
        let mut arguments = attachment(sid, qp, initiator);
        arguments.flags = (arguments.flags.get() | flags).into();
        rig.command(Opcode::StreamAttach, &arguments)?;
    }
    Ok(())
}

/// Checks that the connection works: a Send in each direction arrives complete.
pub(crate) fn works(rig: &Rig, near: &End, far: &End) -> Outcome {
    use urnic_device::vocabulary::WcStatus::Success;
    for (round, (from, to)) in [(near, far), (far, near)].into_iter().enumerate() {
        let text = format!("round {round} of a connection that works");
        let len = text.len() as u32;
        from.region.memory.write(0, text.as_bytes());
        to.qp.receive(rig, 0xa0, &[to.region.sge(4096, 1024)]);
        from.qp.send(rig, 0xa1, &[from.region.sge(0, len)]);
        from.qp.send_cq.expect(rig, 0xa1, Success)?;
        let cqe = to.qp.recv_cq.expect(rig, 0xa0, Success)?;
        ensure!(
            cqe.byte_len.get() == len,
            "{len} bytes were sent, {} received",
            cqe.byte_len.get()
        );
        ensure!(
            to.region.memory.read(4096, text.len()) == text.as_bytes(),
            "other bytes arrived than were sent"
        );
    }
    Ok(())
}
