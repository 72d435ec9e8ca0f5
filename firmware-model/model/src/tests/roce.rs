//! Queue pairs of kind RC that speak RoCE v2, over the kernel's UDP on the loopback interface: two
//! devices, each with an address and port 4791 there.

use super::{one_sided, send_between};
use crate::counters::Counter;
use crate::testing::mock::{Driver, End, Qp, assert_cqe, config, wait_for};
use crate::{DeviceAddress, ModelConfig, Reach};
use rustix::net::sockopt::set_ip_tos;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use urnic_device::command::{CreateMw, CreateQp, Opcode as Command, Status, create_qp};
use urnic_device::cqe::{Cqe, CqeFlags};
use urnic_device::event::EventKind;
use urnic_device::stream::{Endpoint, Path, Retries};
use urnic_device::vocabulary::{Access, QpKind, QpState, WcOpcode, WcStatus};
use urnic_device::wqe::{self, AtomicOperands, BindOperands, Opcode, SendFlags, SendHeader, Sge};
use urnic_faults::Network;
use urnic_testkit::request;
use urnic_wire::roce::{Body, Ends, Header, Psn, Request, Reth, Transfer, UDP_PORT, seal};
use zerocopy::{FromZeros, IntoBytes};

/// PSN of the first packet of each end: after few packets it wraps.
pub(super) const FIRST_PSN: u32 = 0xff_fffa;
/// The path MTU.
const MTU: u32 = 1024;
/// A Send of one packet.
const SEND_ONLY: Request = Request::Transfer(Transfer::SendOnly(None));

/// An address that no other device of these tests has, and no other process of them.
fn address() -> IpAddr {
    static NEXT: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let last = NEXT.fetch_add(1, Ordering::Relaxed);
    IpAddr::from([127, 128 | high, low, last])
}

fn device() -> Driver {
    device_at(address())
}

/// A device with this address of these tests.
fn device_at(ip: IpAddr) -> Driver {
    let [.., high, low] = std::process::id().to_be_bytes();
    // The port is on this address only, not on all of the host.
    Driver::start_with(ModelConfig {
        addresses: vec![DeviceAddress {
            ip,
            scope: 0,
            prefix_len: 8,
        }],
        reach: Reach::Confined {
            host: Vec::new(),
            allow: [format!("127.{}.{low}.0/24", 128 | high), "239.0.0.0/8".into()]
                .iter()
                .filter_map(|network| Network::parse(network))
                .collect(),
        },
        ..config()
    })
}

/// A device with a queue pair.
pub(super) struct Node {
    pub(super) driver: Driver,
    pub(super) end: End,
    pub(super) qpn: u32,
}

impl Node {
    /// In the state INIT.
    fn new(qpn: u32) -> Node {
        Node::with(device(), QpKind::ReliableConnected, qpn)
    }

    /// With the address of another one.
    fn at(ip: IpAddr, qpn: u32) -> Node {
        Node::with(device_at(ip), QpKind::ReliableConnected, qpn)
    }

    /// In the state INIT, with a queue pair of this kind.
    pub(super) fn of(kind: QpKind, qpn: u32) -> Node {
        Node::with(device(), kind, qpn)
    }

    fn with(driver: Driver, kind: QpKind, qpn: u32) -> Node {
        let end = queue_pair(&driver, kind, qpn);
        driver.modify(&end.qp, QpState::Init).unwrap();
        Node { driver, end, qpn }
    }

    pub(super) fn ip(&self) -> IpAddr {
        self.driver.device.core().config.addresses[0].ip
    }

    pub(super) fn modify(&self, state: QpState) {
        self.driver.modify(&self.end.qp, state).unwrap();
    }

    pub(super) fn path_to(&self, peer: &Node) -> Path {
        Path {
            remote: Endpoint::from(SocketAddr::new(peer.ip(), 0)),
            qid: self.end.qp.id.into(),
            source: 0.into(),
            remote_qpn: peer.qpn.into(),
            psn: FIRST_PSN.into(),
            mtu: MTU.into(),
            min_rnr_timer: 1.into(),
            reads: 4.into(),
            traffic_class: 0.into(),
        }
    }

    /// Retries that are never used up in a test.
    pub(super) fn retries(&self) -> Retries {
        Retries {
            qid: self.end.qp.id.into(),
            psn: FIRST_PSN.into(),
            timeout: 16.into(),
            retry_cnt: 7.into(),
            rnr_retry: 7.into(),
            reads: 4.into(),
        }
    }

    pub(super) fn connect(&self, path: &Path) -> Result<(), Status> {
        self.driver.command(Command::ConnectPath, path).map(drop)
    }

    fn start(&self, retries: &Retries) -> Result<(), Status> {
        self.driver.command(Command::StartPath, retries).map(drop)
    }

    /// Connects the queue pair, which is in the state INIT.
    pub(super) fn ready(&self, peer: &Node, retries: &Retries) {
        self.connect(&self.path_to(peer)).unwrap();
        self.modify(QpState::Rtr);
        self.start(retries).unwrap();
        self.modify(QpState::Rts);
    }

