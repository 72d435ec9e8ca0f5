//! Queue pairs of kind UD, over the kernel's UDP on the loopback interface.

use crate::capture::CaptureFile;
use crate::counters::Counter;
use crate::testing::mock::{Cq, Driver, End, Qp, Region, assert_cqe, config, wait_for};
use crate::{DeviceAddress, ModelConfig, Reach};
use rustix::io::Errno;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use urnic_device::command::{
    CreateQp, CreateSrq, Handle, ModifyQp, Opcode, QueueHandle, Status, create_qp, modify,
};
use urnic_device::cqe::{Cqe, CqeFlags};
use urnic_device::event::EventKind;
use urnic_device::stream::{BindDatagrams, DatagramPort, Endpoint, Multicast, bind};
use urnic_device::vocabulary::{Access, QpKind, QpState, WcStatus};
use urnic_device::wqe::{DatagramAddress, RecvHeader, SendFlags, SendHeader, Sge};
use urnic_faults::Network;
use urnic_wire::roce::{Body, Deth, Ends, GRH_LEN, Header, Psn, parse, seal};
use zerocopy::{FromZeros, IntoBytes};

const QKEY: u32 = 0x1111_1111;
const V4: u8 = 0;
const V6: u8 = 1;

fn device() -> Driver {
    device_with(false)
}

fn device_with(same_host: bool) -> Driver {
    let mut config = ModelConfig {
        same_host,
        ..config()
    };
    config.addresses.push(DeviceAddress {
        ip: IpAddr::V6(Ipv6Addr::LOCALHOST),
        scope: 0,
        prefix_len: 128,
    });
    Driver::start_with(config)
}

/// A queue pair of kind UD with all it needs.
struct Port {
    send_cq: Cq,
    recv_cq: Cq,
    qp: Qp,
    region: Region,
    port: u16,
}

impl Port {
    /// In the init state.
    fn new(driver: &Driver, srq: u32, pd: u32) -> Port {
        Port::bound(driver, srq, pd, 0)
    }

    /// In the init state, with a port that is bound with these flags.
    fn bound(driver: &Driver, srq: u32, pd: u32, flags: u32) -> Port {
        let special = CreateQp {
            srq: srq.into(),
            ..CreateQp::default()
        };
        Port::created(driver, pd, flags, &special)
    }

    /// In the init state, with the special arguments, and a port that is bound with these flags.
    fn created(driver: &Driver, pd: u32, flags: u32, special: &CreateQp) -> Port {
        let (send_cq, recv_cq) = (driver.cq(8), driver.cq(8));
        let arguments = BindDatagrams {
            flags: flags.into(),
            ..BindDatagrams::default()
        };
        let bound: DatagramPort = driver
            .command(Opcode::BindDatagrams, &arguments)
            .unwrap()
            .result();
        let port = u16::try_from(bound.port.get()).unwrap();
        let arguments = CreateQp {
            kind: (QpKind::UnreliableDatagram as u32).into(),
            datagrams: bound.id,
            label: (u32::from(port) << 8).into(),
            srq: special.srq,
            rules: special.rules,
            max_datagram: special.max_datagram,
            ..driver.qp_arguments(pd, &send_cq, &recv_cq)
        };
        let qp = driver.try_qp(&arguments).unwrap();
        let region = driver.register(pd, 1 << 16, Access::LOCAL_WRITE).unwrap();
        let port = Port {
            send_cq,
            recv_cq,
            qp,
            region,
            port,
        };
        port.modify(driver, QpState::Init);
        port
    }

    /// Able to send and to receive.
    fn ready(driver: &Driver) -> Port {
        Port::ready_with(driver, 0)
    }

    /// Able to send and to receive, with a port that is bound with these flags.
    fn ready_with(driver: &Driver, flags: u32) -> Port {
        Port::bound(driver, 0, driver.pd(), flags).begun(driver)
    }

    /// Able to send and to receive, with the special arguments.
    fn ready_as(driver: &Driver, special: &CreateQp) -> Port {
        Port::created(driver, driver.pd(), 0, special).begun(driver)
    }

