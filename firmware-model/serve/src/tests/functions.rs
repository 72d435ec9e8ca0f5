//! The state machine of a function: messages in, replies out, no I/O.

use super::super::config_space::PBA_OFFSET;
use super::super::function::{Disconnect, Function, Hardware, MAX_FDS, Outgoing};
use super::super::ledger::{Extent, Ledger, Place};
use super::super::passed::Passed;
use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use urnic_device::registers::{CMD_BASE, CONTROL, KICK};
use urnic_vfio_user::*;

/// Hardware that records its calls.
#[derive(Default)]
struct Bench {
    started: bool,
    registers: BTreeMap<u32, u32>,
    rung: Vec<(u64, u64)>,
    assigned: BTreeMap<u32, bool>,
    masked: Vec<(u32, bool)>,
    raised: Vec<u32>,
    ledger: Ledger,
    files: usize,
    resets: usize,
}

const PAGES_LEN: u64 = 1 << 20;
const VECTORS: u32 = 9;

impl Hardware for Bench {
    fn start(&mut self, client: &Capabilities) -> Result<Option<Memory>, Errno> {
        assert!(
            !std::mem::replace(&mut self.started, true),
            "a function starts once"
        );
        Ok(client.urnic.map(|_| Memory::Messages))
    }
    fn register(&mut self, offset: u32) -> u32 {
        assert!(offset.is_multiple_of(4) && offset < 4096);
        self.registers.get(&offset).copied().unwrap_or(0)
    }
    fn set_register(&mut self, offset: u32, value: u32) {
        assert!(offset.is_multiple_of(4) && offset < 4096);
        self.registers.insert(offset, value);
    }
    fn doorbells_len(&self) -> u64 {
        PAGES_LEN
    }
    fn doorbells(&self) -> Result<OwnedFd, Errno> {
        eventfd(0, EventfdFlags::CLOEXEC)
    }
    fn doorbells_read(&mut self, offset: u64, into: &mut [u8]) {
        assert!(offset + into.len() as u64 <= PAGES_LEN);
        into.fill(0xdb);
    }
    fn ring(&mut self, offset: u64, value: u64) {
        assert!(offset < PAGES_LEN && offset.is_multiple_of(8));
        self.rung.push((offset, value));
    }
    fn vectors(&self) -> u32 {
        VECTORS
    }
    fn assign(&mut self, vector: u32, eventfd: Option<OwnedFd>) {
        assert!(vector < VECTORS);
        self.assigned.insert(vector, eventfd.is_some());
    }
    fn mask(&mut self, vector: u32, masked: bool) {
        assert!(vector < VECTORS);
        self.masked.push((vector, masked));
    }
    fn raise(&mut self, vector: u32) {
        assert!(vector < VECTORS);
        self.raised.push(vector);
    }
    fn is_pending(&self, vector: u32) -> bool {
        self.raised.contains(&vector)
    }
    fn map(&mut self, map: &DmaMap, file: Option<Passed>) -> Result<(), Errno> {
        let extent = Extent::new(map.address, map.size, Place::Mapped)?;
        if self.ledger.overlaps(&extent) {
            return Err(Errno::EXIST);
        }
        self.files += usize::from(file.is_some());
        self.ledger.insert(extent);
        Ok(())
    }
    fn unmap(&mut self, first: u64, last: u64) -> Result<(), Errno> {
        self.ledger.remove(first, last).map(drop)
    }
    fn reset(&mut self) {
        self.resets += 1;
    }
}

fn descriptors(count: usize) -> Vec<OwnedFd> {
    (0..count)
        .map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap())
        .collect()
}

/// A function on the bench.
struct Rig {
    function: Function,
    bench: Bench,
}

/// The reply and the number of descriptors that came with it.
type Answer = (Result<Message, Option<u32>>, usize);

impl Rig {
    fn bare() -> Rig {
        Rig {
            function: Function::default(),
            bench: Bench::default(),
        }
    }

    /// A function whose client has completed the version exchange.
    fn new() -> Rig {
        let mut rig = Rig::bare();
        rig.ask(&Request::Version(qemu()), vec![]).0.unwrap();
        rig
    }

