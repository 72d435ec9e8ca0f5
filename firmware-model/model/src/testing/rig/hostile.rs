//! An engine with all kinds of work outstanding, and a peer that sends arbitrary bytes.

use super::ends::{Scripted, agreed, native};
use super::node::everything;
use super::queues::{Shape, Work};
use crate::counters::Counter;
use crate::rdmap::Attachment;
use std::time::Duration;
use urnic_device::vocabulary::QpState;
use urnic_device::wqe::Opcode;
use urnic_wire::mpa::fpdu::{self, CrcMode, fpdu_len};
use urnic_wire::mpa::marker;

/// The parameters of the engine's connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hostile {
    pub(crate) crc: bool,
    pub(crate) markers: bool,
    pub(crate) native: bool,
    pub(crate) initiator: bool,
    pub(crate) extensions: bool,
    pub(crate) delivered: bool,
    /// The peer may place payload in receives by itself.
    pub(crate) fills: bool,
    /// Replace the STag by one that exists.
    pub(crate) knows_stag: bool,
    /// Bytes that arrive at a time.
    pub(crate) cut: usize,
}

impl Hostile {
    /// The peer sends FPDUs with these ULPDUs, then `noise`. For any bytes: no panic, at most one
    /// Terminate, every work request completes once and in order, and memory that was not offered
    /// stays as it is.
    pub(crate) fn send(self, ulpdus: Vec<Vec<u8>>, noise: &[u8]) {
        let base = if self.native {
            native(self.initiator)
        } else {
            agreed(self.initiator)
        };
        let attachment = Attachment {
            crc: self.crc,
            markers_rx: self.markers,
            delivered: self.delivered,
            spare_read: self.delivered,
            ord_limit: base.ord + u32::from(self.delivered),
            ..base
        };
        let shape = Shape {
            extensions: self.extensions,
            ..Shape::default()
        };
        let mut peer = Scripted::with(&shape, attachment);
        if self.fills {
            peer.node.engine.let_peer_fill();
        }
        let (open, private) = (
            peer.node.region(4096, everything()),
            peer.node.region(4096, everything()),
        );
        for n in 0..4 {
            peer.node.post_recv(n, &[open.sge(0, 1000)]);
        }
        for n in 0..2 {
            peer.node.post(&Work::read(n, 5, 0).sge(open.sge(0, 100)));
        }
        peer.node.post(
            &Work::new(Opcode::FetchAdd, 2)
                .to(5, 0)
                .atomic(1, 1)
                .sge(open.sge(8, 8)),
        );
        peer.node.post(&Work::send(3).inline(b"hello"));
        peer.run();
        let mut bytes = Vec::new();
        for mut ulpdu in ulpdus {
            if self.knows_stag && ulpdu.len() > 6 {
                ulpdu[2..6].copy_from_slice(&open.stag.to_be_bytes());
            }
            let mut frame = vec![0; 2 * fpdu_len(ulpdu.len()) + 64];
            let len = match self.markers {
                true => marker::emit(bytes.len() as u64, &ulpdu, CrcMode::On, &mut frame),
                false => fpdu::emit(&ulpdu, CrcMode::On, &mut frame),
            };
            bytes.extend_from_slice(&frame[..len]);
        }
        bytes.extend_from_slice(noise);
        for part in bytes.chunks(self.cut.max(1)) {
            if peer.wire.is_reset() {
                break;
            }
            peer.send(part);
        }
        assert!(peer.node.count(Counter::TxTerminates) <= 1);
        peer.node.set_state(QpState::Err);
        peer.advance(Duration::from_secs(10));
        let sent: Vec<u64> = peer.node.sent().iter().map(|s| s.0).collect();
        assert_eq!(sent, [0, 1, 2, 3]);
        let received: Vec<u64> = peer.node.received().iter().map(|r| r.0).collect();
        assert_eq!(received, [0, 1, 2, 3]);
        assert_eq!(private.bytes(), vec![0; 4096]);
        assert!(!peer.node.engine.is_attached());
    }
}
