//! Streams: TCP connections from the function to itself, in streaming mode.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;

use urnic_device::command::{Command, Handle, Nothing, Opcode, Status};
use urnic_device::event::EventKind;
use urnic_device::stream::{Close, Endpoints, Listen, MAX_STREAMING, Receive, input};
use urnic_device::vocabulary::QpState;

use crate::check::checks;
use crate::connection::{End, addresses, attachment, connect_arguments, listen, own, stream};
use crate::memory::Memory;
use crate::outcome::{Outcome, ensure};
use crate::queues::{Cq, Qp};
use crate::rig::Rig;

checks! {
    the_address_table_has_no_holes,
    bytes_go_both_ways_in_pieces_of_exactly_n,
    the_end_of_a_stream_is_reported,
    connecting_without_a_listener_reports_an_event,
    a_port_has_at_most_one_listener,
    addresses_of_others_are_refused,
    invalid_stream_parameters_are_refused,
    streams_attach_in_the_right_state_only,
}

fn the_address_table_has_no_holes(rig: &Rig) -> Outcome {
    for address in addresses(rig)? {
        ensure!(address.ip != [0; 16], "an address of the table is all zero");
        let most = if address.ip[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] {
            32
        } else {
            128
        };
        ensure!(
            address.prefix_len.get() <= most,
            "a prefix of {} bits",
            address.prefix_len
        );
    }
    Ok(())
}

fn send(rig: &Rig, sid: u32, bytes: &[u8]) -> Outcome {
    let input = rig.memory(bytes.len())?;
    input.write(0, bytes);
    let mut command = Command::new(Opcode::StreamSend, &Handle { id: sid.into() });
    command.input = input.iova().into();
    command.input_len = (bytes.len() as u32).into();
    rig.run(command).map(drop)
}

fn receive(rig: &Rig, sid: u32, len: usize) -> Outcome<Rc<Memory>> {
    let output = rig.memory(len)?;
    rig.with_output(
        Opcode::StreamReceive,
        &Handle { id: sid.into() },
        output.iova(),
        len,
    )?;
    Ok(output)
}

fn query(rig: &Rig, sid: u32) -> Outcome<Endpoints> {
    let output = rig.memory(size_of::<Endpoints>())?;
    rig.with_output(
        Opcode::StreamQuery,
        &Handle { id: sid.into() },
        output.iova(),
        size_of::<Endpoints>(),
    )?;
    Ok(output.load(0))
}

fn close(rig: &Rig, sid: u32, abort: bool) -> Outcome {
    let arguments = Close {
        sid: sid.into(),
        abort: u32::from(abort).into(),
    };
    rig.command(Opcode::StreamClose, &arguments).map(drop)
}

