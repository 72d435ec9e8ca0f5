//! Two ends over a network that loses, duplicates and reorders messages, by seed. Their programs
//! decide by the same seed.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;

/// The network's faults, in per cent of the messages.
#[derive(Debug, Clone, Copy)]
struct Faults {
    loss: u64,
    duplication: u64,
    reordering: u64,
    /// Longest delay of a message that is late.
    late_ms: u64,
}

/// What the program at an end does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Accept,
    Reject,
    Ready,
    Disconnect,
    Release,
}

/// What happens at a time.
#[derive(Debug, Clone)]
enum Item {
    Arrives(usize, Box<Mad>),
    Does(usize, u32, Step),
}

struct Network {
    faults: Faults,
    /// Programs also reject, and release connections at any time.
    whimsical: bool,
    random: Box<dyn FnMut() -> u64 + Send>,
    ends: [End; 2],
    now: Time,
    items: BTreeMap<(Time, u64), Item>,
    number: u64,
    /// The names of a connection's events, at each end.
    histories: [HashMap<u32, Vec<&'static str>>; 2],
    /// Depths and numbers of established connections: the passive end's, by its own queue pair.
    checked: usize,
}

impl Network {
    fn new(seed: u64, faults: Faults, whimsical: bool) -> Network {
        Network {
            faults,
            whimsical,
            random: Box::new(random(seed)),
            ends: [End::client(), End::server()],
            now: START,
            items: BTreeMap::new(),
            number: 0,
            histories: [HashMap::new(), HashMap::new()],
            checked: 0,
        }
    }

    fn chance(&mut self, per_cent: u64) -> bool {
        ((self.random)() >> 8) % 100 < per_cent
    }

    fn at(&mut self, after_ms: u64, item: Item) {
        self.number += 1;
        let at = self.now + Duration::from_millis(after_ms);
        self.items.insert((at, self.number), item);
    }

    /// The message is on its way to the other end, or lost.
    fn carry(&mut self, from: usize, mad: Mad) {
        let copies = 1 + usize::from(self.chance(self.faults.duplication));
        for _ in 0..copies {
            if self.chance(self.faults.loss) {
                continue;
            }
            let late = self.chance(self.faults.reordering);
            let delay = 1 + if late {
                (self.random)() % self.faults.late_ms
            } else {
                0
            };
            self.at(delay, Item::Arrives(1 - from, Box::new(mad)));
        }
    }

    /// Takes what an end did, and lets its program react.
    fn collect(&mut self, of: usize) {
        self.ends[of].drain();
        let sent: Vec<Mad> = self.ends[of].sent.drain(..).collect();
        let events: Vec<(u32, Event)> = self.ends[of].events.drain(..).collect();
        for mad in sent {
            self.carry(of, mad);
        }
        for (id, event) in events {
            self.histories[of].entry(id).or_default().push(name(&event));
            let thinks = (self.random)() % 7000;
            let step = match event {
                Event::Requested(_) if self.whimsical && self.chance(20) => Step::Reject,
                Event::Requested(_) => Step::Accept,
                Event::Accepted(_) if self.whimsical && self.chance(10) => Step::Reject,
                Event::Accepted(_) => Step::Ready,
                Event::Established(_) => Step::Disconnect,
                _ => continue,
            };
            self.at(thinks, Item::Does(of, id, step));
            if self.whimsical && self.chance(30) {
                let later = (self.random)() % 30_000;
                self.at(later, Item::Does(of, id, Step::Release));
            }
        }
    }

    fn perform(&mut self, of: usize, id: u32, step: Step) {
        let end = &mut self.ends[of];
        let (now, connections) = (self.now, &mut end.connections);
        let result = match step {
            Step::Accept => {
                // Each connection has a queue pair of its own.
                let accept = Accept {
                    qpn: 0x1000 + id % 0xf0_0000,
                    ..accept()
                };
                connections.accept(now, id, &accept)
            }
            Step::Reject => connections.reject(now, id, b"no"),
            Step::Ready => connections.ready(id, b""),
            Step::Disconnect => connections.disconnect(now, id),
            Step::Release => {
                connections.release(now, id);
                Ok(())
            }
        };
        // What is not possible any more has no effect: the peer was faster.
        let _ = result;
        self.collect(of);
    }

    /// Until nothing is left to happen, and at most an hour.
    fn run(&mut self) {
        let end = self.now + Duration::from_secs(3600);
        while self.now < end {
            let item = self.items.first_key_value().map(|((at, _), _)| *at);
            let timers = self.ends.iter().filter_map(|end| end.connections.deadline());
            let Some(next) = timers.chain(item).min() else {
                return;
            };
            self.now = self.now.max(next);
            for of in [0, 1] {
                self.ends[of].now = self.now;
                self.ends[of].connections.expire(self.now);
                self.collect(of);
            }
            while let Some(entry) = self.items.first_entry()
                && entry.key().0 <= self.now
            {
                match entry.remove() {
                    Item::Arrives(to, mad) => {
                        self.ends[to].receive(&mad);
                        self.collect(to);
                    }
                    Item::Does(of, id, step) => self.perform(of, id, step),
                }
                self.check_established();
            }
        }
        panic!("it does not end: {:?}", self.items);
    }

