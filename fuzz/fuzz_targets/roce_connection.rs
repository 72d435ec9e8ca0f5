//! A connection of RoCE v2 whose peer sends anything with a valid ICRC: the requester, the
//! responder, and an unreliable receiver.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::collections::VecDeque;
use urnic_roce::message::{Kind, MAX_MESSAGE_LEN, Message, Mtu, Remote};
use urnic_roce::requester::{self, Effect, Requester, Status};
use urnic_roce::responder::{self, Arrival, Fault, Refusal, Responder, Step};
use urnic_roce::unreliable::Receiver;
use urnic_wire::roce::{Aeth, AtomicEth, Credits, NakCode, Psn, Request, Response, Reth, Syndrome, Transfer};

const FIRST: Psn = Psn::new(0xff_fff0);
const MTU: Mtu = Mtu::Bytes256;
/// Messages that wait at most.
const DEPTH: usize = 8;

/// Numbers out of the input; zeroes after its end.
struct Input<'i>(&'i [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        *first
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes([(); 4].map(|()| self.byte()))
    }

    /// A length or PSN: small ones are most interesting.
    fn number(&mut self) -> u32 {
        match self.byte() {
            0xff => self.word(),
            0xfe => u32::from(self.byte()) << 8,
            small => small.into(),
        }
    }

    fn payload_len(&mut self) -> usize {
        match self.byte() {
            0..128 => 256,
            other => usize::from(other - 128) * 3,
        }
    }

    fn reth(&mut self) -> Reth {
        Reth {
            address: u64::from(self.word()) << 16,
            rkey: 1,
            length: self.number(),
        }
    }

    fn aeth(&mut self) -> Aeth {
        let syndrome = match self.byte() % 8 {
            0 => Syndrome::RnrNak(self.byte()),
            1 => Syndrome::Nak(NakCode::PsnSequenceError),
            2 => Syndrome::Nak(NakCode::InvalidRequest),
            3 => Syndrome::Nak(NakCode::RemoteAccessError),
            _ => Syndrome::Ack(Credits::new(self.byte())),
        };
        Aeth {
            syndrome,
            msn: self.byte().into(),
        }
    }

    fn kind(&mut self) -> (Kind, u32) {
        let remote = Remote {
            address: self.word().into(),
            rkey: 1,
        };
        let length = self.number();
        match self.byte() % 6 {
            0 => (Kind::Send, length),
            1 => (Kind::SendInvalidate(1), length),
            2 => (Kind::WriteImmediate(remote, [0; 4]), length),
            3 => (Kind::Write(remote), length),
            4 => (Kind::Read(remote), length),
            _ => (Kind::FetchAdd { remote, add: 1 }, 8),
        }
    }

    fn transfer(&mut self) -> Transfer {
        let immediate = (self.byte() & 1 == 0).then_some([0; 4]);
        match self.byte() % 8 {
            0 => Transfer::SendFirst,
            1 => Transfer::SendMiddle,
            2 => Transfer::SendLast(immediate),
            3 => Transfer::SendOnly(immediate),
            4 => Transfer::WriteFirst(self.reth()),
            5 => Transfer::WriteMiddle,
            6 => Transfer::WriteLast(immediate),
            _ => Transfer::WriteOnly(self.reth(), immediate),
        }
    }

    fn request(&mut self) -> Request {
        let atomic = |input: &mut Self| AtomicEth {
            address: u64::from(input.byte()) * 4,
            rkey: 1,
            swap_or_add: 1,
            compare: 2,
        };
        match self.byte() % 8 {
            0 | 1 => Request::Read(self.reth()),
            2 => Request::CompareSwap(atomic(self)),
            3 => Request::FetchAdd(atomic(self)),
            4 => Request::SendOnlyInvalidate(1),
            5 => Request::SendLastInvalidate(1),
            _ => Request::Transfer(self.transfer()),
        }
    }

    fn response(&mut self) -> Response {
        match self.byte() % 8 {
            0 => Response::ReadFirst(self.aeth()),
            1 => Response::ReadMiddle,
            2 => Response::ReadLast(self.aeth()),
            3 => Response::ReadOnly(self.aeth()),
            4 => Response::AtomicAcknowledge(self.aeth(), 5),
            _ => Response::Acknowledge(self.aeth()),
        }
    }

    fn refusal(&mut self) -> Option<Refusal> {
        match self.byte() {
            0xff => Some(Refusal::Access),
            0xfe => Some(Refusal::Invalid),
            0xf0..0xfe => Some(Refusal::NotReady),
            _ => None,
        }
    }
}

/// The requester, and the messages whose completions are to come.
struct Sender {
    requester: Requester,
    posted: VecDeque<(u64, u32)>,
    next_id: u64,
    /// The PSN of a packet that was sent.
    sent: Psn,
    now: u64,
}

impl Sender {
    fn new() -> Self {
        let requester = Requester::new(requester::Attributes {
            mtu: MTU,
            first_psn: FIRST,
            timeout: 1,
            retry_cnt: 7,
            rnr_retry: 6,
            max_rd_atomic: 2,
            window: 32,
            depth: DEPTH,
        });
        Self {
            requester,
            posted: VecDeque::new(),
            next_id: 0,
            sent: FIRST,
            now: 0,
        }
    }

