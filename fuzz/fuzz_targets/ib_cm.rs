//! Two ends of the communication manager, and a network that the input controls: it delivers,
//! loses, repeats, changes and delays messages, and the programs call as the input says. Afterwards
//! every connection ends.

#![no_main]

use std::net::IpAddr;
use std::time::Duration;

use libfuzzer_sys::fuzz_target;
use urnic_cm::ib_cm::{Accept, Admission, Connect, Connections, Event, Limits, Output, Route, Settings};
use urnic_wire::mad::{MAD_LEN, parse, service_id};

/// Longer inputs find nothing that shorter ones do not.
const MAX_STEPS: usize = 200;
/// Most messages that wait for their delivery, and most connections at an end.
const MAX_WAITING: usize = 64;

struct World {
    now: Duration,
    ends: [Connections; 2],
    routes: [Route; 2],
    /// Messages with the end that they are for.
    network: Vec<(usize, [u8; MAD_LEN])>,
    known: [Vec<u32>; 2],
}

impl World {
    fn new() -> World {
        let addresses: [IpAddr; 2] = [[10, 0, 0, 1].into(), [10, 0, 0, 2].into()];
        let connections = |ca_guid: u64| {
            let settings = Settings {
                ca_guid,
                limits: Limits {
                    connections: 20,
                    per_peer: 15,
                    undecided: 8,
                    undecided_per_peer: 6,
                },
                ..Settings::default()
            };
            let mut last = ca_guid << 16;
            let next = move || {
                last += 1;
                last
            };
            Connections::new(settings, Box::new(next))
        };
        World {
            now: Duration::from_secs(1),
            ends: [connections(1), connections(2)],
            routes: [
                Route::new(addresses[0], addresses[1]),
                Route::new(addresses[1], addresses[0]),
            ],
            network: Vec::new(),
            known: [Vec::new(), Vec::new()],
        }
    }

    fn drain(&mut self, end: usize) {
        while let Some(output) = self.ends[end].next_output() {
            match output {
                Output::Send(route, mad) => {
                    assert_eq!(route, self.routes[end]);
                    let mut bytes = [0; MAD_LEN];
                    mad.emit(&mut bytes);
                    if self.network.len() < MAX_WAITING {
                        self.network.push((1 - end, bytes));
                    }
                }
                Output::Event(id, Event::Requested(_)) => self.known[end].push(id),
                Output::Event(id, event) => {
                    assert!(self.known[end].contains(&id), "{event:?}");
                }
            }
        }
    }

    /// A message arrives, with a byte of it changed if `change` is not 0.
    fn deliver(&mut self, message: u8, at: u8, change: u8, admission: Admission) {
        if self.network.is_empty() {
            return;
        }
        let index = usize::from(message) % self.network.len();
        let (end, mut bytes) = self.network[index];
        bytes[usize::from(at)] ^= change;
        if let Ok(mad) = parse(&bytes) {
            let route = self.routes[end];
            self.ends[end].receive(self.now, route, &mad, &mut |_, _| admission);
            self.drain(end);
        }
    }

    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        for end in [0, 1] {
            while let Some(at) = self.ends[end].deadline()
                && at <= until
            {
                self.ends[end].expire(at);
                self.drain(end);
            }
        }
        self.now = until;
    }

    fn call(&mut self, end: usize, call: u8, which: u8) {
        let (now, route) = (self.now, self.routes[end]);
        let connections = &mut self.ends[end];
        let known = &mut self.known[end];
        let qpn = 2 + u32::from(which);
        let id = match known.len() {
            0 => 0,
            len => known[usize::from(which) % len],
        };
        let _ = match call % 7 {
            0 if known.len() < MAX_WAITING => {
                let connect = Connect {
                    service_id: service_id(0x0106, 7000),
                    source_port: 4000,
                    qpn,
                    responder_resources: which,
                    initiator_depth: call,
                    flow_control: true,
                    retry_count: 7,
                    rnr_retry_count: 7,
                    srq: false,
                    traffic_class: 0,
                    ack_timeout: None,
                    private_data: vec![which; usize::from(which % 60)],
                };
                connections.connect(now, route, &connect).map(|id| known.push(id))
            }
            1 => {
                let accept = Accept {
                    qpn,
                    responder_resources: which,
                    initiator_depth: call,
                    flow_control: true,
                    rnr_retry_count: 7,
                    srq: true,
                    private_data: vec![which; usize::from(which)],
                };
                connections.accept(now, id, &accept)
            }
            2 => connections.ready(id, &[which; 10]),
            3 => connections.communication_established(id),
            4 => connections.reject(now, id, &[which; 10]),
            5 => connections.disconnect(now, id),
            _ => {
                connections.release(now, id);
                Ok(())
            }
        };
        self.drain(end);
    }

    /// Everything that the programs have is released, and an hour passes.
    fn end(mut self) {
        for end in [0, 1] {
            for id in self.known[end].clone() {
                self.ends[end].release(self.now, id);
            }
            self.drain(end);
        }
        self.pass(Duration::from_secs(3600));
        for end in [0, 1] {
            assert_eq!(self.ends[end].deadline(), None);
            let left = self.known[end]
                .iter()
                .find(|id| self.ends[end].state(**id).is_some());
            assert_eq!(left, None);
        }
    }
}

/// Steps of 4 bytes: what, and its arguments.
const CALL_FIRST: u8 = 0;
const CALL_SECOND: u8 = 1;
const DELIVER: u8 = 2;
const LOSE: u8 = 3;
const PASS: u8 = 4;

fn run(input: &[u8]) {
    let mut world = World::new();
    for step in input.chunks_exact(4).take(MAX_STEPS) {
        match step[0] % 5 {
            CALL_FIRST => world.call(0, step[1], step[2]),
            CALL_SECOND => world.call(1, step[1], step[2]),
            DELIVER => {
                let admission = match step[0] / 5 % 8 {
                    0 => Admission::Full,
                    1 => Admission::NoListener,
                    _ => Admission::Shown,
                };
                world.deliver(step[1], step[2], step[3], admission);
            }
            LOSE if world.network.is_empty() => {}
            LOSE => {
                let index = usize::from(step[1]) % world.network.len();
                world.network.remove(index);
            }
            _ => world.pass(Duration::from_millis(u64::from(step[1]) * 100)),
        }
    }
    world.end();
}

/// A connection from end to end, and one that is rejected.
fn seeds() -> Vec<Vec<u8>> {
    let shown = DELIVER + 5 * 2;
    let arrives = [[shown, 0, 0, 0], [LOSE, 0, 0, 0]].concat();
    let connect = [CALL_FIRST, 0, 9, 0];
    let established = [
        &connect[..],
        &arrives,
        &[CALL_SECOND, 1, 10, 0],
        &arrives,
        &[CALL_FIRST, 2, 0, 0],
        &arrives,
        &[CALL_SECOND, 5, 0, 0],
        &arrives,
        &arrives,
        &[PASS, 20, 0, 0],
    ];
    let rejected = [&connect[..], &arrives, &[CALL_SECOND, 4, 0, 0], &arrives];
    vec![established.concat(), rejected.concat()]
}

fuzz_target!(init: urnic_fuzz::plant(seeds()), |input: &[u8]| run(input));
