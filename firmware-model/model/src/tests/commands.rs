//! Commands, registers, isolation.

use crate::memory::{Accessor, MemoryAccess};
use crate::testing::mock::{Driver, End, Pair, assert_cqe, config, wait_for, zeroed};
use crate::{Counter, Limits, ModelConfig};
use urnic_device::command::*;
use urnic_device::doorbell::{Doorbell, Kind};
use urnic_device::event::EventKind;
use urnic_device::registers::*;
use urnic_device::stream::{Address, ip_of};
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use zerocopy::{FromBytes, IntoBytes};

type Status = urnic_device::command::Status;

#[test]
fn limits_are_the_advertised_ones() {
    let driver = Driver::start_with(ModelConfig {
        limits: Limits {
            qps: 2,
            cqs: 3,
            pds: 2,
            ..Limits::default()
        },
        ..config()
    });
    let mut command = Command::new(Opcode::QueryDevice, &Nothing {});
    command.output = driver.arena.alloc(size_of::<DeviceAttributes>()).into();
    command.output_len = (size_of::<DeviceAttributes>() as u32 - 1).into();
    assert_eq!(driver.execute(command).unwrap_err(), Status::InvalidArgument);
    command.output_len = (size_of::<DeviceAttributes>() as u32).into();
    driver.execute(command).unwrap();
    let bytes = driver
        .arena
        .read(command.output.get(), size_of::<DeviceAttributes>());
    let attributes = DeviceAttributes::read_from_bytes(&bytes).unwrap();
    assert_eq!(
        (
            attributes.max_qp.get(),
            attributes.max_cq.get(),
            attributes.max_pd.get()
        ),
        (2, 3, 2)
    );
    assert_eq!(attributes.max_sge_rd.get(), attributes.max_sge.get());
    assert_eq!((attributes.max_ird.get(), attributes.max_ord.get()), (128, 128));
    let pd = driver.pd();
    let cq = driver.cq(3);
    let qps: Vec<_> = (0..2).map(|_| driver.qp(pd, &cq, &cq)).collect();
    let third = driver.try_qp(&driver.qp_arguments(pd, &cq, &cq));
    assert_eq!(third.err(), Some(Status::NoResources));
    let arguments = ModifyQp {
        qp: qps[0].id.into(),
        mask: modify::IRD.into(),
        ird: 129.into(),
        ..zeroed()
    };
    let refused = driver.command(Opcode::ModifyQp, &arguments).unwrap_err();
    assert_eq!(refused, Status::InvalidArgument);
    driver.on(Opcode::DestroyQp, qps[0].id).unwrap();
    driver.qp(pd, &cq, &cq);
}

#[test]
fn the_address_table_is_the_configured_one() {
    let driver = Driver::start();
    let mut command = Command::new(Opcode::QueryAddresses, &Nothing {});
    command.output = driver.arena.alloc(64).into();
    command.output_len = 64.into();
    let count: Count = driver.execute(command).unwrap().result();
    assert_eq!(count.count.get(), 1);
    let bytes = driver.arena.read(command.output.get(), size_of::<Address>());
    let address = Address::read_from_bytes(&bytes).unwrap();
    assert_eq!(ip_of(&address.ip).to_string(), "127.0.0.1");
    assert_eq!(address.prefix_len.get(), 8);
}

/// A page of plain memory loses doorbells when queues share a slot: the device polls all queues of
/// the slot.
#[test]
fn a_rung_slot_is_polled_for_all_its_queues() {
    let driver = Driver::start_with(ModelConfig {
        doorbell_memory: true,
        ..config()
    });
    let pd = driver.pd();
    let mut cq = driver.cq(10);
    let mut slots = std::collections::HashMap::<u32, Vec<_>>::new();
    for _ in 0..300 {
        let arguments = driver.qp_arguments(pd, &cq, &cq);
        let handle: QueueHandle = driver.command(Opcode::CreateQp, &arguments).unwrap().result();
        slots
            .entry(handle.doorbell.get())
            .or_default()
            .push((handle.id.get(), arguments.record.get()));
    }
    let (slot, shared) = slots.iter().find(|(_, qps)| qps.len() > 1).unwrap();
    for (qid, record) in shared {
        let arguments = ModifyQp {
            qp: (*qid).into(),
            mask: modify::STATE.into(),
            state: (QpState::Err as u32).into(),
            ..zeroed()
        };
        driver.command(Opcode::ModifyQp, &arguments).unwrap();
        // One malformed entry for each queue, published without a doorbell.
        driver.arena.write(*record, 1u32.as_bytes());
    }
    assert!(cq.poll().is_none());
    let last = Doorbell {
        kind: Kind::Send,
        queue: shared[0].0,
        index: 1,
    };
    let pages = driver.device.doorbell_pages().unwrap();
    pages.store(driver.uar, *slot, last.encode());
    assert!(driver.device.scan_doorbells());
    for _ in shared {
        let cqe = cq.poll().unwrap();
        assert_ne!(cqe.status, WcStatus::Success as u8);
    }
}

