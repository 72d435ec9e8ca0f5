//! Messages that one end emits are parsed by the other, however the stream is split; and any other
//! bytes from a peer do no harm.

use proptest::prelude::*;
use std::fs::File;
use std::os::fd::OwnedFd;
use urnic_vfio_user::*;

const LIMITS: Limits = Limits {
    message: 1 << 16,
    fds: 8,
};

fn descriptors(count: usize) -> Vec<OwnedFd> {
    let null = File::open("/dev/null").expect("there is one");
    (0..count)
        .map(|_| null.try_clone().expect("a descriptor is free").into())
        .collect()
}

fn capabilities() -> impl Strategy<Value = Capabilities> {
    let number = || proptest::option::of(any::<u64>());
    let memory = prop_oneof![Just(Memory::ProcessVm), Just(Memory::Messages)];
    let urnic = (any::<bool>(), proptest::option::of(memory))
        .prop_map(|(identity, memory)| Urnic { identity, memory });
    let first = (number(), number(), number(), number());
    let second = (proptest::option::of(any::<bool>()), proptest::option::of(urnic));
    (first, second).prop_map(|((fds, xfer, maps, pgsizes), (multi, urnic))| Capabilities {
        max_msg_fds: fds,
        max_data_xfer_size: xfer,
        max_dma_maps: maps,
        pgsizes,
        write_multiple: multi,
        urnic,
    })
}

fn version() -> impl Strategy<Value = Version> {
    (any::<u16>(), any::<u16>(), capabilities()).prop_map(|(major, minor, capabilities)| Version {
        major,
        minor,
        capabilities,
    })
}

fn access() -> impl Strategy<Value = RegionAccess> {
    any::<(u64, u32, u32)>().prop_map(|(offset, region, count)| RegionAccess {
        offset,
        region,
        count,
    })
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), 0..300)
}

/// A command as owned data.
#[derive(Debug, Clone)]
struct TestMessage {
    kind: usize,
    version: Version,
    numbers: (u64, u64, u64, u32, u32, u32),
    access: RegionAccess,
    data: Vec<u8>,
}

fn test_message() -> impl Strategy<Value = TestMessage> {
    (
        0..14usize,
        version(),
        any::<(u64, u64, u64, u32, u32, u32)>(),
        access(),
        bytes(),
    )
        .prop_map(|(kind, version, numbers, access, data)| TestMessage {
            kind,
            version,
            numbers,
            access,
            data,
        })
}

impl TestMessage {
    fn request(&self) -> Request<'_> {
        let (a, b, c, x, index, start) = self.numbers;
        let argsz = x.max(32);
        match self.kind {
            0 => Request::Version(self.version.clone()),
            1 => Request::DmaMap(DmaMap {
                flags: DmaMapFlags::from_bits_retain(x),
                offset: a,
                address: b,
                size: c,
            }),
            2 => Request::DmaUnmap(self.unmap()),
            3 => Request::DeviceInfo { argsz },
            4 => Request::RegionInfo { argsz, index },
            5 => Request::RegionIoFds { argsz, index },
            6 => Request::IrqInfo { argsz, index },
            7 => {
                let data = [IrqData::None, IrqData::Bool(&self.data), IrqData::Eventfd][a as usize % 3];
                let count = if let IrqData::Bool(bools) = data {
                    bools.len() as u32
                } else {
                    x
                };
                Request::SetIrqs(SetIrqs {
                    index,
                    start,
                    count,
                    action: [IrqAction::Mask, IrqAction::Unmask, IrqAction::Trigger][b as usize % 3],
                    data,
                })
            }
            8 => Request::RegionRead(self.access),
            9 => Request::RegionWrite {
                offset: a,
                region: index,
                data: &self.data,
            },
            10 => {
                let writes = self.data.chunks(7).map(|piece| SmallWrite::new(index, b, piece));
                Request::RegionWriteMulti(writes.collect::<Option<_>>().expect("7 bytes fit"))
            }
            11 => Request::DmaRead(DmaAccess { address: a, count: b }),
            12 => Request::DmaWrite {
                address: a,
                data: &self.data,
            },
            _ => Request::DeviceReset,
        }
    }

    fn unmap(&self) -> DmaUnmap {
        DmaUnmap {
            flags: DmaUnmapFlags::from_bits_retain(self.numbers.3),
            address: self.numbers.0,
            size: self.numbers.1,
        }
    }

    fn reply(&self) -> Reply<'_> {
        let (a, b, c, x, index, count) = self.numbers;
        match self.kind {
            0 => Reply::Version(self.version.clone()),
            1 => Reply::DmaMap,
            2 => Reply::DmaUnmap(self.unmap()),
            3 => Reply::DeviceInfo(DeviceInfo {
                flags: DeviceFlags::from_bits_retain(x),
                regions: index,
                irqs: count,
            }),
            4 => {
                let area = |piece: &[u8]| SparseArea {
                    offset: c,
                    size: piece.len() as u64,
                };
                let sparse = (a % 2 == 0).then(|| self.data.chunks(50).map(area).collect());
                let flags = RegionFlags::from_bits_retain(x) - RegionFlags::CAPS;
                Reply::RegionInfo(RegionInfo::new(index, flags, a, b, sparse))
            }
            5 | 6 => Reply::IrqInfo(IrqInfo {
                flags: IrqFlags::from_bits_retain(x),
                index,
                count,
            }),
            7 => Reply::SetIrqs,
            8 => Reply::RegionRead {
                offset: a,
                region: index,
                data: &self.data,
            },
            9 => Reply::RegionWrite(self.access),
            10 => Reply::RegionWriteMulti(a),
            11 => Reply::DmaRead {
                address: a,
                data: &self.data,
            },
            12 => Reply::DmaWrite,
            _ => Reply::DeviceReset,
        }
    }
}

