//! The command queue: each command is decoded, carried out on the caller's thread, and completed in
//! the ring.

mod answer;
mod memory;
mod paths;
mod queues;
pub(crate) mod reset;
mod streams;

use crate::counters::Counter;
use crate::events::Effects;
use crate::host::Mapping;
use crate::runtime::{CommandQueue, Core};
use answer::{Answer, Check as _, Refused, argument, count, done};
use std::sync::atomic::Ordering;
use urnic_device::command::{
    COMMAND_LEN, COMPLETION_LEN, Command, Completion, Handle, Nothing, Opcode, Status, features,
};
use urnic_device::stream::{Address, Endpoint};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A command under execution.
struct Job<'a> {
    core: &'a Core,
    command: Command,
    effects: &'a mut Effects,
}

/// Executes the next command of the queue and completes it.
pub(crate) fn execute_next(core: &Core, queue: &mut CommandQueue, effects: &mut Effects) {
    let index = queue.consumer;
    queue.consumer = index.wrapping_add(1);
    let slot = (index & ((1 << queue.log_size) - 1)) as usize;
    let command: Command = queue.commands.read(slot * COMMAND_LEN);
    let tag = command.tag;
    let mut completion = Job {
        core,
        command,
        effects,
    }
    .run()
    .unwrap_or_else(|Refused { status, argument }| {
        let mut completion = Completion::new(0, status, &Nothing {});
        completion.argument = argument.into();
        let opcode = Opcode::from_raw(command.opcode.get());
        let argument = opcode.and_then(|opcode| completion.argument_of(opcode));
        tracing::debug!(?opcode, ?status, argument, "command refused");
        completion
    });
    completion.tag = tag;
    let phase = offset_of_phase();
    let at = slot * COMPLETION_LEN;
    queue.completions.copy_in(at, &completion.as_bytes()[..phase]);
    let lap = !(index >> queue.log_size) & 1;
    queue
        .completions
        .word(at + phase)
        .store(lap.to_le(), Ordering::Release);
}

const fn offset_of_phase() -> usize {
    std::mem::offset_of!(Completion, phase)
}