    fn raw(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> (Vec<Message>, usize, Result<(), Disconnect>) {
        let limits = Limits {
            message: 1 << 22,
            fds: 64,
        };
        let mut decoder = Decoder::of_sorted(limits);
        decoder.push(bytes, fds.into_iter().map(Passed::new));
        let mut out = Outgoing::default();
        let mut end = Ok(());
        for message in decoder {
            end = self.function.message(message.unwrap(), &mut self.bench, &mut out);
        }
        let mut decoder = Decoder::new(limits);
        decoder.push(&out.bytes, []);
        (decoder.map(Result::unwrap).collect(), out.fds.len(), end)
    }

    /// Sends one command and returns its one reply, or the errno.
    fn ask(&mut self, request: &Request<'_>, fds: Vec<OwnedFd>) -> Answer {
        let mut bytes = Vec::new();
        request.emit(77, false, &mut bytes);
        let (mut replies, fds, _) = self.raw(&bytes, fds);
        assert_eq!(replies.len(), 1);
        let reply = replies.remove(0);
        assert_eq!(
            (reply.header.id, reply.header.command),
            (77, request.command() as u16)
        );
        let Kind::Reply { error } = reply.header.kind else {
            panic!("not a reply");
        };
        (if error.is_some() { Err(error) } else { Ok(reply) }, fds)
    }

    fn errno(&mut self, request: &Request<'_>, fds: Vec<OwnedFd>) -> Option<Errno> {
        let (answer, fds) = self.ask(request, fds);
        let error = answer.err()?;
        assert_eq!(fds, 0, "errors bring nothing");
        Some(Errno::from_raw_os_error(error.unwrap() as i32))
    }

    fn read(&mut self, region: u32, offset: u64, count: u32) -> Result<Vec<u8>, Errno> {
        let access = RegionAccess {
            offset,
            region,
            count,
        };
        match self.ask(&Request::RegionRead(access), vec![]).0 {
            Err(error) => Err(Errno::from_raw_os_error(error.unwrap() as i32)),
            Ok(message) => match message.reply().unwrap() {
                Reply::RegionRead { data, .. } => Ok(data.to_vec()),
                other => panic!("{other:?}"),
            },
        }
    }

    fn write(&mut self, region: u32, offset: u64, data: &[u8]) -> Option<Errno> {
        self.errno(&Request::RegionWrite { offset, region, data }, vec![])
    }
}

fn qemu() -> Version {
    Version {
        major: 0,
        minor: 0,
        capabilities: Capabilities {
            max_msg_fds: Some(16),
            max_data_xfer_size: Some(1 << 20),
            max_dma_maps: Some(65535),
            pgsizes: Some(4096),
            write_multiple: Some(true),
            urnic: None,
        },
    }
}

fn map(address: u64, size: u64) -> Request<'static> {
    Request::DmaMap(DmaMap {
        flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
        offset: 0,
        address,
        size,
    })
}

fn unmap(address: u64, size: u64) -> Request<'static> {
    Request::DmaUnmap(DmaUnmap {
        flags: DmaUnmapFlags::empty(),
        address,
        size,
    })
}

fn set<'a>(start: u32, count: u32, action: IrqAction, data: IrqData<'a>) -> Request<'a> {
    Request::SetIrqs(SetIrqs {
        index: irq_index::MSIX,
        start,
        count,
        action,
        data,
    })
}

#[test]
fn nothing_precedes_the_version() {
    for first in [
        Request::DeviceReset,
        map(0, 4096),
        Request::DeviceInfo { argsz: 16 },
    ] {
        let mut rig = Rig::bare();
        let mut bytes = Vec::new();
        first.emit(1, false, &mut bytes);
        let (replies, _, end) = rig.raw(&bytes, vec![]);
        assert_eq!(end, Err(Disconnect));
        assert!(matches!(replies[0].header.kind, Kind::Reply { error: Some(_) }));
        assert!(!rig.bench.started);
    }
    let mut wrong = qemu();
    wrong.major = 1;
    assert_eq!(
        Rig::bare().errno(&Request::Version(wrong), vec![]),
        Some(Errno::PROTONOSUPPORT)
    );
    let mut nothing = qemu();
    nothing.capabilities.max_data_xfer_size = Some(0);
    assert_eq!(
        Rig::bare().errno(&Request::Version(nothing), vec![]),
        Some(Errno::INVAL)
    );
}

