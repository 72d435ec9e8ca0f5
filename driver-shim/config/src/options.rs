//! The table of options, from which help, file, list and variables are derived.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use toml::Value;
use urnic_faults::Plan;
use urnic_process::log::LogFilter;
use urnic_wire::mpa::startup::RtrKey;

use crate::error::{Error, Source};
use crate::names::{MAX_DEVICES, is_name};
use crate::settings::{
    CmPorts, Completion, Config, Identity, Llp, Placement, RealDevices, SameHost, SctpTransport, Strict,
    VfioApi, Wire,
};
use crate::values::{
    device, either, milliseconds, number, path, ports, rtr_frame, rtr_types, seconds, show_path,
    show_rtr_types, truth,
};

/// One option.
#[derive(Debug)]
pub struct Opt {
    /// The key: section and name, joined by dots.
    pub key: &'static str,
    /// The accepted values, in words that fit both into help and after "it takes".
    pub takes: &'static str,
    /// The purpose of the option.
    pub help: &'static str,
    /// Reads the text into the configuration; `None` if the text does not fit [`Opt::takes`].
    set: fn(&mut Config, &str) -> Option<()>,
    /// The option's value in a configuration, in the form in which a user writes it.
    show: fn(&Config) -> String,
}

impl Opt {
    /// The environment variable that sets the option.
    pub fn variable(&self) -> String {
        format!("URNIC_{}", self.key.replace('.', "_").to_uppercase())
    }

    /// The option's value in `config`, in the form in which a user writes it.
    pub fn value(&self, config: &Config) -> String {
        (self.show)(config)
    }

    pub(super) fn set_text(&self, config: &mut Config, text: &str, at: Source) -> Result<(), Error> {
        (self.set)(config, text.trim()).ok_or_else(|| Error::Value {
            key: self.key,
            value: text.escape_debug().to_string(),
            expected: self.takes.to_owned(),
            at,
        })
    }

    /// Sets the option from a TOML value, with the effect of the value's text.
    pub(super) fn set_value(&self, config: &mut Config, value: &Value, at: Source) -> Result<(), Error> {
        self.set_text(config, &text_of(value), at)
    }

    /// Whether a `[[peer]]` may set the option.
    pub fn is_per_peer(&self) -> bool {
        ["llp", "wire"].contains(&self.key) || self.key.starts_with("mpa.") || self.key.starts_with("cm.")
    }
}

/// The text of a TOML value; an array is its elements, joined by commas.
pub(super) fn text_of(value: &Value) -> String {
    match value {
        Value::Array(elements) => elements.iter().map(bare).collect::<Vec<_>>().join(","),
        value => bare(value),
    }
}

/// The text of a TOML value, of a string without quotes.
pub(super) fn bare(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        // With a point: a whole number is not written so.
        Value::Float(number) => format!("{number:?}"),
        Value::Boolean(truth) => truth.to_string(),
        Value::Datetime(time) => time.to_string(),
        // No option takes these.
        Value::Array(_) | Value::Table(_) => format!("{value:?}"),
    }
}