proptest! {
    #[test]
    fn emitted_messages_are_parsed(
        all in proptest::collection::vec((test_message(), any::<u16>(), any::<bool>(), any::<bool>(), 0..=8usize), 1..8),
        cuts in proptest::collection::vec(1..200usize, 1..40),
    ) {
        let mut decoder = Decoder::new(LIMITS);
        let mut understood = Vec::new();
        let mut cuts = cuts.iter().cycle();
        for (test_message, id, is_reply, no_reply, fds) in &all {
            let mut message = Vec::new();
            match is_reply {
                false => test_message.request().emit(*id, *no_reply, &mut message),
                true => test_message.reply().emit(*id, &mut message),
            }
            // Descriptors come with the first bytes of their message.
            let mut fds = descriptors(*fds);
            let mut rest = &message[..];
            while !rest.is_empty() {
                let (piece, behind) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                decoder.push(piece, fds.drain(..));
                understood.extend(decoder.by_ref().map(Result::unwrap));
                rest = behind;
            }
        }
        prop_assert!(!decoder.is_in_message());
        prop_assert_eq!(understood.len(), all.len());
        for ((test_message, id, is_reply, no_reply, fds), message) in all.iter().zip(&understood) {
            prop_assert_eq!(message.header.id, *id);
            prop_assert_eq!(message.fds.len(), *fds);
            prop_assert_eq!(message.is_reply(), *is_reply);
            if *is_reply {
                prop_assert_eq!(message.reply().unwrap(), test_message.reply());
            } else {
                prop_assert_eq!(message.header.kind, Kind::Command { no_reply: *no_reply });
                prop_assert_eq!(message.request().unwrap(), test_message.request());
            }
        }
    }

    #[test]
    fn messages_in_one_read_keep_order_and_descriptors(
        all in proptest::collection::vec(test_message(), 1..6),
        fds in 0..=8usize,
    ) {
        let mut read = Vec::new();
        all.iter().for_each(|test_message| test_message.request().emit(7, false, &mut read));
        let mut decoder = Decoder::new(LIMITS);
        decoder.push(&read, descriptors(fds));
        let messages: Vec<Message> = decoder.map(Result::unwrap).collect();
        prop_assert_eq!(messages.len(), all.len());
        for (i, (test_message, message)) in all.iter().zip(&messages).enumerate() {
            prop_assert_eq!(message.request().unwrap(), test_message.request());
            prop_assert_eq!(message.fds.len(), if i + 1 == all.len() { fds } else { 0 });
        }
    }

    #[test]
    fn any_payload_is_understood_or_refused(command in 0..24u16, payload in bytes()) {
        if let Ok(request) = Request::parse(command, &payload) {
            let mut again = Vec::new();
            request.emit(1, false, &mut again);
            prop_assert_eq!(&Request::parse(command, &again[HEADER_LEN..]).unwrap(), &request);
        }
        if let Ok(reply) = Reply::parse(command, &payload) {
            let mut again = Vec::new();
            reply.emit(1, &mut again);
        }
    }

    #[test]
    fn any_stream_is_taken_apart_or_ends(
        reads in proptest::collection::vec((bytes(), 0..12usize), 0..20),
    ) {
        let mut decoder = Decoder::new(LIMITS);
        for (read, fds) in reads {
            decoder.push(&read, descriptors(fds));
            for message in decoder.by_ref().take(100) {
                let Ok(message) = message else { return Ok(()) };
                prop_assert!(message.payload.len() + HEADER_LEN <= LIMITS.message && message.fds.len() <= LIMITS.fds);
            }
            prop_assert!(decoder.missing() > 0);
        }
    }
}

