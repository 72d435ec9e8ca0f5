//! Valid commands and requests, with the changes of the fuzzer: so wrong values reach a device that
//! has connections, regions and requests.

use super::address;
use crate::testing::mock::{Driver, End};
use std::net::{Ipv4Addr, SocketAddr};
use urnic_device::command::{
    Command, CreateMr, CreateMw, Handle, ModifyQp, Nothing, Opcode, PAYLOAD_LEN, QueueHandle, modify,
};
use urnic_device::event::EventKind;
use urnic_device::stream::{Attach, Connect, Endpoint, Listen, attach};
use urnic_device::vocabulary::{Access, QpState};
use urnic_device::wqe::{Opcode as Work, SendHeader, Sge};
use urnic_testkit::Source;

/// Commands that take memory of the arena, for an input: as much as it has.
const MOST_QUEUES: usize = 200;
/// Objects that later commands name.
const KEPT: usize = 16;
const PORT: u16 = 7000;

/// The queue pair that posts, and the objects that were made.
pub(super) struct Legal {
    pub(super) end: End,
    handles: Vec<u32>,
    stags: Vec<u32>,
    queues: usize,
}

impl Legal {
    pub(super) fn new(driver: &Driver) -> Legal {
        let end = End::new(driver);
        Legal {
            handles: vec![end.qp.id, end.pd, end.send_cq.id],
            stags: vec![end.region.stag],
            end,
            queues: 0,
        }
    }

    /// An object: mostly one that exists.
    fn handle(&self, source: &mut Source<'_>) -> u32 {
        let byte = source.byte();
        let known = self.handles.get(usize::from(byte) % KEPT);
        known.copied().unwrap_or_else(|| u32::from(byte))
    }

    fn stag(&self, source: &mut Source<'_>) -> u32 {
        let byte = source.byte();
        let known = self.stags.get(usize::from(byte) % KEPT);
        known.copied().unwrap_or_else(|| source.word())
    }

    fn attach(&self, source: &mut Source<'_>, sid: u32) -> Attach {
        let flags = source.byte();
        Attach {
            sid: sid.into(),
            qid: self.end.qp.id.into(),
            flags: (u32::from(flags) & (attach::CRC | attach::INITIATOR)).into(),
            ord: 4.into(),
            ird: 4.into(),
            first_msn: 1.into(),
            ..Attach::default()
        }
    }

    /// A command about queues, regions and domains.
    fn object(&mut self, driver: &Driver, source: &mut Source<'_>) -> Command {
        let access = Access::from_bits_truncate(source.byte().into());
        let end = &self.end;
        self.queues += 1;
        match source.byte() % 8 {
            0 => Command::new(Opcode::AllocPd, &Nothing {}),
            1 if self.queues < MOST_QUEUES => Command::new(Opcode::CreateCq, &driver.cq_arguments(4)),
            2 if self.queues < MOST_QUEUES => {
                let arguments = driver.qp_arguments(end.pd, &end.send_cq, &end.recv_cq);
                Command::new(Opcode::CreateQp, &arguments)
            }
            3 | 4 => {
                let arguments = CreateMr {
                    base: 0.into(),
                    len: (u64::from(source.byte()) << 8).into(),
                    dma: address(source).into(),
                    pd: end.pd.into(),
                    access: access.bits().into(),
                    ..CreateMr::default()
                };
                Command::new(Opcode::CreateMr, &arguments)
            }
            5 => {
                let arguments = CreateMw {
                    pd: end.pd.into(),
                    ..CreateMw::default()
                };
                Command::new(Opcode::CreateMw, &arguments)
            }
            _ => {
                let state = QpState::from_raw(u32::from(source.byte()) % 8).unwrap_or(QpState::Init);
                let arguments = ModifyQp {
                    qp: self.handle(source).into(),
                    mask: (modify::STATE | modify::ACCESS).into(),
                    state: (state as u32).into(),
                    access: access.bits().into(),
                    ..ModifyQp::default()
                };
                Command::new(Opcode::ModifyQp, &arguments)
            }
        }
    }

    /// A command about streams: of one port, which the device connects to itself.
    fn stream(&self, driver: &Driver, source: &mut Source<'_>) -> Command {
        let there = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT));
        match source.byte() % 6 {
            0 => {
                let arguments = Listen {
                    local: there.into(),
                    backlog: 4.into(),
                    ..Listen::default()
                };
                Command::new(Opcode::StreamListen, &arguments)
            }
            1 => {
                let arguments = Connect {
                    remote: there.into(),
                    local: Endpoint::default(),
                    ..Connect::default()
                };
                Command::new(Opcode::StreamConnect, &arguments)
            }
            2 | 3 => {
                // The last stream that was accepted, or else one that was connected.
                let accepted = std::iter::from_fn(|| driver.event())
                    .filter(|event| event.kind == EventKind::StreamAccepted as u8)
                    .map(|event| event.data.get() as u32)
                    .last();
                let sid = accepted.unwrap_or_else(|| self.handle(source));
                Command::new(Opcode::StreamAttach, &self.attach(source, sid))
            }
            4 => Command::new(Opcode::LoopbackAttach, &self.attach(source, 0)),
            _ => Command::new(
                Opcode::StreamClose,
                &Handle {
                    id: self.handle(source).into(),
                },
            ),
        }
    }

    /// A command, after as many changes as the fuzzer wants.
    pub(super) fn command(&mut self, driver: &Driver, source: &mut Source<'_>) -> Command {
        let kind = source.byte();
        let mut command = match kind & 1 {
            0 => self.object(driver, source),
            _ => self.stream(driver, source),
        };
        for _ in 0..(kind >> 1 & 7).saturating_sub(4) {
            let at = usize::from(source.byte()) % (PAYLOAD_LEN / 4) * 4;
            command.payload[at..at + 4].copy_from_slice(&source.number().to_le_bytes());
        }
        command
    }

    /// Keeps the handle that a command answered with.
    pub(super) fn made(&mut self, opcode: u16, handle: QueueHandle) {
        let id = handle.id.get();
        let kept = match Opcode::from_raw(opcode) {
            Some(Opcode::CreateMr | Opcode::CreateMw) => &mut self.stags,
            _ => &mut self.handles,
        };
        kept.push(id);
        if kept.len() > KEPT {
            // The first ones are those of the end.
            kept.remove(3.min(kept.len() - 2));
        }
    }

    fn sge(&self, source: &mut Source<'_>) -> Sge {
        Sge {
            offset: (self.end.region.iova + (u64::from(source.number()) << 4)).into(),
            len: source.number().into(),
            stag: self.stag(source).into(),
        }
    }

    /// Posts requests and receives.
    pub(super) fn post(&mut self, driver: &Driver, source: &mut Source<'_>) {
        for _ in 0..1 + source.byte() % 4 {
            let sges: Vec<Sge> = (0..source.byte() % 4).map(|_| self.sge(source)).collect();
            let choice = source.byte();
            if choice % 4 == 0 {
                self.end.qp.post_recv(driver, choice.into(), &sges);
                continue;
            }
            let work = Work::from_raw(choice % 16).unwrap_or(Work::Send);
            let header = SendHeader {
                opcode: work as u8,
                flags: source.byte() % 32,
                remote_offset: (self.end.region.iova + u64::from(source.number())).into(),
                stag: self.stag(source).into(),
                ..urnic_testkit::request(work, choice.into())
            };
            self.end.qp.post(driver, header, &sges);
        }
    }
}
