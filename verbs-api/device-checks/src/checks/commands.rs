//! The command queue.

use urnic_device::command::{
    Command, Count, CreateCq, CreateEq, CreateMr, CreateMw, DeviceAttributes, Handle, ModifyMr, ModifyQp,
    Nothing, Opcode, Status,
};
use urnic_device::counter::Counter;
use urnic_device::registers::{CMD_VECTOR, VECTORS};
use urnic_device::stream::{Attach, Close, MAX_STREAMING};

use crate::check::checks;
use crate::outcome::{Outcome, ensure};
use crate::rig::{LOG_COMMANDS, Rig, UNREACHABLE_ADDRESS};

checks! {
    completions_carry_tag_and_phase_for_many_laps,
    a_full_ring_goes_by_one_doorbell,
    completions_raise_their_vector,
    unknown_opcodes_are_refused,
    commands_on_missing_objects_are_refused,
    buffers_out_of_reach_fail_their_command,
    output_buffers_too_short_are_refused,
    counters_are_counted,
    garbage_is_refused,
}

fn completions_carry_tag_and_phase_for_many_laps(rig: &Rig) -> Outcome {
    for _ in 0..(5 << LOG_COMMANDS) + 3 {
        rig.lives()?;
    }
    Ok(())
}

fn a_full_ring_goes_by_one_doorbell(rig: &Rig) -> Outcome {
    for _ in 0..3 {
        let puts: Vec<u32> = (0..1u32 << LOG_COMMANDS)
            .map(|_| rig.put(Command::new(Opcode::AllocPd, &Nothing {})))
            .collect();
        rig.ring_commands();
        let mut domains = Vec::new();
        for at in puts {
            let completion = rig.completion(at)?;
            ensure!(
                completion.status.get() == Status::Ok as u16,
                "AllocPd ended with {}",
                completion.status
            );
            domains.push(completion.result::<Handle>().id.get());
        }
        domains.sort_unstable();
        domains.dedup();
        ensure!(
            domains.len() == 1 << LOG_COMMANDS,
            "two protection domains have one number: {domains:x?}"
        );
        for pd in domains {
            rig.on(Opcode::FreePd, pd)?;
        }
    }
    Ok(())
}

fn completions_raise_their_vector(rig: &Rig) -> Outcome {
    let vector = rig.bus.read32(VECTORS) - 1;
    rig.bus.write32(CMD_VECTOR, vector);
    rig.line.take(vector);
    rig.lives()?;
    rig.wait("the interrupt of a command's completion", || {
        rig.line.take(vector).then_some(())
    })
}

fn unknown_opcodes_are_refused(rig: &Rig) -> Outcome {
    for raw in (0..80).chain([0xff, 0x100, 0x7fff, 0xffff]) {
        if Opcode::from_raw(raw).is_none() {
            let mut command = Command::new(Opcode::AllocPd, &Nothing {});
            command.opcode = raw.into();
            rig.refuses(command, Status::UnknownOpcode)?;
        }
    }
    rig.lives()
}

fn commands_on_missing_objects_are_refused(rig: &Rig) -> Outcome {
    for id in [0x00ff_fff0, u32::MAX] {
        for opcode in [
            Opcode::FreeUar,
            Opcode::FreePd,
            Opcode::DestroyEq,
            Opcode::DestroyMr,
            Opcode::DestroyMw,
            Opcode::DestroyCq,
            Opcode::DestroySrq,
            Opcode::QueryQp,
            Opcode::QueryCounters,
            Opcode::DestroyQp,
            Opcode::StreamUnlisten,
            Opcode::StreamQuery,
        ] {
            rig.refuses_on(opcode, id, Status::InvalidHandle)?;
        }
        let qp = ModifyQp {
            qp: id.into(),
            ..ModifyQp::default()
        };
        rig.refuses(Command::new(Opcode::ModifyQp, &qp), Status::InvalidHandle)?;
        let mw = CreateMw {
            pd: id.into(),
            kind: 1.into(),
        };
        rig.refuses(Command::new(Opcode::CreateMw, &mw), Status::InvalidHandle)?;
        let mr = ModifyMr {
            stag: id.into(),
            ..ModifyMr::default()
        };
        rig.refuses(Command::new(Opcode::ModifyMr, &mr), Status::InvalidHandle)?;
        let close = Close {
            sid: id.into(),
            abort: 1.into(),
        };
        rig.refuses(Command::new(Opcode::StreamClose, &close), Status::InvalidHandle)?;
        let attach = Attach {
            sid: id.into(),
            qid: id.into(),
            first_msn: 1.into(),
            ..Attach::default()
        };
        rig.refuses(Command::new(Opcode::StreamAttach, &attach), Status::InvalidHandle)?;
        rig.refuses(
            Command::new(Opcode::LoopbackAttach, &attach),
            Status::InvalidHandle,
        )?;
    }
    rig.lives()
}

