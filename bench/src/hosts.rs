//! Between hosts, with the options that programs have by default: native connections, whose numbers
//! the programs exchange by themselves, and connections of rdma_cm; beside raw TCP, UCX and
//! libfabric over TCP.

use std::cell::OnceCell;
use std::rc::Rc;

use urnic_tests::Program;

use crate::place::Place;
use crate::raw::Latency;
use crate::table::{Aim, Measured, Row, tried};
use crate::{calls, libfabric, ours, raw, ucx};

/// An operation, perftest's programs for it, and the most that its latency may be of raw TCP's.
struct Operation {
    what: &'static str,
    latency: &'static str,
    bandwidth: &'static str,
    /// Measured requests.
    count: u32,
    at_most: f64,
}

/// The target of perftest's Writes spins on its memory.
const OPERATIONS: [Operation; 3] = [
    Operation {
        what: "Send",
        latency: "ib_send_lat",
        bandwidth: "ib_send_bw",
        count: 20_000,
        at_most: 1.3,
    },
    Operation {
        what: "Write",
        latency: "ib_write_lat",
        bandwidth: "ib_write_bw",
        count: 3_000,
        at_most: 1.5,
    },
    Operation {
        what: "Read",
        latency: "ib_read_lat",
        bandwidth: "ib_read_bw",
        count: 10_000,
        at_most: 2.0,
    },
];

/// What a p99 may be of raw TCP's.
const P99: f64 = 3.0;

/// How a connection is made, and perftest's option for it.
const CONNECTIONS: [(&str, &str); 2] = [("native", ""), ("rdma_cm", "-R")];

/// Sizes of streams, and messages of a run.
const STREAMS: [(&str, &str); 2] = [("64 KiB", "-s 65536 -n 16000"), ("1 MiB", "-s 1048576 -n 1000")];

/// Streams of raw TCP: iperf3's size of a write, and so many writes.
const STREAM: (usize, u64) = (131_072, 8_000);

/// The same over the [far](Place::far) link: the size of a message, and messages.
const FAR_STREAM: (usize, u64) = (65_536, 800);

/// The processors with which no thread of the two ends waits for one: each end has a thread that
/// spins and the device's.
const PROCESSORS: usize = 4;

/// Figures of a run: ours, and the other one if there is one.
type Figures = Vec<(Measured<f64>, Option<Measured<f64>>)>;

/// Rows that one run fills.
struct Group {
    rows: Vec<Row>,
    /// A count, which is the same in each round.
    is_count: bool,
    measure: Box<dyn Fn() -> Figures>,
}

/// The rows between hosts.
pub(crate) struct Hosts {
    groups: Vec<Group>,
}

impl Hosts {
    /// The rows that are `wanted` by their names, between the ends of this place.
    pub(crate) fn new(place: &Place, wanted: impl Fn(&str) -> bool) -> Self {
        let pinned = place.pinned();
        let mut groups = Vec::new();
        for (pin, place) in [("", Ok(place.clone())), (", pinned", pinned.clone())] {
            for operation in &OPERATIONS {
                for connection in CONNECTIONS {
                    groups.push(latency(&place, &pinned, pin, operation, connection));
                }
            }
            groups.extend(streams(&place, pin, CONNECTIONS[0]));
        }
        groups.push(beside_others(&pinned));
        groups.extend(streams(&Ok(place.clone()), "", CONNECTIONS[1]));
        groups.extend(with_cubic(place));
        groups.extend(over_sctp(place));
        groups.extend(over_roce(place));
        groups.push(connections(place));
        groups.push(many_connections(place));
        groups.push(start_up(place));
        groups.extend(far(place));
        groups.extend(OPERATIONS.map(|operation| system_calls(place, operation)));
        groups.retain(|group| group.rows.iter().any(|row| wanted(row.what())));
        Self { groups }
    }

    /// Measures a round. Each group has urnic and the other, one directly after the other.
    pub(crate) fn measure(&mut self, round: usize) {
        for group in &mut self.groups {
            if group.is_count && round > 1 {
                continue;
            }
            let figures = (group.measure)();
            for (row, (ours, theirs)) in group.rows.iter_mut().zip(figures) {
                row.add(ours, theirs);
            }
        }
    }

    /// The rows with their figures.
    pub(crate) fn into_rows(self) -> Vec<Row> {
        self.groups.into_iter().flat_map(|group| group.rows).collect()
    }
}

