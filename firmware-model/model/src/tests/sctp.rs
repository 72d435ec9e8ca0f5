//! Devices whose streams are DDP sessions over SCTP, in UDP on the loopback network.

use super::streams::{endpoints, receive, send};
use super::{one_sided, send_between};
use crate::ModelConfig;
use crate::testing::mock::{Driver, End, Pair, assert_cqe, config, wait_for};
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use urnic_device::command::{Handle, Opcode, QpStatus, Status};
use urnic_device::event::{EventKind, QpFault};
use urnic_device::stream::{Close, Connect, Listen, Listening, attach, attached, listen, llp};
use urnic_device::vocabulary::{QpState, WcStatus};
use urnic_device::wqe;
use urnic_wire::sctp::session::{Function, MAX_MESSAGE_LEN, SessionMessage};

/// Room for any message of session control.
const ROOM: u32 = MAX_MESSAGE_LEN as u32;

fn driver() -> Driver {
    Driver::start_with(ModelConfig {
        same_host: false,
        ..config()
    })
}

/// A listener for sessions: its number, and its address.
fn listening(driver: &Driver, backlog: u32) -> (u32, SocketAddr) {
    let arguments = Listen {
        local: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0).into(),
        backlog: backlog.into(),
        traffic_class: listen::SCTP.into(),
    };
    let listening: Listening = driver.command(Opcode::StreamListen, &arguments).unwrap().result();
    let port = listening.port.get() as u16;
    (
        listening.lid.get(),
        SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port),
    )
}

fn connecting(driver: &Driver, remote: SocketAddr) -> u32 {
    let arguments = Connect {
        remote: remote.into(),
        llp: llp::SCTP.into(),
        ..Connect::default()
    };
    driver.create(Opcode::StreamConnect, &arguments).unwrap()
}

/// A message of session control.
fn message(function: Function, private_data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; MAX_MESSAGE_LEN];
    let len = SessionMessage::new(function, None, private_data)
        .emit(&mut bytes)
        .unwrap();
    bytes.truncate(len);
    bytes
}

/// Receives a message of session control.
fn received(driver: &Driver, sid: u32) -> Vec<u8> {
    let buffer = receive(driver, sid, ROOM).unwrap();
    let event = driver.await_event(EventKind::StreamReceived, sid);
    assert_eq!(event.code.get(), 0);
    driver.arena.read(buffer, event.data.get() as usize)
}

fn closed(driver: &Driver, sid: u32) {
    let arguments = Close {
        sid: sid.into(),
        abort: 0.into(),
    };
    driver.command(Opcode::StreamClose, &arguments).unwrap();
}

/// An Initiate from `near`, as `far` got it: the numbers of both ends.
fn initiated(near: &Driver, far: &Driver, (lid, address): (u32, SocketAddr)) -> (u32, u32) {
    let sid = connecting(near, address);
    assert_eq!(near.await_event(EventKind::StreamConnected, sid).code.get(), 0);
    send(near, sid, &message(Function::Initiate, b"please")).unwrap();
    let accepted = far.await_event(EventKind::StreamAccepted, lid).data.get() as u32;
    assert_eq!(received(far, accepted), message(Function::Initiate, b"please"));
    (sid, accepted)
}

/// A session between two devices.
fn connected(near: &Driver, far: &Driver, listener: (u32, SocketAddr)) -> Pair {
    let pair = Pair {
        initiator: End::new(near),
        responder: End::new(far),
    };
    let (sid, accepted) = initiated(near, far, listener);
    send(far, accepted, &message(Function::Accept, b"")).unwrap();
    far.attach_with(accepted, &pair.responder.qp, attach::FENCE_OPEN)
        .unwrap();
    assert_eq!(received(near, sid), message(Function::Accept, b""));
    near.attach_with(sid, &pair.initiator.qp, attach::INITIATOR)
        .unwrap();
    pair
}

fn way(driver: &Driver, qid: u32) -> u32 {
    let handle = Handle { id: qid.into() };
    let status: QpStatus = driver.command(Opcode::QueryQp, &handle).unwrap().result();
    status.attached.get()
}