fn buffers_out_of_reach_fail_their_command(rig: &Rig) -> Outcome {
    for opcode in [Opcode::QueryDevice, Opcode::QueryAddresses, Opcode::QueryCounters] {
        let mut command = Command::new(opcode, &Nothing {});
        command.output = UNREACHABLE_ADDRESS.into();
        command.output_len = 4096.into();
        rig.refuses(command, Status::DmaFault)?;
    }
    let pd = rig.create(Opcode::AllocPd, &Nothing {})?;
    let contiguous = CreateMr {
        len: 4096.into(),
        dma: UNREACHABLE_ADDRESS.into(),
        pd: pd.into(),
        ..CreateMr::default()
    };
    rig.refuses(Command::new(Opcode::CreateMr, &contiguous), Status::DmaFault)?;
    let listed = CreateMr {
        dma: 0.into(),
        len: (64 * 4096).into(),
        log_page: 12.into(),
        ..contiguous
    };
    let mut command = Command::new(Opcode::CreateMr, &listed);
    command.input = UNREACHABLE_ADDRESS.into();
    command.input_len = (64 * 8).into();
    rig.refuses(command, Status::DmaFault)?;
    let queue = CreateEq {
        ring: UNREACHABLE_ADDRESS.into(),
        record: rig.memory(64)?.iova().into(),
        log_size: 4.into(),
        vector: 0.into(),
    };
    rig.refuses(Command::new(Opcode::CreateEq, &queue), Status::DmaFault)?;
    // The failed commands left no reference to the domain.
    rig.on(Opcode::FreePd, pd)?;
    rig.lives()
}

fn output_buffers_too_short_are_refused(rig: &Rig) -> Outcome {
    let len = size_of::<DeviceAttributes>();
    let output = rig.memory(len)?;
    let mut command = Command::new(Opcode::QueryDevice, &Nothing {});
    command.output = output.iova().into();
    command.output_len = (len as u32 - 1).into();
    rig.refuses(command, Status::InvalidArgument)?;
    // The device truncates arrays instead, and the count shows it.
    let count: Count = rig
        .with_output(Opcode::QueryCounters, &Nothing {}, output.iova(), 8)?
        .result();
    ensure!(
        count.count.get() as usize >= Counter::ALL.len(),
        "{} counters are too few",
        count.count
    );
    ensure!(
        output.read(8, 64) == [0; 64],
        "the device wrote beyond the output buffer"
    );
    for len in [0, MAX_STREAMING + 1] {
        let mut command = Command::new(Opcode::StreamReceive, &Handle { id: 1.into() });
        command.output = output.iova().into();
        command.output_len = len.into();
        rig.refuses(command, Status::InvalidArgument)?;
    }
    rig.lives()
}

fn counters_are_counted(rig: &Rig) -> Outcome {
    let len = Counter::ALL.len() * 8;
    let output = rig.memory(len)?;
    let counters = |id: u32| -> Outcome<Vec<u64>> {
        rig.with_output(
            Opcode::QueryCounters,
            &Handle { id: id.into() },
            output.iova(),
            len,
        )?;
        Ok((0..Counter::ALL.len())
            .map(|n| output.load::<zerocopy::little_endian::U64>(n * 8).get())
            .collect::<Vec<u64>>())
    };
    let (near, far) = crate::connection::pair(rig)?;
    let before = counters(0)?;
    crate::connection::works(rig, &near, &far)?;
    let after = counters(0)?;
    for counter in [
        Counter::TxMessages,
        Counter::RxMessages,
        Counter::TxBytes,
        Counter::RxBytes,
    ] {
        let n = counter as usize;
        ensure!(
            after[n] > before[n],
            "{} did not move from {}",
            counter.name(),
            before[n]
        );
        let own = counters(near.qp.id)?[n];
        ensure!(own > 0, "{} of the queue pair is 0", counter.name());
    }
    let invalid = || Ok(counters(0)?[Counter::InvalidDoorbells as usize]);
    let before = invalid()?;
    near.qp.ring_for_another(rig);
    rig.wait("an invalid doorbell is counted", || {
        invalid().map_or_else(|error| Some(Err(error)), |now| (now > before).then_some(Ok(())))
    })?
}

/// Any bytes are a command that ends with some status and affects no other object.
fn garbage_is_refused(rig: &Rig) -> Outcome {
    let (near, far) = crate::connection::pair(rig)?;
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    // Commands that change or destroy the objects of the connection are left out, because random
    // bytes may contain the number of such an object.
    let opcodes = [
        Opcode::CreateEq,
        Opcode::CreateMr,
        Opcode::CreateMw,
        Opcode::CreateCq,
        Opcode::CreateSrq,
        Opcode::CreateQp,
        Opcode::StreamSend,
        Opcode::StreamReceive,
        Opcode::StreamConnect,
        Opcode::StreamAttach,
    ];
    for round in 0..200 {
        let mut command = Command::new(opcodes[round % opcodes.len()], &CreateCq::default());
        for chunk in command.payload.chunks_mut(8) {
            // Addresses out of reach on any bus: beyond all memory.
            chunk.copy_from_slice(&(next() | 0xffff_ffff_0000_0000).to_le_bytes());
        }
        (command.input, command.output) = (UNREACHABLE_ADDRESS.into(), UNREACHABLE_ADDRESS.into());
        (command.input_len, command.output_len) = (64.into(), 64.into());
        let status = rig.execute(command)?.status.get();
        ensure!(
            status != Status::Ok as u16,
            "{:?} of garbage succeeded",
            opcodes[round % opcodes.len()]
        );
    }
    rig.lives()?;
    crate::connection::works(rig, &near, &far)
}