/// A group whose figures come from the runs at a place, if there is such a place.
fn group(place: &Measured<Place>, rows: Vec<Row>, figures: impl Fn(&Place) -> Figures + 'static) -> Group {
    let (place, count) = (place.clone(), rows.len());
    Group {
        rows,
        is_count: false,
        measure: Box::new(move || match &place {
            Ok(place) => figures(place),
            Err(reason) => (0..count)
                .map(|_| (Err(reason.clone()), Some(Err(reason.clone()))))
                .collect(),
        }),
    }
}

/// Three rows of latency. Raw TCP always has processors of its own: where the scheduler puts both
/// of its ends on one, each waits for the other's time slice.
fn latency(
    place: &Measured<Place>,
    pinned: &Measured<Place>,
    pin: &str,
    operation: &'static Operation,
    (connection, option): (&'static str, &'static str),
) -> Group {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let has_aim = operation.what != "Write" || (pin.is_empty() && processors >= PROCESSORS);
    let at_most = |limit| if has_aim { Aim::AtMost(limit) } else { Aim::Report };
    let row = |figure: &str, aim| {
        let what = format!("hosts: {} 64 B, {connection}{pin}, {figure}", operation.what);
        Row::new(&what, "us", "raw TCP, spinning, pinned", aim)
    };
    let pinned = pinned.clone();
    let rows = vec![
        row("median", at_most(operation.at_most)),
        row("p99", at_most(P99)),
        row("mean", Aim::Report),
    ];
    group(place, rows, move |place| {
        let options = format!("-s 64 -n {} {option}", operation.count);
        let ours = tried(|| ours::latency(place, operation.latency, &options));
        let theirs = tried(|| Ok(raw::ping_pong(pinned.as_ref().map_err(Clone::clone)?, "spin", 64)));
        let figures: [fn(&Latency) -> f64; 3] = [|of| of.median, |of| of.p99, |of| of.mean];
        let of = |latency: &Measured<Latency>, figure| latency.as_ref().map(figure).map_err(Clone::clone);
        figures
            .map(|figure| (of(&ours, figure), Some(of(&theirs, figure))))
            .into()
    })
}

/// A Send beside what other libraries make of TCP, and beside a ping-pong with as many segments as
/// a Send has that is confirmed by an empty Read.
fn beside_others(pinned: &Measured<Place>) -> Group {
    let row = |figure: &str, against| {
        let what = format!("hosts: Send 64 B, native, pinned, {figure}");
        Row::new(&what, "us", against, Aim::Report)
    };
    let rows = vec![
        row("median", "raw TCP, two segments"),
        row("median", "UCX over TCP, tag_lat"),
        row("mean", "libfabric tcp, fi_pingpong"),
    ];
    group(pinned, rows, |place| {
        let ours = tried(|| ours::latency(place, "ib_send_lat", "-s 64 -n 20000"));
        let two = tried(|| Ok(raw::ping_pong(place, "two", 64).median));
        let ucx = tried(|| ucx::latency(place, &ucx::over_tcp(place), 64));
        let libfabric = tried(|| libfabric::mean_latency(place));
        let median = ours.clone().map(|ours| ours.median);
        vec![
            (median.clone(), Some(two)),
            (median, Some(ucx)),
            (ours.map(|ours| ours.mean), Some(libfabric)),
        ]
    })
}

/// Bandwidths and rates of messages.
fn streams(
    place: &Measured<Place>,
    pin: &str,
    (connection, option): (&'static str, &'static str),
) -> Vec<Group> {
    let mut groups = Vec::new();
    for operation in &OPERATIONS {
        let name = format!("hosts: {} {{}}, {connection}{pin}", operation.what);
        for (size, options) in STREAMS {
            let what = name.replace("{}", size);
            let row = |against, aim| Row::new(&what, "MiB/s", against, aim);
            let rows = vec![
                row("raw TCP, as iperf3", Aim::AtLeast(1.2)),
                row("raw TCP, TCP_NODELAY", Aim::Report),
            ];
            groups.push(group(place, rows, move |place| {
                let options = format!("{options} {option}");
                let ours = tried(|| ours::bandwidth(place, operation.bandwidth, &options));
                let stream = |mode| tried(move || Ok(raw::stream(place, mode, STREAM.0, STREAM.1)));
                vec![
                    (ours.clone(), Some(stream("stream"))),
                    (ours, Some(stream("nodelay"))),
                ]
            }));
        }
        let row = |against, aim| Row::new(&name.replace("{}", "64 B"), "M/s", against, aim);
        let is_send = operation.what == "Send";
        let ucx_row = is_send.then(|| row("UCX over TCP, tag_bw", Aim::Report));
        let mut rows = vec![row("2.5 M/s", Aim::AtLeast(1.0))];
        rows.extend(ucx_row);
        let count = if operation.what == "Read" {
            200_000
        } else {
            1_000_000
        };
        groups.push(group(place, rows, move |place| {
            let options = format!("-s 64 -n {count} {option}");
            let ours = tried(|| ours::rate(place, operation.bandwidth, &options));
            let mut figures = vec![(ours.clone(), Some(Ok(2.5)))];
            if is_send {
                let ucx = ucx::over_tcp(place);
                let theirs = tried(|| ucx::messages(place, &ucx, 64, 100_000));
                figures.push((ours, Some(theirs)));
            }
            figures
        }));
    }
    groups
}

