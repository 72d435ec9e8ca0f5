//! A client whose memory a fuzzer fills: the device works on rings, records and command queues in a
//! file that both sides map, as in `urnic serve`.
//!
//! The fuzzer may change the file at any time. In half of the inputs a second thread changes it
//! while the device reads it.

use super::memory::{Budget, ClientMemory};
use super::passed::Passed;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use urnic_device::command::{
    COMMAND_LEN, COMPLETION_LEN, Command, Completion, CreateCq, CreateEq, CreateMr, CreateQp, Handle,
    ModifyQp, Nothing, Opcode, QueueHandle, modify,
};
use urnic_device::doorbell::{Doorbell, Kind};
use urnic_device::registers::{
    CMD_BASE, CMD_COMPLETION_BASE, CMD_DOORBELL, CMD_LOG_SIZE, CONTROL, Control, STATUS, Status, fatal,
};
use urnic_device::stream::Attach;
use urnic_device::vocabulary::{Access, QpState};
use urnic_device::wqe::{BLOCK_LEN, RecvHeader, SendHeader, Sge};
use urnic_model::DoorbellPages;
use urnic_model::Nanos;
use urnic_model::config::{DeviceAddress, Limits, ModelConfig};
use urnic_model::testing::sim::{Conditions, SimNetwork};
use urnic_model::{Device, Interrupts};
use urnic_testkit::Source;
use urnic_vfio_user::{DmaMap, DmaMapFlags};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes};

const BASE: u64 = 0x1_0000_0000;
const LEN: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// An address, mostly in the memory.
fn address(source: &mut Source<'_>) -> u64 {
    match source.byte() {
        0xff => u64::from(source.word()) << 32 | u64::from(source.word()),
        0xfe => BASE + LEN - 8,
        page => BASE + u64::from(page) * PAGE + u64::from(source.byte()) * 8,
    }
}

/// Layout of the memory: the command queue and its completions, then one page each.
const COMPLETIONS: u64 = PAGE;
const EQ_RING: u64 = 2 * PAGE;
const CQ_RING: u64 = 3 * PAGE;
const SQ_RING: u64 = 4 * PAGE;
const RQ_RING: u64 = 5 * PAGE;
const RECORDS: u64 = 6 * PAGE;
const DATA: u64 = 8 * PAGE;
/// Number of blocks and entries of each ring, as a power of two.
const LOG_SIZE: u32 = 6;
const EQ_RECORD: u64 = RECORDS;
const CQ_RECORD: u64 = RECORDS + 64;
const QP_RECORD: u64 = RECORDS + 128;

struct Silence;

impl Interrupts for Silence {
    fn raise(&self, _: u32) {}
}

/// The client side.
struct Client {
    file: OwnedFd,
    memory: Arc<ClientMemory>,
    device: Device,
    commands: u32,
    sends: u32,
    receives: u32,
    uar: u32,
    cq: u32,
    qp: u32,
    doorbell: u32,
    stags: Vec<u32>,
}

/// Lends a part of the client's file.
fn lend(memory: &ClientMemory, file: &OwnedFd, first: u64, size: u64) {
    let map = DmaMap {
        flags: DmaMapFlags::READ | DmaMapFlags::WRITE,
        offset: first,
        address: BASE + first,
        size,
    };
    let file = file.try_clone().map(Passed::Memory);
    // Passing a range a second time fails, which is expected.
    let _ = file.map(|file| memory.map(&map, Some(file)));
}

impl Client {
    fn new(now: &Arc<AtomicU64>) -> Option<Client> {
        let file = memfd_create("fuzzed", MemfdFlags::CLOEXEC).ok()?;
        ftruncate(&file, LEN).ok()?;
        let memory = Arc::new(ClientMemory::new(Budget::new(1)).ok()?);
        lend(&memory, &file, 0, LEN);
        let config = ModelConfig {
            addresses: vec![DeviceAddress {
                ip: IpAddr::V4(Ipv4Addr::LOCALHOST),
                scope: 0,
                prefix_len: 8,
            }],
            doorbell_memory: true,
            limits: Limits {
                uars: 4,
                ..Limits::default()
            },
            ..ModelConfig::default()
        };
        let network = Arc::new(SimNetwork::new(Conditions::default(), now.clone()));
        let device = Device::start_manual(config, memory.clone(), Arc::new(Silence), network).ok()?;
        Some(Client {
            file,
            memory,
            device,
            commands: 0,
            sends: 0,
            receives: 0,
            uar: 0,
            cq: 0,
            qp: 0,
            doorbell: 0,
            stags: Vec::new(),
        })
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        if at + bytes.len() as u64 <= LEN {
            let _ = rustix::io::pwrite(&self.file, bytes, at);
        }
    }

