//! No message is split (RFC 5043 §9), and no more of a stream are in flight than may be (§10),
//! whatever the network and the reader do.

use super::*;

/// Numbers that look random (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// What happens in one run.
#[derive(Debug, Clone)]
struct Plan {
    seed: u64,
    /// Of a hundred packets, how many are lost; half as many are repeated, delayed little, and
    /// delayed long.
    loss: u64,
    latency: u64,
    /// Milliseconds of each three seconds in which all packets are lost.
    outage: u64,
    packet_len: usize,
    window: usize,
    /// Streams of each end.
    streams: u16,
    /// Messages of each end.
    count: usize,
    /// Messages are as short as this, at most; 0: as long as may be.
    longest: usize,
    /// The reader takes all each so many steps.
    reads: u64,
}

fn plans() -> impl Strategy<Value = Plan> {
    let network = (any::<u64>(), 0..20u64, 0..8u64, prop_oneof![Just(0), 0..800u64]);
    let packet_len = prop_oneof![400..=1452usize, 400..9000usize];
    let sizes = (packet_len, 1500..64_000usize);
    let use_of_it = (1..=8u16, 1..400usize, prop_oneof![Just(0), 1..100usize], 1..20u64);
    (network, sizes, use_of_it).prop_map(|(network, sizes, use_of_it)| {
        let (seed, loss, latency, outage) = network;
        let (packet_len, window) = (sizes.0, sizes.1.max(sizes.0));
        let (streams, count, longest, reads) = use_of_it;
        Plan {
            seed,
            loss,
            latency,
            outage,
            packet_len,
            window,
            streams,
            count,
            longest,
            reads,
        }
    })
}

fn fates(random: &mut Random, loss: u64) -> Vec<u8> {
    let fate = |of_hundred: u64| match of_hundred {
        n if n < loss => 0,
        n if n < loss * 3 / 2 => 1,
        n if n < loss * 2 => 2,
        n if n < loss * 5 / 2 => 3,
        _ => 9,
    };
    // The association is begun without loss: a connection may fail after some.
    let begun = std::iter::repeat_n(9, 4);
    begun
        .chain((0..3000).map(|_| fate(random.next() % 100)))
        .collect()
}

/// The messages of each end, each with its stream.
fn messages(random: &mut Random, plan: &Plan, longest: usize) -> Vec<(u16, Vec<u8>)> {
    let longest = if plan.longest == 0 { longest } else { plan.longest };
    let message = |random: &mut Random| {
        // One of four is as long as may be, which leaves the least room.
        let len = match random.below(4) {
            0 => longest,
            _ => 1 + random.below(longest),
        };
        let stream = random.below(usize::from(plan.streams)) as u16;
        (stream, (0..len).map(|_| random.next() as u8).collect())
    };
    (0..plan.count).map(|_| message(random)).collect()
}

/// Runs a plan, at most for ten simulated minutes.
fn run(plan: &Plan) {
    let mut random = Random(plan.seed);
    let all_fates = fates(&mut random, plan.loss);
    let plan_settings = |port| Settings {
        packet_len: plan.packet_len,
        window: plan.window,
        ..settings(port)
    };
    let mut net = Net::of(plan_settings, &all_fates, STEP * plan.latency as u32);
    let ids = net.connected();
    net.outage = Duration::from_millis(plan.outage);
    let longest = net.ends[0].longest(ids[0]);
    let mut unsent = [0, 1].map(|_| messages(&mut random, plan, longest));
    let mut expected = unsent.clone();
    let mut came = [Vec::new(), Vec::new()];
    for at in 0..120_000u64 {
        for from in 0..2 {
            while let Some((stream, message)) = unsent[from].last() {
                let sent = (*stream, Contents::Segment);
                match net.ends[from].send(ids[from], sent, message.clone(), net.now) {
                    Ok(()) => _ = unsent[from].pop(),
                    Err(SendError::Full) => break,
                    Err(error) => panic!("{error}: {:?}", net.events),
                }
            }
        }
        net.step();
        for (to, id) in ids.into_iter().enumerate() {
            while at % plan.reads == 0
                && let Some(received) = net.ends[to].take(id, net.now)
            {
                came[1 - to].push((received.stream, received.data));
            }
        }
        let is_done = |from: usize| net.ends[from].unacknowledged(ids[from]) == 0;
        if came.iter().all(|came| came.len() >= plan.count) && is_done(0) && is_done(1) {
            for from in 0..2 {
                came[from].sort();
                expected[from].sort();
                assert!(
                    came[from] == expected[from],
                    "messages of end {from} came whole, once"
                );
            }
            return;
        }
    }
    let counts = came.map(|came| came.len());
    panic!("stuck: {counts:?} of {} came, {:?}", plan.count, net.events);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn sctp_03_and_27_no_message_is_split_or_stuck(plan in plans()) {
        run(&plan);
    }
}