/// Streams whose congestion control is CUBIC: that of the host may be another, as BBR, which takes
/// the pauses of a receiver for those of the network.
fn with_cubic(place: &Place) -> Vec<Group> {
    let is_network = place.is_two_hosts();
    let made = Rc::new(OnceCell::new());
    let group = |(size, options): (&str, &'static str)| {
        let what = format!("hosts: Send {size}, native, CUBIC");
        let row = |against| Row::new(&what, "MiB/s", against, Aim::Report);
        let made = Rc::clone(&made);
        let measure = move || {
            let make = || match is_network {
                true => tried(Place::with_cubic),
                false => Err("TCP over loopback is that of the host".to_owned()),
            };
            let place = made.get_or_init(make).as_ref().map_err(Clone::clone);
            let ours = tried(|| ours::bandwidth(place.clone()?, "ib_send_bw", options));
            let stream = |mode| tried(|| Ok(raw::stream(place.clone()?, mode, STREAM.0, STREAM.1)));
            vec![
                (ours.clone(), Some(stream("stream"))),
                (ours, Some(stream("nodelay"))),
            ]
        };
        Group {
            rows: vec![row("raw TCP, as iperf3"), row("raw TCP, TCP_NODELAY")],
            is_count: false,
            measure: Box::new(measure),
        }
    };
    STREAMS.map(group).into()
}

/// DDP over SCTP, compared with DDP over TCP.
fn over_sctp(place: &Place) -> [Group; 2] {
    let sctp = place.over_sctp();
    let row = |what: &str, unit| {
        let what = format!("hosts: Send {what}, native, over SCTP");
        Row::new(&what, unit, "the same over TCP", Aim::Report)
    };
    let group = |row, measure: fn(&Place) -> Measured<f64>| {
        let sctp = sctp.clone();
        group(&Ok(place.clone()), vec![row], move |tcp| {
            vec![(tried(|| measure(&sctp)), Some(tried(|| measure(tcp))))]
        })
    };
    [
        group(row("64 B", "us"), |place| {
            Ok(ours::latency(place, "ib_send_lat", "-s 64 -n 5000")?.median)
        }),
        group(row("64 KiB", "MiB/s"), |place| {
            ours::bandwidth(place, "ib_send_bw", "-s 65536 -n 2000")
        }),
    ]
}

/// Datagrams of raw UDP: as long as the packets of RoCE v2 with the path MTU that perftest takes
/// where packets of Ethernet have 1500 bytes, and so many.
const DATAGRAMS: (usize, u64) = (1040, 400_000);

/// RoCE v2 compared with raw UDP.
fn over_roce(place: &Place) -> Vec<Group> {
    let roce = place.over_roce();
    let mut groups = Vec::new();
    for operation in &OPERATIONS {
        let what = |size| format!("hosts: {} {size}, RoCE v2", operation.what);
        let aim = match operation.what {
            "Send" => Aim::AtMost(1.3),
            _ => Aim::Report,
        };
        let rows = vec![Row::new(&what("64 B"), "us", "raw UDP, spinning", aim)];
        let ours = roce.clone();
        groups.push(group(&Ok(place.clone()), rows, move |place| {
            let latency = tried(|| ours::latency(&ours, operation.latency, "-s 64 -n 5000 -x 3"));
            let theirs = tried(|| Ok(raw::ping_pong(place, "udp", 64).median));
            vec![(latency.map(|latency| latency.median), Some(theirs))]
        }));
        for (size, options) in [("64 KiB", "-s 65536 -n 4000"), ("1 MiB", "-s 1048576 -n 250")] {
            let rows = vec![Row::new(&what(size), "MiB/s", "raw UDP, GSO", Aim::AtLeast(0.8))];
            let ours = roce.clone();
            groups.push(group(&Ok(place.clone()), rows, move |place| {
                let options = format!("{options} -x 3");
                let bandwidth = tried(|| ours::bandwidth(&ours, operation.bandwidth, &options));
                let theirs = tried(|| Ok(raw::stream(place, "segments", DATAGRAMS.0, DATAGRAMS.1)));
                vec![(bandwidth, Some(theirs))]
            }));
        }
    }
    groups
}