#[test]
fn a_version_reply_has_only_requested_capabilities() {
    let mut rig = Rig::bare();
    let mut question = Vec::new();
    Request::Version(qemu()).emit(1, false, &mut question);
    let (replies, ..) = rig.raw(&question, vec![]);
    // QEMU has no more room for the reply than its request took.
    assert!(replies[0].header.size as usize <= question.len());
    let Ok(Reply::Version(answer)) = replies[0].reply() else {
        panic!("a version");
    };
    assert_eq!((answer.major, answer.minor), (0, 0));
    assert_eq!(answer.capabilities.max_msg_fds, Some(MAX_FDS as u64));
    assert_eq!(answer.capabilities.urnic, None);
    assert_eq!(
        rig.errno(&Request::Version(qemu()), vec![]),
        Some(Errno::INVAL),
        "only once"
    );

    let mut bare = Rig::bare();
    let (answer, _) = bare.ask(&Request::Version(Version::default()), vec![]);
    let Ok(Reply::Version(answer)) = answer.as_ref().unwrap().reply() else {
        panic!("a version");
    };
    assert_eq!(answer.capabilities, Capabilities::default());

    let mut ours = qemu();
    (ours.minor, ours.capabilities.urnic) = (
        9,
        Some(Urnic {
            identity: true,
            memory: None,
        }),
    );
    let (answer, _) = Rig::bare().ask(&Request::Version(ours), vec![]);
    let Ok(Reply::Version(answer)) = answer.as_ref().unwrap().reply() else {
        panic!("a version");
    };
    assert_eq!(answer.minor, MINOR);
    assert_eq!(answer.capabilities.urnic.unwrap().memory, Some(Memory::Messages));
}

