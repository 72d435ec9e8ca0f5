//! Packets, captured in a private network namespace and dissected by tshark's independent
//! dissectors of MPA and DDP/RDMAP.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::Signal;

use crate::build::scratch;
use crate::netns::Netns;
use crate::program::{Program, Running};
use crate::realigned;
use crate::wait::{TIME_LIMIT, until};

/// Dissectors that take any Send for their own protocol, and then report it as malformed.
pub const HEURISTIC_DISSECTORS: [&str; 3] = ["rpcordma", "smb_direct", "iser"];

/// Arguments and display filter for frames that a dissector reports as malformed or cannot decode,
/// with the text of the dissector.
pub const LOST: ([&str; 8], &str) = (
    [
        "-T",
        "fields",
        "-e",
        "frame.number",
        "-e",
        "_ws.malformed",
        "-e",
        "_ws.expert.message",
    ],
    "_ws.malformed || (iwarp_mpa && _ws.expert.severity == \"Error\")",
);

/// Arguments by which tshark reads [`Wire::segments`].
pub const AS_DDP: [&str; 2] = [
    "-o",
    "uat:user_dlts:\"User 0 (DLT=147)\",\"iwarp_ddp_rdmap\",\"0\",\"\",\"0\",\"\"",
];

/// A running capture of one interface.
#[derive(Debug)]
pub struct Capture {
    dumpcap: Running,
    file: PathBuf,
}

/// A finished capture; the file is removed when dropped, unless by a failing test.
#[derive(Debug)]
pub struct Wire {
    file: PathBuf,
}

/// The result of the dissectors for the MPA streams of a capture.
#[derive(Debug)]
pub struct Dissection {
    /// The capture that was dissected.
    pub wire: Wire,
    /// Number of FPDUs with a correct CRC.
    pub good_crcs: u64,
    /// Number of FPDUs with a wrong CRC.
    pub bad_crcs: u64,
    /// Frames that a dissector reports as malformed or cannot decode, with the text of the
    /// dissector.
    pub malformed: Vec<String>,
    /// Number of MPA Request and Reply frames.
    pub startups: u64,
    /// Number of last or only segments of RDMAP messages, by opcode.
    pub opcodes: BTreeMap<u8, u64>,
    /// Number of markers.
    pub markers: u64,
}

/// A file name that is not in use.
pub(crate) fn fresh(extension: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    scratch().join(format!("wire-{}-{number}.{extension}", std::process::id()))
}

impl Capture {
    /// Starts capturing all TCP on an interface of the namespace.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn start(netns: &Netns, interface: &str) -> Result<Self, String> {
        crate::skip::installed("tshark")?;
        crate::skip::installed("dumpcap")?;
        let file = fresh("pcapng");
        let args = [
            "-q",
            "-B",
            "256",
            "-f",
            "tcp or udp port 9",
            "-i",
            interface,
            "-w",
        ];
        let mut dumpcap = netns
            .program(Program::plain("dumpcap").args(args).arg(&file))
            .spawn();
        dumpcap.wait_for_output("that it captures", |text| text.contains("File: ").then_some(()));
        Ok(Self { dumpcap, file })
    }

    /// Ends the capture once everything sent until now, on the namespace's way to `towards`, is in
    /// it.
    pub fn stop(self, netns: &Netns, towards: &str) -> Wire {
        // Packets are captured in order: when this one is in the file, so are those before it.
        const LAST: &str = "urnic: the last packet of this capture";
        netns
            .program(Program::plain("bash").args(["-c", &format!("echo '{LAST}' >/dev/udp/{towards}/9")]))
            .run();
        let complete = until(TIME_LIMIT, || {
            tail_contains(&self.file, LAST.as_bytes()).then_some(())
        });
        self.dumpcap.signal(Signal::INT);
        let ended = self.dumpcap.wait();
        assert!(complete.is_some(), "the capture misses its last packet: {ended}");
        Wire { file: self.file }
    }
}

fn tail_contains(file: &Path, needle: &[u8]) -> bool {
    const TAIL: usize = 4096;
    let bytes = std::fs::read(file).unwrap_or_default();
    let tail = &bytes[bytes.len().saturating_sub(TAIL)..];
    tail.windows(needle.len()).any(|window| window == needle)
}

impl Wire {
    /// A capture file that exists already.
    pub fn of(file: PathBuf) -> Self {
        Self { file }
    }

    /// Lets tshark read streams without markers, as [`realigned`](Self::realigned).
    ///
    /// # Panics
    /// When tshark cannot read the file, or the capture lacks something.
    pub fn dissect(self) -> Dissection {
        self.realigned().dissect_as_captured()
    }

    /// The streams without markers, with a packet for each frame (`realigned` has the reason).
    ///
    /// # Panics
    /// When tshark cannot read the file, or the capture lacks something.
    #[must_use]
    pub fn realigned(self) -> Self {
        let mut fields = vec!["-T", "fields"];
        fields.extend(realigned::FIELDS.iter().flat_map(|field| ["-e", field]));
        let packets = realigned::pcap(&self.tshark(&fields, "tcp.len > 0")).unwrap_or_else(|e| panic!("{e}"));
        let file = fresh("pcap");
        std::fs::write(&file, packets).expect("a capture file is written");
        Self { file }
    }