    fn begun(self, driver: &Driver) -> Port {
        self.modify(driver, QpState::Rtr);
        self.modify(driver, QpState::Rts);
        self
    }

    fn modify(&self, driver: &Driver, state: QpState) {
        let arguments = ModifyQp {
            qp: self.qp.id.into(),
            mask: (modify::STATE | modify::QKEY).into(),
            state: (state as u32).into(),
            qkey: QKEY.into(),
            ..ModifyQp::new_zeroed()
        };
        driver.command(Opcode::ModifyQp, &arguments).unwrap();
    }

    fn qpn(&self) -> u32 {
        u32::from(self.port) << 8
    }

    fn address(&self, family: u8) -> DatagramAddress {
        let ip: IpAddr = match family {
            V4 => Ipv4Addr::LOCALHOST.into(),
            _ => Ipv6Addr::LOCALHOST.into(),
        };
        DatagramAddress {
            ip: Endpoint::from(SocketAddr::new(ip, 1)).ip,
            qkey: QKEY.into(),
            qpn: self.qpn().into(),
            port: self.port.into(),
            source: family,
            ..DatagramAddress::default()
        }
    }

    /// Posts a signalled Send of these elements, changed by `change`.
    fn send_with(
        &mut self,
        driver: &Driver,
        cookie: u64,
        to: DatagramAddress,
        sges: &[Sge],
        change: impl FnOnce(&mut SendHeader),
    ) {
        let operands = [to.as_bytes(), sges.as_bytes()].concat();
        let blocks = (32 + operands.len()).div_ceil(64) as u8;
        let mut header = SendHeader {
            flags: SendFlags::SIGNALED.bits(),
            num_sge: sges.len() as u8,
            blocks,
            cookie: cookie.into(),
            ..SendHeader::default()
        };
        change(&mut header);
        let entry = [header.as_bytes(), &operands].concat();
        self.qp.post_raw(driver, &entry, blocks.into());
    }

    /// Sends this text, and waits for the completion.
    fn send(&mut self, driver: &Driver, to: DatagramAddress, text: &[u8]) {
        driver.arena.write(self.region.iova, text);
        let sge = self.region.sge(0, text.len() as u32);
        self.send_with(driver, 5, to, &[sge], |_| {});
        let sent = self.send_cq.await_completion(driver);
        assert_cqe(&sent, 5, WcStatus::Success);
        assert_eq!(sent.byte_len.get() as usize, text.len());
    }

    /// Posts a receive at 4096 of the region.
    fn post_recv(&mut self, driver: &Driver, cookie: u64, len: u32) {
        self.qp.post_recv(driver, cookie, &[self.region.sge(4096, len)]);
    }

    /// Waits for a datagram; returns its completion and what is in the receive.
    fn receive(&mut self, driver: &Driver) -> (Cqe, Vec<u8>) {
        let cqe = self.recv_cq.await_completion(driver);
        let bytes = driver
            .arena
            .read(self.region.iova + 4096, cqe.byte_len.get() as usize);
        (cqe, bytes)
    }

    /// Asserts that datagrams still arrive.
    fn works(&mut self, driver: &Driver) {
        self.post_recv(driver, 77, 100);
        self.send(driver, self.address(V4), b"alive");
        let (cqe, bytes) = self.receive(driver);
        assert_cqe(&cqe, 77, WcStatus::Success);
        assert_eq!(&bytes[GRH_LEN..], b"alive");
    }
}

fn counted(driver: &Driver, counter: Counter) -> u64 {
    driver.counter(counter)
}