    /// Executes the next entry of the command queue.
    fn ring_commands(&mut self) -> Option<Completion> {
        let slot = u64::from(self.commands & 15);
        self.commands = self.commands.wrapping_add(1);
        self.device.bar0_write(CMD_DOORBELL, self.commands);
        let mut bytes = [0; COMPLETION_LEN];
        rustix::io::pread(&self.file, &mut bytes, COMPLETIONS + slot * COMPLETION_LEN as u64).ok()?;
        Completion::read_from_bytes(&bytes).ok()
    }

    fn execute(&mut self, command: &Command) -> Option<Completion> {
        self.write(
            u64::from(self.commands & 15) * COMMAND_LEN as u64,
            command.as_bytes(),
        );
        self.ring_commands()
    }

    fn command<T: IntoBytes + Immutable>(&mut self, opcode: Opcode, arguments: &T) -> Option<Completion> {
        self.execute(&Command::new(opcode, arguments))
            .filter(|completion| completion.status.get() == 0)
    }

    /// Enables the device and creates one object of each kind: a queue pair that is its own peer,
    /// with regions.
    fn set_up(&mut self) -> Option<()> {
        (self.commands, self.sends, self.receives) = (0, 0, 0);
        self.write(0, &[0; DATA as usize]);
        self.device.bar0_write(CMD_LOG_SIZE, 4);
        for (register, value) in [(CMD_BASE, BASE), (CMD_COMPLETION_BASE, BASE + COMPLETIONS)] {
            self.device.bar0_write(register, value as u32);
            self.device.bar0_write(register + 4, (value >> 32) as u32);
        }
        self.device.bar0_write(CONTROL, Control::ENABLE.bits());
        let eq = CreateEq {
            ring: (BASE + EQ_RING).into(),
            record: (BASE + EQ_RECORD).into(),
            log_size: LOG_SIZE.into(),
            vector: 0.into(),
        };
        self.command(Opcode::CreateEq, &eq)?;
        self.uar = self
            .command(Opcode::AllocUar, &Nothing {})?
            .result::<Handle>()
            .id
            .get();
        let pd = self.command(Opcode::AllocPd, &Nothing {})?.result::<Handle>().id;
        self.make_queues(pd)?;
        self.register(pd)
    }

