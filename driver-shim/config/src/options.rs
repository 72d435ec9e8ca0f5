//! The table of options, from which help, file, list and variables are derived.

use std::net::IpAddr;
use std::ops::RangeInclusive;

use toml::Value;
use urnic_faults::Plan;
use urnic_wire::mpa::startup::RtrKey;

use crate::error::{Error, Source};
use crate::log_filter::is_log_filter;
use crate::names::{MAX_DEVICES, is_name};
use crate::settings::{CmPorts, Completion, Config, Identity, Placement, SameHost, Strict, VfioApi};
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
        self.key.starts_with("mpa.") || self.key.starts_with("cm.")
    }
}

/// The text of a TOML value; an array is its elements, joined by commas.
pub(super) fn text_of(value: &Value) -> String {
    match value {
        Value::Array(elements) => elements.iter().map(bare).collect::<Vec<_>>().join(","),
        value => bare(value),
    }
}

fn bare(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
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
        help: "The name of the device that programs see, for programs that expect a certain name. With several devices it is the first name, \
               whose number at the end counts on: mlx5_0, mlx5_1.",
        set: |c, text| is_name(text).then(|| c.name = text.to_owned()),
        show: |c| c.name.clone(),
    },
    Opt {
        key: "devices",
        takes: "a number from 1 to 64",
        help: "How many devices programs see, each with its own queue pairs, threads and counters. Each has all addresses of the host; to give \
               each its own, write [[device]] sections in the file.",
        set: |c, text| number(text, 1..=MAX_DEVICES).map(|v| c.devices = v),
        show: |c| c.each_device().len().to_string(),
    },
    Opt {
        key: "log",
        takes: "a level (off, error, warn, info, debug, trace), or levels of modules such as urnic_cm::native=debug",
        help: "What to log on standard error: a level (error, warn, info, debug, trace, off), or levels per module. \
               debug logs each step of each connection.",
        set: |c, text| is_log_filter(text).then(|| c.log = text.to_owned()),
        show: |c| c.log.clone(),
    },
    Opt {
        key: "pcap",
        takes: "a file name, or nothing",
        help: "Capture the wire into this pcapng file, for Wireshark. %p stands for the process's number; without it the first process with a \
               connection gets the file, and others one beside it with their numbers in the names. A device in another process has its wire there: \
               `urnic serve --pcap`.",
        set: |c, text| {
            c.pcap = path(text);
            Some(())
        },
        show: |c| show_path(c.pcap.as_deref()),
    },
    Opt {
        key: "report",
        takes: "a file name, or nothing",
        help: "When a process exits, append one line of JSON to this file: its devices with their counters, failed completions by operation and \
               cause, warnings, and findings of `strict`. %p stands for the process's number. A process that is killed, or ends by _exit, \
               writes none.",
        set: |c, text| {
            c.report = path(text);
            Some(())
        },
        show: |c| show_path(c.report.as_deref()),
    },
    Opt {
        key: "trace",
        takes: "a file name, or nothing",
        help: "Write the life of each work request to this file: when it was posted, seen by the device, completed and polled; for Perfetto, \
               Chrome and `urnic trace`. %p stands for the process's number; without it processes share the file. It is whole JSON at any time.",
        set: |c, text| {
            c.trace = path(text);
            Some(())
        },
        show: |c| show_path(c.trace.as_deref()),
    },
    Opt {
        key: "strict",
        takes: "off, on or error",
        help: "Check how the program uses verbs, and report each finding once for each place in the program, with a backtrace: a buffer that \
               changes while it is sent, keys of memory that is not registered, completion queues that are too small, objects that are left, \
               and more. error makes the exit status 86 if there was a finding. Programs run slower.",
        set: |c, text| {
            c.strict = Strict::ALL.into_iter().find(|v| v.name() == text)?;
            Some(())
        },
        show: |c| c.strict.name().to_owned(),
    },
    Opt {
        key: "suppressions",
        takes: "a file name, or nothing",
        help: "Findings of `strict` to leave out: one on each line, as a rule's name, or a rule's name and a part of its text or backtrace. \
               # begins a comment.",
        set: |c, text| {
            c.suppressions = path(text);
            Some(())
        },
        show: |c| show_path(c.suppressions.as_deref()),
    },
    Opt {
        key: "faults",
        takes: "faults such as \"reset after=64k nth=2; drop p=0.01; seed=7\", none, or nothing",
        help: "What goes wrong on purpose, for tests of how a program takes it: KIND KEY=VALUE …, with semicolons between faults. \
               `urnic fault --list` has the kinds. none: nothing yet, but `urnic fault PID` can add faults. The flag also takes @FILE and \
               @SCENARIO. Connections are on TCP then, as with same_host=off.",
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
        help: "The kind of device that programs see: an iWARP RNIC, or a RoCE v2 NIC, for programs that accept nothing else. \
               The wire is iWARP with both, and ends of both kinds connect to each other.",
        set: |c, text| {
            c.identity = Identity::ALL.into_iter().find(|v| v.name() == text)?;
            Some(())
        },
        show: |c| c.identity.name().to_owned(),
    },
    Opt {
        key: "completion",
        takes: "auto, taken or delivered",
        help: "When a Send, Write or immediate completes: when TCP has taken it (taken), or when the peer has placed or delivered it \
               (delivered), which costs a zero-length RDMA Read for each batch of requests. auto is delivered on connections made by \
               exchanged QP numbers, whose programs expect InfiniBand, and on all with identity=roce; taken on rdma_cm connections of an \
               iWARP RNIC.",
        set: |c, text| {
            c.completion = Completion::ALL.into_iter().find(|v| v.name() == text)?;
            Some(())
        },
        show: |c| c.completion.name().to_owned(),
    },
    Opt {
        key: "same_host",
        takes: "auto or off",
        help: "How the device in the process reaches peers on the same host: auto passes the bytes of connections with another urnic \
               through shared memory, after the usual start-up on TCP, and between processes of one user Writes, Reads and \
               datagrams, too; off leaves them to TCP and UDP. With pcap it is off, so that the capture has what the network \
               would have.",
        set: |c, text| {
            c.same_host = SameHost::ALL.into_iter().find(|v| v.name() == text)?;
            Some(())
        },
        show: |c| c.same_host.name().to_owned(),
    },
    Opt {
        key: "placement",
        takes: "in-order or last-first",
        help: "The order in which the device in the process places the bytes of peers' RDMA Writes. last-first places the last byte \
               of each segment (64 KiB of a Write, or less), and the others some 20 to 100 us later: a program that polls the last byte, and \
               takes the others for there, finds old ones. RDMA does not promise the order. Connections are on TCP then, as with \
               same_host=off.",
        set: |c, text| {
            c.placement = Placement::ALL.into_iter().find(|v| v.name() == text)?;
            Some(())
        },
        show: |c| c.placement.name().to_owned(),
    },
    Opt {
        key: "mpa.crc",
        takes: "true or false",
        help: "Ask for CRC32C on every FPDU. A connection has CRCs when either side asks; turning them off leaves the \
               data to TCP's checksum (RFC 5044 §4.4).",
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
        help: "How long the responder, after its Reply, waits for the first FPDU, before which it may not send.",
        set: |c, text| seconds(text).map(|v| c.mpa.rtr_timeout = v),
        show: |c| c.mpa.rtr_timeout.as_secs().to_string(),
    },
    Opt {
        key: "mpa.rtr_types",
        takes: "one or more of send, write, read, with commas",
        help: "Which zero-length messages may open a connection made with rdma_cm (RFC 6581 §9.2); native ones use a Write.",
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
        help: "As a responder with rdma_cm, accept nothing but the RTR that was agreed on as the first message; another ends the \
               connection. Otherwise it is counted, and opens the connection too.",
        set: |c, text| truth(text).map(|v| c.mpa.strict_rtr = v),
        show: |c| c.mpa.strict_rtr.to_string(),
    },
    Opt {
        key: "mpa.strict_depths",
        takes: "true or false",
        help: "Reject an rdma_cm initiator that takes fewer RDMA Reads than the accepting program requests. Otherwise fewer are sent.",
        set: |c, text| truth(text).map(|v| c.mpa.strict_depths = v),
        show: |c| c.mpa.strict_depths.to_string(),
    },
    Opt {
        key: "mpa.rtr_frame",
        takes: "off, hex or text",
        help: "Use the RTR frame proposed in 2007 on rdma_cm connections of revision 1, with this spelling of its key; requests are then of \
               revision 1. Only for peers known to speak it.",
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
        key: "native.listen",
        takes: "an IPv4 or IPv6 address, or any",
        help: "Where to listen for connections made by exchanged QP numbers.",
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
        help: "TCP ports to listen at, for firewalls; each process takes one per 256 QPs.",
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
        help: "When nothing arrived for this long, the side that was to be the responder connects too (one-way firewalls, NAT).",
        set: |c, text| milliseconds(text).map(|v| c.native.call_grace = v),
        show: |c| c.native.call_grace.as_millis().to_string(),
    },
    Opt {
        key: "native.fin_grace_ms",
        takes: "milliseconds, 0 to 600000",
        help: "How long posted receives wait, after the peer ended the stream in good order, before they are flushed; and how long requests that only that peer could complete wait, if its end lies after a message for which no receive is posted, before they fail.",
        set: |c, text| milliseconds(text).map(|v| c.native.fin_grace = v),
        show: |c| c.native.fin_grace.as_millis().to_string(),
    },
    Opt {
        key: "native.max_parked",
        takes: "a number from 1 to 65536",
        help: "How many connection requests for QPs that are not ready yet a process keeps.",
        set: |c, text| number(text, 1..=65_536).map(|v: u32| c.native.max_parked = v as usize),
        show: |c| c.native.max_parked.to_string(),
    },
    Opt {
        key: "native.park_timeout_ms",
        takes: "milliseconds, 0 to 600000",
        help: "How long such a request is kept.",
        set: |c, text| milliseconds(text).map(|v| c.native.park_timeout = v),
        show: |c| c.native.park_timeout.as_millis().to_string(),
    },
    Opt {
        key: "native.allow_nat",
        takes: "true or false",
        help: "Take connections made by exchanged QP numbers from any address; else only from that of the peer's GID.",
        set: |c, text| truth(text).map(|v| c.native.allow_nat = v),
        show: |c| c.native.allow_nat.to_string(),
    },
    Opt {
        key: "cm.rnr_grace_ms",
        takes: "milliseconds, 0 to 600000",
        help: "On rdma_cm connections, how long a Send may find no receive posted before the connection is terminated; 0 is iWARP to \
               the letter, but for the very first receive, for which there is a second.",
        set: |c, text| milliseconds(text).map(|v| c.cm.rnr_grace = v),
        show: |c| c.cm.rnr_grace.as_millis().to_string(),
    },
    Opt {
        key: "cm.ack_timeout",
        takes: "0 to 31",
        help: "On rdma_cm connections, the Local ACK Timeout where the program sets none (RDMA_OPTION_ID_ACK_TIMEOUT): requests fail \
               whose peer's host is silent for 4.096 us * 2^N * (retry count + 1), 8.6 s with 18 and 7 retries. 0: as long as TCP tries.",
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
        help: "Whether a listener of rdma_cm has the TCP port of its number (tcp), or leaves it to other programs (own): then it has the UDP \
               port of this number, where initiators ask for its TCP port. auto is own with identity=roce, as on a RoCE NIC, and tcp with \
               identity=iwarp. Other implementations of iWARP reach a listener only with tcp.",
        set: |c, text| {
            c.cm.ports = CmPorts::ALL.into_iter().find(|ports| ports.name() == text)?;
            Some(())
        },
        show: |c| c.cm.ports.name().to_owned(),
    },
    Opt {
        key: "vfio.api",
        takes: "auto, cdev, group or noiommu",
        help: "How to get at a PCI function: by its own file and iommufd (cdev), by its group's file (group), or by that where there is no \
               IOMMU and nothing is pinned (noiommu). auto takes the first that is there and allowed.",
        set: |c, text| {
            let api = VfioApi::ALL.into_iter().find(|api| api.name() == text)?;
            c.vfio.api = api;
            Some(())
        },
        show: |c| c.vfio.api.name().to_owned(),
    },
    Opt {
        key: "present.dir",
        takes: "an absolute folder name, or nothing",
        help: "Where to keep the files that stand for /sys/class/infiniband; else in $XDG_RUNTIME_DIR, /tmp or \
               /dev/shm, the first that will have them and in which other users cannot rename files.",
        set: |c, text| {
            let dir = path(text);
            dir.iter()
                .all(|dir| dir.is_absolute())
                .then(|| c.present.dir = dir)
        },
        show: |c| show_path(c.present.dir.as_deref()),
    },
];