fn reset(id: u16) -> Vec<u8> {
    let mut out = Vec::new();
    Request::DeviceReset.emit(id, false, &mut out);
    out
}

#[test]
fn bytes_are_as_the_specification_draws_them() {
    let mut out = Vec::new();
    Request::RegionWrite {
        offset: 0x30,
        region: region_index::CONFIG,
        data: &[1, 2, 3],
    }
    .emit(0x1234, true, &mut out);
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
    let fields = [0..2, 2..4, 4..8, 8..12, 12..16, 16..24, 24..28, 28..32].map(|range| number(&out[range]));
    assert_eq!(fields, [0x1234, 10, 35, 0x10, 0, 0x30, 7, 3]);
    assert_eq!(out[32..], [1, 2, 3]);

    let mut out = Vec::new();
    emit_error(9, Command::DmaMap as u16, 17, &mut out);
    let fields = [0..2, 2..4, 4..8, 8..12, 12..16].map(|range| number(&out[range]));
    assert_eq!(fields, [9, 2, 16, 0x21, 17]);
}

#[test]
fn the_first_messages_of_qemu_are_parsed() {
    let text = br#"{"capabilities": {"migration": {"max_bitmap_size": 268435456, "pgsize": 4096}, "pgsizes": 4096, "max_data_xfer_size": 1048576, "max_msg_fds": 16, "max_dma_maps": 65535, "write_multiple": true}}"#;
    let payload = [&[0, 0, 0, 0][..], text, b"\0"].concat();
    let Request::Version(version) = Request::parse(1, &payload).unwrap() else {
        panic!("not a version");
    };
    assert_eq!((version.major, version.minor), (0, 0));
    assert_eq!(version.capabilities.max_msg_fds, Some(16));
    assert_eq!(version.capabilities.write_multiple, Some(true));
    assert_eq!(version.capabilities.urnic, None);
}

#[test]
fn version_data_may_be_missing_but_not_wrong() {
    assert!(Request::parse(1, &[0; 4]).is_ok());
    assert!(Request::parse(1, b"\0\0\0\0{}\0").is_ok());
    let deep = [&b"\0\0\0\0"[..], &[b'['; 2000], b"\0"].concat();
    let long = [&b"\0\0\0\0{"[..], &[b' '; MAX_VERSION_DATA], b"}\0"].concat();
    for wrong in [
        &b"\0\0\0\0{}"[..],
        b"\0\0\0\0[1]\0",
        b"\0\0\0\0{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        b"\0\0\0\0\xff\0",
        &deep,
        &long,
    ] {
        assert_eq!(Request::parse(1, wrong), Err(Malformed::Json), "{wrong:?}");
    }
    assert_eq!(Request::parse(1, &[0; 3]), Err(Malformed::Short));
}