    pub(super) fn post(&mut self, header: SendHeader, sges: &[Sge]) {
        self.end.qp.post(&self.driver, header, sges);
    }

    pub(super) fn post_recv(&mut self, cookie: u64, sges: &[Sge]) {
        self.end.qp.post_recv(&self.driver, cookie, sges);
    }

    /// Posts a request with these operands.
    pub(super) fn post_with(&mut self, mut header: SendHeader, operands: &[u8]) {
        header.blocks = wqe::blocks(operands.len()) as u8;
        let entry = [header.as_bytes(), operands].concat();
        self.end.qp.post_raw(&self.driver, &entry, header.blocks.into());
    }

    pub(super) fn sge(&self, at: u64, len: u32) -> Sge {
        self.end.region.sge(at, len)
    }

    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        self.driver.arena.write(self.end.region.iova + at, bytes);
    }

    pub(super) fn read(&self, at: u64, len: usize) -> Vec<u8> {
        self.driver.arena.read(self.end.region.iova + at, len)
    }

    /// The completion of a request. The other device runs by its own thread.
    pub(super) fn sent(&mut self) -> Cqe {
        self.end.send_cq.await_completion(&self.driver)
    }

    pub(super) fn received(&mut self) -> Cqe {
        self.end.recv_cq.await_completion(&self.driver)
    }

    pub(super) fn counted(&self, counter: Counter) -> u64 {
        self.driver.counter(counter)
    }
}

fn arguments(driver: &Driver, kind: QpKind, rules: u32) -> CreateQp {
    CreateQp {
        kind: (kind as u32).into(),
        rules: rules.into(),
        ..driver.qp_arguments(driver.pd(), &driver.cq(8), &driver.cq(8))
    }
}

/// A queue pair in the state INIT; one of kind UD is at the port of RoCE v2.
fn queue_pair(driver: &Driver, kind: QpKind, qpn: u32) -> End {
    let pd = driver.pd();
    let (send_cq, recv_cq) = (driver.cq(8), driver.cq(8));
    let rules = match kind {
        QpKind::UnreliableDatagram => create_qp::ROCE,
        _ => 0,
    };
    let arguments = CreateQp {
        kind: (kind as u32).into(),
        rules: rules.into(),
        label: qpn.into(),
        ..driver.qp_arguments(pd, &send_cq, &recv_cq)
    };
    let qp = driver.try_qp(&arguments).unwrap();
    let all = Access::LOCAL_WRITE
        | Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::MW_BIND;
    let region = driver.register(pd, 1 << 20, all).unwrap();
    End {
        pd,
        send_cq,
        recv_cq,
        qp,
        region,
    }
}

/// Two connected queue pairs.
fn pair() -> (Node, Node) {
    pair_with(|_| {})
}

/// Two connected queue pairs; `change` changes how the first one tries again.
fn pair_with(change: impl FnOnce(&mut Retries)) -> (Node, Node) {
    let (near, far) = (Node::new(0x11), Node::new(0x12_3456));
    far.ready(&near, &far.retries());
    let mut retries = near.retries();
    change(&mut retries);
    near.ready(&far, &retries);
    (near, far)
}

pub(super) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at % 251) as u8 ^ seed).collect()
}

/// Asserts that both queue pairs end, and that what is posted is flushed.
#[track_caller]
fn both_ended(near: &mut Node, far: &mut Node) {
    for node in [near, far] {
        node.driver.await_event(EventKind::QpError, node.end.qp.id);
        assert_eq!(node.driver.state(&node.end.qp), QpState::Err);
        let sge = node.sge(0, 1);
        node.post(request(Opcode::Send, 90), &[sge]);
        assert_cqe(&node.sent(), 90, WcStatus::WrFlushErr);
        node.post_recv(91, &[sge]);
        assert_cqe(&node.received(), 91, WcStatus::WrFlushErr);
    }
}

#[test]
fn sends_of_all_sizes_go_both_ways_in_order() {
    let (mut near, mut far) = pair();
    let sizes = [0, 1, 3, 4, 1023, 1024, 1025, 2048, 5000, 65_536, 1 << 20];
    for (cookie, size) in (0..).zip(sizes) {
        let (here, there) = (&mut near, &mut far);
        send_between(
            (&here.driver, &mut here.end),
            (&there.driver, &mut there.end),
            cookie,
            size,
        );
        send_between(
            (&there.driver, &mut there.end),
            (&here.driver, &mut here.end),
            cookie,
            size,
        );
    }
    for node in [&near, &far] {
        let count = sizes.len() as u64;
        assert_eq!(node.counted(Counter::TxMessages), count);
        assert_eq!(node.counted(Counter::RxMessages), count);
        assert_eq!(node.counted(Counter::RxDatagramErrors), 0);
    }
}