    /// Creates a completion queue, and a queue pair that is its own peer.
    fn make_queues(&mut self, pd: U32) -> Option<()> {
        let cq = CreateCq {
            ring: (BASE + CQ_RING).into(),
            record: (BASE + CQ_RECORD).into(),
            log_size: LOG_SIZE.into(),
            uar: self.uar.into(),
            ..CreateCq::default()
        };
        self.cq = self
            .command(Opcode::CreateCq, &cq)?
            .result::<QueueHandle>()
            .id
            .get();
        let qp = CreateQp {
            sq_ring: (BASE + SQ_RING).into(),
            rq_ring: (BASE + RQ_RING).into(),
            record: (BASE + QP_RECORD).into(),
            pd,
            send_cq: self.cq.into(),
            recv_cq: self.cq.into(),
            uar: self.uar.into(),
            sq_log_size: LOG_SIZE.into(),
            rq_log_size: LOG_SIZE.into(),
            rq_log_stride: 6.into(),
            ..CreateQp::default()
        };
        let made: QueueHandle = self.command(Opcode::CreateQp, &qp)?.result();
        (self.qp, self.doorbell) = (made.id.get(), made.doorbell.get());
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change = ModifyQp {
                qp: made.id,
                mask: (modify::STATE | modify::ACCESS).into(),
                state: (state as u32).into(),
                access: (Access::all() - Access::ON_DEMAND).bits().into(),
                ..ModifyQp::default()
            };
            self.command(Opcode::ModifyQp, &change)?;
        }
        let attach = Attach {
            qid: made.id,
            ord: 4.into(),
            ird: 4.into(),
            first_msn: 1.into(),
            ..Attach::default()
        };
        self.command(Opcode::LoopbackAttach, &attach)?;
        Some(())
    }

    /// Registers the regions.
    fn register(&mut self, pd: U32) -> Option<()> {
        self.stags.clear();
        // One region covers all memory, rings included; one covers every second page after the
        // rings.
        let all = CreateMr {
            len: LEN.into(),
            dma: BASE.into(),
            pd,
            access: (Access::all() - Access::ON_DEMAND).bits().into(),
            ..CreateMr::default()
        };
        let region = self.command(Opcode::CreateMr, &all)?;
        self.stags.push(region.result::<Handle>().id.get());
        let pages: Vec<u8> = (0..64u64)
            .flat_map(|page| (BASE + DATA + 2 * page * PAGE).to_le_bytes())
            .collect();
        self.write(DATA, &pages);
        let scattered = CreateMr {
            len: (64 * PAGE).into(),
            dma: 0.into(),
            log_page: 12.into(),
            ..all
        };
        let mut command = Command::new(Opcode::CreateMr, &scattered);
        command.input = (BASE + DATA).into();
        command.input_len = (pages.len() as u32).into();
        let region = self.execute(&command)?;
        self.stags.push(region.result::<Handle>().id.get());
        Some(())
    }

    /// An STag: mostly that of one of the regions.
    fn stag(&self, source: &mut Source<'_>) -> u32 {
        let number = source.byte();
        match self.stags.get(usize::from(number) % 4) {
            Some(stag) => *stag,
            None => source.number(),
        }
    }

    fn sges(&self, source: &mut Source<'_>, count: u8) -> Vec<u8> {
        (0..count)
            .flat_map(|_| {
                let sge = Sge {
                    offset: u64::from(source.number()).into(),
                    len: source.number().into(),
                    stag: self.stag(source).into(),
                };
                <[u8; size_of::<Sge>()]>::try_from(sge.as_bytes()).unwrap_or_default()
            })
            .collect()
    }

    /// Posts a request of any kind. Its header may declare a wrong number of blocks.
    fn post_send(&mut self, source: &mut Source<'_>) {
        let count = source.byte() % 8;
        let sges = self.sges(source, count);
        let count_byte = source.byte();
        let header = SendHeader {
            opcode: source.byte() % 12,
            flags: source.byte() % 16,
            num_sge: if count_byte & 0x80 == 0 { count } else { count_byte },
            blocks: if count_byte & 0x40 == 0 {
                (32 + sges.len()).div_ceil(BLOCK_LEN) as u8
            } else {
                count_byte & 0x1f
            },
            inline_len: source.number().into(),
            remote_offset: u64::from(source.number()).into(),
            stag: self.stag(source).into(),
            ..SendHeader::default()
        };
        let mut entry = header.as_bytes().to_vec();
        entry.extend(sges);
        for block in entry.chunks(BLOCK_LEN) {
            let slot = u64::from(self.sends & ((1 << LOG_SIZE) - 1));
            self.write(SQ_RING + slot * BLOCK_LEN as u64, block);
            self.sends = self.sends.wrapping_add(1);
        }
        self.write(QP_RECORD, &self.sends.to_le_bytes());
    }

    fn post_receive(&mut self, source: &mut Source<'_>) {
        let mut entry = RecvHeader::new(7, u16::from(source.byte() % 5))
            .as_bytes()
            .to_vec();
        entry.extend(self.sges(source, 3));
        let slot = u64::from(self.receives & ((1 << LOG_SIZE) - 1));
        self.write(RQ_RING + slot * 64, &entry);
        self.receives = self.receives.wrapping_add(1);
        self.write(QP_RECORD + 4, &self.receives.to_le_bytes());
    }

    fn ring(&self, source: &mut Source<'_>) {
        let (how, queue) = (source.byte(), source.byte());
        let kind = Kind::from_raw(1 + how % 5).unwrap_or(Kind::Send);
        let own = if kind == Kind::Arm || kind == Kind::ArmSolicited {
            self.cq
        } else {
            self.qp
        };
        let doorbell = Doorbell {
            kind,
            queue: if queue < 0xc0 { own } else { source.word() },
            index: source.number(),
        };
        let value = if how < 0xf0 {
            doorbell.encode()
        } else {
            u64::from(source.word()) << 32 | 1
        };
        let Some(pages) = self.device.doorbell_pages() else {
            return;
        };
        match how & 0x20 {
            0 => store(pages, self.uar, self.doorbell, value),
            _ => store(pages, source.number(), source.number(), value),
        }
        self.device.scan_doorbells();
    }

    /// Executes any command, with any addresses in the memory.
    fn any_command(&mut self, source: &mut Source<'_>) {
        let mut command = Command::new(Opcode::QueryDevice, &Nothing {});
        command.opcode = u16::from(source.byte() % 64).into();
        let addresses = usize::from(source.byte() % 4) * 8;
        let (pointers, rest) = command.payload.split_at_mut(addresses);
        for place in pointers.as_chunks_mut::<8>().0 {
            place.copy_from_slice(&address(source).to_le_bytes());
        }
        for place in rest.as_chunks_mut::<4>().0.iter_mut().take(16) {
            place.copy_from_slice(&source.number().to_le_bytes());
        }
        command.input = address(source).into();
        command.output = address(source).into();
        command.input_len = source.number().into();
        command.output_len = source.number().into();
        self.execute(&command);
    }

    fn act(&mut self, source: &mut Source<'_>, now: &mut u64) {
        match source.byte() % 16 {
            0..4 => self.post_send(source),
            4 => self.post_receive(source),
            5..8 => self.ring(source),
            8 | 9 => self.any_command(source),
            10 => {
                // Into the rings and records, over their contents.
                let at = u64::from(source.byte()) * 96;
                let word = source.word();
                self.write(at & !3, &word.to_le_bytes());
            }
            11 => {
                let offset = u32::from(source.byte()) * 4;
                let value = source.number();
                self.device.bar0_write(offset, value);
                if offset == CMD_DOORBELL {
                    self.commands = value;
                }
            }
            12 => drop(self.ring_commands()),
            13 => {
                let first = u64::from(source.byte()) * PAGE;
                let last = first + u64::from(source.byte()) * PAGE + PAGE - 1;
                let _ = self.memory.unmap(BASE + first, BASE + last, Some(&self.device));
            }
            14 => match source.byte() {
                0xff => drop(ftruncate(&self.file, u64::from(source.byte()) * PAGE)),
                page => lend(&self.memory, &self.file, u64::from(page) * PAGE, PAGE),
            },
            _ => *now += 1_000_000 * u64::from(source.byte()),
        }
        self.device.scan_doorbells();
        self.device.step(Nanos(*now));
    }

    /// Handles faults as a session does; `false` if the session would end.
    fn handle_faults(&mut self) -> bool {
        if self.memory.faults().is_empty() {
            return true;
        }
        self.device.fail(fatal::HOST_MEMORY);
        let faults = self.memory.faults().take();
        self.memory.restore_holes(faults).is_ok()
    }
}