    /// Where both ends have the connection, their queue pairs fit.
    fn check_established(&mut self) {
        let [client, server] = &self.ends;
        let ids: Vec<u32> = self.histories[0].keys().copied().collect();
        for id in ids {
            let connection = client.connections.table.get(id);
            let Some(remote) = connection.and_then(|connection| connection.remote) else {
                continue;
            };
            let (Some((rtr, _)), Some((peer_rts, _))) =
                (client.connections.rtr(id), server.connections.rts(remote.comm_id))
            else {
                continue;
            };
            let (peer_rtr, _) = server.connections.rtr(remote.comm_id).unwrap();
            let (rts, _) = client.connections.rts(id).unwrap();
            assert_eq!((rtr.rq_psn, rts.sq_psn), (peer_rts.sq_psn, peer_rtr.rq_psn));
            assert_eq!(rtr.max_dest_rd_atomic, peer_rts.max_rd_atomic);
            assert_eq!(rts.max_rd_atomic, peer_rtr.max_dest_rd_atomic);
            self.checked += 1;
        }
    }

    fn connect(&mut self, count: u32) -> Vec<u32> {
        let ids = (0..count).map(|number| {
            let end = &mut self.ends[0];
            let connect = Connect {
                qpn: CLIENT_QPN + number,
                ..connect()
            };
            end.connections.connect(end.now, end.route, &connect).unwrap()
        });
        let ids = ids.collect();
        self.collect(0);
        ids
    }

    /// The programs end.
    fn release_all(&mut self) {
        for of in [0, 1] {
            let ids: Vec<u32> = self.histories[of].keys().copied().collect();
            for id in ids {
                self.perform(of, id, Step::Release);
            }
        }
    }

    /// Every connection at either end has events in an order that a program can expect, and nothing
    /// is left.
    fn check_end(&self) {
        for (of, histories) in self.histories.iter().enumerate() {
            let sizes = self.ends[of].connections.table.sizes();
            assert_eq!(sizes, (0, [0; 4]), "end {of}");
            for history in histories.values() {
                let ends = ["REJECTED", "UNREACHABLE", "DISCONNECTED"];
                let ended = history.iter().filter(|name| ends.contains(name)).count();
                assert!(ended <= 1, "{history:?}");
                let is_repeated = history
                    .iter()
                    .enumerate()
                    .any(|(at, name)| history[..at].contains(name));
                assert!(!is_repeated, "{history:?}");
                if let Some(at) = history.iter().position(|name| ends.contains(name)) {
                    let after = &history[at + 1..];
                    assert!(after.is_empty() || after == ["TIMEWAIT_EXIT"], "{history:?}");
                }
                assert!(of == 0 || history[0] == "CONNECT_REQUEST", "{history:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// With programs that accept, every connection is established and ends at both ends, whatever
    /// the network loses. Packets live as long as the settings say.
    #[test]
    fn cmc_17_connections_survive_loss_duplication_and_reordering(
        seed: u64, loss in 0..20u64, duplication in 0..30u64, reordering in 0..50u64, count in 1..8u32,
    ) {
        let mut network = Network::new(seed, Faults { loss, duplication, reordering, late_ms: 250 }, false);
        let ids = network.connect(count);
        network.run();
        network.check_end();
        prop_assert!(network.checked > 0);
        prop_assert_eq!(network.histories[1].len(), count as usize, "each is requested once");
        for id in ids {
            let history = &network.histories[0][&id];
            prop_assert_eq!(&history[..], ["CONNECT_RESPONSE", "DISCONNECTED", "TIMEWAIT_EXIT"]);
        }
        for history in network.histories[1].values() {
            prop_assert_eq!(
                &history[..],
                ["CONNECT_REQUEST", "ESTABLISHED", "DISCONNECTED", "TIMEWAIT_EXIT"]
            );
        }
    }

    /// With programs that also reject and release, and networks that lose nearly everything,
    /// nothing stays for ever and no program gets events in a wrong order.
    #[test]
    fn cmc_17_every_attempt_ends(
        seed: u64, loss in 0..100u64, duplication in 0..50u64, reordering in 0..100u64, count in 1..8u32,
    ) {
        let mut network = Network::new(seed, Faults { loss, duplication, reordering, late_ms: 20_000 }, true);
        network.connect(count);
        network.run();
        network.release_all();
        network.run();
        network.check_end();
    }
}