#[test]
fn ud_05_a_datagram_arrives_after_its_route() {
    let driver = device();
    let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
    for family in [V4, V6] {
        far.post_recv(&driver, 9, 200);
        near.send(&driver, far.address(family), b"hello");
        let (cqe, bytes) = far.receive(&driver);
        assert_cqe(&cqe, 9, WcStatus::Success);
        assert_eq!(cqe.byte_len.get(), 45);
        assert_eq!((cqe.source_qpn.get(), cqe.label.get()), (near.qpn(), far.qpn()));
        // A queue pair's number has its port.
        assert_eq!(cqe.source_port.get(), near.qpn() >> 8);
        let expected = match family {
            V4 => CqeFlags::DATAGRAM,
            _ => CqeFlags::DATAGRAM | CqeFlags::IPV6,
        };
        assert_eq!(cqe.flags, expected.bits());
        assert_eq!(&bytes[GRH_LEN..], b"hello");
        match family {
            V4 => assert_eq!(bytes[32..40], [127, 0, 0, 1, 127, 0, 0, 1]),
            _ => assert_eq!(bytes[24..40], Ipv6Addr::LOCALHOST.octets()),
        }
    }
    assert_eq!(counted(&driver, Counter::RxDatagrams), 2);
}

#[test]
fn ud_06_immediate_data_and_solicited_events_arrive() {
    let driver = device();
    let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
    far.post_recv(&driver, 9, 200);
    near.send_with(&driver, 1, far.address(V4), &[], |header| {
        header.opcode = urnic_device::wqe::Opcode::SendImm as u8;
        header.immediate = *b"imm!";
        header.flags |= SendFlags::SOLICITED.bits();
    });
    let (cqe, bytes) = far.receive(&driver);
    assert_eq!((cqe.extra, bytes.len()), (*b"imm!", GRH_LEN));
    let flags = CqeFlags::DATAGRAM | CqeFlags::WITH_IMM | CqeFlags::SOLICITED;
    assert_eq!(cqe.flags, flags.bits());
}

#[test]
fn ud_07_a_datagram_without_a_receive_is_dropped() {
    let driver = device();
    let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
    near.send(&driver, far.address(V4), b"lost");
    wait_for("the drop", || {
        (counted(&driver, Counter::RxDatagramDrops) == 1).then_some(())
    });
    far.works(&driver);
}

#[test]
fn ud_08_a_wrong_qkey_or_number_is_dropped() {
    let driver = device();
    let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
    far.post_recv(&driver, 9, 200);
    let mut wrong = far.address(V4);
    wrong.qkey = 7.into();
    near.send(&driver, wrong, b"wrong key");
    let mut wrong = far.address(V4);
    wrong.qpn = (far.qpn() + 1).into();
    near.send(&driver, wrong, b"wrong number");
    // Bit 31: the key of the sending queue pair is meant.
    let mut own = far.address(V4);
    own.qkey = (1 << 31).into();
    near.send(&driver, own, b"right");
    let (cqe, bytes) = far.receive(&driver);
    assert_cqe(&cqe, 9, WcStatus::Success);
    assert_eq!(&bytes[GRH_LEN..], b"right");
    assert_eq!(counted(&driver, Counter::QkeyViolations), 1);
    assert_eq!(counted(&driver, Counter::RxDatagramErrors), 1);
}

#[test]
fn ud_09_a_datagram_longer_than_its_receive_fails_that_receive_only() {
    let driver = device();
    let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
    far.post_recv(&driver, 9, 44);
    near.send(&driver, far.address(V4), b"hello");
    assert_cqe(&far.receive(&driver).0, 9, WcStatus::LocLenErr);
    far.works(&driver);
}

#[test]
fn ud_10_a_request_that_cannot_be_sent_stops_the_send_queue_only() {
    let driver = device();
    let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
    let cases = [
        (4097, V4, WcStatus::LocLenErr),
        (5, V6, WcStatus::LocQpOpErr),
        (5, 99, WcStatus::LocQpOpErr),
    ];
    for (len, source, status) in cases {
        let mut to = far.address(V4);
        to.source = source;
        let sge = near.region.sge(0, len);
        near.send_with(&driver, 1, to, &[sge], |_| {});
        assert_cqe(&near.send_cq.await_completion(&driver), 1, status);
        assert_eq!(driver.state(&near.qp), QpState::Sqe);
        near.send_with(&driver, 2, far.address(V4), &[], |_| {});
        assert_cqe(&near.send_cq.await_completion(&driver), 2, WcStatus::WrFlushErr);
        near.post_recv(&driver, 3, 100);
        far.send(&driver, near.address(V4), b"still");
        assert_cqe(&near.receive(&driver).0, 3, WcStatus::Success);
        near.modify(&driver, QpState::Rts);
    }
    far.post_recv(&driver, 9, 5000);
    near.send(&driver, far.address(V4), &[7; 4096]);
    assert_eq!(far.receive(&driver).1[GRH_LEN..], [7; 4096]);
}

