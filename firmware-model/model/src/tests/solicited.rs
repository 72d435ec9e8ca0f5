//! Completion queues armed for solicited completions, and the messages that wake their programs.

use super::virtual_time::TestBed;
use crate::testing::mock::assert_cqe;
use crate::testing::sim::Conditions;
use std::time::Duration;
use urnic_device::vocabulary::{Access, WcStatus};
use urnic_device::wqe::{Opcode, SendFlags, SendHeader};

/// RDM-S-05: of all messages that take a receive, only the solicited ones notify a queue that is
/// armed for them. In all else they are like the unsolicited ones.
#[test]
fn rdm_s_05_only_solicited_sends_wake() {
    let forms = [
        (Opcode::Send, SendFlags::empty(), false),
        (Opcode::SendInv, SendFlags::empty(), false),
        (Opcode::Send, SendFlags::SOLICITED, true),
        (Opcode::SendInv, SendFlags::SOLICITED, true),
    ];
    for solicited_only in [true, false] {
        for (opcode, flags, solicited) in forms {
            let world = TestBed::new(Conditions::default());
            let (near, far) = (&world.near, &world.far);
            let mut pair = world.connect();
            let stag = far
                .register(pair.responder.pd, 64, Access::LOCAL_WRITE | Access::REMOTE_READ)
                .unwrap()
                .stag;
            let into = pair.responder.region.sge(0, 64);
            pair.responder.qp.post_recv(far, 1, &[into]);
            pair.responder.qp.post_recv(far, 2, &[into]);
            pair.responder.recv_cq.arm(far, solicited_only);
            let mut header = SendHeader {
                opcode: opcode as u8,
                flags: (flags | SendFlags::SIGNALED).bits(),
                cookie: 5.into(),
                ..SendHeader::default()
            };
            if opcode == Opcode::SendInv {
                header.stag = stag.into();
            }
            near.arena.write(pair.initiator.region.iova, b"hello");
            pair.initiator
                .qp
                .post(near, header, &[pair.initiator.region.sge(0, 5)]);
            let received = world.pass_until(|| pair.responder.recv_cq.poll());
            assert_cqe(&received, 1, WcStatus::Success);
            assert_eq!(far.arena.read(pair.responder.region.iova, 5), b"hello");
            // Each step executes all effects of the device.
            world.pass(Duration::from_micros(10));
            let woken = match solicited || !solicited_only {
                true => vec![pair.responder.recv_cq.id],
                false => vec![],
            };
            assert_eq!(far.notifications(), woken, "{opcode:?}, {flags:?}");
            let sent = world.pass_until(|| pair.initiator.send_cq.poll());
            assert_cqe(&sent, 5, WcStatus::Success);
            let revoked = far.device.core().memory.is_revoked(stag);
            assert_eq!(revoked, opcode == Opcode::SendInv);
            // The queue stays armed until a solicited message comes.
            if woken.is_empty() {
                header.opcode = Opcode::Send as u8;
                header.flags = (SendFlags::SOLICITED | SendFlags::SIGNALED).bits();
                pair.initiator
                    .qp
                    .post(near, header, &[pair.initiator.region.sge(0, 5)]);
                let received = world.pass_until(|| pair.responder.recv_cq.poll());
                assert_cqe(&received, 2, WcStatus::Success);
                world.pass(Duration::from_micros(10));
                assert_eq!(far.notifications(), [pair.responder.recv_cq.id]);
            }
        }
    }
}