#[test]
fn new_messages_wait_for_retransmissions() {
    let mut net = Net::of(settings, &[], STEP);
    let [ours, _] = net.connected();
    let longest = net.ends[0].longest(ours);
    net.outage = Duration::from_secs(3);
    for _ in 0..2 {
        let long = vec![1; longest];
        let sent = net.ends[0].send(ours, (1, Contents::Segment), long, net.now);
        assert_eq!(sent, Ok(()));
    }
    while sent_of(&net, 0, 1) < 3 {
        net.step();
    }
    // The first was sent again, and cwnd has no room for the second, but for a short one.
    let sent = net.ends[0].send(ours, (2, Contents::Segment), vec![2], net.now);
    assert_eq!(sent, Ok(()));
    net.outage = Duration::ZERO;
    while sent_of(&net, 0, 1) < 4 {
        assert_eq!(sent_of(&net, 0, 2), 0, "RFC 9260 §6.1, rule C");
        net.step();
    }
    for _ in 0..100 {
        net.step();
    }
    assert_eq!(net.ends[0].unacknowledged(ours), 0);
}

/// DATA chunks of each stream that an end has sent.
fn sent_of(net: &Net, end: usize, stream: u16) -> usize {
    let of_end = net.log.iter().filter(|(from, _)| *from == end);
    let is_meant = |bytes: &[u8]| {
        let packet = Packet::parse(bytes).unwrap();
        let data = packet.chunks().filter_map(|chunk| chunk.unwrap().data());
        data.filter(|data| data.stream == stream).count()
    };
    of_end.map(|(_, bytes)| is_meant(bytes)).sum()
}

#[test]
fn sctp_29_a_stream_has_limited_messages_in_flight() {
    let limited = |port| Settings {
        in_flight: 5,
        ..settings(port)
    };
    let mut net = Net::of(limited, &[], STEP);
    let [ours, theirs] = net.connected();
    for number in 0..20u8 {
        for stream in [1, 6] {
            let sent = net.ends[0].send(ours, (stream, Contents::Segment), vec![number], net.now);
            assert_eq!(sent, Ok(()));
        }
    }
    assert_eq!(
        net.ends[0].unacknowledged(ours),
        2 * 20 * 20,
        "each has a chunk of 20 bytes"
    );
    net.step();
    assert_eq!([1, 6].map(|stream| sent_of(&net, 0, stream)), [5, 5]);
    for _ in 0..100 {
        net.step();
    }
    assert_eq!([1, 6].map(|stream| sent_of(&net, 0, stream)), [20, 20]);
    assert_eq!(net.ends[0].unacknowledged(ours), 0);
    let came = std::iter::from_fn(|| net.ends[1].take(theirs, net.now));
    assert_eq!(came.count(), 40);
}

#[test]
fn sctp_29_half_of_the_numbers_may_be_in_flight() {
    let most = |in_flight| {
        let settings = Settings {
            in_flight,
            ..settings(1)
        };
        settings.most_in_flight()
    };
    assert_eq!([most(0), most(7), most(32767), most(32768)], [1, 7, 32767, 32767]);
    assert_eq!(settings(1).in_flight, 32767);
}