/// Runs rings, records, requests, doorbells and commands of a fuzzer: nothing panics, and after its
/// reset the device is as new, unless its memory is lost.
#[cfg_attr(not(fuzzing), expect(unreachable_pub, reason = "public for the fuzz target"))]
pub fn shared_ring(data: &[u8]) {
    let mut source = Source::new(data);
    let now = Arc::new(AtomicU64::new(0));
    let Some(mut client) = Client::new(&now) else {
        return;
    };
    assert!(client.set_up().is_some(), "a new device takes what is right");
    let (stop, mutates) = (AtomicBool::new(false), source.byte() & 1 == 1);
    let seed = u64::from(source.word()) | 1;
    let file = client.file.try_clone();
    let lost = std::thread::scope(|scope| {
        if let (true, Ok(file)) = (mutates, &file) {
            scope.spawn(|| write_random(file, seed, &stop));
        }
        let mut time = 0;
        let mut lost = false;
        while !source.is_empty() && !lost {
            client.act(&mut source, &mut time);
            lost = !client.handle_faults();
        }
        stop.store(true, Ordering::Relaxed);
        lost
    });
    if lost {
        return;
    }
    client.device.reset();
    let _ = client.memory.unmap(0, u64::MAX, Some(&client.device));
    if ftruncate(&client.file, LEN).is_err() || !client.handle_faults() {
        return;
    }
    client.device.reset();
    lend(&client.memory, &client.file, 0, LEN);
    assert!(client.set_up().is_some(), "it is as new");
    assert_eq!(client.device.bar0_read(STATUS), Status::READY.bits());
}

/// Rings a doorbell as a client does, in the file of the pages; pages that do not exist are not
/// rung.
fn store(pages: &DoorbellPages, page: u32, offset: u32, value: u64) {
    let at = u64::from(page) * PAGE + u64::from(offset & 0xff8);
    let _ = rustix::io::pwrite(pages.fd(), &value.to_le_bytes(), at);
}

/// Changes words of the rings and records while the device reads them.
fn write_random(file: &OwnedFd, seed: u64, stop: &AtomicBool) {
    let mut random = seed;
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = EQ_RING + (random >> 20) % ((DATA - EQ_RING) / 4) * 4;
        let _ = rustix::io::pwrite(file.as_fd(), &(random as u32 % 97).to_le_bytes(), at);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn any_bytes_in_shared_rings_are_harmless(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            super::shared_ring(&data);
        }
    }
}