    fn post(&mut self, input: &mut Input<'_>) {
        let (kind, length) = input.kind();
        let message = Message {
            id: self.next_id,
            kind,
            length,
            solicited: true,
            fence: input.byte() & 3 == 0,
        };
        if self.posted.len() < DEPTH && self.requester.post(message).is_ok() {
            self.posted.push_back((self.next_id, length));
            self.next_id += 1;
        }
    }

    fn transmit(&mut self, most: u8) {
        for _ in 0..most {
            let Some(packet) = self.requester.transmit(self.now) else {
                return;
            };
            let (_, length) = self.message(packet.id);
            assert!(packet.offset + packet.length <= length && packet.length <= MTU.bytes());
            self.sent = packet.psn;
        }
    }

    fn message(&self, id: u64) -> (u64, u32) {
        *self
            .posted
            .iter()
            .find(|(posted, _)| *posted == id)
            .expect("a message in the queue")
    }

    fn respond(&mut self, input: &mut Input<'_>) {
        let back = input.number();
        let psn = self.sent.after(0u32.wrapping_sub(back));
        let (response, len) = (input.response(), input.payload_len());
        match self.requester.receive(self.now, psn, &response, len) {
            Effect::None => {}
            Effect::Place { id, offset } => assert!(offset + len as u32 <= self.message(id).1),
            Effect::Original { id, .. } => assert_eq!(self.message(id).1, 8),
        }
    }

    fn complete(&mut self) {
        while let Some(completion) = self.requester.poll() {
            assert_eq!(Some(completion.id), self.posted.pop_front().map(|(id, _)| id));
            let is_ended = self.requester.is_ended();
            assert!(is_ended || completion.status == Status::Success);
        }
        assert!(!self.requester.is_ended() || self.posted.is_empty());
    }
}

fn request(responder: &mut Responder, input: &mut Input<'_>) {
    let ahead = input.number();
    let psn = responder
        .expected()
        .after(if ahead < 128 { 0 } else { ahead.wrapping_sub(200) });
    let arrival = Arrival {
        psn,
        request: input.request(),
        payload_len: input.payload_len(),
        ack_request: input.byte() & 1 == 0,
    };
    match (responder.receive(&arrival), input.refusal()) {
        (Step::Ignored, _) => {}
        (Step::Place(placement), refusal) => {
            let place = *placement.place();
            assert!(place.length <= MTU.bytes() && place.length as usize == arrival.payload_len);
            assert!(place.end.is_none_or(|end| end.length <= MAX_MESSAGE_LEN));
            match refusal {
                Some(refusal) => placement.refuse(refusal),
                None => placement.done(),
            }
        }
        (Step::Read(check), Some(refusal)) => check.refuse(refusal),
        (Step::Read(check), None) => {
            assert!(check.memory().length <= MAX_MESSAGE_LEN);
            check.done();
        }
        (Step::Atomic(execution), Some(refusal)) => execution.refuse(refusal),
        (Step::Atomic(execution), None) => execution.done(7),
    }
}

fn answer(responder: &mut Responder, input: &mut Input<'_>) {
    for _ in 0..input.byte() {
        let Some(packet) = responder.transmit() else {
            return;
        };
        assert!(packet.data.length <= MTU.bytes());
        if input.byte() == 0xff {
            responder.refuse(&packet, Fault::Access);
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    // A Send and a Read, sent and answered; a Send of two packets, and a Read, received.
    let mut seed = Vec::new();
    for (kind, length) in [(0, 100), (4, 255), (5, 8)] {
        seed.extend([0, 0, 0, 0, 0, length, kind, 1]);
    }
    let respond = [1, 9, 2, 0, 5, 4, 0, 0, 0, 2, 0, 1, 4, 0, 0, 0];
    let receive = [
        5, 0, 6, 0, 0, 0, 0, 0, 5, 0, 6, 0, 2, 200, 0, 0, 5, 0, 0, 0, 0, 0, 0, 40, 0, 0, 0, 6, 9,
    ];
    vec![
        [&seed[..], &respond].concat(),
        receive.to_vec(),
        vec![3, 4, 7, 0, 0, 0, 7, 1, 0, 2],
    ]
}

fuzz_target!(init: urnic_fuzz::plant(seeds()), |bytes: &[u8]| {
    let mut input = Input(bytes);
    let mut sender = Sender::new();
    let mut responder = Responder::new(responder::Attributes {
        mtu: MTU,
        first_psn: FIRST,
        min_rnr_timer: 1,
        max_dest_rd_atomic: 2,
        ack_every: 4,
    });
    let mut receiver = Receiver::new(MTU, FIRST);
    while !input.0.is_empty() {
        match input.byte() % 8 {
            0 => sender.post(&mut input),
            1 => sender.transmit(input.byte()),
            2 => sender.respond(&mut input),
            3 => {
                sender.now += u64::from(input.number());
                sender.requester.on_timer(sender.now);
            }
            4 => match input.byte() {
                0 => sender.requester.drain(true),
                1 => sender.requester.drain(false),
                2 => sender.requester.refuse(input.byte().into()),
                3 => sender.requester.flush(),
                _ => sender.requester.congestion_notified(),
            },
            5 => request(&mut responder, &mut input),
            6 => answer(&mut responder, &mut input),
            _ => {
                let psn = FIRST.after(input.number());
                if let Some(placement) = receiver.receive(psn, input.transfer(), input.payload_len())
                    && input.refusal().is_none()
                {
                    placement.done();
                }
            }
        }
        sender.complete();
    }
});