#[test]
fn many_requests_may_be_outstanding() {
    let (mut near, mut far) = pair();
    let bytes = pattern(20_000, 1);
    near.write(0, &bytes);
    for cookie in 0..30 {
        let sge = far.sge(cookie * 20_000, 20_000);
        far.post_recv(cookie, &[sge]);
    }
    for cookie in 0..30 {
        let sge = near.sge(0, 20_000);
        near.post(request(Opcode::Send, cookie), &[sge]);
    }
    for cookie in 0..30 {
        assert_cqe(&near.sent(), cookie, WcStatus::Success);
        assert_cqe(&far.received(), cookie, WcStatus::Success);
        assert_eq!(far.read(cookie * 20_000, 20_000), bytes);
    }
}

#[test]
fn immediate_data_and_solicited_events_arrive() {
    let (mut near, mut far) = pair();
    for (opcode, len, received) in [
        (Opcode::SendImm, 0, WcOpcode::Recv),
        (Opcode::SendImm, 3000, WcOpcode::Recv),
        (Opcode::WriteImm, 0, WcOpcode::RecvRdmaWithImm),
        (Opcode::WriteImm, 3000, WcOpcode::RecvRdmaWithImm),
    ] {
        let bytes = pattern(len as usize, opcode as u8);
        near.write(0, &bytes);
        let into = far.sge(0, 4000);
        far.post_recv(7, &[into]);
        let header = SendHeader {
            immediate: *b"imm!",
            flags: (SendFlags::SIGNALED | SendFlags::SOLICITED).bits(),
            ..one_sided(opcode, 8, &far.end)
        };
        let sge = near.sge(0, len);
        near.post(header, &[sge]);
        assert_cqe(&near.sent(), 8, WcStatus::Success);
        let cqe = far.received();
        assert_cqe(&cqe, 7, WcStatus::Success);
        assert_eq!((cqe.opcode, cqe.byte_len.get()), (received as u8, len));
        assert_eq!(cqe.extra, *b"imm!");
        assert_eq!(cqe.flags, (CqeFlags::WITH_IMM | CqeFlags::SOLICITED).bits());
        assert_eq!(far.read(0, bytes.len()), bytes);
    }
}

#[test]
fn writes_and_reads_of_all_sizes_are_served_by_a_passive_target() {
    let (mut near, far) = pair();
    for (cookie, len) in (0..).zip([0, 1, 1024, 1025, 4097, 300_000]) {
        let bytes = pattern(len as usize, cookie as u8);
        near.write(0, &bytes);
        let from = near.sge(0, len);
        near.post(one_sided(Opcode::Write, cookie, &far.end), &[from]);
        assert_cqe(&near.sent(), cookie, WcStatus::Success);
        assert_eq!(far.read(0, bytes.len()), bytes);
        let into = near.sge(500_000, len);
        near.post(one_sided(Opcode::Read, cookie, &far.end), &[into]);
        let cqe = near.sent();
        assert_cqe(&cqe, cookie, WcStatus::Success);
        assert_eq!((cqe.opcode, cqe.byte_len.get()), (WcOpcode::RdmaRead as u8, len));
        assert_eq!(near.read(500_000, bytes.len()), bytes);
    }
}

#[test]
fn more_reads_than_the_peer_answers_at_once() {
    let (mut near, far) = pair();
    let bytes = pattern(40 * 3000, 9);
    far.write(0, &bytes);
    for cookie in 0..40 {
        let header = SendHeader {
            remote_offset: (far.end.region.iova + cookie * 3000).into(),
            ..one_sided(Opcode::Read, cookie, &far.end)
        };
        let into = near.sge(cookie * 3000, 3000);
        near.post(header, &[into]);
    }
    for cookie in 0..40 {
        assert_cqe(&near.sent(), cookie, WcStatus::Success);
    }
    assert_eq!(near.read(0, bytes.len()), bytes);
}

#[test]
fn atomic_operations_return_the_original_value() {
    let (mut near, far) = pair();
    far.write(0, &100u64.to_ne_bytes());
    // The operation, its operands, the value that it returns, and the one that it leaves.
    for (cookie, (opcode, compare_add, swap, original, after)) in (0..).zip([
        (Opcode::FetchAdd, 5, 0, 100, 105),
        (Opcode::CompareSwap, 104, 1, 105, 105),
        (Opcode::CompareSwap, 105, 1, 105, 1),
        (Opcode::FetchAdd, u64::MAX, 0, 1, 0),
    ]) {
        let operands = AtomicOperands {
            compare_add: u64::into(compare_add),
            swap: u64::into(swap),
        };
        let into = near.sge(64, 8);
        let bytes = [operands.as_bytes(), into.as_bytes()].concat();
        let header = SendHeader {
            num_sge: 1,
            ..one_sided(opcode, cookie, &far.end)
        };
        near.post_with(header, &bytes);
        assert_cqe(&near.sent(), cookie, WcStatus::Success);
        assert_eq!(near.read(64, 8), u64::to_ne_bytes(original));
        assert_eq!(far.read(0, 8), u64::to_ne_bytes(after));
    }
}