#[test]
fn a_reset_frees_everything() {
    let (driver, far) = (Driver::start(), Driver::start());
    let mut pair = Pair::connect(&driver, &far);
    let (lid, port) = driver.listen("127.0.0.1:0".parse().unwrap(), 1).unwrap();
    assert!(lid > 0);
    driver.device.bar0_write(CONTROL, Control::RESET.bits());
    assert_eq!(driver.device.bar0_read(STATUS), 0);
    assert_eq!(driver.device.bar0_read(CONTROL), 0);
    assert_eq!(driver.device.bar0_read(CMD_VECTOR), NO_VECTOR);
    // The peer's stream ends, the port is free, and old doorbells have no effect.
    far.await_event(EventKind::PeerClosed, pair.responder.qp.id);
    assert!(
        far.connect(std::net::SocketAddr::new([127, 0, 0, 1].into(), port))
            .is_ok_and(|sid| { far.await_event(EventKind::StreamConnected, sid).code.get() != 0 })
    );
    pair.initiator.qp.post_send(&driver, 1, &[]);
    assert!(pair.initiator.send_cq.poll().is_none());
    wait_for("descriptors of epoll and its wake-up alone", || {
        (driver.device.core().descriptor_numbers().len() == 2).then_some(())
    });
}

/// SEC-07, VRB-S-01: the limit event comes once per arming.
#[test]
fn sec_07_a_shared_receive_queue_reports_its_low_limit() {
    let (near, far) = (Driver::start(), Driver::start());
    let mut initiator = End::new(&near);
    let pd = far.pd();
    let mut recv_cq = far.cq(8);
    let send_cq = far.cq(8);
    let region = far.register(pd, 4096, Access::LOCAL_WRITE).unwrap();
    let ring = far.arena.alloc(64 << 3);
    let record = far.arena.alloc(128);
    let arguments = CreateSrq {
        ring: ring.into(),
        record: record.into(),
        pd: pd.into(),
        log_size: 3.into(),
        log_stride: 6.into(),
        uar: far.uar.into(),
    };
    let srq: QueueHandle = far.command(Opcode::CreateSrq, &arguments).unwrap().result();
    let arguments = CreateQp {
        srq: srq.id,
        ..far.qp_arguments(pd, &send_cq, &recv_cq)
    };
    let qp = far.try_qp(&arguments).unwrap();
    far.ready(&qp);
    let post = |index: u32| {
        let at = ring + u64::from(index % 8) * 64;
        let header = urnic_device::wqe::RecvHeader::new(index.into(), 1);
        far.arena.write(at, header.as_bytes());
        far.arena.write(at + 16, region.sge(0, 8).as_bytes());
        // The receive half of the record: its second word.
        far.arena.write(record + 4, (index + 1).as_bytes());
    };
    (0..4).for_each(post);
    let limit = ModifySrq {
        srq: srq.id,
        limit: 3.into(),
    };
    far.command(Opcode::ModifySrq, &limit).unwrap();
    assert!(far.event().is_none());
    let (lid, port) = far.listen("127.0.0.1:0".parse().unwrap(), 1).unwrap();
    let sid = near
        .connect(std::net::SocketAddr::new([127, 0, 0, 1].into(), port))
        .unwrap();
    near.await_event(EventKind::StreamConnected, sid);
    let accepted = far.await_event(EventKind::StreamAccepted, lid);
    far.attach(accepted.data.get() as u32, &qp, false).unwrap();
    near.attach(sid, &initiator.qp, true).unwrap();
    for cookie in 0..3 {
        initiator
            .qp
            .post_send(&near, cookie, &[initiator.region.sge(0, 8)]);
        assert_cqe(&recv_cq.await_idly(), cookie, WcStatus::Success);
    }
    far.await_event(EventKind::SrqLimit, srq.id.get());
    assert!(
        std::iter::from_fn(|| far.event()).all(|e| e.kind != EventKind::SrqLimit as u8),
        "once"
    );
    wait_for("the counters", || {
        (far.counter(Counter::RxMessages) == 3).then_some(())
    });
}