#[test]
fn ud_11_the_error_state_flushes_and_reset_begins_anew() {
    let driver = device();
    let mut port = Port::ready(&driver);
    port.post_recv(&driver, 1, 100);
    port.modify(&driver, QpState::Err);
    assert_cqe(&port.recv_cq.await_completion(&driver), 1, WcStatus::WrFlushErr);
    port.send_with(&driver, 2, port.address(V4), &[], |_| {});
    assert_cqe(&port.send_cq.await_completion(&driver), 2, WcStatus::WrFlushErr);
    for state in [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts] {
        port.modify(&driver, state);
    }
    port.works(&driver);
}

#[test]
fn ud_12_hostile_packets_harm_nothing() {
    let driver = device();
    let mut port = Port::ready(&driver);
    port.post_recv(&driver, 1, 100);
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = SocketAddr::from((Ipv4Addr::LOCALHOST, port.port));
    let deth = Deth {
        qkey: QKEY,
        source_qpn: 3,
    };
    let header = Header::new(port.qpn(), Psn::default(), Body::Datagram(deth, None));
    let ends = Ends {
        source: socket.local_addr().unwrap(),
        destination: to,
    };
    let mut right = [0; 64];
    let len = header.emit(&mut right, 5);
    right[len..len + 5].copy_from_slice(b"right");
    let len = seal(&mut right, len + 5, &ends);
    let right = &right[..len];
    let mut hostile: Vec<Vec<u8>> = (0..len).map(|n| right[..n].to_vec()).collect();
    hostile.extend((0..len).filter(|n| *n != 4).map(|n| {
        let mut packet = right.to_vec();
        packet[n] ^= 0x10;
        packet
    }));
    hostile.push(vec![0xff; 9000]);
    for packet in &hostile {
        socket.send_to(packet, to).unwrap();
    }
    socket.send_to(right, to).unwrap();
    let (cqe, bytes) = port.receive(&driver);
    assert_cqe(&cqe, 1, WcStatus::Success);
    assert_eq!((&bytes[GRH_LEN..], cqe.source_qpn.get()), (&b"right"[..], 3));
    assert_eq!(counted(&driver, Counter::RxDatagramErrors), hostile.len() as u64);
    port.works(&driver);
}

#[test]
fn ud_13_a_group_is_received_between_attach_and_detach() {
    let driver = device();
    let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
    let group: SocketAddr = "239.1.2.3:4791".parse().unwrap();
    let membership = |qid: u32| Multicast {
        group: Endpoint::from(group),
        qid: qid.into(),
        source: u32::from(V4).into(),
    };
    driver
        .command(Opcode::AttachMulticast, &membership(far.qp.id))
        .unwrap();
    let to = to_group(group, far.address(V4));
    far.post_recv(&driver, 9, 100);
    near.send(&driver, to, b"to all");
    let (cqe, bytes) = far.receive(&driver);
    assert_cqe(&cqe, 9, WcStatus::Success);
    assert_eq!(&bytes[GRH_LEN..], b"to all");
    assert_eq!(bytes[36..40], [239, 1, 2, 3]);
    driver
        .command(Opcode::DetachMulticast, &membership(far.qp.id))
        .unwrap();
    far.post_recv(&driver, 10, 100);
    near.send(&driver, to, b"to nobody");
    near.send(&driver, far.address(V4), b"to far");
    assert_eq!(&far.receive(&driver).1[GRH_LEN..], b"to far");
    let again = driver.command(Opcode::DetachMulticast, &membership(far.qp.id));
    assert_eq!(again.err(), Some(Status::InvalidArgument));
    let connected = End::new(&driver);
    let refused = driver.command(Opcode::AttachMulticast, &membership(connected.qp.id));
    assert_eq!(refused.err(), Some(Status::WrongState));
}