#[test]
fn interrupts_need_one_action_and_one_kind_of_data() {
    let payload = |flags: u32, count: u32| {
        [24u32, flags, 2, 0, count]
            .iter()
            .flat_map(|n| n.to_ne_bytes())
            .collect::<Vec<u8>>()
    };
    for flags in [0, 1, 32, 1 | 2 | 32, 1 | 8 | 16, 1 | 32 | 64] {
        assert_eq!(
            Request::parse(8, &payload(flags, 0)),
            Err(Malformed::Flags(flags))
        );
    }
    assert!(Request::parse(8, &payload(1 | 32, u32::MAX)).is_ok());
    assert_eq!(
        Request::parse(8, &payload(2 | 32, u32::MAX)),
        Err(Malformed::Short)
    );
}

#[test]
fn a_chain_of_capabilities_must_lead_forward() {
    let info = RegionInfo::new(2, RegionFlags::READ, 1 << 20, 0, Some(vec![]));
    let mut message = Vec::new();
    Reply::RegionInfo(info.clone()).emit(1, &mut message);
    let mut payload = message.split_off(HEADER_LEN);
    assert_eq!(Reply::parse(5, &payload), Ok(Reply::RegionInfo(info)));
    // Another kind of capability, which is its own successor.
    payload[32..34].copy_from_slice(&9u16.to_ne_bytes());
    payload[36..40].copy_from_slice(&32u32.to_ne_bytes());
    assert_eq!(Reply::parse(5, &payload), Err(Malformed::Capability));
    payload[36..40].copy_from_slice(&u32::MAX.to_ne_bytes());
    assert_eq!(Reply::parse(5, &payload), Err(Malformed::Short));
}

#[test]
fn a_region_that_is_too_short_reports_the_needed_size() {
    let area = SparseArea {
        offset: 0,
        size: 4096,
    };
    let info = RegionInfo::new(2, RegionFlags::MMAP, 8192, 0, Some(vec![area]));
    assert_eq!(info.argsz, 64);
    let cut = info.clone().within(RegionInfo::LEN);
    assert_eq!((cut.argsz, &cut.sparse), (64, &None));
    assert!(cut.flags.contains(RegionFlags::CAPS));
    let mut message = Vec::new();
    Reply::RegionInfo(cut.clone()).emit(1, &mut message);
    assert_eq!(message.len(), HEADER_LEN + 32);
    assert_eq!(
        Reply::parse(5, &message[HEADER_LEN..]),
        Ok(Reply::RegionInfo(cut))
    );
    assert_eq!(info.clone().within(64), info);
}

#[test]
fn a_stream_beyond_the_limits_ends() {
    let mut too_long = reset(1);
    too_long[4..8].copy_from_slice(&(LIMITS.message as u32 + 1).to_ne_bytes());
    let mut too_short = reset(1);
    too_short[4..8].copy_from_slice(&15u32.to_ne_bytes());
    let mut of_no_type = reset(1);
    of_no_type[8..12].copy_from_slice(&3u32.to_ne_bytes());
    for (bytes, error) in [
        (too_long, StreamError::TooLong(LIMITS.message as u32 + 1)),
        (too_short, StreamError::Header),
        (of_no_type, StreamError::Header),
    ] {
        let mut decoder = Decoder::new(LIMITS);
        decoder.push(&bytes, []);
        decoder.push(&reset(2), []);
        assert_eq!(decoder.next().unwrap().unwrap_err(), error);
        decoder.push(&reset(3), []);
        assert_eq!(decoder.next().unwrap().unwrap_err(), error);
    }
}

#[test]
fn descriptors_do_not_pile_up_after_an_unfinished_message() {
    let mut decoder = Decoder::new(LIMITS);
    for byte in &reset(1)[..LIMITS.fds] {
        decoder.push(&[*byte], descriptors(1));
        assert!(decoder.next().is_none());
    }
    decoder.push(&[0], descriptors(1));
    assert_eq!(decoder.next().unwrap().unwrap_err(), StreamError::TooManyFds);
}

#[test]
fn reading_only_the_missing_bytes_gives_one_message() {
    let stream = [reset(1), reset(2)].concat();
    let mut decoder = Decoder::new(LIMITS);
    let mut rest = &stream[..];
    let mut ids = Vec::new();
    while !rest.is_empty() {
        let (piece, behind) = rest.split_at(decoder.missing());
        decoder.push(piece, []);
        ids.extend(decoder.next().map(|message| message.unwrap().header.id));
        rest = behind;
    }
    assert_eq!(ids, [1, 2]);
}