fn with_page_list(driver: &Driver, arguments: &CreateMr, pages: &[u64]) -> Result<u32, Status> {
    let mut command = Command::new(Opcode::CreateMr, arguments);
    command.input = driver.arena.alloc(pages.len() * 8).into();
    command.input_len = (pages.len() as u32 * 8).into();
    driver.arena.write(command.input.get(), pages.as_bytes());
    let completion = driver.execute(command)?;
    Ok(completion.result::<Handle>().id.get())
}

#[test]
fn a_region_may_be_a_list_of_pages() {
    let driver = Driver::start();
    let pd = driver.pd();
    let first = driver.arena.alloc(3 * 4096);
    let scattered = [first + 8192, first, first + 4096];
    let arguments = |log_page: u32, skip: u64, len: u64| CreateMr {
        base: 0x10_0000.into(),
        len: len.into(),
        dma: skip.into(),
        pd: pd.into(),
        access: Access::REMOTE_READ.bits().into(),
        log_page: log_page.into(),
        ..zeroed()
    };
    let text = |stag: u32, at: u64, len: usize| {
        let table = &driver.device.core().memory;
        let need = crate::memory::Need::RemoteRead;
        let window = table
            .check(
                Accessor { pd, qid: 1 },
                MemoryAccess {
                    stag,
                    offset: at,
                    len: len as u64,
                    need,
                },
            )
            .unwrap();
        let pieces = window.extents(0, len as u64).count();
        let mut bytes = vec![0; len];
        window.copy_out(0, &mut bytes).unwrap();
        (String::from_utf8(bytes).unwrap(), pieces)
    };
    driver.arena.write(first + 8192 + 4090, b"across");
    driver.arena.write(first, b" pages");
    let stag = with_page_list(&driver, &arguments(12, 4000, 8000), &scattered).unwrap();
    let (seen, pieces) = text(stag, 0x10_0000 + 90, 12);
    assert_eq!((seen.as_str(), pieces), ("across pages", 2));
    // Neighbours become one extent.
    let neighbours = [first, first + 4096, first + 8192];
    let stag = with_page_list(&driver, &arguments(12, 0, 3 * 4096), &neighbours).unwrap();
    let (seen, pieces) = text(stag, 0x10_0000 + 8192 + 4090, 6);
    assert_eq!((seen.as_str(), pieces), ("across", 1));
    assert_eq!(text(stag, 0x10_0000, 3 * 4096).1, 1);
    let refused = [
        (arguments(12, 4096, 8), &scattered[..], Status::InvalidArgument),
        (
            arguments(12, 0, 3 * 4096 + 1),
            &scattered,
            Status::InvalidArgument,
        ),
        (arguments(12, 4095, 2), &scattered[..1], Status::InvalidArgument),
        (arguments(11, 0, 8), &scattered, Status::InvalidArgument),
        (arguments(41, 0, 8), &scattered, Status::InvalidArgument),
        (arguments(12, 0, 8), &[8][..], Status::DmaFault),
    ];
    for (arguments, pages, status) in refused {
        assert_eq!(
            with_page_list(&driver, &arguments, pages),
            Err(status),
            "{arguments:?}"
        );
    }
    let mut command = Command::new(Opcode::CreateMr, &arguments(12, 0, 8));
    command.input = u64::MAX.into();
    command.input_len = 8.into();
    assert_eq!(driver.execute(command).unwrap_err(), Status::DmaFault);
}

/// A driver may name one page any number of times: the device bounds the memory for page lists.
#[test]
fn page_lists_share_so_much_room() {
    let driver = Driver::start_with(ModelConfig {
        limits: Limits {
            mr_pages: 5,
            ..Limits::default()
        },
        ..config()
    });
    let page = driver.arena.alloc(4096);
    let arguments = CreateMr {
        len: (3 * 4096).into(),
        pd: driver.pd().into(),
        log_page: 12.into(),
        ..zeroed()
    };
    let register = || with_page_list(&driver, &arguments, &[page; 3]);
    for _ in 0..3 {
        let stag = register().unwrap();
        assert_eq!(register(), Err(Status::NoResources));
        driver.on(Opcode::DestroyMr, stag).unwrap();
    }
    let longer = CreateMr {
        len: (6 * 4096).into(),
        ..arguments
    };
    let refused = with_page_list(&driver, &longer, &[page; 6]);
    assert_eq!(refused, Err(Status::NoResources));
    register().unwrap();
    driver.device.reset();
    assert_eq!(driver.device.core().page_room.take(5).map(drop), Some(()));
}