/// The address of the members of a group; the rest is that of `port`.
fn to_group(group: SocketAddr, port: DatagramAddress) -> DatagramAddress {
    DatagramAddress {
        ip: Endpoint::from(group).ip,
        qpn: 0xff_ffff.into(),
        port: group.port().into(),
        ..port
    }
}

#[test]
fn ud_13_a_member_receives_its_own_datagrams_unless_it_blocks_them() {
    for rules in [0, create_qp::BLOCK_OWN_MULTICAST] {
        let driver = device();
        let special = CreateQp {
            rules: rules.into(),
            ..CreateQp::default()
        };
        let mut member = Port::ready_as(&driver, &special);
        let group: SocketAddr = "239.1.2.4:4791".parse().unwrap();
        let membership = Multicast {
            group: Endpoint::from(group),
            qid: member.qp.id.into(),
            source: u32::from(V4).into(),
        };
        driver.command(Opcode::AttachMulticast, &membership).unwrap();
        let to = to_group(group, member.address(V4));
        member.post_recv(&driver, 9, 100);
        member.send(&driver, to, b"to all");
        if rules == 0 {
            assert_eq!(&member.receive(&driver).1[GRH_LEN..], b"to all");
        } else {
            member.send(&driver, member.address(V4), b"to itself");
            assert_eq!(&member.receive(&driver).1[GRH_LEN..], b"to itself");
        }
    }
}

#[test]
fn ud_05_the_traffic_class_is_in_the_route_by_memory_and_by_udp() {
    for same_host in [false, true] {
        let driver = device_with(same_host);
        let (mut near, mut far) = (Port::ready(&driver), Port::ready(&driver));
        for (family, class) in [(V4, 0xfc), (V6, 0xb8), (V4, 0x10), (V4, 0xfc), (V4, 0)] {
            let to = DatagramAddress {
                traffic_class: class,
                ..far.address(family)
            };
            far.post_recv(&driver, 1, 100);
            near.send(&driver, to, b"urgent");
            let (_, bytes) = far.receive(&driver);
            let seen = match family {
                V4 => bytes[21],
                _ => bytes[0] << 4 | bytes[1] >> 4,
            };
            assert_eq!(seen, class);
        }
    }
}

#[test]
fn ud_10_a_datagram_longer_than_the_ports_mtu_fails() {
    let driver = device();
    let special = CreateQp {
        max_datagram: 1024.into(),
        ..CreateQp::default()
    };
    let mut far = Port::ready(&driver);
    for (len, status) in [(1024, WcStatus::Success), (1025, WcStatus::LocLenErr)] {
        let mut near = Port::ready_as(&driver, &special);
        far.post_recv(&driver, 1, 2048);
        let sge = near.region.sge(0, len);
        near.send_with(&driver, 3, far.address(V4), &[sge], |_| {});
        assert_cqe(&near.send_cq.await_completion(&driver), 3, status);
    }
}

#[test]
fn ud_14_a_shared_receive_queue_supplies_datagrams() {
    let driver = device();
    let pd = driver.pd();
    let (ring, record) = (driver.arena.alloc(64 << 3), driver.arena.alloc(128));
    let arguments = CreateSrq {
        ring: ring.into(),
        record: record.into(),
        pd: pd.into(),
        log_size: 3.into(),
        log_stride: 6.into(),
        uar: driver.uar.into(),
    };
    let srq: QueueHandle = driver.command(Opcode::CreateSrq, &arguments).unwrap().result();
    let mut ports = [(); 2].map(|()| Port::new(&driver, srq.id.get(), pd));
    ports.iter().for_each(|port| port.modify(&driver, QpState::Rtr));
    let mut near = Port::ready(&driver);
    near.send(&driver, ports[0].address(V4), b"lost");
    wait_for("the drop", || {
        (counted(&driver, Counter::RxDatagramDrops) == 1).then_some(())
    });
    for (index, port) in (0u32..).zip(&mut ports) {
        let at = ring + u64::from(index) * 64;
        driver
            .arena
            .write(at, RecvHeader::new(index.into(), 1).as_bytes());
        driver.arena.write(at + 16, port.region.sge(4096, 100).as_bytes());
        // The receive half of the record: its second word.
        driver.arena.write(record + 4, (index + 1).as_bytes());
        near.send(&driver, port.address(V4), b"shared");
        let (cqe, bytes) = port.receive(&driver);
        assert_cqe(&cqe, index.into(), WcStatus::Success);
        assert_eq!(&bytes[GRH_LEN..], b"shared");
    }
}