#[test]
fn inline_data_and_lists_of_elements() {
    let (mut near, mut far) = pair();
    let bytes = pattern(200, 3);
    let into = far.sge(0, 300);
    far.post_recv(1, &[into]);
    let header = SendHeader {
        inline_len: 200.into(),
        flags: (SendFlags::SIGNALED | SendFlags::INLINE).bits(),
        ..request(Opcode::Send, 2)
    };
    near.post_with(header, &bytes);
    assert_cqe(&near.sent(), 2, WcStatus::Success);
    assert_cqe(&far.received(), 1, WcStatus::Success);
    assert_eq!(far.read(0, 200), bytes);
    // Neither the elements nor the packets of both ends begin at the same bytes.
    let bytes = pattern(5000, 4);
    near.write(0, &bytes);
    let lists = |node: &Node, lens: [u32; 3]| {
        let mut at = 0;
        lens.map(|len| {
            let sge = node.sge(at, len);
            at += u64::from(len);
            sge
        })
    };
    let (from, into) = (lists(&near, [1, 2999, 2000]), lists(&far, [1500, 0, 3500]));
    far.post_recv(3, &into);
    near.post(request(Opcode::Send, 4), &from);
    assert_cqe(&near.sent(), 4, WcStatus::Success);
    assert_cqe(&far.received(), 3, WcStatus::Success);
    assert_eq!(far.read(0, 5000), bytes);
    let into = lists(&near, [7, 4000, 993]);
    near.write(0, &[0; 5000]);
    near.post(one_sided(Opcode::Read, 5, &far.end), &into);
    assert_cqe(&near.sent(), 5, WcStatus::Success);
    assert_eq!(near.read(0, 5000), bytes);
}

#[test]
fn unsignalled_requests_complete_without_an_entry() {
    let (mut near, far) = pair();
    let sge = near.sge(0, 10);
    for cookie in 0..5 {
        let mut header = one_sided(Opcode::Write, cookie, &far.end);
        if cookie < 4 {
            header.flags = 0;
        }
        near.post(header, &[sge]);
    }
    assert_cqe(&near.sent(), 4, WcStatus::Success);
    assert_eq!(near.end.qp.sq_consumer(), near.end.qp.sq_producer());
}

#[test]
fn a_send_longer_than_its_receive_ends_both() {
    for (len, room) in [(100, 50), (5000, 3000)] {
        let (mut near, mut far) = pair();
        let into = far.sge(0, room);
        far.post_recv(1, &[into]);
        far.post_recv(2, &[into]);
        let from = near.sge(0, len);
        near.post(request(Opcode::Send, 3), &[from]);
        near.post(request(Opcode::Send, 4), &[from]);
        assert_cqe(&near.sent(), 3, WcStatus::RemInvReqErr);
        assert_cqe(&near.sent(), 4, WcStatus::WrFlushErr);
        assert_cqe(&far.received(), 1, WcStatus::LocLenErr);
        assert_cqe(&far.received(), 2, WcStatus::WrFlushErr);
        both_ended(&mut near, &mut far);
    }
}

/// Also if the Read or Write has several packets.
#[test]
fn access_that_is_not_permitted_ends_both() {
    for opcode in [Opcode::Write, Opcode::WriteImm, Opcode::Read, Opcode::FetchAdd] {
        for wrong in ["the key", "the right", "the end", "the right of the queue pair"] {
            let (mut near, mut far) = pair();
            let mut header = one_sided(opcode, 1, &far.end);
            let len = if opcode == Opcode::FetchAdd { 8 } else { 3000 };
            match wrong {
                "the key" => header.stag = (far.end.region.stag ^ 1).into(),
                "the right" => {
                    let at = far.end.region.iova;
                    let region = far
                        .driver
                        .register_at(far.end.pd, at, 1 << 20, Access::LOCAL_WRITE);
                    header.stag = region.unwrap().stag.into();
                }
                "the end" => {
                    header.remote_offset = (far.end.region.iova + (1 << 20) - 8 * u64::from(len / 16)).into();
                }
                _ => without_rights(&far.driver, &far.end.qp),
            }
            far.post_recv(5, &[]);
            let sge = near.sge(0, len);
            if opcode == Opcode::FetchAdd {
                header.num_sge = 1;
                let operands = [AtomicOperands::default().as_bytes(), sge.as_bytes()].concat();
                near.post_with(header, &operands);
            } else {
                near.post(header, &[sge]);
            }
            let cqe = near.sent();
            assert_eq!(
                WcStatus::from_raw(cqe.status),
                Some(WcStatus::RemAccessErr),
                "{opcode:?} with the wrong {wrong}"
            );
            assert_cqe(&far.received(), 5, WcStatus::WrFlushErr);
            both_ended(&mut near, &mut far);
        }
    }
}

/// Takes all remote rights from a queue pair.
fn without_rights(driver: &Driver, qp: &Qp) {
    use urnic_device::command::{ModifyQp, modify};
    let arguments = ModifyQp {
        qp: qp.id.into(),
        mask: modify::ACCESS.into(),
        ..ModifyQp::default()
    };
    driver.command(Command::ModifyQp, &arguments).unwrap();
}

