//! Rings against a simple device in this test: the test reads the driver's entries according to the
//! datasheet.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;
use urnic_device::cqe::{CQE_LEN, Cqe, CqeFlags};
use urnic_device::record::{CqRecord, QueueRecord};
use urnic_device::vocabulary::{WcOpcode, WcStatus};
use urnic_device::wqe::{
    AtomicOperands, BLOCK_LEN, MAX_SGE, OPERANDS, Opcode, RecvHeader, SendFlags, SendHeader, Sge, blocks,
};
use urnic_rdma_core::*;
use zerocopy::FromBytes;

use super::ledger::Ledger;
use super::receive_queue::{ReceiveQueue, ReceiveShape};
use super::send_queue::{SendQueue, SendRules, SendShape};
use super::work_completion::{is_receive, work_completion};
use urnic_driver::rings::CompletionRing;
use urnic_sys::Plain;

use crate::from_c::{FromC, Out, Requests};

/// Zeroed memory aligned like a device ring.
struct Memory(Vec<Block>);

#[derive(Clone)]
#[repr(align(64))]
struct Block(#[allow(dead_code)] [u8; BLOCK_LEN]);

impl Memory {
    fn new(len: usize) -> Memory {
        Memory(vec![Block([0; BLOCK_LEN]); len.div_ceil(BLOCK_LEN)])
    }

    fn ptr<T>(&self) -> NonNull<T> {
        NonNull::new(self.0.as_ptr().cast_mut().cast()).unwrap()
    }

    /// The memory as a record of indices.
    fn record<T>(&self) -> &T {
        // SAFETY: zeroed memory of a record, whose fields are atomics.
        unsafe { self.ptr().as_ref() }
    }

    /// `len` bytes from `at`, around the end.
    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let all = size_of_val(self.0.as_slice());
        // SAFETY: within the memory.
        (0..len)
            .map(|i| unsafe { self.ptr::<u8>().add((at + i) % all).read_volatile() })
            .collect()
    }
}

const RULES: SendRules = SendRules {
    kind: urnic_device::vocabulary::QpKind::ReliableConnected,
    signal_all: false,
    max_sge_read: 1,
    atomics: true,
    immediate: true,
    windows: true,
};

/// The list that begins with a work request of a test, which is valid.
fn one<'a, T>(wr: *const T) -> Requests<'a, T> {
    // SAFETY: the tests' work requests are valid.
    unsafe { Requests::from_c(wr.cast_mut()) }
}

/// A send queue and the device's view of it.
struct Sends {
    queue: SendQueue,
    ring: Memory,
    record: Memory,
    ledger: Arc<Ledger>,
    shape: SendShape,
}

impl Sends {
    fn new(slots: u32, sge: u32, inline: u32) -> Sends {
        Sends::with(slots, sge, inline, RULES)
    }

    fn with(slots: u32, sge: u32, inline: u32, rules: SendRules) -> Sends {
        let shape = SendShape {
            slots,
            max_sge: sge,
            max_inline: inline,
            blocks: (slots * blocks((sge * 16).max(inline) as usize) as u32).next_power_of_two(),
        };
        let ring = Memory::new(shape.blocks as usize * BLOCK_LEN);
        let record = Memory::new(size_of::<QueueRecord>());
        let ledger = Arc::new(Ledger::new(1, shape.slots));
        // SAFETY: ring and record have the size of the shape, and are dropped with the queue.
        let queue = unsafe { SendQueue::new(ring.ptr(), record.record(), shape, rules, ledger.clone()) };
        Sends {
            queue,
            ring,
            record,
            ledger,
            shape,
        }
    }

    fn post(&mut self, wr: &ibv_send_wr) -> Result<(), Errno> {
        self.queue.post(one(wr).take().unwrap())
    }

    fn record(&self) -> &QueueRecord {
        self.record.record()
    }