#[test]
fn sctp_06_either_end_sends_first_messages_of_all_sizes() {
    let (near, far) = (driver(), driver());
    let Pair {
        mut initiator,
        mut responder,
    } = connected(&near, &far, listening(&far, 8));
    assert_eq!(way(&near, initiator.qp.id), attached::SCTP);
    assert_eq!(way(&far, responder.qp.id), attached::SCTP);
    // Either end may send first: here it is the passive one.
    for (cookie, size) in [0, 1, 64, 1000, 1400, 4096, 65_535, 1 << 20]
        .into_iter()
        .enumerate()
    {
        let cookie = cookie as u64;
        send_between((&far, &mut responder), (&near, &mut initiator), cookie, size);
        send_between((&near, &mut initiator), (&far, &mut responder), cookie, size);
    }
}

#[test]
fn reads_and_writes_pass_both_ways_over_sctp() {
    let (near, far) = (driver(), driver());
    let Pair {
        mut initiator,
        mut responder,
    } = connected(&near, &far, listening(&far, 8));
    let bytes: Vec<u8> = (0..1u32 << 20).map(|b| (b * 7) as u8).collect();
    near.arena.write(initiator.region.iova, &bytes);
    let write = one_sided(wqe::Opcode::Write, 1, &responder);
    let all = initiator.region.sge(0, 1 << 20);
    initiator.qp.post(&near, write, &[all]);
    assert_cqe(&initiator.send_cq.await_completion(&near), 1, WcStatus::Success);
    let read = one_sided(wqe::Opcode::Read, 2, &initiator);
    let into = responder.region.sge(0, 1 << 20);
    // A Read of the bytes that the Write has placed, over them.
    far.arena.write(responder.region.iova, &vec![0; 4096]);
    responder.qp.post(&far, read, &[into]);
    assert_cqe(&responder.send_cq.await_completion(&far), 2, WcStatus::Success);
    assert!(far.arena.read(responder.region.iova, 1 << 20) == bytes);
}

/// The queue pairs of two hosts share an association: a session ends, and the others go on.
#[test]
fn sctp_32_a_session_ends_and_its_association_goes_on() {
    let (near, far) = (driver(), driver());
    let listener = listening(&far, 8);
    let mut pairs: Vec<Pair> = (0..8).map(|_| connected(&near, &far, listener)).collect();
    let [first, second] = [0; 2].map(|_| initiated(&near, &far, listener));
    let of_one = endpoints(&near, first.0);
    assert_eq!(of_one, endpoints(&near, second.0), "one UDP port");
    let (local, remote) = endpoints(&far, second.1);
    assert_eq!(of_one, (remote, local), "the same at the other end");
    let ended = pairs.remove(3);
    near.modify(&ended.initiator.qp, QpState::Err).unwrap();
    far.await_event(EventKind::Closed, ended.responder.qp.id);
    for (cookie, pair) in (1..).zip(&mut pairs) {
        send_between(
            (&near, &mut pair.initiator),
            (&far, &mut pair.responder),
            cookie,
            5000,
        );
    }
    // The streams of the ended session can have another one.
    let Pair {
        mut initiator,
        mut responder,
    } = connected(&near, &far, listener);
    send_between((&near, &mut initiator), (&far, &mut responder), 9, 5000);
}

/// RFC 5043 §11.3: the RDMAP Terminate of one stream.
#[test]
fn sctp_18_and_32_a_terminate_ends_one_session_of_an_association() {
    let (near, far) = (driver(), driver());
    let listener = listening(&far, 8);
    let mut pairs: Vec<Pair> = (0..2).map(|_| connected(&near, &far, listener)).collect();
    let Pair {
        mut initiator,
        responder,
    } = pairs.remove(0);
    let mut write = one_sided(wqe::Opcode::Write, 1, &responder);
    write.stag = (responder.region.stag ^ 0x0100).into();
    let bytes = initiator.region.sge(0, 8);
    initiator.qp.post(&near, write, &[bytes]);
    let event = far.await_event(EventKind::QpError, responder.qp.id);
    assert_eq!(event.code.get(), QpFault::TerminateSent as u16);
    let event = near.await_event(EventKind::QpError, initiator.qp.id);
    assert_eq!(event.code.get(), QpFault::TerminateReceived as u16);
    let Pair {
        mut initiator,
        mut responder,
    } = pairs.remove(0);
    send_between((&near, &mut initiator), (&far, &mut responder), 2, 5000);
}