/// A device that may not reach its host's address 127.0.0.2.
fn confined() -> Driver {
    Driver::start_with(ModelConfig {
        reach: Reach::Confined {
            host: vec!["127.0.0.2".parse().unwrap()],
            allow: Network::parse("127.0.0.1").into_iter().collect(),
        },
        ..config()
    })
}

#[test]
fn ud_15_a_confined_device_sends_to_no_address_of_its_host() {
    let driver = confined();
    let mut port = Port::ready(&driver);
    let host = UdpSocket::bind("127.0.0.2:0").unwrap();
    host.set_nonblocking(true).unwrap();
    for ip in ["127.0.0.2", "239.1.2.3"] {
        let place = SocketAddr::new(ip.parse().unwrap(), host.local_addr().unwrap().port());
        let to = DatagramAddress {
            ip: Endpoint::from(place).ip,
            port: place.port().into(),
            ..port.address(V4)
        };
        port.send(&driver, to, b"not allowed");
    }
    assert_eq!(counted(&driver, Counter::TxDatagramDrops), 2);
    assert!(host.recv(&mut [0; 100]).is_err());
    port.works(&driver);
}

#[test]
fn ud_16_ports_and_queue_pairs_have_one_owner() {
    let driver = device();
    let port = Port::ready(&driver);
    let taken = BindDatagrams {
        local: Endpoint::from(SocketAddr::from((Ipv4Addr::LOCALHOST, port.port))),
        ..BindDatagrams::default()
    };
    let refused = driver.command(Opcode::BindDatagrams, &taken);
    assert_eq!(refused.err(), Some(Status::AddressInUse));
    let without_port = CreateQp {
        kind: (QpKind::UnreliableDatagram as u32).into(),
        ..driver.qp_arguments(driver.pd(), &driver.cq(4), &driver.cq(4))
    };
    assert_eq!(driver.try_qp(&without_port).err(), Some(Status::InvalidHandle));
    let unknown = CreateQp {
        kind: 3.into(),
        ..without_port
    };
    assert_eq!(driver.try_qp(&unknown).err(), Some(Status::InvalidArgument));
    driver.on(Opcode::DestroyQp, port.qp.id).unwrap();
    let bound: DatagramPort = driver.command(Opcode::BindDatagrams, &taken).unwrap().result();
    assert_eq!(bound.port.get(), u32::from(port.port));
    let handle = Handle { id: bound.id };
    driver.command(Opcode::CloseDatagrams, &handle).unwrap();
    let again = driver.command(Opcode::CloseDatagrams, &handle);
    assert_eq!(again.err(), Some(Status::InvalidHandle));
}

