//! Memory regions and windows.

use std::rc::Rc;

use urnic_device::command::{
    Command, CreateMr, CreateMw, Handle, ModifyMr, Nothing, Opcode, Status, features, reregister,
};
use urnic_device::vocabulary::{Access, WcStatus};
use urnic_device::wqe::{self, BindOperands, Sge};
use urnic_testkit::request;
use zerocopy::IntoBytes;

use crate::check::checks;
use crate::connection::pair;
use crate::memory::Memory;
use crate::outcome::{Failure, Outcome, ensure};
use crate::queues::{ALL_RIGHTS, Region};
use crate::rig::{Rig, UNREACHABLE_ADDRESS};

checks! {
    a_region_of_no_bytes_needs_no_memory,
    rights_that_contradict_each_other_are_refused,
    a_region_of_pages_in_any_order,
    page_lists_that_are_too_short_are_refused,
    a_changed_region_keeps_its_stag,
    a_window_opens_a_part_of_a_region,
    an_on_demand_region_uses_the_mapping_at_access,
}

fn a_region_of_no_bytes_needs_no_memory(rig: &Rig) -> Outcome {
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let arguments = CreateMr {
        base: 0x1_0000.into(),
        dma: UNREACHABLE_ADDRESS.into(),
        pd: pd.into(),
        access: ALL_RIGHTS.bits().into(),
        ..CreateMr::default()
    };
    let stag = rig.create(Opcode::CreateMr, &arguments)?;
    rig.on(Opcode::DestroyMr, stag)?;
    rig.on(Opcode::FreePd, pd)
}

fn rights_that_contradict_each_other_are_refused(rig: &Rig) -> Outcome {
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let memory = rig.memory(4096)?;
    let good = CreateMr {
        len: 4096.into(),
        dma: memory.iova().into(),
        pd: pd.into(),
        ..CreateMr::default()
    };
    let refused = [
        CreateMr {
            access: (1 << 15).into(),
            ..good
        },
        CreateMr {
            access: Access::REMOTE_WRITE.bits().into(),
            ..good
        },
        CreateMr {
            access: Access::REMOTE_ATOMIC.bits().into(),
            ..good
        },
        CreateMr {
            log_page: 3.into(),
            ..good
        },
        CreateMr {
            len: u64::MAX.into(),
            ..good
        },
    ];
    for arguments in refused {
        rig.refuses(
            Command::new(Opcode::CreateMr, &arguments),
            Status::InvalidArgument,
        )?;
    }
    let stag = rig.create(Opcode::CreateMr, &good)?;
    rig.refuses_on(Opcode::FreePd, pd, Status::Busy)?;
    rig.on(Opcode::DestroyMr, stag)?;
    rig.refuses_on(Opcode::DestroyMr, stag, Status::InvalidHandle)?;
    rig.on(Opcode::FreePd, pd)
}

const PAGE: usize = 4096;
const PAGES: usize = 9;
/// Offset of the region in the first page.
const SKIP: usize = 100;

/// Pages in a mixed order, and the command that makes one region of them.
fn listed(rig: &Rig, pd: u32, entries: usize) -> Outcome<(Rc<Memory>, Vec<usize>, Command)> {
    let memory = rig.memory(2 * PAGES * PAGE)?;
    let order: Vec<usize> = (0..PAGES).map(|n| (n * 5 + 3) % PAGES * 2).collect();
    let list = rig.memory(PAGES * 8)?;
    for (n, page) in order.iter().enumerate() {
        let iova = memory.iova() + (page * PAGE) as u64;
        list.write(n * 8, &iova.to_le_bytes());
    }
    let arguments = CreateMr {
        base: 0x1_0000.into(),
        len: ((PAGES * PAGE - SKIP) as u64).into(),
        dma: (SKIP as u64).into(),
        pd: pd.into(),
        access: ALL_RIGHTS.bits().into(),
        log_page: 12.into(),
        ..CreateMr::default()
    };
    let mut command = Command::new(Opcode::CreateMr, &arguments);
    command.input = list.iova().into();
    command.input_len = (entries as u32 * 8).into();
    Ok((memory, order, command))
}