impl Job<'_> {
    fn run(&mut self) -> Answer {
        let opcode = Opcode::from_raw(self.command.opcode.get()).ok_or(Status::UnknownOpcode)?;
        match opcode {
            Opcode::QueryDevice => self.query_device(),
            Opcode::QueryAddresses => self.query_addresses(),
            Opcode::QueryCounters => self.query_counters(),
            Opcode::AllocUar => self.alloc_uar(),
            Opcode::FreeUar => self.free_uar(),
            Opcode::AllocPd => self.alloc_pd(),
            Opcode::FreePd => self.free_pd(),
            Opcode::CreateEq => self.create_eq(),
            Opcode::DestroyEq => self.destroy_eq(),
            Opcode::CreateMr => self.create_mr(),
            Opcode::DestroyMr => self.destroy_mr(),
            Opcode::ModifyMr => self.modify_mr(),
            Opcode::CreateMw => self.create_mw(),
            Opcode::DestroyMw => self.destroy_mw(),
            Opcode::CreateCq => self.create_cq(),
            Opcode::DestroyCq => self.destroy_cq(),
            Opcode::ResizeCq => self.resize_cq(),
            Opcode::ModerateCq => self.moderate_cq(),
            Opcode::CreateSrq => self.create_srq(),
            Opcode::ModifySrq => self.modify_srq(),
            Opcode::DestroySrq => self.destroy_srq(),
            Opcode::CreateQp => self.create_qp(),
            Opcode::ModifyQp => self.modify_qp(),
            Opcode::QueryQp => self.query_qp(),
            Opcode::DestroyQp => self.destroy_qp(),
            Opcode::StreamConnect => self.stream_connect(),
            Opcode::StreamListen => self.stream_listen(),
            Opcode::StreamUnlisten => self.stream_unlisten(),
            Opcode::StreamSend => self.stream_send(),
            Opcode::StreamReceive => self.stream_receive(),
            Opcode::StreamQuery => self.stream_query(),
            Opcode::StreamAttach => self.stream_attach(),
            Opcode::StreamClose => self.stream_close(),
            Opcode::LoopbackAttach => self.loopback_attach(),
            Opcode::BindDatagrams => self.bind_datagrams(),
            Opcode::CloseDatagrams => self.close_datagrams(),
            Opcode::AttachMulticast => self.attach_multicast(),
            Opcode::DetachMulticast => self.detach_multicast(),
            Opcode::ConnectPath => self.connect_path(),
            Opcode::StartPath => self.start_path(),
        }
    }

    /// The arguments as a `T`.
    fn arguments<T: FromBytes>(&self) -> T {
        self.command.arguments()
    }

    /// The object number that is the only argument.
    fn handle(&self) -> u32 {
        self.arguments::<Handle>().id.get()
    }

    /// Refuses a command that may cause events while too many wait.
    fn room_for_events(&self) -> Result<(), Status> {
        match self.core.schedule.is_backed_up() {
            true => Err(Status::NoResources),
            false => Ok(()),
        }
    }

    /// Host memory that an object is going to use.
    fn map(&self, iova: u64, len: usize, align: usize) -> Result<Mapping, Status> {
        Mapping::new(&*self.core.host, iova, len, align).ok_or(Status::DmaFault)
    }

    fn input(&self) -> Result<Mapping, Status> {
        self.map(self.command.input.get(), self.command.input_len.get() as usize, 1)
    }

    fn output(&self) -> Result<Mapping, Status> {
        self.map(
            self.command.output.get(),
            self.command.output_len.get() as usize,
            1,
        )
    }

    /// Writes one value to the output buffer, which must have room for it.
    fn write_output<T: IntoBytes + Immutable>(&self, value: &T) -> Result<(), Status> {
        if (self.command.output_len.get() as usize) < size_of::<T>() {
            return Err(Status::InvalidArgument);
        }
        self.output()?.write(0, value);
        Ok(())
    }

    /// Writes as many values to the output buffer as fit, and answers how many there are.
    fn write_array<T: IntoBytes + Immutable>(&self, values: &[T]) -> Answer {
        let room = self.command.output_len.get() as usize / size_of::<T>();
        let written = &values[..values.len().min(room)];
        if !written.is_empty() {
            self.output()?.copy_in(0, written.as_bytes());
        }
        count(values.len())
    }

    fn query_device(&self) -> Answer {
        let mut attributes = self.core.config.attributes();
        if self.core.host.on_demand() {
            attributes.features |= features::ON_DEMAND;
        }
        self.write_output(&attributes)?;
        done()
    }

    fn query_addresses(&self) -> Answer {
        let addresses = self.core.config.addresses.iter().map(|a| Address {
            ip: Endpoint::from(std::net::SocketAddr::new(a.ip, 0)).ip,
            scope: a.scope.into(),
            prefix_len: a.prefix_len.into(),
        });
        self.write_array(&addresses.collect::<Vec<_>>())
    }

    /// With a queue pair's number its own counters, else those of the device.
    fn query_counters(&mut self) -> Answer {
        let mut sums = [0u64; Counter::ALL.len()];
        match self.handle() {
            0 => {
                self.core.counters.sum_into(&mut sums);
                for qp in self.core.qps.all() {
                    qp.sum_counters_into(&mut sums, self.effects);
                }
                sums[Counter::Polls as usize] += u64::from(self.core.schedule.polls());
            }
            qid => {
                let qp = self.core.qps.find(qid).of(argument!(Handle.id))?;
                qp.sum_counters_into(&mut sums, self.effects);
            }
        }
        self.write_array(&sums.map(zerocopy::little_endian::U64::from))
    }
}