/// Both ends are in the process; each packet is in the file once.
#[test]
fn ud_17_a_capture_has_the_packets_as_they_are_on_the_wire() {
    let folder = urnic_testkit::Folder::new("datagrams");
    let path = folder.file("trace.pcapng");
    let capture = CaptureFile::new(path.clone(), None).interface("urnic0", "");
    let driver = Driver::start_with(ModelConfig {
        capture: Some(capture),
        ..config()
    });
    let mut near = Port::ready(&driver);
    near.works(&driver);
    let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
    stranger.send_to(b"noise", ("127.0.0.1", near.port)).unwrap();
    wait_for("the noise", || {
        (counted(&driver, Counter::RxDatagramErrors) == 1).then_some(())
    });
    near.works(&driver);
    let file = std::fs::read(path).unwrap();
    let mut packets = Vec::new();
    let mut rest = &file[..];
    while let Some(len) = rest.get(4..8) {
        let (block, later) = rest.split_at(u32::from_le_bytes(len.try_into().unwrap()) as usize);
        rest = later;
        if block[0] == 6 {
            let len = u32::from_le_bytes(block[20..24].try_into().unwrap()) as usize;
            packets.push(block[28..28 + len].to_vec());
        }
    }
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, near.port));
    let ends = Ends {
        source: local,
        destination: local,
    };
    let payloads: Vec<_> = packets
        .iter()
        .map(|packet| parse(&packet[28..], &ends).map(|(_, payload)| payload.to_vec()))
        .collect();
    let alive = Ok(b"alive".to_vec());
    assert_eq!(payloads.len(), 3);
    assert_eq!((&payloads[0], &payloads[2]), (&alive, &alive));
    assert_eq!(packets[1][28..], *b"noise");
    assert_eq!(
        packets[1][20..22],
        stranger.local_addr().unwrap().port().to_be_bytes()
    );
}

/// A UDP port of this host that nobody has.
fn nobody(family: u8) -> Endpoint {
    let ip: IpAddr = match family {
        V4 => Ipv4Addr::LOCALHOST.into(),
        _ => Ipv6Addr::LOCALHOST.into(),
    };
    let socket = UdpSocket::bind((ip, 0)).unwrap();
    Endpoint::from(socket.local_addr().unwrap())
}

#[test]
fn ud_18_refused_datagrams_are_reported() {
    let driver = device();
    let mut port = Port::ready_with(&driver, bind::REPORT_REFUSED);
    for psn in 0..16_u64 {
        let family = if psn % 3 == 0 { V6 } else { V4 };
        if psn % 4 == 1 {
            // One that arrives.
            port.works(&driver);
            continue;
        }
        let nobody = nobody(family);
        let to = DatagramAddress {
            ip: nobody.ip,
            port: nobody.port,
            ..port.address(family)
        };
        port.send(&driver, to, b"is anybody there?");
        let event = driver.await_event(EventKind::DatagramRefused, port.qp.id);
        assert_eq!(event.data.get(), psn);
        assert_eq!(i32::from(event.code.get()), Errno::CONNREFUSED.raw_os_error());
    }
    port.works(&driver);
    assert_eq!(driver.event().map(|event| event.kind), None);
    // Requests that fail or are flushed have PSNs too.
    let nowhere = DatagramAddress {
        source: 200,
        ..port.address(V4)
    };
    let sge = port.region.sge(0, 1);
    port.send_with(&driver, 1, nowhere, &[sge], |_| {});
    let failed = port.send_cq.await_completion(&driver);
    assert_cqe(&failed, 1, WcStatus::LocQpOpErr);
    for cookie in [2, 3] {
        port.send_with(&driver, cookie, port.address(V4), &[sge], |_| {});
        let flushed = port.send_cq.await_completion(&driver);
        assert_cqe(&flushed, cookie, WcStatus::WrFlushErr);
    }
    port.modify(&driver, QpState::Rts);
    let nobody = nobody(V4);
    let to = DatagramAddress {
        port: nobody.port,
        ..port.address(V4)
    };
    port.send(&driver, to, b"is anybody there?");
    let event = driver.await_event(EventKind::DatagramRefused, port.qp.id);
    assert_eq!(event.data.get(), 17 + 3);
    assert_eq!(counted(&driver, Counter::TxDatagramDrops), 0);
}