fn bytes_go_both_ways_in_pieces_of_exactly_n(rig: &Rig) -> Outcome {
    let (connecting, accepted) = stream(rig)?;
    let (here, there) = (query(rig, connecting)?, query(rig, accepted)?);
    ensure!(
        SocketAddr::from(here.local) == SocketAddr::from(there.remote)
            && SocketAddr::from(here.remote) == SocketAddr::from(there.local),
        "the two ends do not name each other"
    );
    let bytes: Vec<u8> = (0..MAX_STREAMING).map(|n| n as u8).collect();
    for (from, to) in [(connecting, accepted), (accepted, connecting)] {
        send(rig, from, &bytes)?;
        let mut at = 0;
        for len in [1, 19, 200, bytes.len() - 220] {
            let buffer = receive(rig, to, len)?;
            let event = rig.event(EventKind::StreamReceived, to)?;
            ensure!(
                event.code.get() == 0 && event.data.get() == len as u64,
                "{len} bytes were requested and sent: {event:?}"
            );
            ensure!(
                buffer.read(0, len) == bytes[at..at + len],
                "other bytes arrived than were sent"
            );
            ensure!(
                buffer.read(len, 64) == [0; 64],
                "the device wrote beyond the buffer"
            );
            at += len;
        }
        ensure!(
            query(rig, to)?.input.get() == input::NONE,
            "there is more than was sent"
        );
    }
    // A receive with a least number of bytes ends with those that have arrived.
    let buffer = rig.memory(20)?;
    let arguments = Receive {
        sid: accepted.into(),
        least: 1.into(),
    };
    rig.with_output(Opcode::StreamReceive, &arguments, buffer.iova(), 20)?;
    send(rig, connecting, b"some")?;
    let event = rig.event(EventKind::StreamReceived, accepted)?;
    ensure!(
        event.code.get() == 0 && matches!(event.data.get(), 1..=4),
        "4 bytes were sent, and at least 1 of 20 requested: {event:?}"
    );
    let len = event.data.get() as usize;
    ensure!(
        buffer.read(0, len) == b"some"[..len],
        "other bytes arrived than were sent"
    );
    if len < 4 {
        receive(rig, accepted, 4 - len)?;
        rig.event(EventKind::StreamReceived, accepted)?;
    }
    // One receive waits; a second one is not allowed.
    let buffer = receive(rig, accepted, 4)?;
    let mut second = Command::new(Opcode::StreamReceive, &Handle { id: accepted.into() });
    second.output = buffer.iova().into();
    second.output_len = 4.into();
    rig.refuses(second, Status::Busy)?;
    ensure!(
        !rig.has_event(EventKind::StreamReceived, accepted),
        "nothing was sent and something received"
    );
    send(rig, connecting, b"late")?;
    rig.event(EventKind::StreamReceived, accepted)?;
    ensure!(buffer.read(0, 4) == b"late", "other bytes arrived than were sent");
    close(rig, connecting, true)?;
    close(rig, accepted, true)
}

fn the_end_of_a_stream_is_reported(rig: &Rig) -> Outcome {
    let (connecting, accepted) = stream(rig)?;
    send(rig, connecting, b"abc")?;
    close(rig, connecting, false)?;
    rig.wait("input", || match query(rig, accepted) {
        Ok(ends) => (ends.input.get() == input::BYTES).then_some(()),
        Err(_) => None,
    })?;
    let buffer = receive(rig, accepted, 8)?;
    let event = rig.event(EventKind::StreamReceived, accepted)?;
    ensure!(
        event.code.get() == 0 && event.data.get() == 3,
        "3 bytes were sent before the end: {event:?}"
    );
    ensure!(buffer.read(0, 3) == b"abc", "other bytes arrived than were sent");
    close(rig, accepted, false)?;
    rig.refuses_on(Opcode::StreamQuery, accepted, Status::InvalidHandle)?;
    // The abrupt close.
    let (connecting, accepted) = stream(rig)?;
    receive(rig, accepted, 8)?;
    close(rig, connecting, true)?;
    let event = rig.event(EventKind::StreamReceived, accepted)?;
    ensure!(event.code.get() != 0, "the peer reset the stream: {event:?}");
    Ok(())
}

fn connecting_without_a_listener_reports_an_event(rig: &Rig) -> Outcome {
    let mut unused = own(rig)?;
    let (lid, port) = listen(rig, unused)?;
    rig.on(Opcode::StreamUnlisten, lid)?;
    rig.refuses_on(Opcode::StreamUnlisten, lid, Status::InvalidHandle)?;
    unused.set_port(port);
    let sid = rig.create(Opcode::StreamConnect, &connect_arguments(unused))?;
    let event = rig.event(EventKind::StreamConnected, sid)?;
    ensure!(
        event.code.get() == 111,
        "errno {} instead of ECONNREFUSED (111)",
        event.code
    );
    rig.refuses_on(Opcode::StreamQuery, sid, Status::InvalidHandle)
}