fn a_region_of_pages_in_any_order(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let (memory, order, command) = listed(rig, far.pd, PAGES)?;
    let stag = rig.run(command)?.result::<Handle>().id.get();
    let len = PAGES * PAGE - SKIP;
    let bytes: Vec<u8> = (0..len).map(|n| (n / 7 + n % 251) as u8).collect();
    near.region.memory.write(0, &bytes);
    let there = Sge {
        offset: 0x1_0000.into(),
        len: 0.into(),
        stag: stag.into(),
    };
    near.qp.remote(
        rig,
        wqe::Opcode::Write,
        1,
        &[near.region.sge(0, len as u32)],
        there,
    );
    near.qp.remote(
        rig,
        wqe::Opcode::Read,
        2,
        &[near.region.sge(100_000, len as u32)],
        there,
    );
    near.qp.send_cq.expect(rig, 1, WcStatus::Success)?;
    near.qp.send_cq.expect(rig, 2, WcStatus::Success)?;
    ensure!(
        near.region.memory.read(100_000, len) == bytes,
        "other bytes are read than were written"
    );
    for (n, place) in order.into_iter().enumerate() {
        let (skip, at) = if n == 0 { (SKIP, 0) } else { (0, n * PAGE - SKIP) };
        let page = memory.read(place * PAGE + skip, PAGE - skip);
        ensure!(
            page == bytes[at..at + PAGE - skip],
            "page {n} of the list has other bytes than belong there"
        );
        let between = memory.read((place + 1) * PAGE, PAGE);
        ensure!(
            between.iter().all(|byte| *byte == 0),
            "the device wrote into a page that is not in the list"
        );
    }
    Ok(())
}

fn page_lists_that_are_too_short_are_refused(rig: &Rig) -> Outcome {
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let (_memory, _, command) = listed(rig, pd, PAGES - 1)?;
    rig.refuses(command, Status::InvalidArgument)?;
    rig.on(Opcode::FreePd, pd)
}

fn a_changed_region_keeps_its_stag(rig: &Rig) -> Outcome {
    let (near, far) = pair(rig)?;
    let target = Region::new(rig, far.pd, 4096, ALL_RIGHTS)?;
    let arguments = ModifyMr {
        stag: target.stag.into(),
        what: reregister::ACCESS.into(),
        new: CreateMr {
            access: (Access::LOCAL_WRITE | Access::REMOTE_READ).bits().into(),
            ..CreateMr::default()
        },
    };
    rig.command(Opcode::ModifyMr, &arguments)?;
    let there = target.sge(0, 0);
    near.qp
        .remote(rig, wqe::Opcode::Read, 1, &[near.region.sge(0, 64)], there);
    near.qp.send_cq.expect(rig, 1, WcStatus::Success)?;
    // The device does not write memory that it may only read.
    near.region.memory.write(0, &[7; 64]);
    near.qp
        .remote(rig, wqe::Opcode::Write, 2, &[near.region.sge(0, 64)], there);
    far.qp.fails(rig)?;
    ensure!(
        target.memory.read(0, 64) == [0; 64],
        "the device wrote where only reading is allowed"
    );
    rig.refuses(
        Command::new(
            Opcode::ModifyMr,
            &ModifyMr {
                what: 8.into(),
                ..arguments
            },
        ),
        Status::InvalidArgument,
    )
}