#[test]
fn ud_18_a_datagram_that_a_confined_device_drops_is_reported() {
    let driver = confined();
    let mut port = Port::ready_with(&driver, bind::REPORT_REFUSED);
    port.works(&driver);
    let place = SocketAddr::new("127.0.0.2".parse().unwrap(), 4000);
    let to = DatagramAddress {
        ip: Endpoint::from(place).ip,
        port: place.port().into(),
        ..port.address(V4)
    };
    port.send(&driver, to, b"not allowed");
    let event = driver.await_event(EventKind::DatagramRefused, port.qp.id);
    assert_eq!(event.data.get(), 1);
    assert_ne!(event.code.get(), 0);
    // The driver takes no events: those that find no room in its queue are lost.
    for _ in 0..200 {
        port.send(&driver, to, b"not allowed");
    }
    let queue = driver.device.core().async_events.load();
    assert_eq!(queue.as_ref().map(|queue| queue.waiting()), Some(0));
    let events = std::iter::from_fn(|| driver.event()).count();
    assert!((1..200).contains(&events), "{events}");
}

#[test]
fn ud_19_a_port_of_ipv6_leaves_that_of_ipv4_to_others() {
    let driver = device();
    let taken = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let local = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), taken.local_addr().unwrap().port());
    let bind = |flags: u32| {
        let arguments = BindDatagrams {
            local: Endpoint::from(local),
            flags: flags.into(),
            ..BindDatagrams::default()
        };
        driver.command(Opcode::BindDatagrams, &arguments).map(drop)
    };
    assert_eq!(bind(0), Err(Status::AddressInUse));
    assert_eq!(bind(bind::IPV6_ONLY), Ok(()));
    assert_eq!(bind(bind::IPV6_ONLY), Err(Status::AddressInUse));
    for unknown in [8, 1 << 31] {
        assert_eq!(bind(unknown), Err(Status::InvalidArgument));
    }
}

/// Between devices on one host, all datagrams but the first go through memory, and arrive as by
/// UDP.
#[test]
fn shm_14_datagrams_pass_through_memory() {
    let (here, there) = (device_with(true), device_with(true));
    let (mut near, mut far) = (Port::ready(&here), Port::ready(&there));
    for family in [V4, V6] {
        let before = counted(&here, Counter::DirectDatagrams);
        for n in 0..100u8 {
            far.post_recv(&there, n.into(), 200);
            near.send(&here, far.address(family), &[n; 20]);
            let (cqe, bytes) = far.receive(&there);
            assert_cqe(&cqe, n.into(), WcStatus::Success);
            assert_eq!((cqe.byte_len.get(), &bytes[GRH_LEN..]), (60, &[n; 20][..]));
            assert_eq!(cqe.source_qpn.get(), near.qpn());
            assert_eq!(bytes[0] >> 4, if family == V6 { 6 } else { 0 });
        }
        let direct = counted(&here, Counter::DirectDatagrams) - before;
        assert!((95..100).contains(&direct), "{direct}");
    }
    // The receiver sleeps.
    far.post_recv(&there, 7, 200);
    near.send(&here, far.address(V4), b"wake up");
    assert_cqe(&far.recv_cq.await_idly(), 7, WcStatus::Success);
    // Without a receive, or with another Q_Key, it is dropped and counted, as by UDP.
    near.send(&here, far.address(V4), b"nowhere");
    wait_for("the drop", || {
        (counted(&there, Counter::RxDatagramDrops) == 1).then_some(())
    });
    near.send(
        &here,
        DatagramAddress {
            qkey: 1.into(),
            ..far.address(V4)
        },
        b"wrong",
    );
    wait_for("the violation", || {
        (counted(&there, Counter::QkeyViolations) == 1).then_some(())
    });
}

/// Both devices of one process, one of which is off: UDP.
#[test]
fn shm_14_a_port_that_wants_no_memory_gets_udp() {
    for (one, other) in [(true, false), (false, true)] {
        let (here, there) = (device_with(one), device_with(other));
        let (mut near, mut far) = (Port::ready(&here), Port::ready(&there));
        for n in 0..5 {
            far.post_recv(&there, n, 200);
            near.send(&here, far.address(V4), b"by UDP");
            assert_cqe(&far.receive(&there).0, n, WcStatus::Success);
        }
        assert_eq!(counted(&here, Counter::DirectDatagrams), 0);
    }
}