    /// A capture of the DDP segments in the SCTP packets of a UDP port, to be read with [`AS_DDP`].
    /// tshark knows SCTP in UDP, but not the payload protocol identifiers of RFC 5043; and of a
    /// packet that was captured twice it shows the data once.
    ///
    /// # Panics
    /// When tshark cannot read the file, or a chunk is in none of DDP's forms.
    #[must_use]
    pub fn segments(&self, port: u16) -> Self {
        const LINKTYPE_USER0: u32 = 147;
        const SSN_LEN: usize = 2;
        let decode = format!("udp.port=={port},sctp");
        let chunks = ["sctp.data_payload_proto_id", "data.data"];
        let fields = ["-d", &decode, "-T", "fields", "-e", chunks[0], "-e", chunks[1]];
        // Magic, version 2.4, time zone, accuracy, longest packet.
        let header = [0xa1b2_c3d4_u32, 4 << 16 | 2, 0, 0, 0x4_0000, LINKTYPE_USER0];
        let mut file: Vec<u8> = header.into_iter().flat_map(u32::to_le_bytes).collect();
        for line in self.tshark(&fields, "data.data").lines() {
            let (identifiers, data) = line.split_once('\t').expect("two fields");
            let pairs = identifiers.split(',').zip(data.split(','));
            for (_, hex) in pairs.filter(|(identifier, _)| *identifier == "16") {
                let digits = |at| u8::from_str_radix(hex.get(at..at + 2).expect("two digits"), 16);
                let bytes: Result<Vec<u8>, _> = (0..hex.len()).step_by(2).map(digits).collect();
                let segment = &bytes.expect("hexadecimal digits")[SSN_LEN..];
                let len = segment.len() as u32;
                file.extend([0, 0, len, len].into_iter().flat_map(u32::to_le_bytes));
                file.extend(segment);
            }
        }
        let segments = fresh("pcap");
        std::fs::write(&segments, file).expect("a capture file is written");
        Self { file: segments }
    }

    /// Lets tshark read the capture. MPA has no port of its own: its dissector is a heuristic one,
    /// which tshark tries before the dissectors by port number.
    ///
    /// # Panics
    /// When tshark cannot read the file.
    pub fn dissect_as_captured(self) -> Dissection {
        let text = self.tshark(&["-V", "-O", "iwarp_mpa,iwarp_ddp_rdmap"], "iwarp_mpa");
        let mut dissection = Dissection {
            wire: self,
            good_crcs: 0,
            bad_crcs: 0,
            malformed: Vec::new(),
            startups: 0,
            opcodes: BTreeMap::new(),
            markers: 0,
        };
        for line in text.lines().map(str::trim) {
            dissection.read(line);
        }
        // Wireshark marks undecodable data with an expert item of severity error, anywhere in the
        // tree.
        let lost = dissection.wire.tshark(&LOST.0, LOST.1);
        dissection.malformed = lost.lines().map(str::to_owned).collect();
        dissection
    }

    /// What tshark prints with these arguments about the packets that pass the display filter.
    pub fn tshark(&self, args: &[&str], filter: &str) -> String {
        self.tshark_without(&HEURISTIC_DISSECTORS, args, filter)
    }

    /// The output of tshark for a capture whose Sends all carry RPC-over-RDMA. The dissector of NFS
    /// fails to find data that was sent by chunk.
    pub fn tshark_of_rpc(&self, args: &[&str], filter: &str) -> String {
        self.tshark_without(&["smb_direct", "iser", "nfs"], args, filter)
    }

    fn tshark_without(&self, guessers: &[&str], args: &[&str], filter: &str) -> String {
        let mut tshark = Command::new("tshark");
        tshark
            .arg("-r")
            .arg(&self.file)
            .args(["-n", "--enable-heuristic", "iwarp_mpa_tcp"]);
        tshark.args([
            "-o",
            "tcp.try_heuristic_first:TRUE",
            "-o",
            "tcp.check_checksum:FALSE",
        ]);
        for guesser in guessers {
            tshark.args(["--disable-protocol", guesser]);
        }
        let out = tshark
            .args(args)
            .args(["-Y", filter])
            .output()
            .expect("tshark runs");
        assert!(
            out.status.success(),
            "tshark: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        String::from_utf8_lossy(&out.stdout).into_owned()
    }
}

impl Dissection {
    fn read(&mut self, line: &str) {
        if line.contains("CRC:") || line.contains("CRC check:") {
            self.good_crcs += u64::from(line.contains("Good CRC32"));
            self.bad_crcs += u64::from(line.contains("Bad CRC32"));
        }
        if line.starts_with("Request frame header") || line.starts_with("Reply frame header") {
            self.startups += 1;
        }
        if line.contains("FPDU back pointer") {
            self.markers += 1;
        }
        if let Some((_, rest)) = line.split_once("OpCode: ")
            && let Some(number) = rest.split_once("(0x").and_then(|(_, n)| n.split(')').next())
            && let Ok(opcode) = u8::from_str_radix(number, 16)
        {
            *self.opcodes.entry(opcode).or_default() += 1;
        }
    }

    /// Panics unless the capture has frames and all of them are well formed.
    #[track_caller]
    pub fn is_clean(&self) {
        assert!(self.good_crcs > 0, "no FPDU with a good CRC was seen: {self:?}");
        assert!(self.bad_crcs == 0 && self.malformed.is_empty(), "{self:?}");
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("capture kept: {}", self.file.display());
            return;
        }
        let _ = std::fs::remove_file(&self.file);
    }
}