    /// The entry at a block index: its header and operands.
    fn entry(&self, index: u32) -> (SendHeader, Vec<u8>) {
        let at = (index % self.shape.blocks) as usize * BLOCK_LEN;
        let header = SendHeader::read_from_bytes(&self.ring.bytes(at, OPERANDS)).unwrap();
        let operands = self
            .ring
            .bytes(at + OPERANDS, usize::from(header.blocks) * BLOCK_LEN - OPERANDS);
        (header, operands)
    }
}

fn send(list: &mut [ibv_sge]) -> ibv_send_wr {
    let mut wr = ibv_send_wr::zeroes();
    wr.opcode = IBV_WR_SEND;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.sg_list = list.as_mut_ptr();
    wr.num_sge = list.len() as i32;
    wr
}

fn sge_of(data: &[u8]) -> ibv_sge {
    ibv_sge {
        addr: data.as_ptr() as u64,
        length: data.len() as u32,
        lkey: 0,
    }
}

#[test]
fn a_full_send_queue_has_room_after_a_polled_completion() {
    let mut s = Sends::new(4, 1, 0);
    for id in 0..4 {
        s.post(&ibv_send_wr {
            wr_id: 100 + id,
            ..send(&mut [])
        })
        .unwrap();
    }
    assert_eq!(s.post(&send(&mut [])), Err(Errno::NOMEM));
    // The third request completes: the two before it were not signalled.
    assert_eq!(s.ledger.settle_send(2), 102);
    for _ in 0..3 {
        s.post(&send(&mut [])).unwrap();
    }
    assert_eq!(s.post(&send(&mut [])), Err(Errno::NOMEM));
}

#[test]
fn slots_and_blocks_count_on_across_the_wrap_of_their_indices() {
    let mut s = Sends::new(4, 3, 0); // Entries of one or two blocks in a ring of eight.
    let mut list = [ibv_sge {
        addr: 0x1000,
        length: 7,
        lkey: 5,
    }; 3];
    let (mut at, base) = (0u32.wrapping_sub(24), 0u32.wrapping_sub(32));
    s.queue.rewind((at, base));
    s.ledger.settle_all(base, 0);
    for round in 0..64u32 {
        let count = 1 + round as usize % 3;
        list[0].addr = round.into();
        s.post(&ibv_send_wr {
            wr_id: round.into(),
            ..send(&mut list[..count])
        })
        .unwrap();
        let (header, operands) = s.entry(at);
        assert_eq!(header.cookie.get(), u64::from(base.wrapping_add(round)));
        assert_eq!(usize::from(header.num_sge), count);
        assert_eq!(u32::from(header.blocks), if count == 3 { 2 } else { 1 });
        let first = Sge::read_from_prefix(&operands).unwrap().0;
        assert_eq!(
            (first.offset.get(), first.len.get(), first.stag.get()),
            (round.into(), 7, 5)
        );
        at = at.wrapping_add(u32::from(header.blocks));
        s.queue.publish();
        assert_eq!(s.record().sq_producer.load(Ordering::Relaxed), at);
        assert_eq!(s.ledger.settle_send(base.wrapping_add(round)), u64::from(round));
    }
}

#[test]
fn inline_data_wraps_around_the_end_of_the_ring() {
    let mut s = Sends::new(2, 2, 200); // Entries of up to four blocks in a ring of eight.
    let data: Vec<u8> = (0..=255).collect();
    for round in 0..32u32 {
        let len = 1 + round as usize * 37 % 200;
        let (a, b) = data[..len].split_at(len / 3);
        let mut list = [sge_of(a), sge_of(b)];
        let wr = ibv_send_wr {
            send_flags: IBV_SEND_INLINE,
            ..send(&mut list)
        };
        let at = s.queue.mark().0;
        s.post(&wr).unwrap();
        let (header, operands) = s.entry(at);
        assert_eq!((header.num_sge, header.inline_len.get() as usize), (0, len));
        assert_eq!(header.flags, SendFlags::INLINE.bits());
        assert_eq!(operands[..len], data[..len], "round {round} at block {at}");
        s.ledger.settle_send(round);
    }
}

