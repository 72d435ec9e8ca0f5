//! Queue pairs of kind UD and UC that speak RoCE v2: two devices, as in the tests of
//! [kind RC](super::roce).

use super::roce::{FIRST_PSN, Node, pattern};
use crate::counters::Counter;
use crate::testing::mock::{assert_cqe, wait_for};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use urnic_device::command::{ModifyQp, Opcode as Command, modify};
use urnic_device::cqe::CqeFlags;
use urnic_device::stream::{Endpoint, Multicast};
use urnic_device::vocabulary::{QpKind, QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{DatagramAddress, Opcode, SendHeader};
use urnic_testkit::request;
use urnic_wire::roce::{Body, Deth, Ends, GRH_LEN, Header, MULTICAST_QPN, Psn, Transfer, UDP_PORT, seal};
use zerocopy::{FromZeros, IntoBytes};

const QKEY: u32 = 0x1111_1111;

/// Sends a packet with this body from an address to the device of a node.
fn forge(from: IpAddr, far: &Node, qpn: u32, body: Body, text: &[u8]) {
    let socket = UdpSocket::bind((from, 0)).unwrap();
    let ends = Ends {
        source: socket.local_addr().unwrap(),
        destination: SocketAddr::new(far.ip(), UDP_PORT),
    };
    let header = Header::new(qpn, Psn::new(FIRST_PSN), body);
    let mut packet = vec![0; 100 + text.len()];
    let at = header.emit(&mut packet, text.len());
    packet[at..at + text.len()].copy_from_slice(text);
    let len = seal(&mut packet, at + text.len(), &ends);
    socket.send_to(&packet[..len], ends.destination).unwrap();
}

/// A device with a queue pair of kind UD that is ready.
fn datagrams(qpn: u32) -> Node {
    let node = Node::of(QpKind::UnreliableDatagram, qpn);
    for state in [QpState::Rtr, QpState::Rts] {
        let arguments = ModifyQp {
            qp: node.end.qp.id.into(),
            mask: (modify::STATE | modify::QKEY).into(),
            state: (state as u32).into(),
            qkey: QKEY.into(),
            ..ModifyQp::new_zeroed()
        };
        node.driver.command(Command::ModifyQp, &arguments).unwrap();
    }
    node
}

fn address(ip: IpAddr, qpn: u32) -> DatagramAddress {
    DatagramAddress {
        ip: Endpoint::from(SocketAddr::new(ip, 1)).ip,
        qkey: QKEY.into(),
        qpn: qpn.into(),
        port: UDP_PORT.into(),
        ..DatagramAddress::default()
    }
}

impl Node {
    /// Sends the first bytes of the region as a datagram.
    fn send_to(&mut self, to: DatagramAddress, len: u32) {
        let header = SendHeader {
            num_sge: 1,
            ..request(Opcode::Send, 5)
        };
        let sge = self.sge(0, len);
        self.post_with(header, &[to.as_bytes(), sge.as_bytes()].concat());
        assert_cqe(&self.sent(), 5, WcStatus::Success);
    }

    /// The text of the next datagram.
    fn text(&mut self) -> Vec<u8> {
        let cqe = self.received();
        assert_cqe(&cqe, 9, WcStatus::Success);
        self.read(4096, cqe.byte_len.get() as usize)[GRH_LEN..].to_vec()
    }

    fn listen(&mut self) {
        let into = self.sge(4096, 2000);
        self.post_recv(9, &[into]);
    }
}

#[test]
fn datagrams_go_both_ways_at_the_port_of_all_queue_pairs() {
    let (mut near, mut far) = (datagrams(0x11), datagrams(0x12_3456));
    for round in 0..4 {
        for len in [0, 1, 1024] {
            let bytes = pattern(len, round);
            near.write(0, &bytes);
            far.listen();
            let to = address(far.ip(), far.qpn);
            near.send_to(to, len as u32);
            let cqe = far.received();
            assert_cqe(&cqe, 9, WcStatus::Success);
            assert_eq!((cqe.source_qpn.get(), cqe.label.get()), (near.qpn, far.qpn));
            assert_eq!(far.read(4096 + GRH_LEN as u64, len), bytes);
        }
        std::mem::swap(&mut near, &mut far);
    }
}

/// Any peer may send a datagram, in contrast to a packet of a connection.
#[test]
fn datagrams_of_strangers_need_the_number_and_the_q_key() {
    let mut far = datagrams(0x12_3456);
    let qpn = far.qpn;
    let stranger = IpAddr::from([127, 1, 2, 3]);
    let deth = |qkey| Deth {
        qkey,
        source_qpn: 0x77,
    };
    far.listen();
    forge(
        stranger,
        &far,
        qpn,
        Body::Datagram(deth(QKEY + 1), None),
        b"wrong key",
    );
    wait_for("a violation", || {
        (far.counted(Counter::QkeyViolations) == 1).then_some(())
    });
    forge(
        stranger,
        &far,
        qpn + 1,
        Body::Datagram(deth(QKEY), None),
        b"nobody",
    );
    forge(
        stranger,
        &far,
        qpn,
        Body::Unreliable(Transfer::SendOnly(None)),
        b"other kind",
    );
    forge(
        stranger,
        &far,
        MULTICAST_QPN,
        Body::Datagram(deth(QKEY), None),
        b"no group",
    );
    wait_for("three errors", || {
        (far.counted(Counter::RxDatagramErrors) == 3).then_some(())
    });
    forge(stranger, &far, qpn, Body::Datagram(deth(QKEY), None), b"hello");
    assert_eq!(far.text(), b"hello");
}

#[test]
fn datagrams_to_a_group_reach_its_members() {
    let group = IpAddr::from([239, 1, 2, 9]);
    let (mut near, mut far) = (datagrams(0x11), datagrams(0x12));
    let membership = |node: &Node| Multicast {
        group: Endpoint::from(SocketAddr::new(group, UDP_PORT)),
        qid: node.end.qp.id.into(),
        source: 0.into(),
    };
    let attach = membership(&far);
    far.driver.command(Command::AttachMulticast, &attach).unwrap();
    near.write(0, b"to all");
    far.listen();
    near.send_to(address(group, MULTICAST_QPN), 6);
    assert_eq!(far.text(), b"to all");
    far.driver.command(Command::DetachMulticast, &attach).unwrap();
    far.listen();
    near.send_to(address(group, MULTICAST_QPN), 6);
    near.write(0, b"to far");
    near.send_to(address(far.ip(), far.qpn), 6);
    assert_eq!(far.text(), b"to far");
}

/// Two connected queue pairs of kind UC.
fn pair() -> (Node, Node) {
    let [near, far] = [0x11, 0x12_3456].map(|qpn| Node::of(QpKind::UnreliableConnected, qpn));
    far.ready(&near, &far.retries());
    near.ready(&far, &near.retries());
    (near, far)
}

#[test]
fn uc_sends_of_all_sizes_complete_and_arrive() {
    let (mut near, mut far) = pair();
    for (seed, len) in (0..).zip([0, 1, 1023, 1024, 1025, 5000, 65_536]) {
        let bytes = pattern(len, seed);
        near.write(0, &bytes);
        let [from, into] = [near.sge(0, len as u32), far.sge(0, 1 << 20)];
        far.post_recv(9, &[into]);
        let header = SendHeader {
            immediate: [1, 2, 3, 4],
            ..request(Opcode::SendImm, 5)
        };
        near.post(header, &[from]);
        assert_cqe(&near.sent(), 5, WcStatus::Success);
        let cqe = far.received();
        assert_cqe(&cqe, 9, WcStatus::Success);
        assert_eq!((cqe.byte_len.get() as usize, cqe.extra), (len, [1, 2, 3, 4]));
        assert!(CqeFlags::from_bits_retain(cqe.flags).contains(CqeFlags::WITH_IMM));
        assert_eq!(far.read(0, len), bytes);
    }
    assert_eq!(near.counted(Counter::TxMessages), 7);
}

#[test]
fn uc_writes_arrive_and_one_with_immediate_data_takes_a_receive() {
    let (mut near, mut far) = pair();
    let bytes = pattern(5000, 3);
    near.write(0, &bytes);
    let (from, remote) = (near.sge(0, 5000), far.sge(8192, 5000));
    far.post_recv(9, &[]);
    for opcode in [Opcode::Write, Opcode::WriteImm] {
        let header = SendHeader {
            remote_offset: remote.offset,
            stag: remote.stag,
            ..request(opcode, 5)
        };
        near.post(header, &[from]);
        assert_cqe(&near.sent(), 5, WcStatus::Success);
    }
    let cqe = far.received();
    assert_cqe(&cqe, 9, WcStatus::Success);
    assert_eq!(cqe.opcode, WcOpcode::RecvRdmaWithImm as u8);
    assert_eq!(far.read(8192, 5000), bytes);
}

/// A Send without a receive, one that is too long, a Write to no memory, and the first packet of a
/// message whose others are lost.
#[test]
fn uc_messages_that_are_dropped_leave_the_receive_to_the_next() {
    let (mut near, mut far) = pair();
    let from = near.sge(0, 3000);
    near.write(0, &pattern(3000, 1));
    near.post(request(Opcode::Send, 5), &[from]);
    wait_for("a drop", || {
        (far.counted(Counter::RxMessageDrops) > 0).then_some(())
    });
    let into = far.sge(0, 2999);
    far.post_recv(9, &[into]);
    near.post(request(Opcode::Send, 6), &[from]);
    let nowhere = SendHeader {
        stag: 0xdead.into(),
        ..request(Opcode::Write, 7)
    };
    near.post(nowhere, &[from]);
    for cookie in 5..8 {
        assert_cqe(&near.sent(), cookie, WcStatus::Success);
    }
    let first = Body::Unreliable(Transfer::SendFirst);
    forge(near.ip(), &far, far.qpn, first, &[7; 1024]);
    let text = near.sge(0, 100);
    near.post(request(Opcode::Send, 8), &[text]);
    assert_cqe(&near.sent(), 8, WcStatus::Success);
    let cqe = far.received();
    assert_cqe(&cqe, 9, WcStatus::Success);
    assert_eq!(cqe.byte_len.get(), 100);
    assert_eq!(far.read(0, 100), pattern(100, 1));
    assert_eq!(far.counted(Counter::RxMessageDrops), 4);
    assert!(far.end.recv_cq.poll().is_none());
}

#[test]
fn uc_a_refused_request_stops_the_sends_until_they_are_restarted() {
    let (mut near, mut far) = pair();
    let from = near.sge(0, 10);
    near.post(request(Opcode::Read, 5), &[from]);
    near.post(request(Opcode::Send, 6), &[from]);
    assert_cqe(&near.sent(), 5, WcStatus::LocQpOpErr);
    assert_cqe(&near.sent(), 6, WcStatus::WrFlushErr);
    assert_eq!(near.driver.state(&near.end.qp), QpState::Sqe);
    // Receives go on.
    let into = near.sge(0, 100);
    near.post_recv(9, &[into]);
    let text = far.sge(0, 4);
    far.post(request(Opcode::Send, 5), &[text]);
    assert_cqe(&near.received(), 9, WcStatus::Success);
    near.modify(QpState::Rts);
    let into = far.sge(0, 100);
    far.post_recv(9, &[into]);
    near.post(request(Opcode::Send, 7), &[from]);
    assert_cqe(&near.sent(), 7, WcStatus::Success);
    assert_cqe(&far.received(), 9, WcStatus::Success);
}