fn a_port_has_at_most_one_listener(rig: &Rig) -> Outcome {
    let mut address = own(rig)?;
    let (lid, port) = listen(rig, address)?;
    ensure!(port != 0, "a listener has port 0");
    address.set_port(port);
    let again = Listen {
        local: address.into(),
        backlog: 1.into(),
        ..Listen::default()
    };
    rig.refuses(Command::new(Opcode::StreamListen, &again), Status::AddressInUse)?;
    rig.on(Opcode::StreamUnlisten, lid)
}

/// An address that no function has: it is reserved for documentation (RFC 5737).
const FOREIGN: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

fn addresses_of_others_are_refused(rig: &Rig) -> Outcome {
    let foreign = SocketAddr::new(FOREIGN, 0);
    let listen = Listen {
        local: foreign.into(),
        backlog: 1.into(),
        ..Listen::default()
    };
    let mut call = connect_arguments(SocketAddr::new(own(rig)?.ip(), 9));
    call.local = foreign.into();
    for command in [
        Command::new(Opcode::StreamListen, &listen),
        Command::new(Opcode::StreamConnect, &call),
    ] {
        let status = rig.execute(command)?.status.get();
        let expected = [Status::Denied as u16, Status::AddressNotAvailable as u16];
        ensure!(
            expected.contains(&status),
            "{} at an address of somebody else ended with {}",
            crate::rig::opcode_name(&command),
            crate::rig::status_name(status)
        );
    }
    rig.lives()
}

fn invalid_stream_parameters_are_refused(rig: &Rig) -> Outcome {
    let own = own(rig)?;
    for remote in [
        SocketAddr::new(own.ip(), 0),
        SocketAddr::new(Ipv4Addr::new(224, 0, 0, 1).into(), 9),
    ] {
        rig.refuses(
            Command::new(Opcode::StreamConnect, &connect_arguments(remote)),
            Status::InvalidArgument,
        )?;
    }
    let mut call = connect_arguments(own);
    call.traffic_class = 256.into();
    rig.refuses(
        Command::new(Opcode::StreamConnect, &call),
        Status::InvalidArgument,
    )?;
    let (connecting, accepted) = stream(rig)?;
    let mut command = Command::new(
        Opcode::StreamSend,
        &Handle {
            id: connecting.into(),
        },
    );
    command.input = rig.memory(4096)?.iova().into();
    command.input_len = (MAX_STREAMING + 1).into();
    rig.refuses(command, Status::InvalidArgument)?;
    close(rig, connecting, true)?;
    close(rig, accepted, true)
}

fn streams_attach_in_the_right_state_only(rig: &Rig) -> Outcome {
    let (connecting, accepted) = stream(rig)?;
    let cq = Rc::new(Cq::new(rig, 4)?);
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let early = Qp::new(rig, pd, &cq, &cq)?;
    rig.refuses(
        Command::new(Opcode::StreamAttach, &attachment(connecting, &early, true)),
        Status::WrongState,
    )?;
    early.modify(rig, QpState::Init)?;
    rig.refuses(
        Command::new(Opcode::StreamAttach, &attachment(connecting, &early, true)),
        Status::WrongState,
    )?;
    let end = End::new(rig)?;
    // A stream with an outstanding receive cannot be attached.
    receive(rig, accepted, 4)?;
    rig.refuses(
        Command::new(Opcode::StreamAttach, &attachment(accepted, &end.qp, false)),
        Status::WrongState,
    )?;
    rig.command(Opcode::StreamAttach, &attachment(connecting, &end.qp, true))?;
    // The stream is no longer in streaming mode, and the queue pair accepts no second one.
    rig.refuses_on(Opcode::StreamQuery, connecting, Status::InvalidHandle)?;
    let (other, _) = stream(rig)?;
    rig.refuses(
        Command::new(Opcode::StreamAttach, &attachment(other, &end.qp, true)),
        Status::WrongState,
    )?;
    ensure!(
        end.qp.status(rig)?.attached.get() == 1,
        "QueryQp does not report the queue pair's stream"
    );
    Ok(())
}