/// Connections of rdma_cm, one after the other.
fn connections(place: &Place) -> Group {
    let against = "raw TCP connect + RTT";
    let rows = vec![
        Row::new("hosts: rdma_connect, median", "us", against, Aim::AtMost(2.5)),
        Row::new("hosts: rdma_cm connections", "1/s", against, Aim::AtLeast(0.4)),
    ];
    group(&Ok(place.clone()), rows, |place| {
        let ours = tried(|| ours::cm_connections(place));
        let theirs = tried(|| Ok(raw::connects(place)));
        vec![
            (
                ours.clone().map(|ours| ours.median),
                Some(theirs.clone().map(|theirs| theirs.median)),
            ),
            (
                ours.map(|ours| ours.per_second),
                Some(theirs.map(|theirs| theirs.per_second)),
            ),
        ]
    })
}

/// A thousand native connections at once.
fn many_connections(place: &Place) -> Group {
    let what = "hosts: 1,000 native connections";
    let rows = vec![Row::new(what, "1/s", "raw TCP connect + RTT", Aim::Report)];
    group(&Ok(place.clone()), rows, |place| {
        let ours = tried(|| ours::connections(place)).map(|ours| ours.per_second);
        let theirs = tried(|| Ok(raw::connects(place)));
        vec![(ours, Some(theirs.map(|theirs| theirs.per_second)))]
    })
}

/// The start-up of a job with ranks on both hosts.
fn start_up(place: &Place) -> Group {
    let what = "hosts: start-up of 8 ranks";
    let rows = vec![Row::new(what, "ms", "the same by TCP sockets", Aim::Report)];
    group(&Ok(place.clone()), rows, |place| {
        let run = |queue_pairs| tried(move || ours::all_to_all(place, queue_pairs));
        vec![(run(true), Some(run(false)))]
    })
}

/// Streams over a network that delays and loses packets, which is made when it is needed first. On
/// one host urnic delays its connections by itself, and loses nothing; nothing delays raw TCP.
fn far(place: &Place) -> Vec<Group> {
    let (size, count) = FAR_STREAM;
    let options = format!("-s {size} -n {count}");
    let is_network = place.is_two_hosts();
    let (network, against) = match is_network {
        true => ("20 ms, loss 0.1 %", "raw TCP, as iperf3"),
        false => ("20 ms by --faults", ""),
    };
    let here = Ok(place.delayed());
    let made = Rc::new(OnceCell::new());
    let group = |operation: Operation| {
        let what = format!("hosts: {} 64 KiB, {network}", operation.what);
        let rows = vec![Row::new(&what, "MiB/s", against, Aim::Report)];
        let (made, here, options) = (Rc::clone(&made), here.clone(), options.clone());
        let measure = move || {
            let make = || {
                if is_network {
                    tried(Place::far)
                } else {
                    here.clone()
                }
            };
            let place = made.get_or_init(make).clone();
            let ours = tried(|| ours::bandwidth(&place.clone()?, operation.bandwidth, &options));
            let theirs = is_network.then(|| tried(|| Ok(raw::stream(&place?, "stream", size, count))));
            vec![(ours, theirs)]
        };
        Group {
            rows,
            is_count: false,
            measure: Box::new(measure),
        }
    };
    OPERATIONS.map(group).into()
}

/// System calls at both ends of a connection for each message: of the ping-pongs of Sends and
/// Writes, or for a Read.
fn system_calls(place: &Place, operation: Operation) -> Group {
    let what = format!("hosts: {} 64 B, native, system calls", operation.what);
    let is_read = operation.what == "Read";
    let against = match is_read {
        true => "raw TCP, there and back",
        false => "raw TCP, spinning",
    };
    let rows = vec![Row::new(&what, "calls", against, Aim::Report)];
    // An exchange has two messages.
    let messages = if is_read { 1.0 } else { 2.0 };
    let counted = group(&Ok(place.clone()), rows, move |place| {
        let ours = |count| Program::new(operation.latency).line(&format!("-d urnic0 -F -s 64 -n {count}"));
        let theirs = |count| raw::program(&format!("spin 64 {count}"));
        let each = |calls: Measured<f64>| calls.map(|calls| calls / messages);
        vec![(
            each(tried(|| calls::per_message(place, ours))),
            Some(each(tried(|| calls::per_message(place, theirs)))),
        )]
    });
    Group {
        is_count: true,
        ..counted
    }
}