#[test]
fn sctp_15_and_18_and_19_the_initiator_gets_the_answer() {
    let (near, far) = (driver(), driver());
    let listener = listening(&far, 8);
    let (sid, accepted) = initiated(&near, &far, listener);
    let mut reject = vec![0; MAX_MESSAGE_LEN];
    let len = SessionMessage::reject(false, b"no").emit(&mut reject).unwrap();
    send(&far, accepted, &reject[..len]).unwrap();
    assert_eq!(received(&near, sid), &reject[..len]);
    // Nothing follows.
    assert_eq!(received(&near, sid), b"");
    let (sid, accepted) = initiated(&near, &far, listener);
    closed(&far, accepted);
    let terminate = &message(Function::Terminate, b"")[..2];
    assert_eq!(received(&near, sid), terminate);
    assert_eq!(received(&near, sid), b"");
    // And by the initiator, while the other end decides.
    let (sid, accepted) = initiated(&near, &far, listener);
    closed(&near, sid);
    assert_eq!(received(&far, accepted), terminate);
}

/// RFC 5043 §6.4: there is a limit, and beyond it the answer is a Terminate.
#[test]
fn sctp_16_requests_beyond_the_backlog_get_a_terminate() {
    let (near, far) = (driver(), driver());
    let (_, address) = listening(&far, 1);
    // The device takes one more than wait at the listener.
    let sids: Vec<u32> = (0..4).map(|_| connecting(&near, address)).collect();
    for sid in &sids {
        near.await_event(EventKind::StreamConnected, *sid);
        send(&near, *sid, &message(Function::Initiate, b"")).unwrap();
    }
    // Which of them is beyond it depends on the order of arrival.
    let buffers: Vec<u64> = sids
        .iter()
        .map(|sid| receive(&near, *sid, ROOM).unwrap())
        .collect();
    let (buffer, event) = wait_for("an answer", || {
        let mut all = sids.iter().zip(&buffers);
        all.find_map(|(sid, buffer)| Some((*buffer, near.event_of(EventKind::StreamReceived, *sid)?)))
    });
    let answer = near.arena.read(buffer, event.data.get() as usize);
    assert_eq!(answer, &message(Function::Terminate, b"")[..2]);
}

#[test]
fn a_port_without_a_listener_refuses_sctp() {
    let near = driver();
    let free = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let sid = connecting(&near, free);
    let event = near.await_event(EventKind::StreamConnected, sid);
    assert_eq!(event.code.get(), libc::ECONNREFUSED as u16);
    // The port can be used.
    let far = driver();
    let (lid, address) = listening(&far, 1);
    far.on(Opcode::StreamUnlisten, lid).unwrap();
    let sid = connecting(&near, address);
    let event = near.await_event(EventKind::StreamConnected, sid);
    assert_eq!(event.code.get(), libc::ECONNREFUSED as u16);
}

#[test]
fn sctp_10_the_end_of_a_device_ends_its_sessions() {
    let (near, far) = (driver(), driver());
    let listener = listening(&far, 8);
    let Pair { initiator, .. } = connected(&near, &far, listener);
    drop(far);
    near.await_event(EventKind::Closed, initiator.qp.id);
}

#[test]
fn unknown_lower_layers_are_refused() {
    let near = driver();
    let arguments = Connect {
        remote: SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 1).into(),
        llp: 7.into(),
        ..Connect::default()
    };
    let refused = near.create(Opcode::StreamConnect, &arguments);
    assert_eq!(refused, Err(Status::InvalidArgument));
}

/// As `rdma_bind_addr` reserves the port from which an id connects later.
#[test]
fn a_port_whose_listener_is_gone_is_free_at_once() {
    let (near, far) = (driver(), driver());
    let (_, address) = listening(&far, 8);
    for _ in 0..20 {
        let (lid, own) = listening(&near, 1);
        near.on(Opcode::StreamUnlisten, lid).unwrap();
        let arguments = Connect {
            remote: address.into(),
            local: own.into(),
            llp: llp::SCTP.into(),
            ..Connect::default()
        };
        let sid = near.create(Opcode::StreamConnect, &arguments).unwrap();
        assert_eq!(near.await_event(EventKind::StreamConnected, sid).code.get(), 0);
        assert_eq!(endpoints(&near, sid).0, own);
    }
}