#[test]
fn elements_and_operands_wrap_around_the_end_of_the_ring() {
    let mut s = Sends::new(1, MAX_SGE as u32, 0); // One entry of nine blocks in a ring of sixteen.
    let mut list: Vec<ibv_sge> = (0..MAX_SGE as u32)
        .map(|i| ibv_sge {
            addr: i.into(),
            length: i,
            lkey: !i,
        })
        .collect();
    for round in 0..20u32 {
        let at = s.queue.mark().0;
        s.post(&send(&mut list)).unwrap();
        let (header, operands) = s.entry(at);
        assert_eq!(header.blocks, 9);
        for (i, sge) in list.iter().enumerate() {
            let got = Sge::read_from_prefix(&operands[i * 16..]).unwrap().0;
            assert_eq!(
                (got.offset.get(), got.len.get(), got.stag.get()),
                (sge.addr, sge.length, sge.lkey)
            );
        }
        s.ledger.settle_send(round);
    }
}

#[test]
fn each_opcode_fills_the_fields_it_needs() {
    let mut s = Sends::new(16, 2, 0);
    let mut list = [ibv_sge {
        addr: 0x1000,
        length: 8,
        lkey: 9,
    }];
    let rdma = ibv_send_wr_wr {
        rdma: ibv_send_wr_rdma {
            remote_addr: 0xabc,
            rkey: 0x77,
        },
    };
    let atomic = ibv_send_wr_wr {
        atomic: ibv_send_wr_atomic {
            remote_addr: 0xdef0,
            compare_add: 3,
            swap: 4,
            rkey: 0x78,
        },
    };
    let imm = 0xaabb_ccddu32.to_be();
    let table = [
        (IBV_WR_SEND, Opcode::Send, rdma, 0, 0),
        (IBV_WR_SEND_WITH_IMM, Opcode::SendImm, rdma, 0, 0),
        (IBV_WR_SEND_WITH_INV, Opcode::SendInv, rdma, 0, imm),
        (IBV_WR_RDMA_WRITE, Opcode::Write, rdma, 0xabc, 0x77),
        (IBV_WR_RDMA_WRITE_WITH_IMM, Opcode::WriteImm, rdma, 0xabc, 0x77),
        (IBV_WR_RDMA_READ, Opcode::Read, rdma, 0xabc, 0x77),
        (
            IBV_WR_ATOMIC_CMP_AND_SWP,
            Opcode::CompareSwap,
            atomic,
            0xdef0,
            0x78,
        ),
        (
            IBV_WR_ATOMIC_FETCH_AND_ADD,
            Opcode::FetchAdd,
            atomic,
            0xdef0,
            0x78,
        ),
        (IBV_WR_LOCAL_INV, Opcode::LocalInv, rdma, 0, imm),
    ];
    for (n, (opcode, expected, wr, offset, stag)) in table.into_iter().enumerate() {
        let at = s.queue.mark().0;
        let count = if opcode == IBV_WR_LOCAL_INV { 0 } else { 1 };
        let flags = IBV_SEND_FENCE | IBV_SEND_SOLICITED;
        s.post(&ibv_send_wr {
            opcode,
            wr,
            imm_data: imm,
            send_flags: flags,
            ..send(&mut list[..count])
        })
        .unwrap();
        let (header, operands) = s.entry(at);
        assert_eq!(header.opcode, expected as u8);
        assert_eq!(header.flags, (SendFlags::FENCE | SendFlags::SOLICITED).bits());
        assert_eq!(
            (header.remote_offset.get(), header.stag.get()),
            (offset, stag),
            "{expected:?}"
        );
        if matches!(expected, Opcode::SendImm | Opcode::WriteImm) {
            assert_eq!(header.immediate, [0xaa, 0xbb, 0xcc, 0xdd]);
        }
        if matches!(expected, Opcode::CompareSwap | Opcode::FetchAdd) {
            let (got, rest) = AtomicOperands::read_from_prefix(&operands).unwrap();
            assert_eq!((got.compare_add.get(), got.swap.get()), (3, 4));
            assert_eq!(Sge::read_from_prefix(rest).unwrap().0.stag.get(), 9);
        }
        assert_eq!(header.cookie.get(), n as u64);
    }
}