/// The messages that QEMU sends from its start to a driver's first interrupt, in order.
#[test]
fn messages_of_qemu_are_parsed() {
    let mut rig = Rig::new();
    assert!(rig.ask(&Request::DeviceInfo { argsz: 16 }, vec![]).0.is_ok());
    // Guest memory with a file; ROM and the device's own BAR without.
    assert_eq!(rig.errno(&map(0, 0xa_0000), descriptors(1)), None);
    assert_eq!(rig.errno(&map(0x10_0000, 0x3ff0_0000), descriptors(1)), None);
    assert_eq!(rig.errno(&map(0xfffc_0000, 0x4_0000), vec![]), None);
    assert_eq!(rig.errno(&map(0xfe00_0000, PAGES_LEN), vec![]), None);
    assert_eq!(rig.bench.files, 2);
    for index in 0..region_index::COUNT {
        let mut argsz = RegionInfo::LEN;
        // QEMU repeats the request if the reply is longer.
        let (info, fds) = loop {
            let (answer, fds) = rig.ask(&Request::RegionInfo { argsz, index }, vec![]);
            let Ok(Reply::RegionInfo(info)) = answer.as_ref().unwrap().reply() else {
                panic!("a region");
            };
            if info.argsz <= argsz {
                break (info, fds);
            }
            argsz = info.argsz;
        };
        let expected = [4096, 0, PAGES_LEN, 0, 4096, 0, 0, 4096, 0][index as usize];
        assert_eq!(info.size, expected, "region {index}");
        assert_eq!(fds, usize::from(index == 2));
        let all = SparseArea {
            offset: 0,
            size: PAGES_LEN,
        };
        assert_eq!(info.sparse, (index == 2).then(|| vec![all]));
    }
    assert_eq!(
        rig.errno(&Request::RegionInfo { argsz: 32, index: 9 }, vec![]),
        Some(Errno::INVAL)
    );
    let config = rig.read(region_index::CONFIG, 0, 4096).unwrap();
    assert_eq!(config[..4], [0xfe, 0xff, 0x4e, 0x52]);
    for index in 0..irq_index::COUNT {
        let (answer, _) = rig.ask(&Request::IrqInfo { argsz: 16, index }, vec![]);
        let Ok(Reply::IrqInfo(info)) = answer.as_ref().unwrap().reply() else {
            panic!("interrupts");
        };
        assert_eq!(info.count, if index == irq_index::MSIX { VECTORS } else { 0 });
    }
    // The guest's firmware: sizes BARs, places them, enables memory.
    for bar in 0..6 {
        assert_eq!(rig.write(region_index::CONFIG, 0x10 + 4 * bar, &[0xff; 4]), None);
        let size = rig.read(region_index::CONFIG, 0x10 + 4 * bar, 4).unwrap();
        let size = (!u32::from_le_bytes(size.try_into().unwrap())).wrapping_add(1);
        assert_eq!(u64::from(size), [4096, 0, PAGES_LEN, 0, 4096, 0][bar as usize]);
    }
    assert_eq!(rig.write(region_index::CONFIG, 4, &[6, 0]), None);
    // Under an IOMMU QEMU unmaps ranges that were never lent, one of them to the end of the
    // addresses; then it sends one message per page.
    assert_eq!(rig.errno(&unmap(0, 1 << 63), vec![]), None);
    assert_eq!(rig.errno(&unmap(1 << 63, 1 << 63), vec![]), None);
    assert_eq!(rig.bench.ledger.len(), 0);
    for page in 0..512u64 {
        assert_eq!(
            rig.errno(&map(0xffff_0000_0000 + page * 4096, 4096), descriptors(1)),
            None
        );
    }
    assert_eq!(rig.errno(&unmap(0xffff_0000_0000, 512 * 4096), vec![]), None);
    assert_eq!(rig.bench.ledger.len(), 0);
    // Vectors, one at a time; a count of 1 without a descriptor means none.
    let eventfd = IrqData::Eventfd;
    assert_eq!(rig.errno(&set(0, 1, IrqAction::Trigger, eventfd), vec![]), None);
    for vector in 0..VECTORS {
        assert_eq!(
            rig.errno(&set(vector, 1, IrqAction::Trigger, eventfd), descriptors(1)),
            None
        );
    }
    assert_eq!(rig.errno(&set(3, 1, IrqAction::Trigger, eventfd), vec![]), None);
    let expected: BTreeMap<u32, bool> = (0..VECTORS).map(|vector| (vector, vector != 3)).collect();
    assert_eq!(rig.bench.assigned, expected);
    assert_eq!(
        rig.errno(&set(0, 0, IrqAction::Trigger, IrqData::None), vec![]),
        None
    );
    assert!(rig.bench.assigned.values().all(|assigned| !assigned));
    // Posted writes have no reply, and neither do several writes in one message.
    let mut bytes = Vec::new();
    let base = u64::from(CMD_BASE);
    Request::RegionWrite {
        offset: base,
        region: 0,
        data: &[1, 2, 3, 4, 5, 6, 7, 8],
    }
    .emit(1, true, &mut bytes);
    let multi = [
        SmallWrite::new(0, CONTROL.into(), &[1, 0, 0, 0]).unwrap(),
        SmallWrite::new(2, 4096 + 8, &[9; 8]).unwrap(),
        SmallWrite::new(0, KICK.into(), &[1, 0, 0, 0]).unwrap(),
    ];
    Request::RegionWriteMulti(multi.to_vec()).emit(2, true, &mut bytes);
    let (replies, fds, end) = rig.raw(&bytes, vec![]);
    assert_eq!((replies.len(), fds, end), (0, 0, Ok(())));
    assert_eq!(rig.bench.registers[&CMD_BASE], 0x0403_0201);
    assert_eq!(rig.bench.registers[&(CMD_BASE + 4)], 0x0807_0605);
    assert_eq!(rig.bench.registers[&CONTROL], 1);
    assert_eq!(rig.bench.rung, [(4104, 0x0909_0909_0909_0909)]);
    assert_eq!(rig.errno(&Request::DeviceReset, vec![]), None);
    assert_eq!(rig.bench.resets, 1);
    assert_eq!(
        rig.read(region_index::CONFIG, 4, 2),
        Ok(vec![0, 0]),
        "a reset function decodes nothing"
    );
}