#[test]
fn memory_that_is_not_ones_own_ends_the_request_here() {
    for (opcode, len) in [
        (Opcode::Send, 100),
        (Opcode::Write, 100),
        (Opcode::Read, 100),
        (Opcode::Read, 5000),
    ] {
        let (mut near, mut far) = pair();
        let into = far.sge(0, 100);
        far.post_recv(1, &[into]);
        let good = near.sge(0, 10);
        let bad = Sge {
            stag: (near.end.region.stag ^ 1).into(),
            ..near.sge(0, len)
        };
        near.post(one_sided(Opcode::Write, 2, &far.end), &[good]);
        near.post(one_sided(opcode, 3, &far.end), &[bad]);
        near.post(one_sided(Opcode::Write, 4, &far.end), &[good]);
        assert_cqe(&near.sent(), 2, WcStatus::Success);
        assert_cqe(&near.sent(), 3, WcStatus::LocProtErr);
        assert_cqe(&near.sent(), 4, WcStatus::WrFlushErr);
        assert_eq!(near.driver.state(&near.end.qp), QpState::Err);
        // The peer has seen nothing wrong.
        assert_eq!(far.driver.state(&far.end.qp), QpState::Rts);
    }
}

#[test]
fn a_receive_with_a_wrong_key_fails_here_and_there() {
    let (mut near, mut far) = pair();
    let bad = Sge {
        stag: (far.end.region.stag ^ 1).into(),
        ..far.sge(0, 100)
    };
    far.post_recv(1, &[bad]);
    let from = near.sge(0, 100);
    near.post(request(Opcode::Send, 2), &[from]);
    assert_cqe(&near.sent(), 2, WcStatus::RemOpErr);
    assert_cqe(&far.received(), 1, WcStatus::LocProtErr);
    both_ended(&mut near, &mut far);
}

#[test]
fn a_send_waits_for_a_receive() {
    let (mut near, mut far) = pair();
    near.write(0, b"patience");
    let from = near.sge(0, 8);
    near.post(request(Opcode::Send, 1), &[from]);
    // It is sent again and again.
    wait_for("packets", || {
        near.driver.device.progress(0);
        (near.counted(Counter::TxCalls) > 5).then_some(())
    });
    assert!(near.end.send_cq.poll().is_none());
    let into = far.sge(0, 8);
    far.post_recv(2, &[into]);
    assert_cqe(&near.sent(), 1, WcStatus::Success);
    assert_cqe(&far.received(), 2, WcStatus::Success);
    assert_eq!(far.read(0, 8), b"patience");
    assert_eq!(far.counted(Counter::RxMessages), 1);
}

#[test]
fn a_send_without_retries_fails_without_a_receive() {
    let (mut near, far) = pair_with(|retries| retries.rnr_retry = 0.into());
    let from = near.sge(0, 8);
    near.post(request(Opcode::Send, 1), &[from]);
    assert_cqe(&near.sent(), 1, WcStatus::RnrRetryExcErr);
    assert_eq!(near.driver.state(&near.end.qp), QpState::Err);
    assert_eq!(far.driver.state(&far.end.qp), QpState::Rts);
}

#[test]
fn requests_without_an_answer_fail_after_all_retries() {
    let short = |retries: &mut Retries| {
        (retries.timeout, retries.retry_cnt) = (10.into(), 2.into());
    };
    let (mut near, far) = pair_with(short);
    far.driver.on(Command::DestroyQp, far.end.qp.id).unwrap();
    let from = near.sge(0, 8);
    near.post(one_sided(Opcode::Write, 1, &far.end), &[from]);
    near.post(one_sided(Opcode::Write, 2, &far.end), &[from]);
    // Its own thread has the timer.
    assert_cqe(&near.end.send_cq.await_idly(), 1, WcStatus::RetryExcErr);
    assert_cqe(&near.end.send_cq.await_idly(), 2, WcStatus::WrFlushErr);
}

#[test]
fn windows_are_bound_and_invalidated_by_either_end() {
    let (mut near, mut far) = pair();
    let arguments = CreateMw {
        pd: far.end.pd.into(),
        kind: 2.into(),
    };
    let window = far.driver.create(Command::CreateMw, &arguments).unwrap();
    let mut stag = window;
    for by_peer in [true, false] {
        stag = stag & !0xff | (stag + 1) & 0xff;
        let mut operands = BindOperands::new_zeroed();
        operands.offset = (far.end.region.iova + 8).into();
        operands.len = 8.into();
        operands.mr_stag = far.end.region.stag.into();
        operands.access = Access::REMOTE_WRITE.bits().into();
        operands.new_stag = stag.into();
        let bind = SendHeader {
            stag: window.into(),
            ..request(Opcode::BindMw, 1)
        };
        far.post_with(bind, operands.as_bytes());
        assert_cqe(&far.sent(), 1, WcStatus::Success);
        near.write(0, b"a window");
        let write = SendHeader {
            remote_offset: (far.end.region.iova + 8).into(),
            stag: stag.into(),
            ..request(Opcode::Write, 2)
        };
        let from = near.sge(0, 8);
        near.post(write, &[from]);
        assert_cqe(&near.sent(), 2, WcStatus::Success);
        assert_eq!(far.read(8, 8), b"a window");
        let invalidate = |opcode| SendHeader {
            stag: stag.into(),
            ..request(opcode, 3)
        };
        if by_peer {
            far.post_recv(4, &[]);
            near.post(invalidate(Opcode::SendInv), &[]);
            assert_cqe(&near.sent(), 3, WcStatus::Success);
            let cqe = far.received();
            assert_cqe(&cqe, 4, WcStatus::Success);
            assert_eq!(cqe.flags, CqeFlags::WITH_INV.bits());
            assert_eq!(u32::from_ne_bytes(cqe.extra), stag);
        } else {
            far.post(invalidate(Opcode::LocalInv), &[]);
            assert_cqe(&far.sent(), 3, WcStatus::Success);
            near.post(write, &[from]);
            assert_cqe(&near.sent(), 2, WcStatus::RemAccessErr);
        }
    }
    both_ended(&mut near, &mut far);
}