#[test]
fn invalid_requests_are_refused_without_effect() {
    let mut s = Sends::new(4, 2, 32);
    let data = [0u8; 64];
    // The requests point to these elements.
    let mut list = [sge_of(&data[..16]); 3];
    let mut more_than_fits_inline = [sge_of(&data[..33])];
    let mut more_than_a_length_says = [
        ibv_sge {
            addr: 0,
            length: u32::MAX,
            lkey: 0,
        },
        sge_of(&data),
    ];
    let refused = [
        ibv_send_wr {
            opcode: IBV_WR_TSO,
            ..send(&mut [])
        },
        ibv_send_wr {
            opcode: 0x7fff,
            ..send(&mut [])
        },
        ibv_send_wr {
            send_flags: 1 << 30,
            ..send(&mut [])
        },
        send(&mut list[..3]),
        ibv_send_wr {
            num_sge: -1,
            ..send(&mut [])
        },
        ibv_send_wr {
            send_flags: IBV_SEND_INLINE,
            ..send(&mut more_than_fits_inline)
        },
        ibv_send_wr {
            opcode: IBV_WR_RDMA_READ,
            send_flags: IBV_SEND_INLINE,
            ..send(&mut list[..1])
        },
        ibv_send_wr {
            opcode: IBV_WR_RDMA_READ,
            ..send(&mut list[..2])
        },
        ibv_send_wr {
            opcode: IBV_WR_ATOMIC_FETCH_AND_ADD,
            ..send(&mut [])
        },
        send(&mut more_than_a_length_says),
    ];
    for (n, wr) in refused.iter().enumerate() {
        assert_eq!(s.post(wr), Err(Errno::INVAL), "request {n}");
    }
    assert_eq!(s.queue.publish(), None);
    assert_eq!(s.queue.mark(), (0, 0));

    let plain = SendRules {
        atomics: false,
        immediate: false,
        windows: false,
        ..RULES
    };
    let mut s = Sends::with(4, 2, 0, plain);
    for opcode in [
        IBV_WR_SEND_WITH_IMM,
        IBV_WR_RDMA_WRITE_WITH_IMM,
        IBV_WR_ATOMIC_CMP_AND_SWP,
        IBV_WR_BIND_MW,
    ] {
        assert_eq!(
            s.post(&ibv_send_wr {
                opcode,
                ..send(&mut list[..1])
            }),
            Err(Errno::INVAL)
        );
    }
}

#[test]
fn with_sq_sig_all_every_entry_is_signalled() {
    let mut s = Sends::with(
        4,
        1,
        0,
        SendRules {
            signal_all: true,
            ..RULES
        },
    );
    s.post(&ibv_send_wr {
        send_flags: 0,
        ..send(&mut [])
    })
    .unwrap();
    assert_eq!(s.entry(0).0.flags, SendFlags::SIGNALED.bits());
}

#[test]
fn the_device_gets_requested_doorbells_and_a_list_at_once() {
    let mut s = Sends::new(8, 1, 0);
    s.post(&send(&mut [])).unwrap();
    s.post(&send(&mut [])).unwrap();
    assert_eq!(s.record().sq_producer.load(Ordering::Relaxed), 0);
    assert_eq!(s.queue.publish(), Some(2));
    assert_eq!(s.record().sq_producer.load(Ordering::Relaxed), 2);
    assert_eq!(s.queue.publish(), None);
    s.record().sq_event.store(4, Ordering::Relaxed);
    for expected in [None, None, Some(5)] {
        s.post(&send(&mut [])).unwrap();
        assert_eq!(s.queue.publish(), expected);
    }
}