fn a_window_opens_a_part_of_a_region(rig: &Rig) -> Outcome {
    if rig.attributes.features.get() & features::WINDOWS == 0 {
        return Err(Failure::NotHere("it has no memory windows".to_owned()));
    }
    let (near, far) = pair(rig)?;
    let region = Region::new(rig, far.pd, 8192, ALL_RIGHTS | Access::MW_BIND)?;
    let window = CreateMw {
        pd: far.pd.into(),
        kind: 2.into(),
    };
    let window = rig.create(Opcode::CreateMw, &window)?;
    crate::connection::works(rig, &near, &far)?;
    let bound = window & !0xff | 0x5a;
    let mut operands = BindOperands::default();
    operands.offset = (region.base + 4096).into();
    operands.len = 4096.into();
    operands.mr_stag = region.stag.into();
    operands.access = Access::REMOTE_WRITE.bits().into();
    operands.new_stag = bound.into();
    let mut header = request(wqe::Opcode::BindMw, 1);
    header.stag = window.into();
    far.qp.post(rig, header, operands.as_bytes(), 0);
    far.qp.send_cq.expect(rig, 1, WcStatus::Success)?;
    rig.refuses_on(Opcode::DestroyMr, region.stag, Status::Busy)?;
    near.region.memory.write(0, b"through the window");
    let there = Sge {
        stag: bound.into(),
        ..region.sge(4096, 0)
    };
    near.qp
        .remote(rig, wqe::Opcode::Write, 2, &[near.region.sge(0, 18)], there);
    near.qp.send_cq.expect(rig, 2, WcStatus::Success)?;
    rig.wait("the write to arrive", || {
        (region.memory.read(4096, 18) == b"through the window").then_some(())
    })?;
    // Again, after the owner has invalidated the window.
    let mut header = request(wqe::Opcode::LocalInv, 3);
    header.stag = bound.into();
    far.qp.post(rig, header, &[], 0);
    far.qp.send_cq.expect(rig, 3, WcStatus::Success)?;
    near.region.memory.write(0, &[9; 18]);
    near.qp
        .remote(rig, wqe::Opcode::Write, 4, &[near.region.sge(0, 18)], there);
    far.qp.fails(rig)?;
    ensure!(
        region.memory.read(4096, 18) == b"through the window",
        "a closed window was written through"
    );
    Ok(())
}

fn an_on_demand_region_uses_the_mapping_at_access(rig: &Rig) -> Outcome {
    // An address without memory.
    const ABSENT: u64 = 4096;
    let (near, far) = pair(rig)?;
    let access = ALL_RIGHTS | Access::ON_DEMAND;
    let arguments = CreateMr {
        base: 0x1_0000.into(),
        len: 4096.into(),
        dma: ABSENT.into(),
        pd: near.pd.into(),
        access: access.bits().into(),
        ..CreateMr::default()
    };
    if rig.attributes.features.get() & features::ON_DEMAND == 0 {
        return rig.refuses(
            Command::new(Opcode::CreateMr, &arguments),
            Status::InvalidArgument,
        );
    }
    let paged = CreateMr {
        log_page: 12.into(),
        ..arguments
    };
    rig.refuses(Command::new(Opcode::CreateMr, &paged), Status::InvalidArgument)?;
    let (from, to) = (
        Region::new(rig, near.pd, 4096, access)?,
        Region::new(rig, far.pd, 4096, access)?,
    );
    from.memory.write(7, b"on demand");
    far.qp.receive(rig, 1, &[to.sge(100, 64)]);
    near.qp.send(rig, 2, &[from.sge(7, 9)]);
    near.qp.send_cq.expect(rig, 2, WcStatus::Success)?;
    far.qp.recv_cq.expect(rig, 1, WcStatus::Success)?;
    ensure!(
        to.memory.read(100, 9) == b"on demand",
        "other bytes arrived than were sent"
    );
    let stag = rig.create(Opcode::CreateMr, &arguments)?;
    let absent = Sge {
        offset: 0x1_0000.into(),
        len: 9.into(),
        stag: stag.into(),
    };
    near.qp.send(rig, 3, &[absent]);
    near.qp.send_cq.expect(rig, 3, WcStatus::LocProtErr)?;
    rig.lives()
}
