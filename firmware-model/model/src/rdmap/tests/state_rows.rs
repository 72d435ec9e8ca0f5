//! Verbs rows: changes of state, the single Terminate, and fenced requests.

use super::Scripted;
use crate::memory::{Accessor, MemoryAccess, Need};
use crate::rdmap::{Attachment, NoStream, Rtr, WithoutReceive};
use crate::testing::rig::*;
use crate::transport::QpChange;
use urnic_device::stream::{Attach, attach, rtr};
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{BindOperands, Opcode, SendFlags};
use zerocopy::FromZeros;

const SUCCESS: WcStatus = WcStatus::Success;
const FLUSHED: WcStatus = WcStatus::WrFlushErr;

/// The changes that lead from Reset to each state.
const PATHS: [(QpState, &[QpState]); 6] = {
    use QpState::*;
    [
        (Reset, &[]),
        (Init, &[Init]),
        (Rtr, &[Init, Rtr]),
        (Rts, &[Init, Rtr, Rts]),
        (Sqd, &[Init, Rtr, Rts, Sqd]),
        (Err, &[Err]),
    ]
};

#[test]
fn vrb_q_05_changes_of_state_that_exist() {
    use QpState::*;
    let legal = [
        (Reset, Init),
        (Init, Init),
        (Init, Rtr),
        (Rtr, Rts),
        (Rts, Rts),
        (Rts, Sqd),
    ];
    for (from, path) in PATHS {
        for to in [Reset, Init, Rtr, Rts, Sqd, Sqe, Err] {
            let mut peer = Scripted::new();
            peer.node.engine = peer.node.engine.anew();
            peer.node.stream = Box::new(NoStream);
            path.iter().for_each(|state| peer.node.set_state(*state));
            assert_eq!(peer.node.engine.state(), from);
            let change = QpChange {
                state: Some(to),
                ..QpChange::default()
            };
            let changed = peer
                .node
                .with(|engine, env, stream| engine.modify(&change, env, stream));
            let exists = to == Err || legal.contains(&(from, to));
            assert_eq!(changed.is_ok(), exists, "{from:?} to {to:?}");
            let now = if exists { to } else { from };
            assert_eq!(peer.node.engine.state(), now, "{from:?} to {to:?}");
        }
    }
}

/// Errors that follow one another while the first one's Terminate cannot be sent.
#[test]
fn vrb_q_04_several_errors_send_one_terminate() {
    let mut peer = Scripted::new();
    peer.node.post_recv(9, &[]);
    peer.wire.set_capacity(0, 0);
    // A Send that is longer than its receive, then a bad STag, then a local error.
    peer.send_unread(&fpdu_of(&send_segment(true, 1, 0, b"long")));
    peer.send_unread(&fpdu_of(&write_segment(0x77, 0, b"x")));
    peer.node.post(&Work::send(1).sge(sge(0, 4, 0xdead)));
    while peer.node.pump() {}
    assert_eq!(peer.node.engine.state(), QpState::Sqe);
    peer.wire.set_capacity(0, 5000);
    let payload = peer.terminate();
    assert_eq!(payload[..2], [0x12, 0x05], "for the first of them");
    // The peer's own Terminate is not answered by another.
    peer.send_ulpdu(&untagged(0x41, 0x47, 0, 2, 1, 0, &[0; 4]));
    peer.node.set_state(QpState::Err);
    assert!(peer.output().is_empty());
    assert_eq!(peer.node.faults().len(), 1, "reported once");
    assert_eq!(peer.node.sent(), [(1, FLUSHED)]);
    assert_eq!(peer.node.received().len(), 1);
}