#[test]
fn a_reset_drops_unpublished_requests_and_frees_all_slots() {
    let mut s = Sends::new(2, 1, 0);
    s.post(&send(&mut [])).unwrap();
    s.queue.publish();
    s.post(&send(&mut [])).unwrap();
    let posted = s.queue.discard();
    s.ledger.settle_all(posted, 0);
    assert_eq!(s.queue.publish(), None);
    for id in [8, 9] {
        s.post(&ibv_send_wr {
            wr_id: id,
            ..send(&mut [])
        })
        .unwrap();
    }
    assert_eq!(s.post(&send(&mut [])), Err(Errno::NOMEM));
    assert_eq!(s.entry(1).0.cookie.get(), 2);
    assert_eq!((s.ledger.settle_send(2), s.ledger.settle_send(3)), (8, 9));
}

fn receives(
    ring: &Memory,
    record: &Memory,
    shape: ReceiveShape,
    ledger: Option<Arc<Ledger>>,
) -> ReceiveQueue {
    // SAFETY: ring and record have the size of the shape, and are dropped with the queue.
    unsafe { ReceiveQueue::new(ring.ptr(), record.record(), shape, ledger) }
}

#[test]
fn receives_fill_their_ring_and_completions_free_slots() {
    let shape = ReceiveShape {
        slots: 4,
        max_sge: 3,
        entries: 4,
        log_stride: 6,
    };
    let ring = Memory::new((shape.entries as usize) << shape.log_stride);
    let record = Memory::new(size_of::<QueueRecord>());
    let ledger = Arc::new(Ledger::new(1, 1));
    let mut queue = receives(&ring, &record, shape, Some(ledger.clone()));
    let producer = &record.record::<QueueRecord>().rq_producer;
    let mut list = [ibv_sge {
        addr: 0x1000,
        length: 7,
        lkey: 5,
    }; 4];
    let mut post = |wr_id, list: &mut [ibv_sge], num_sge| {
        let wr = ibv_recv_wr {
            wr_id,
            next: ptr::null_mut(),
            sg_list: list.as_mut_ptr(),
            num_sge,
        };
        queue.post_list(one(&wr), None).1.map_err(|error| error.errno)
    };
    for id in 0..23u64 {
        let count = id as usize % 4;
        post(id, &mut list, count as i32).unwrap();
        assert_eq!(producer.load(Ordering::Relaxed), id as u32 + 1);
        let at = (id as usize % 4) << shape.log_stride;
        let entry = ring.bytes(at, 1 << shape.log_stride);
        let (header, rest) = RecvHeader::read_from_prefix(&entry).unwrap();
        assert_eq!(
            (header.cookie.get(), usize::from(header.num_sge.get())),
            (id, count)
        );
        for sge in rest.chunks(16).take(count) {
            assert_eq!(Sge::read_from_prefix(sge).unwrap().0.stag.get(), 5);
        }
        if id >= 3 {
            assert_eq!(post(99, &mut [], 0), Err(Errno::NOMEM));
            ledger.settle_receive();
        }
    }
    assert_eq!(post(0, &mut list, 4), Err(Errno::INVAL));
    assert_eq!(post(0, &mut list, -1), Err(Errno::INVAL));
}

/// A request and its list in a packed struct of C, after one byte.
#[repr(C, packed)]
struct Packed<T> {
    _tag: u8,
    wr: T,
    list: [ibv_sge; 2],
}