#[test]
fn interrupts_are_set_in_all_forms() {
    let mut rig = Rig::new();
    let trigger = IrqAction::Trigger;
    assert_eq!(
        rig.errno(&set(2, 3, trigger, IrqData::Eventfd), descriptors(3)),
        None
    );
    assert_eq!(rig.bench.assigned.keys().copied().collect::<Vec<_>>(), [2, 3, 4]);
    assert_eq!(
        rig.errno(&set(1, 4, trigger, IrqData::Bool(&[1, 0, 0, 7])), vec![]),
        None
    );
    assert_eq!(rig.errno(&set(8, 1, trigger, IrqData::None), vec![]), None);
    assert_eq!(rig.bench.raised, [1, 4, 8]);
    assert_eq!(rig.read(4, PBA_OFFSET.into(), 2), Ok(vec![0b1_0010, 1]));
    assert_eq!(
        rig.errno(&set(0, 2, IrqAction::Mask, IrqData::None), vec![]),
        None
    );
    assert_eq!(
        rig.errno(&set(0, 2, IrqAction::Unmask, IrqData::Bool(&[0, 1])), vec![]),
        None
    );
    assert_eq!(rig.bench.masked, [(0, true), (1, true), (1, false)]);
    let before = rig.bench.assigned.clone();
    let pipe = || vec![rustix::pipe::pipe().unwrap().0];
    for (request, fds) in [
        (set(0, 3, trigger, IrqData::Eventfd), descriptors(2)),
        (set(0, 1, trigger, IrqData::Eventfd), descriptors(2)),
        (set(0, 1, trigger, IrqData::Eventfd), pipe()),
        (set(0, 1, trigger, IrqData::None), descriptors(1)),
        (set(VECTORS, 1, trigger, IrqData::None), vec![]),
        (set(u32::MAX, 2, trigger, IrqData::None), vec![]),
        (set(1, u32::MAX, trigger, IrqData::Eventfd), vec![]),
    ] {
        assert_eq!(rig.errno(&request, fds), Some(Errno::INVAL), "{request:?}");
    }
    let mask_by_eventfd = set(0, 1, IrqAction::Mask, IrqData::Eventfd);
    assert_eq!(rig.errno(&mask_by_eventfd, descriptors(1)), Some(Errno::NOTSUP));
    assert_eq!(rig.bench.assigned, before);
}

#[test]
fn regions_end_where_they_end() {
    let mut rig = Rig::new();
    rig.bench.registers.insert(4, 0x4433_2211);
    assert_eq!(rig.read(0, 5, 2), Ok(vec![0x22, 0x33]), "any part of a register");
    assert_eq!(rig.read(0, 4090, 6).map(|data| data.len()), Ok(6));
    for (region, offset, count) in [
        (0, 4090, 7),
        (0, u64::MAX, 1),
        (1, 0, 1),
        (2, PAGES_LEN, 1),
        (6, 0, 1),
        (7, 4096, 1),
        (8, 0, 1),
        (9, 0, 1),
        (u32::MAX, 0, 0),
    ] {
        assert_eq!(
            rig.read(region, offset, count),
            Err(Errno::INVAL),
            "{region} {offset} {count}"
        );
        let data = vec![0; count as usize];
        assert_eq!(rig.write(region, offset, &data), Some(Errno::INVAL));
    }
    // Registers are written as words, doorbells as double words.
    for (region, offset, len) in [(0, 2, 4), (0, 0, 3), (2, 4, 8), (2, 0, 4)] {
        assert_eq!(
            rig.write(region, offset, &[0; 16][..len]),
            Some(Errno::INVAL),
            "{region} {offset} {len}"
        );
    }
    assert_eq!(rig.read(2, 0, 8), Ok(vec![0xdb; 8]));
    assert_eq!(rig.write(4, 0, &[5; 16]), None);
    assert_eq!(rig.read(4, 0, 17), Ok([&[5; 16][..], &[0]].concat()));
    // Pending bits are read-only.
    assert_eq!(rig.write(4, u64::from(PBA_OFFSET) - 1, &[0xff; 4]), None);
    assert_eq!(rig.read(4, u64::from(PBA_OFFSET) - 1, 4), Ok(vec![0xff, 0, 0, 0]));
    let mut small = qemu();
    small.capabilities.max_data_xfer_size = Some(8);
    let mut rig = Rig::bare();
    rig.ask(&Request::Version(small), vec![]).0.unwrap();
    assert_eq!(
        rig.read(0, 0, 9),
        Err(Errno::TOOBIG),
        "more than the client takes"
    );
}