/// All four blocks of the send queue are in use.
#[test]
fn vrb_c_03_a_terminate_and_a_fence_take_no_slot() {
    let shape = Shape {
        sq_log: 2,
        cq_log: 3,
        ..Shape::default()
    };
    let mut peer = Scripted::with(&shape, agreed(true));
    let sink = peer.node.region(8, everything());
    let fill = |peer: &mut Scripted, first: u64| {
        peer.node.post(&Work::read(first, 5, 0).sge(sink.sge(0, 8)));
        for n in first + 1..first + 4 {
            peer.node.post(&Work::send(n).flags(SendFlags::FENCE));
        }
        peer.run();
        assert_eq!(peer.node.sq_room(), 0);
        assert!(peer.node.sent().is_empty());
    };
    fill(&mut peer, 0);
    peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    assert_eq!(peer.node.sent(), [0, 1, 2, 3].map(|n| (n, SUCCESS)));
    assert_eq!(peer.node.sq_outstanding(), 0, "no fenced request is left");
    fill(&mut peer, 4);
    peer.output();
    peer.send_ulpdu(&send_segment(true, 1, 0, b"no receive"));
    assert_eq!(peer.terminate()[..2], [0x12, 0x02]);
    assert_eq!(peer.node.sent(), [4, 5, 6, 7].map(|n| (n, FLUSHED)));
    assert_eq!(peer.node.received(), []);
    assert_eq!(peer.node.sq_outstanding(), 0);
}

/// Each kind of fenced request, with a Read or an atomic outstanding.
#[test]
fn vrb_f_01_every_fenced_request_waits() {
    let fenced = [
        Opcode::Send,
        Opcode::SendInv,
        Opcode::SendImm,
        Opcode::Write,
        Opcode::WriteImm,
        Opcode::Read,
        Opcode::ReadInv,
        Opcode::FetchAdd,
        Opcode::CompareSwap,
        Opcode::LocalInv,
        Opcode::BindMw,
    ];
    for atomic in [false, true] {
        for opcode in fenced {
            fenced_request_waits(opcode, atomic);
        }
    }
}

fn fenced_request_waits(opcode: Opcode, atomic: bool) {
    let case = format!("{opcode:?} after a {}", if atomic { "FetchAdd" } else { "Read" });
    let mut peer = Scripted::new();
    let sink = peer.node.region(8, everything());
    let other = peer.node.region(64, everything());
    let window = peer.node.memory.create_window(peer.node.pd, true).unwrap() ^ 1;
    let first = if atomic {
        Work::new(Opcode::FetchAdd, 1).to(5, 0).atomic(1, 0)
    } else {
        Work::read(1, 5, 0)
    };
    peer.node.post(&first.sge(sink.sge(0, 8)));
    let work = Work::new(opcode, 2).flags(SendFlags::FENCE).to(6, 0);
    let work = match opcode {
        Opcode::Read | Opcode::ReadInv => work.sge(other.sge(0, 8)),
        Opcode::FetchAdd | Opcode::CompareSwap => work.atomic(1, 2).sge(other.sge(0, 8)),
        Opcode::LocalInv => work.to(other.stag, 0),
        Opcode::BindMw => {
            let mut operands = BindOperands::default();
            operands.offset = other.base.into();
            operands.len = 8.into();
            operands.mr_stag = other.stag.into();
            operands.access = Access::REMOTE_READ.bits().into();
            operands.new_stag = window.into();
            work.bind(operands)
        }
        _ => work,
    };
    peer.node.post(&work);
    assert_eq!(peer.output_ulpdus().len(), 1, "{case}: only the first request");
    let usable = |peer: &Scripted, stag| {
        let (memory, pd) = (&peer.node.memory, peer.node.pd);
        memory
            .check(
                Accessor { pd, qid: 7 },
                MemoryAccess {
                    stag,
                    offset: other.base,
                    len: 8,
                    need: Need::RemoteRead,
                },
            )
            .is_ok()
    };
    assert!(usable(&peer, other.stag), "{case}: nothing is invalidated yet");
    assert!(!usable(&peer, window), "{case}: nothing is bound yet");
    if atomic {
        let payload = [&1u32.to_be_bytes()[..], &[0; 8]].concat();
        peer.send_ulpdu(&untagged(0x41, 0x4b, 0, 3, 1, 0, &payload));
    } else {
        peer.send_ulpdu(&tagged(0xc1, 0x42, sink.stag, sink.base, &[1; 8]));
    }
    let went = peer.output_ulpdus().len();
    match opcode {
        Opcode::LocalInv => assert!(!usable(&peer, other.stag), "{case}: now it is"),
        Opcode::BindMw => assert!(usable(&peer, window), "{case}: now it is"),
        // The immediate is a message of its own.
        Opcode::SendImm | Opcode::WriteImm => assert_eq!(went, 2, "{case}"),
        _ => assert_eq!(went, 1, "{case}"),
    }
    assert_eq!(peer.node.sent()[0], (1, SUCCESS), "{case}");
}