#[test]
fn a_send_that_invalidates_what_it_may_not_fails() {
    let (mut near, mut far) = pair();
    far.post_recv(1, &[]);
    let header = SendHeader {
        stag: 0x1234_5678.into(),
        ..request(Opcode::SendInv, 2)
    };
    near.post(header, &[]);
    assert_cqe(&near.sent(), 2, WcStatus::RemAccessErr);
    assert_cqe(&far.received(), 1, WcStatus::RemInvReqErr);
    both_ended(&mut near, &mut far);
}

#[test]
fn a_drained_send_queue_waits_until_it_may_go_on() {
    let (mut near, far) = pair();
    let from = near.sge(0, 4);
    near.post(one_sided(Opcode::Write, 1, &far.end), &[from]);
    near.modify(QpState::Sqd);
    assert_cqe(&near.sent(), 1, WcStatus::Success);
    near.write(0, b"late");
    near.post(one_sided(Opcode::Write, 2, &far.end), &[from]);
    for _ in 0..1000 {
        near.driver.device.progress(0);
    }
    assert!(near.end.send_cq.poll().is_none());
    assert_ne!(far.read(0, 4), b"late");
    near.modify(QpState::Rts);
    assert_cqe(&near.sent(), 2, WcStatus::Success);
    assert_eq!(far.read(0, 4), b"late");
}

#[test]
fn a_reset_queue_pair_begins_anew() {
    let (mut near, mut far) = pair();
    for round in 0..3 {
        send_between(
            (&near.driver, &mut near.end),
            (&far.driver, &mut far.end),
            round,
            3000,
        );
        let into = far.sge(0, 8);
        far.post_recv(99, &[into]);
        for node in [&near, &far] {
            node.modify(QpState::Reset);
            node.modify(QpState::Init);
        }
        far.ready(&near, &far.retries());
        near.ready(&far, &near.retries());
    }
    // The receives before the resets are dropped.
    assert!(far.end.recv_cq.poll().is_none());
}

/// A packet of a stranger, or one that looks like the peer's.
struct Forged {
    from: IpAddr,
    qpn: u32,
    icrc: u8,
    psn: u32,
    traffic_class: u8,
}

impl Forged {
    /// Sends a Send with the text "forged" from this address.
    fn send_to(&self, far: &Node) {
        let socket = UdpSocket::bind((self.from, 0)).unwrap();
        set_ip_tos(&socket, self.traffic_class).unwrap();
        let header = Header {
            ack_request: true,
            ..Header::new(self.qpn, Psn::new(self.psn), Body::Request(SEND_ONLY))
        };
        let (mut packet, to) = sealed(&socket, far, &header, b"forged!!");
        if let Some(last) = packet.last_mut() {
            *last ^= self.icrc;
        }
        socket.send_to(&packet, to).unwrap();
    }
}

/// A packet from `socket` to a device, and its destination.
fn sealed(socket: &UdpSocket, far: &Node, header: &Header, payload: &[u8]) -> (Vec<u8>, SocketAddr) {
    let ends = Ends {
        source: socket.local_addr().unwrap(),
        destination: SocketAddr::new(far.ip(), UDP_PORT),
    };
    let mut packet = vec![0; 100];
    let at = header.emit(&mut packet, payload.len());
    packet[at..at + payload.len()].copy_from_slice(payload);
    let len = seal(&mut packet, at + payload.len(), &ends);
    packet.truncate(len);
    (packet, ends.destination)
}

#[test]
fn packets_of_strangers_and_broken_ones_are_dropped_and_counted() {
    let (near, mut far) = pair();
    let into = far.sge(0, 100);
    far.post_recv(1, &[into]);
    let (peer, qpn) = (near.ip(), far.qpn);
    let stranger = IpAddr::from([127, 1, 2, 3]);
    let forged = |from, qpn, icrc| Forged {
        from,
        qpn,
        icrc,
        psn: FIRST_PSN,
        traffic_class: 0,
    };
    for (count, packet) in (1..).zip([
        forged(stranger, qpn, 0),
        forged(peer, qpn, 0xff),
        forged(peer, qpn ^ 1, 0),
    ]) {
        packet.send_to(&far);
        wait_for("the drop", || {
            (far.counted(Counter::RxDatagramErrors) == count).then_some(())
        });
    }
    assert!(far.end.recv_cq.poll().is_none());
    // The same packet from the right place is taken: nothing but the named things was wrong.
    forged(peer, qpn, 0).send_to(&far);
    assert_cqe(&far.received(), 1, WcStatus::Success);
    assert_eq!(far.read(0, 8), b"forged!!");
}