#[test]
fn memory_is_mapped_once_and_unmapped_whole() {
    let mut rig = Rig::new();
    assert_eq!(rig.errno(&map(0x1000, 0x3000), vec![]), None);
    for (address, size) in [(0, 0x1001), (0x3fff, 1), (0x2000, 0x1000), (0, 0x10000)] {
        assert_eq!(
            rig.errno(&map(address, size), vec![]),
            Some(Errno::EXIST),
            "{address:#x}"
        );
    }
    for (address, size) in [
        (0x2000, 0x1000),
        (0, 0x2000),
        (0x3000, 0x8000),
        (0, 0),
        (u64::MAX, 2),
    ] {
        assert_eq!(
            rig.errno(&unmap(address, size), vec![]),
            Some(Errno::INVAL),
            "{address:#x}"
        );
    }
    assert_eq!(rig.errno(&map(u64::MAX, 1), vec![]), None);
    assert_eq!(rig.errno(&map(u64::MAX - 1, 2), vec![]), Some(Errno::EXIST));
    assert_eq!(
        rig.errno(&map(0x8000, u64::MAX), vec![]),
        Some(Errno::INVAL),
        "wraps"
    );
    assert_eq!(rig.errno(&map(0x8000, 0), vec![]), Some(Errno::INVAL));
    assert_eq!(rig.errno(&map(0x8000, 1), descriptors(2)), Some(Errno::INVAL));
    let all = |flags, address, size| Request::DmaUnmap(DmaUnmap { flags, address, size });
    assert_eq!(
        rig.errno(&all(DmaUnmapFlags::ALL, 0, 4096), vec![]),
        Some(Errno::INVAL)
    );
    assert_eq!(
        rig.errno(&all(DmaUnmapFlags::DIRTY_BITMAP, 0x1000, 0x3000), vec![]),
        Some(Errno::NOTSUP)
    );
    assert_eq!(rig.bench.ledger.len(), 2);
    assert_eq!(rig.errno(&all(DmaUnmapFlags::ALL, 0, 0), vec![]), None);
    assert_eq!(rig.bench.ledger.len(), 0);
}

#[test]
fn unsupported_requests_leave_the_connection_open() {
    let mut rig = Rig::new();
    assert_eq!(
        rig.errno(&Request::RegionIoFds { argsz: 16, index: 0 }, vec![]),
        Some(Errno::NOTSUP)
    );
    assert_eq!(
        rig.errno(&Request::DmaRead(DmaAccess { address: 0, count: 1 }), vec![]),
        Some(Errno::INVAL)
    );
    assert_eq!(
        rig.errno(&Request::DeviceReset, descriptors(1)),
        Some(Errno::INVAL),
        "descriptors for nothing"
    );
    for (command, errno) in [
        (16u16, Errno::NOTSUP),
        (14, Errno::NOTSUP),
        (0, Errno::NOSYS),
        (999, Errno::NOSYS),
    ] {
        let mut bytes = Vec::new();
        Request::DeviceReset.emit(5, false, &mut bytes);
        bytes[2..4].copy_from_slice(&command.to_ne_bytes());
        let (replies, _, end) = rig.raw(&bytes, vec![]);
        let error = Some(errno.raw_os_error() as u32);
        assert_eq!(replies[0].header.kind, Kind::Reply { error });
        assert_eq!((replies[0].header.command, end), (command, Ok(())));
    }
    assert_eq!(rig.bench.resets, 0);
}

proptest! {
    /// Any message gets exactly one reply if it requests one, and none otherwise.
    #[test]
    fn any_message_has_its_one_answer(
        messages in proptest::collection::vec(
            (0..20u16, any::<bool>(), proptest::collection::vec(any::<u8>(), 0..80), 0..3usize, any::<u8>()),
            1..40,
        ),
    ) {
        let mut rig = Rig::new();
        for (command, no_reply, mut payload, fds, small) in messages {
            // Small numbers are more likely to be valid.
            if small < 200 {
                payload.iter_mut().skip(1).step_by(2).for_each(|byte| *byte = 0);
                payload.iter_mut().skip(2).step_by(4).for_each(|byte| *byte = 0);
            }
            let mut bytes = Vec::new();
            Request::DeviceReset.emit(1, no_reply, &mut bytes);
            bytes.extend(payload);
            let size = bytes.len() as u32;
            bytes[2..4].copy_from_slice(&command.to_ne_bytes());
            bytes[4..8].copy_from_slice(&size.to_ne_bytes());
            let (replies, fds, end) = rig.raw(&bytes, descriptors(fds));
            prop_assert_eq!(replies.len(), usize::from(!no_reply));
            prop_assert!(replies.iter().all(|reply| reply.is_reply() && reply.header.command == command));
            prop_assert!(fds <= 1);
            prop_assert_eq!(end, Ok(()));
        }
    }
}