#[test]
fn requests_and_lists_in_packed_structs_are_taken() {
    let list = [1, 2].map(|n| ibv_sge {
        addr: 0x1000 * n,
        length: 7,
        lkey: 5,
    });
    let mut s = Sends::new(4, 2, 0);
    let mut sent = Box::new(Packed {
        _tag: 0,
        wr: send(&mut []),
        list,
    });
    sent.wr.sg_list = (&raw mut sent.list).cast();
    sent.wr.num_sge = 2;
    // The request is copied, as in `post_send`; its list stays in place.
    let wr = sent.wr;
    s.post(&wr).unwrap();
    let (header, operands) = s.entry(0);
    assert_eq!(header.num_sge, 2);
    assert_eq!(
        Sge::read_from_prefix(&operands[16..]).unwrap().0.offset.get(),
        0x2000
    );

    let shape = ReceiveShape {
        slots: 4,
        max_sge: 2,
        entries: 4,
        log_stride: 6,
    };
    let ring = Memory::new((shape.entries as usize) << shape.log_stride);
    let record = Memory::new(size_of::<QueueRecord>());
    let mut queue = receives(&ring, &record, shape, None);
    let mut received = [77, 78].map(|wr_id| {
        Box::new(Packed {
            _tag: 0,
            wr: ibv_recv_wr {
                wr_id,
                next: ptr::null_mut(),
                sg_list: ptr::null_mut(),
                num_sge: 2,
            },
            list,
        })
    });
    let [first, second] = &mut received;
    for packed in [&mut *first, &mut *second] {
        packed.wr.sg_list = (&raw mut packed.list).cast();
    }
    // The second request has too many elements.
    second.wr.num_sge = 3;
    first.wr.next = &raw mut second.wr;
    let mut bad = Packed {
        _tag: 0,
        wr: ptr::null_mut::<ibv_recv_wr>(),
        list,
    };
    // SAFETY: the variable exists.
    let at = unsafe { Out::from_c(&raw mut bad.wr) };
    let (_, result) = queue.post_list(one(&raw const first.wr), Some(at));
    assert_eq!(result.map_err(|error| error.errno), Err(Errno::INVAL));
    let bad = bad.wr;
    assert_eq!(bad, &raw mut second.wr);
    let entry = ring.bytes(0, 64);
    let (header, rest) = RecvHeader::read_from_prefix(&entry).unwrap();
    assert_eq!((header.cookie.get(), header.num_sge.get()), (77, 2));
    assert_eq!(Sge::read_from_prefix(&rest[16..]).unwrap().0.offset.get(), 0x2000);
}

/// A device that completes: it writes entries with the right phase until the ring is full.
struct Completer {
    ring: Memory,
    record: Memory,
    log_size: u32,
    producer: u32,
}

impl Completer {
    fn new(log_size: u32) -> (Completer, CompletionRing) {
        let c = Completer {
            ring: Memory::new(CQE_LEN << log_size),
            record: Memory::new(size_of::<CqRecord>()),
            log_size,
            producer: 0,
        };
        // SAFETY: ring and record have the size of the queue; the tests drop them together with it.
        let ring = unsafe { CompletionRing::new(c.ring.ptr().as_ptr(), c.record.record(), log_size) };
        (c, ring.unwrap())
    }

    fn consumer(&self) -> u32 {
        let record: &CqRecord = self.record.record();
        record.consumer.load(Ordering::Relaxed)
    }

    fn complete(&mut self, mut cqe: Cqe) {
        assert!(
            self.producer.wrapping_sub(self.consumer()) < 1 << self.log_size,
            "overflow"
        );
        cqe.phase = (!(self.producer >> self.log_size) & 1).into();
        let slot = (self.producer & ((1 << self.log_size) - 1)) as usize;
        // SAFETY: a slot is within the ring.
        unsafe { self.ring.ptr::<Cqe>().add(slot).write(cqe) };
        self.producer = self.producer.wrapping_add(1);
    }
}

fn cqe(qid: u32, cookie: u64) -> Cqe {
    let mut cqe = Cqe::default();
    cqe.qid = qid.into();
    cqe.cookie = cookie.into();
    cqe
}

#[test]
fn completions_come_once_and_in_order_over_many_laps() {
    let (mut device, mut ring) = Completer::new(2);
    let (mut made, mut seen) = (0, 0);
    for round in 0..50 {
        for _ in 0..1 + round % 4 {
            device.complete(cqe(1, made));
            made += 1;
        }
        while ring.has_front() {
            let cqe = ring.front();
            assert_eq!(cqe.cookie.get(), seen);
            seen += 1;
            ring.advance();
        }
        assert_eq!(made, seen);
        ring.publish();
        assert_eq!(device.consumer(), device.producer);
    }
}