/// A queue pair in the state RTR, whose peer is a socket of the test with the number 0x77.
fn target_of_a_socket() -> (Node, UdpSocket) {
    let peer = address();
    let socket = UdpSocket::bind((peer, UDP_PORT)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let far = Node::new(0x12_3456);
    let path = Path {
        remote: Endpoint::from(SocketAddr::new(peer, 0)),
        remote_qpn: 0x77.into(),
        ..far.path_to(&far)
    };
    far.connect(&path).unwrap();
    far.modify(QpState::Rtr);
    (far, socket)
}

/// The opcode and the number of the queue pair in the next packet.
fn opcode_and_qpn(socket: &UdpSocket) -> (u8, u32) {
    let mut packet = [0; 100];
    socket.recv(&mut packet).unwrap();
    let qpn = u32::from_be_bytes(*packet[4..].first_chunk().unwrap());
    (packet[0], qpn)
}

#[test]
fn packets_that_a_router_has_marked_are_reported_to_the_peer() {
    const ACKNOWLEDGE: u8 = 0x11;
    const NOTIFICATION: u8 = 0x81;
    const BECN: u32 = 1 << 30;
    let (mut far, socket) = target_of_a_socket();
    // Not capable of ECN, capable of it, and marked by a router.
    for (number, traffic_class) in (0..).zip([0, 2, 3]) {
        let into = far.sge(0, 100);
        far.post_recv(number.into(), &[into]);
        let marked = Forged {
            from: socket.local_addr().unwrap().ip(),
            qpn: far.qpn,
            icrc: 0,
            psn: FIRST_PSN + number,
            traffic_class,
        };
        marked.send_to(&far);
        assert_cqe(&far.received(), number.into(), WcStatus::Success);
        if traffic_class == 3 {
            assert_eq!(opcode_and_qpn(&socket), (NOTIFICATION, BECN | 0x77));
        }
        // Nobody polls: the device's thread acknowledges.
        assert_eq!(opcode_and_qpn(&socket), (ACKNOWLEDGE, 0x77), "{number}");
    }
}

/// The packets of the response fill a batch, and the acknowledgement is in none of them.
#[test]
fn a_send_after_a_long_read_is_acknowledged() {
    const PACKETS: u32 = 64;
    let (mut far, socket) = target_of_a_socket();
    let into = far.sge(0, 100);
    far.post_recv(1, &[into]);
    let first = Psn::new(FIRST_PSN);
    let read = Request::Read(Reth {
        address: far.end.region.iova,
        rkey: far.end.region.stag,
        length: PACKETS * MTU,
    });
    let read = Header::new(far.qpn, first, Body::Request(read));
    let send = Header {
        ack_request: true,
        ..Header::new(far.qpn, first.after(PACKETS), Body::Request(SEND_ONLY))
    };
    for (header, payload) in [(&read, &b""[..]), (&send, b"follows")] {
        let (packet, to) = sealed(&socket, &far, header, payload);
        socket.send_to(&packet, to).unwrap();
    }
    assert_cqe(&far.received(), 1, WcStatus::Success);
    let mut packet = vec![0; 2048];
    let mut opcodes = (0..=PACKETS).map(|_| {
        socket.recv(&mut packet).unwrap();
        packet[0]
    });
    // RDMA READ response First, Middle, Last, and Acknowledge.
    assert_eq!(opcodes.next(), Some(0x0d));
    assert!(
        opcodes
            .by_ref()
            .take(PACKETS as usize - 2)
            .all(|opcode| opcode == 0x0e)
    );
    assert_eq!(opcodes.collect::<Vec<_>>(), [0x0f, 0x11]);
}

#[test]
fn paths_that_are_wrong_are_refused() {
    let (near, far) = (Node::new(0x11), Node::new(0x12));
    let good = near.path_to(&far);
    type Change = fn(&mut Path);
    let cases: [(Change, Status); 9] = [
        (|path| path.mtu = 1000.into(), Status::InvalidArgument),
        (|path| path.mtu = 0.into(), Status::InvalidArgument),
        (|path| path.mtu = 8192.into(), Status::InvalidArgument),
        (|path| path.min_rnr_timer = 32.into(), Status::InvalidArgument),
        (|path| path.source = 1.into(), Status::InvalidArgument),
        (|path| path.qid = 0xffff.into(), Status::InvalidHandle),
        (
            |path| path.remote = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0).into(),
            Status::InvalidArgument,
        ),
        (
            |path| path.remote = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 0).into(),
            Status::InvalidArgument,
        ),
        (
            |path| path.remote = SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into(),
            Status::Denied,
        ),
    ];
    for (at, (change, status)) in cases.into_iter().enumerate() {
        let mut path = good;
        change(&mut path);
        assert_eq!(near.connect(&path), Err(status), "case {at}");
    }
    near.connect(&good).unwrap();
    near.modify(QpState::Rtr);
    let good = near.retries();
    type ChangeRetries = fn(&mut Retries);
    let cases: [ChangeRetries; 3] = [
        |retries| retries.timeout = 32.into(),
        |retries| retries.retry_cnt = 8.into(),
        |retries| retries.rnr_retry = 8.into(),
    ];
    for change in cases {
        let mut retries = good;
        change(&mut retries);
        assert_eq!(near.start(&retries), Err(Status::InvalidArgument));
    }
    near.start(&good).unwrap();
}