/// Every option, in the order in which help shows them.
pub const OPTIONS: &[Opt] = &[
    Opt {
        key: "device",
        takes: "inproc, vfio-user:PATH or vfio:DDDD:BB:DD.F",
        help: "The RNIC to drive: the model in this process, one served at a vfio-user socket, a PCI function.",
        set: |c, text| device(text).map(|v| c.device = v),
        show: |c| c.device.to_string(),
    },
    Opt {
        key: "name",
        takes: "1 to 63 letters, digits, _, - and ., of which the first is no - or .",
        help: "The name of the device that programs see, for programs that expect a certain name. With several devices it is the first name, and \
               the number at its end is counted up: mlx5_0, mlx5_1.",
        set: |c, text| is_name(text).then(|| c.name = text.to_owned()),
        show: |c| c.name.clone(),
    },
    Opt {
        key: "devices",
        takes: "a number from 1 to 64",
        help: "The number of devices that programs see, each with its own queue pairs, threads and counters. Each has all addresses of the host; \
               to give each its own addresses, write [[device]] sections in the file.",
        set: |c, text| number(text, 1..=MAX_DEVICES).map(|v| c.devices = v),
        show: |c| c.each_device().len().to_string(),
    },
    Opt {
        key: "log",
        takes: "a level (off, error, warn, info, debug, trace), or levels of modules such as urnic_cm::native=debug",
        help: "What to log on standard error: a level (error, warn, info, debug, trace, off), or levels per module. \
               debug logs each step of each connection.",
        set: |c, text| LogFilter::parse(text).map(|_| c.log = text.to_owned()),
        show: |c| c.log.clone(),
    },
    Opt {
        key: "refusals",
        takes: "true or false",
        help: "Warn when a verb is refused, once for each place in the program: which argument is at fault, and where the program made the call. \
               What programs try on purpose, such as ever longer inline data, has no warning. `urnic stat --json` shows the last refusal always.",
        set: |c, text| truth(text).map(|v| c.refusals = v),
        show: |c| c.refusals.to_string(),
    },
    Opt {
        key: "pcap",
        takes: "a file name, or nothing",
        help: "Capture the wire into this pcapng file, for Wireshark. %p stands for the process number; without it the first process with a \
               connection gets the file, and each further process a file in the same folder with its number in the name. Connections of a device \
               in another process are captured there: `urnic serve --pcap`.",
        set: |c, text| path(text).map(|v| c.pcap = v),
        show: |c| show_path(c.pcap.as_deref()),
    },
    Opt {
        key: "report",
        takes: "a file name, or nothing",
        help: "When a process exits, append one line of JSON to this file: its devices with their counters, failed completions by operation and \
               cause, warnings, and findings of `strict`. %p stands for the process number. A process that is killed, or ends by _exit, writes \
               none.",
        set: |c, text| path(text).map(|v| c.report = v),
        show: |c| show_path(c.report.as_deref()),
    },
    Opt {
        key: "trace",
        takes: "a file name, or nothing",
        help: "Write the life of each work request to this file: when it was posted, seen by the device, completed and polled; for Perfetto, \
               Chrome and `urnic trace`. %p stands for the process number; without it processes share the file. It is complete JSON at any time.",
        set: |c, text| path(text).map(|v| c.trace = v),
        show: |c| show_path(c.trace.as_deref()),
    },
    Opt {
        key: "strict",
        takes: "off, on or error",
        help: "Check how the program uses verbs, and report each finding once for each place in the program, with a backtrace: a buffer that \
               changes while it is sent, keys of memory that is not registered, completion queues that are too small, objects that are left, \
               and more. error makes the exit status 86 if there was a finding. Programs run slower.",
        set: |c, text| Strict::named(text).map(|v| c.strict = v),
        show: |c| c.strict.name().to_owned(),
    },
    Opt {
        key: "suppressions",
        takes: "a file name, or nothing",
        help: "Findings of `strict` to leave out: one on each line, as a rule's name, or a rule's name and a part of its text or backtrace. \
               # begins a comment.",
        set: |c, text| path(text).map(|v| c.suppressions = v),
        show: |c| show_path(c.suppressions.as_deref()),
    },
    Opt {
        key: "faults",
        takes: "faults such as \"reset after=64k nth=2; drop p=0.01; seed=7\", none, or nothing",
        help: "Faults that occur on purpose, to test how a program reacts: KIND KEY=VALUE …, with semicolons between faults. `urnic fault --list` \
               has the kinds. none: no fault yet, but `urnic fault PID` can add faults. The flag also takes @FILE and @SCENARIO. Connections use \
               TCP then, as with same_host=off.",
        set: |c, text| {
            Plan::check(text).ok()?;
            c.faults = (!text.is_empty()).then(|| text.to_owned());
            Some(())
        },
        show: |c| c.faults.clone().unwrap_or_default(),
    },
    Opt {
        key: "identity",
        takes: "iwarp or roce",
        help: "The kind of device that programs see: an iWARP RNIC, or a RoCE v2 NIC, for programs that accept nothing else. The wire is iWARP in \
               both cases, unless `wire` says otherwise, and ends of both kinds connect to each other.",
        set: |c, text| Identity::named(text).map(|v| c.identity = v),
        show: |c| c.identity.name().to_owned(),
    },
    Opt {
        key: "real_devices",
        takes: "first, last or hidden",
        help: "The real RDMA devices of the machine: programs see them before the device in lists, after it, or not at all (the flag --only). \
               Many programs take the first device of the list.",
        set: |c, text| RealDevices::named(text).map(|v| c.real_devices = v),
        show: |c| c.real_devices.name().to_owned(),
    },
    Opt {
        key: "completion",
        takes: "auto, taken or delivered",
        help: "When a Send, Write or immediate completes: when TCP has taken it (taken), or when the peer has placed or delivered it (delivered), \
               which costs a zero-length RDMA Read for each batch of requests. auto is delivered on connections made by exchanged QP numbers, \
               whose programs expect InfiniBand, and on all connections with identity=roce; taken on rdma_cm connections of an iWARP RNIC.",
        set: |c, text| Completion::named(text).map(|v| c.completion = v),
        show: |c| c.completion.name().to_owned(),
    },
    Opt {
        key: "same_host",
        takes: "auto or off",
        help: "How the device in the process reaches peers on the same host. auto passes the bytes of connections with another urnic through \
               shared memory, after the usual start-up over TCP, and between processes of one user also Writes, Reads and datagrams; off leaves \
               them to TCP and UDP. With pcap it is off, so that the capture has all bytes.",
        set: |c, text| SameHost::named(text).map(|v| c.same_host = v),
        show: |c| c.same_host.name().to_owned(),
    },
    Opt {
        key: "llp",
        takes: "tcp or sctp",
        help: "The lower layer of connections, which the peer must have, too: MPA over TCP, or SCTP (RFC 5043), in UDP unless sctp.transport says otherwise. A listener has each that \
               the option, or the same of a [[peer]] section, names, at one number of port. With sctp bytes go over SCTP on one host, \
               too, instead of through shared memory, and queue pairs of kind UC stay with TCP. mpa.revision and the timeouts of mpa apply to SCTP, \
               too.",
        set: |c, text| Llp::named(text).map(|v| c.llp = v),
        show: |c| c.llp.name().to_owned(),
    },
    Opt {
        key: "wire",
        takes: "auto, iwarp or roce",
        help: "The protocol of queue pairs with identity=roce: iWARP (auto and iwarp), and datagrams over a UDP port each; or RoCE v2 over UDP port \
               4791, which rdma_rxe of Linux and adapters speak. auto is the same as iwarp: RoCE v2 is for the peers of [[peer]] sections with \
               wire=roce. A connected queue pair gets its wire from its peer's address at the change to RTR; one of kind UD has that of the \
               option. A listener takes iWARP, and RoCE v2 if a section names it; with roce as the option only RoCE v2.",
        set: |c, text| Wire::named(text).map(|v| c.wire = v),
        show: |c| c.wire.name().to_owned(),
    },
    Opt {
        key: "placement",
        takes: "in-order or last-first",
        help: "The order in which the device in the process places the bytes of peers' RDMA Writes. last-first places the last byte of each \
               segment (64 KiB of a Write, or less) some 20 to 100 us before the others: a program that polls the last byte, and assumes that the \
               others are there, finds old bytes. RDMA does not promise the order. Connections use TCP then, as with same_host=off.",
        set: |c, text| Placement::named(text).map(|v| c.placement = v),
        show: |c| c.placement.name().to_owned(),
    },
    Opt {
        key: "busy_poll.limit_us",
        takes: "microseconds, 0 to 10000",
        help: "How long the thread of the device in the process polls a connection for the next RDMA Write, Read or atomic of the peer before it \
               sleeps. It does so while they arrive at intervals up to this limit, the program does not poll its completion queues, and a \
               processor is free. 0: the thread always sleeps, which takes some 10 us longer for each message.",
        set: |c, text| {
            number(text, 0..=10_000).map(|v: u32| c.busy_poll.limit = Duration::from_micros(v.into()))
        },
        show: |c| c.busy_poll.limit.as_micros().to_string(),
    },
    Opt {
        key: "busy_poll.share",
        takes: "percent, 1 to 100",
        help: "The share of one processor that the threads of all devices of a process may spend together on that.",
        set: |c, text| number(text, 1..=100).map(|v| c.busy_poll.share = v),
        show: |c| c.busy_poll.share.to_string(),
    },
    Opt {
        key: "mpa.crc",
        takes: "true or false",
        help: "Request CRC32C on every FPDU. A connection has CRCs if either side requests them; without them only TCP's checksum protects the \
               data (RFC 5044 §4.4).",
        set: |c, text| truth(text).map(|v| c.mpa.crc = v),
        show: |c| c.mpa.crc.to_string(),
    },
    Opt {
        key: "mpa.markers",
        takes: "true or false",
        help: "Request markers in the data that the peer sends. This side sends markers if the peer requests them.",
        set: |c, text| truth(text).map(|v| c.mpa.markers = v),
        show: |c| c.mpa.markers.to_string(),
    },
    Opt {
        key: "mpa.revision",
        takes: "1 or 2",
        help: "Highest MPA revision: 1 is RFC 5044 alone, 2 adds RFC 6581 (read limits, RTR).",
        set: |c, text| number(text, 1..=2).map(|v| c.mpa.revision = v),
        show: |c| c.mpa.revision.to_string(),
    },
    Opt {
        key: "mpa.startup_timeout_initiator_s",
        takes: "seconds, 1 to 3600",
        help: "How long the initiator waits for the whole start-up before it closes the TCP connection.",
        set: |c, text| seconds(text).map(|v| c.mpa.startup_timeout_initiator = v),
        show: |c| c.mpa.startup_timeout_initiator.as_secs().to_string(),
    },
    Opt {
        key: "mpa.startup_timeout_responder_s",
        takes: "seconds, 1 to 3600",
        help: "How long the responder waits for a complete Request before it closes.",
        set: |c, text| seconds(text).map(|v| c.mpa.startup_timeout_responder = v),
        show: |c| c.mpa.startup_timeout_responder.as_secs().to_string(),
    },
    Opt {
        key: "mpa.rtr_timeout_s",
        takes: "seconds, 1 to 3600",
        help: "How long the responder, after its Reply, waits for the first FPDU. It may not send before that.",
        set: |c, text| seconds(text).map(|v| c.mpa.rtr_timeout = v),
        show: |c| c.mpa.rtr_timeout.as_secs().to_string(),
    },
    Opt {
        key: "mpa.rtr_types",
        takes: "one or more of send, write, read, with commas",
        help: "The zero-length messages that may open a connection made with rdma_cm (RFC 6581 §9.2); native connections use a Write.",
        set: |c, text| rtr_types(text).map(|v| c.mpa.rtr_types = v),
        show: |c| show_rtr_types(c.mpa.rtr_types),
    },
    Opt {
        key: "mpa.peer_to_peer",
        takes: "true or false",
        help: "As an initiator with rdma_cm, request an RTR exchange, so that the responder may send first (RFC 6581 §9.2).",
        set: |c, text| truth(text).map(|v| c.mpa.peer_to_peer = v),
        show: |c| c.mpa.peer_to_peer.to_string(),
    },
    Opt {
        key: "mpa.strict_rtr",
        takes: "true or false",
        help: "As a responder with rdma_cm, accept only the agreed RTR as the first message; another message ends the connection. Otherwise \
               another message is counted, and opens the connection too.",
        set: |c, text| truth(text).map(|v| c.mpa.strict_rtr = v),
        show: |c| c.mpa.strict_rtr.to_string(),
    },
    Opt {
        key: "mpa.strict_depths",
        takes: "true or false",
        help: "Reject an rdma_cm initiator that accepts fewer RDMA Reads than the accepting program requests. Otherwise fewer Reads are sent.",
        set: |c, text| truth(text).map(|v| c.mpa.strict_depths = v),
        show: |c| c.mpa.strict_depths.to_string(),
    },
    Opt {
        key: "mpa.rtr_frame",
        takes: "off, hex or text",
        help: "Use the RTR frame proposed in 2007 on rdma_cm connections of revision 1, with this spelling of its key; Requests then have \
               revision 1. Only for peers that are known to support it.",
        set: |c, text| rtr_frame(text).map(|v| c.mpa.rtr_frame = v),
        show: |c| {
            let name = match c.mpa.rtr_frame {
                None => "off",
                Some(RtrKey::Hex) => "hex",
                Some(RtrKey::Text) => "text",
            };
            name.to_owned()
        },
    },
    Opt {
        key: "sctp.transport",
        takes: "udp, kernel or kernel-udp",
        help: "What carries the packets of llp=sctp. udp: UDP, by a library in the process, without privileges. kernel: IP, by the kernel's SCTP \
               sockets (the module sctp), for peers without SCTP over UDP; it is faster, but pcap and faults of packets do not act on it. \
               kernel-udp: UDP, by the kernel, to the UDP port with the number of the peer's SCTP port; net.sctp.udp_port is the kernel's own.",
        set: |c, text| SctpTransport::named(text).map(|v| c.sctp.transport = v),
        show: |c| c.sctp.transport.name().to_owned(),
    },
    Opt {
        key: "native.listen",
        takes: "an IPv4 or IPv6 address, or any",
        help: "The address to listen at for connections made by exchanged QP numbers.",
        set: |c, text| either(text, |t| t.parse::<IpAddr>().ok()).map(|v| c.native.listen = v),
        show: |c| {
            c.native
                .listen
                .map_or_else(|| "any".to_owned(), |v| v.to_string())
        },
    },
    Opt {
        key: "native.port_range",
        takes: "FIRST-LAST, both from 1 to 65535, or any",
        help: "TCP ports to listen at, for firewalls; each process takes one per 256 QPs. With llp=sctp they are UDP ports.",
        set: |c, text| either(text, ports).map(|v| c.native.port_range = v),
        show: |c| {
            let shown = |r: &RangeInclusive<u16>| format!("{}-{}", r.start(), r.end());
            c.native
                .port_range
                .as_ref()
                .map_or_else(|| "any".to_owned(), shown)
        },
    },
    Opt {
        key: "native.call_grace_ms",
        takes: "milliseconds, 0 to 600000",
        help: "If no connection arrives for this time, the responder initiates as well (one-way firewalls, NAT).",
        set: |c, text| milliseconds(text).map(|v| c.native.call_grace = v),
        show: |c| c.native.call_grace.as_millis().to_string(),
    },
    Opt {
        key: "native.fin_grace_ms",
        takes: "milliseconds, 0 to 600000",
        help: "How long posted receives wait, after an orderly end of the stream by the peer, before they are flushed. Also how long requests \
               that only that peer could complete wait before they fail, if the peer's FIN follows a message for which no receive is posted.",
        set: |c, text| milliseconds(text).map(|v| c.native.fin_grace = v),
        show: |c| c.native.fin_grace.as_millis().to_string(),
    },
    Opt {
        key: "native.max_parked",
        takes: "a number from 1 to 65536",
        help: "The number of Requests for QPs that are not ready yet that a process parks at most.",
        set: |c, text| number(text, 1..=65_536).map(|v: u32| c.native.max_parked = v as usize),
        show: |c| c.native.max_parked.to_string(),
    },
    Opt {
        key: "native.park_timeout_ms",
        takes: "milliseconds, 0 to 600000",
        help: "How long such a Request is parked.",
        set: |c, text| milliseconds(text).map(|v| c.native.park_timeout = v),
        show: |c| c.native.park_timeout.as_millis().to_string(),
    },
    Opt {
        key: "native.allow_nat",
        takes: "true or false",
        help: "Accept connections made by exchanged QP numbers from any address; otherwise only from that of the peer's GID.",
        set: |c, text| truth(text).map(|v| c.native.allow_nat = v),
        show: |c| c.native.allow_nat.to_string(),
    },
    Opt {
        key: "cm.rnr_grace_ms",
        takes: "milliseconds, 0 to 600000",
        help: "On rdma_cm connections, how long a Send may wait for a posted receive before the connection is terminated. 0 is the rule of RFC \
               5041, except that a Send waits one second for the very first receive.",
        set: |c, text| milliseconds(text).map(|v| c.cm.rnr_grace = v),
        show: |c| c.cm.rnr_grace.as_millis().to_string(),
    },
    Opt {
        key: "cm.ack_timeout",
        takes: "0 to 31",
        help: "On rdma_cm connections, the Local ACK Timeout if the program sets none (RDMA_OPTION_ID_ACK_TIMEOUT): requests fail if the peer's \
               host is silent for 4.096 us * 2^N * (retry count + 1), 8.6 s with 18 and 7 retries. 0: only TCP itself gives up.",
        set: |c, text| {
            let code = text.parse().ok().filter(|code| *code < 32)?;
            c.cm.ack_timeout = code;
            Some(())
        },
        show: |c| c.cm.ack_timeout.to_string(),
    },
    Opt {
        key: "cm.ports",
        takes: "auto, tcp or own",
        help: "Whether a listener of rdma_cm has the TCP port of its number (tcp), or leaves it to other programs (own): then it has the UDP port \
               of this number, where initiators query its TCP port. auto is own with identity=roce, as on a RoCE NIC, and tcp with \
               identity=iwarp. Other implementations of iWARP reach a listener only with tcp.",
        set: |c, text| CmPorts::named(text).map(|v| c.cm.ports = v),
        show: |c| c.cm.ports.name().to_owned(),
    },
    Opt {
        key: "vfio.api",
        takes: "auto, cdev, group or noiommu",
        help: "How to open a PCI function: by its own file and iommufd (cdev), by its group's file (group), or by the file of a group without an \
               IOMMU, where no memory is pinned (noiommu). auto selects the first that exists and is permitted.",
        set: |c, text| VfioApi::named(text).map(|v| c.vfio.api = v),
        show: |c| c.vfio.api.name().to_owned(),
    },
    Opt {
        key: "present.dir",
        takes: "an absolute folder name, or nothing",
        help: "The folder for the files that stand for /sys/class/infiniband. Without it, the first of $XDG_RUNTIME_DIR, /tmp and /dev/shm that \
               is writable and in which other users cannot rename files.",
        set: |c, text| {
            let dir = path(text).filter(|dir| dir.iter().all(|dir| dir.is_absolute()))?;
            c.present.dir = dir;
            Some(())
        },
        show: |c| show_path(c.present.dir.as_deref()),
    },
];