#[test]
fn an_attachment_is_what_the_command_says() {
    let taken = |flags: u32, send: u32, expect: u32| {
        let mut arguments = Attach::new_zeroed();
        arguments.flags = flags.into();
        arguments.rtr_send = send.into();
        arguments.rtr_expect = expect.into();
        Attachment::try_from(&arguments)
    };
    let kinds = [
        (rtr::NONE, None),
        (rtr::SEND, Some(Rtr::Send)),
        (rtr::WRITE, Some(Rtr::Write)),
        (rtr::READ, Some(Rtr::Read)),
    ];
    for (raw, kind) in kinds {
        let initiator = taken(attach::INITIATOR, raw, rtr::NONE).unwrap();
        assert_eq!((initiator.rtr_send, initiator.rtr_expect), (kind, None));
        let responder = taken(0, rtr::NONE, raw).unwrap();
        assert_eq!((responder.rtr_send, responder.rtr_expect), (None, kind));
        // Only the initiator sends an RTR.
        assert_eq!(taken(0, raw, rtr::NONE).is_ok(), kind.is_none());
        assert_eq!(taken(attach::INITIATOR, rtr::NONE, raw).is_ok(), kind.is_none());
    }
    assert!(taken(attach::INITIATOR, rtr::READ + 1, rtr::NONE).is_err());
    assert!(taken(0, rtr::NONE, rtr::READ + 1).is_err());
    for bit in 0..32 {
        let flag = 1 << bit;
        let Ok(attachment) = taken(flag, rtr::NONE, rtr::NONE) else {
            assert!(flag > attach::SPARE_READ, "flag {flag:#x} is known");
            continue;
        };
        assert!(flag <= attach::SPARE_READ, "flag {flag:#x} is unknown");
        let states = [
            (attach::INITIATOR, attachment.initiator),
            (attach::CRC, attachment.crc),
            (attach::MARKERS_TX, attachment.markers_tx),
            (attach::MARKERS_RX, attachment.markers_rx),
            (
                attach::STALL_ON_EMPTY_RQ,
                attachment.without_receive == WithoutReceive::Waits,
            ),
            (attach::PEER_MAY_CLOSE, attachment.peer_may_close),
            (attach::STRICT_RTR, attachment.strict_rtr),
            (
                attach::STALL_AT_FIRST,
                attachment.without_receive == WithoutReceive::WaitsAtFirst,
            ),
            (attach::FENCE_OPEN, attachment.fence_open),
            (attach::DELIVERED, attachment.delivered),
            (attach::SPARE_READ, attachment.spare_read),
        ];
        for (known, set) in states {
            assert_eq!(set, known == flag, "flag {known:#x} of {flag:#x}");
        }
    }
}

#[test]
fn a_query_tells_how_far_a_transfer_is() {
    const LEN: usize = 4 << 20;
    let transfer = |peer: &Scripted| {
        let status = peer.node.engine.status();
        (status.transfer_len.get(), status.transfer_done.get())
    };
    let mut peer = Scripted::new();
    assert_eq!(transfer(&peer), (0, 0));
    peer.wire.set_capacity(0, 10_000);
    let memory = peer.node.region(LEN, everything());
    peer.node.post(&Work::send(1).sge(memory.sge(0, LEN)));
    while peer.node.pump() {}
    let (len, done) = transfer(&peer);
    assert_eq!(len as usize, LEN);
    assert!((1..LEN).contains(&(done as usize)), "{done} of {LEN} bytes");
    peer.wire.set_capacity(0, 2 * LEN);
    while peer.node.pump() {}
    assert_eq!(transfer(&peer), (0, 0), "all of it is sent");
    peer.node.post(&Work::read(2, 9, 0).sge(memory.sge(0, 8)));
    while peer.node.pump() {}
    assert_eq!(transfer(&peer), (8, 0), "no answer has come");

    let mut peer = Scripted::new();
    let memory = peer.node.region(8, everything());
    let add = Work::new(Opcode::FetchAdd, 1).to(9, 0).atomic(1, 0);
    peer.node.post(&add.sge(memory.sge(0, 8)));
    while peer.node.pump() {}
    assert_eq!(transfer(&peer), (0, 0), "an atomic is no transfer");
}