#[test]
fn paths_in_the_wrong_state_are_refused() {
    let (near, far) = (Node::new(0x11), Node::new(0x12));
    let (path, retries) = (near.path_to(&far), near.retries());
    assert_eq!(near.start(&retries), Err(Status::WrongState));
    // Without a path.
    near.modify(QpState::Rtr);
    assert_eq!(near.start(&retries), Err(Status::WrongState));
    assert_eq!(near.connect(&path), Err(Status::WrongState));
    near.modify(QpState::Reset);
    assert_eq!(near.connect(&path), Err(Status::WrongState));
    near.modify(QpState::Init);
    near.ready(&far, &retries);
    for refused in [near.connect(&path), near.start(&retries)] {
        assert_eq!(refused, Err(Status::WrongState));
    }
}

#[test]
fn only_connections_of_roce_have_paths() {
    let node = Node::new(0x11);
    let driver = &node.driver;
    let datagrams = Node::of(QpKind::UnreliableDatagram, 0x13);
    let path = datagrams.path_to(&node);
    assert_eq!(datagrams.connect(&path), Err(Status::WrongState));
    // The wire is that of the peer.
    let refused = driver.try_qp(&arguments(driver, QpKind::ReliableConnected, create_qp::ROCE));
    assert_eq!(refused.err(), Some(Status::InvalidArgument));
    // A queue pair that waits for a stream has none.
    let qp = driver
        .try_qp(&arguments(driver, QpKind::ReliableConnected, 0))
        .unwrap();
    let path = Path {
        qid: qp.id.into(),
        ..node.path_to(&node)
    };
    assert_eq!(node.connect(&path), Err(Status::WrongState));
    driver.modify(&qp, QpState::Init).unwrap();
    driver.modify(&qp, QpState::Rtr).unwrap();
    assert_eq!(node.connect(&path), Err(Status::WrongState));
    // After a reset it gets the wire of its next peer.
    driver.modify(&qp, QpState::Reset).unwrap();
    driver.modify(&qp, QpState::Init).unwrap();
    assert_eq!(node.connect(&path), Ok(()));
}

/// Receives may be posted before the peer is known.
#[test]
fn receives_posted_in_init_stay() {
    let [mut near, mut far] = [Node::new(0x11), Node::new(0x12)];
    far.post_recv(7, &[far.sge(0, 64)]);
    far.ready(&near, &far.retries());
    near.ready(&far, &near.retries());
    near.post(request(Opcode::Send, 1), &[near.sge(0, 64)]);
    assert_eq!(near.sent().status, WcStatus::Success as u8);
    assert_eq!(far.received().cookie.get(), 7);
}

#[test]
fn a_port_that_is_not_shared_is_taken() {
    let driver = device();
    let ip = driver.device.core().config.addresses[0].ip;
    let wanted = || arguments(&driver, QpKind::UnreliableDatagram, create_qp::ROCE);
    let other = UdpSocket::bind((ip, UDP_PORT)).unwrap();
    let refused = driver.try_qp(&wanted());
    assert_eq!(refused.err(), Some(Status::AddressInUse));
    drop(other);
    assert!(driver.try_qp(&wanted()).is_ok());
}

/// The numbers of the queue pairs name the devices.
#[test]
fn devices_on_one_address_share_the_port() {
    let first = [Node::new(0x11_1100), Node::new(0x22_2200)];
    let again = |node: &Node, qpn| Node::at(node.ip(), qpn);
    let mut pairs = [
        [again(&first[0], 0x33_3300), again(&first[1], 0x44_4400)],
        [again(&first[0], 0x55_5500), again(&first[1], 0x66_6600)],
        first,
    ];
    for [near, far] in &pairs {
        far.ready(near, &far.retries());
        near.ready(far, &near.retries());
    }
    for cookie in 0..10 {
        for [near, far] in &mut pairs {
            for size in [1, 3000] {
                let (here, there) = ((&near.driver, &mut near.end), (&far.driver, &mut far.end));
                send_between(here, there, 2 * cookie, size);
                let (here, there) = ((&near.driver, &mut near.end), (&far.driver, &mut far.end));
                send_between(there, here, 2 * cookie + 1, size);
            }
        }
    }
    // A device that ends takes no other one with it.
    let [rest @ .., ended] = pairs;
    drop(ended);
    for [mut near, mut far] in rest {
        send_between(
            (&near.driver, &mut near.end),
            (&far.driver, &mut far.end),
            100,
            3000,
        );
    }
}