#[test]
fn a_queue_is_armed_after_its_newest_completion() {
    let (mut device, mut ring) = Completer::new(2);
    assert_eq!(ring.newest(), 0);
    for _ in 0..10 {
        // The ring is full; then one entry is taken.
        (0..4).for_each(|cookie| device.complete(cqe(1, cookie)));
        assert_eq!(ring.newest(), device.producer);
        ring.advance();
        assert_eq!(ring.newest(), device.producer);
        (0..3).for_each(|_| ring.advance());
        ring.publish();
        assert_eq!(ring.newest(), device.producer);
    }
}

#[test]
fn only_completions_of_destroyed_queue_pairs_are_skipped() {
    let (mut device, mut ring) = Completer::new(3);
    for (qid, cookie) in [(1, 0), (2, 1), (1, 2), (2, 3), (1, 4)] {
        device.complete(cqe(qid, cookie));
    }
    ring.advance();
    ring.purge(1);
    // A new queue pair with the number of the old queue pair.
    device.complete(cqe(1, 5));
    let mut seen = Vec::new();
    while ring.has_front() {
        let cqe = ring.front();
        seen.push(cqe.cookie.get());
        ring.advance();
    }
    assert_eq!(seen, [1, 3, 5]);
}

#[test]
fn waiting_completions_of_a_queue_pair_stay() {
    let (mut device, mut ring) = Completer::new(2);
    for pass in 0..5 {
        for (qid, cookie) in [(1, 0), (2, 1), (1, 2), (2, 3)] {
            device.complete(cqe(qid, 10 * pass + cookie));
        }
        let waiting = |ring: &CompletionRing| -> Vec<u64> {
            ring.waiting(1).map(|cqe| cqe.cookie.get() - 10 * pass).collect()
        };
        assert_eq!(waiting(&ring), [0, 2]);
        ring.advance();
        assert_eq!(waiting(&ring), [2]);
        (0..3).for_each(|_| ring.advance());
        assert!(waiting(&ring).is_empty());
        ring.publish();
    }
}

#[test]
fn a_work_completion_has_the_fields_of_its_entry() {
    let mut cqe = cqe(1, 0);
    cqe.label = 0x12_3456.into();
    cqe.byte_len = 77.into();
    cqe.extra = [0xaa, 0xbb, 0xcc, 0xdd];
    cqe.opcode = WcOpcode::RecvRdmaWithImm as u8;
    cqe.status = WcStatus::Success as u8;
    cqe.flags = (CqeFlags::WITH_IMM | CqeFlags::SOLICITED).bits();
    let wc = work_completion(&cqe, 42);
    assert!(is_receive(&cqe));
    assert_eq!(
        (wc.wr_id, wc.status, wc.opcode),
        (42, IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM)
    );
    assert_eq!(
        (wc.byte_len, wc.qp_num, wc.wc_flags),
        (77, 0x12_3456, IBV_WC_WITH_IMM)
    );
    assert_eq!(u32::from_be(wc.imm_data), 0xaabb_ccdd);

    cqe.opcode = WcOpcode::Recv as u8;
    cqe.flags = CqeFlags::WITH_INV.bits();
    cqe.extra = 0x1234_5678u32.to_le_bytes();
    let wc = work_completion(&cqe, 0);
    assert_eq!(
        (wc.opcode, wc.wc_flags, wc.imm_data),
        (IBV_WC_RECV, IBV_WC_WITH_INV, 0x1234_5678)
    );

    cqe.opcode = WcOpcode::FetchAdd as u8;
    cqe.status = WcStatus::RemAccessErr as u8;
    cqe.flags = 0;
    cqe.vendor_error = 0x0102_e000.into();
    let wc = work_completion(&cqe, 0);
    assert!(!is_receive(&cqe));
    assert_eq!(
        (wc.status, wc.vendor_err, wc.wc_flags),
        (IBV_WC_REM_ACCESS_ERR, 0x0102_e000, 0)
    );
}
