//! What can be set, from where, and what it is set to.
//!
//! Every option stands once, in [`OPTIONS`]: its key, what a value looks like, what it is for. The file (`--config`,
//! `URNIC_CONFIG`), the list (`URNIC_SET`), each option's own variable (`mpa.crc` is `URNIC_MPA_CRC`) and `urnic run --set` all go
//! through that table, so they accept the same and refuse the same. Later ones win, in that order.
//!
//! The plug-in reads its configuration inside somebody else's program: nothing here panics, and the file is read by raw system
//! calls (the plug-in interposes libc's `open` and `read`).

#![forbid(unsafe_code)]

mod error;
mod lines;
mod log_filter;
mod network;
mod options;
mod profile;

pub use error::{Error, Source};
pub use log_filter::{is_log_filter, log_filter};
pub use network::Network;
pub use options::{OPTIONS, Opt};

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use toml::{Table, Value};
use urnic_wire::mpa::startup::RtrKey;

/// A configuration file larger than this is a mistake, not a configuration.
const FILE_LIMIT: usize = 1 << 20;

/// `URNIC_…` variables that are no options: the file, the list, and what the command line and the tests use among themselves.
const NOT_OPTIONS: [&str; 4] = ["URNIC_CONFIG", "URNIC_SET", "URNIC_LIB", "URNIC_CACHE"];

/// Which device the driver opens (design: devices).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Device {
    /// The model inside this process.
    #[default]
    Inproc,
    /// A model in another process, over the vfio-user socket at this path.
    VfioUser(PathBuf),
    /// A PCI function, by its address (`DDDD:BB:DD.F`).
    Vfio(String),
}

impl fmt::Display for Device {
    /// As the option has it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Inproc => f.write_str("inproc"),
            Device::VfioUser(path) => write!(f, "vfio-user:{}", path.display()),
            Device::Vfio(address) => write!(f, "vfio:{address}"),
        }
    }
}

/// Which zero-length messages may serve as ready-to-receive indication (RFC 6581 §9.2); never empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtrTypes {
    /// Zero-length Send (bit B).
    pub send: bool,
    /// Zero-length RDMA Write (bit C).
    pub write: bool,
    /// Zero-length RDMA Read (bit D).
    pub read: bool,
}

/// MPA start-up: what we ask for and how long we wait (RFC 5044 §7, RFC 6581).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mpa {
    /// Ask for CRCs. They are on when either side asks (RFC 5044 §7.1.1).
    pub crc: bool,
    /// Ask for markers in what we receive (RFC 5044 §4.3).
    pub markers: bool,
    /// Highest revision that we speak: 1 or 2.
    pub revision: u8,
    /// How long an initiator waits for the whole start-up.
    pub startup_timeout_initiator: Duration,
    /// How long a responder waits for the Request.
    pub startup_timeout_responder: Duration,
    /// How long a responder waits for the first FPDU behind its Reply.
    pub rtr_timeout: Duration,
    /// What may serve as RTR.
    pub rtr_types: RtrTypes,
    /// Ask for the peer-to-peer model when calling: our RTR lets the called side send first (RFC 6581 §9.2).
    pub peer_to_peer: bool,
    /// Accept nothing but the RTR that was agreed on as the first message, and end the connection otherwise (conformance EMPA-21).
    pub strict_rtr: bool,
    /// Turn a caller down that takes fewer Reads than the program behind us asks to send, instead of sending fewer (RFC 6581 §9.1).
    pub strict_depths: bool,
    /// The RTR frame proposed in 2007, with the spelling of its key that we send; `None` is off. Only for peers known to speak it.
    pub rtr_frame: Option<RtrKey>,
}

/// Native connections: those made by `modify_qp(RTR)`, with no connection manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Native {
    /// Address to listen at; `None` is every address, IPv4 and IPv6.
    pub listen: Option<IpAddr>,
    /// TCP ports to listen at; `None` leaves the choice to the kernel.
    pub port_range: Option<RangeInclusive<u16>>,
    /// When nothing arrived after this long, the side that was to be called calls too.
    pub call_grace: Duration,
    /// How long posted receives stay after the peer's orderly end of stream.
    pub fin_grace: Duration,
    /// Calls kept for QPs that have not reached RTR, per process.
    pub max_parked: usize,
    /// How long such a call is kept.
    pub park_timeout: Duration,
    /// Whether calls are taken from other addresses than that of the peer named at RTR.
    pub allow_nat: bool,
}

/// Connections made with rdma_cm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cm {
    /// How long a Send of the peer may find no receive posted before the connection is terminated. Zero is RFC 5041 to the letter, but for
    /// queue pairs to which no receive was ever posted: their programs get a second to do so.
    ///
    /// The default is for programs written for InfiniBand, where a sender repeats a Send until the receiver is ready: some post receives a second and
    /// more after the peer's first Send. Meanwhile the stream is not read, so TCP holds the sender back and the device buffers nothing.
    pub rnr_grace: Duration,
}

/// Addresses with options of their own, on rdma_cm connections: a `[[peer]]` of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    network: Network,
    /// Keys and values that were found good.
    options: Vec<(&'static str, String)>,
}

/// Ways to a PCI function that the kernel's VFIO offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum VfioApi {
    /// The first of those below that is there and that this user may use.
    #[default]
    Auto,
    /// The function's own file, and iommufd.
    Cdev,
    /// Its group's file, and a container.
    Group,
    /// Its group's file where there is no IOMMU.
    NoIommu,
}

impl VfioApi {
    const ALL: [VfioApi; 4] = [VfioApi::Auto, VfioApi::Cdev, VfioApi::Group, VfioApi::NoIommu];

    /// As one writes it.
    pub fn name(self) -> &'static str {
        match self {
            VfioApi::Auto => "auto",
            VfioApi::Cdev => "cdev",
            VfioApi::Group => "group",
            VfioApi::NoIommu => "noiommu",
        }
    }
}

/// How a PCI function is driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vfio {
    /// Which way to take.
    pub api: VfioApi,
}

/// How the device is shown to libibverbs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Present {
    /// Folder that holds the presence tree; `None` is `$XDG_RUNTIME_DIR`, `/tmp` or `/dev/shm`.
    pub dir: Option<PathBuf>,
}

/// Everything that can be set. [`Config::default`] is what a machine without any configuration gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The device that the driver opens.
    pub device: Device,
    /// What to log, as a `tracing` filter; `off` logs nothing.
    pub log: String,
    /// Where to capture the wire.
    pub pcap: Option<PathBuf>,
    /// MPA start-up.
    pub mpa: Mpa,
    /// Native connections.
    pub native: Native,
    /// Connections made with rdma_cm.
    pub cm: Cm,
    /// The way to a PCI function.
    pub vfio: Vfio,
    /// Presence.
    pub present: Present,
    /// Peers with options of their own.
    pub peers: Vec<Peer>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            device: Device::Inproc,
            log: "warn".to_owned(),
            pcap: None,
            mpa: Mpa {
                crc: true,
                markers: false,
                revision: 2,
                startup_timeout_initiator: Duration::from_secs(20),
                startup_timeout_responder: Duration::from_secs(10),
                rtr_timeout: Duration::from_secs(10),
                rtr_types: RtrTypes {
                    send: false,
                    write: true,
                    read: true,
                },
                peer_to_peer: true,
                strict_rtr: false,
                strict_depths: false,
                rtr_frame: None,
            },
            native: Native {
                listen: None,
                port_range: None,
                call_grace: Duration::from_millis(1000),
                fin_grace: Duration::from_millis(2000),
                max_parked: 1024,
                park_timeout: Duration::from_millis(10_000),
                allow_nat: false,
            },
            cm: Cm {
                rnr_grace: Duration::from_secs(10),
            },
            vfio: Vfio::default(),
            present: Present::default(),
            peers: Vec::new(),
        }
    }
}

impl Config {
    /// The configuration that this process's environment describes, which includes the file it names.
    ///
    /// # Errors
    /// The first thing wrong, in one line that names it: see [`Error`].
    pub fn from_env() -> Result<Self, Error> {
        Self::from_vars(std::env::vars_os())
    }

    /// As [`Config::from_env`], from these variables; those that do not begin with `URNIC_` are ignored.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_vars(vars: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Self, Error> {
        let mut ours: Vec<(String, OsString)> = vars
            .into_iter()
            .filter(|(name, _)| name.as_bytes().starts_with(b"URNIC_"))
            .map(|(name, value)| (name.to_string_lossy().into_owned(), value))
            .collect();
        ours.sort_unstable();
        let find = |name: &str| {
            ours.iter()
                .find(|(n, _)| n == name)
                .map(|(_, value)| value.as_os_str())
        };

        let mut config = Self::default();
        if let Some(path) = find("URNIC_CONFIG").filter(|path| !path.is_empty()) {
            config.read_file(Path::new(path))?;
        }
        if let Some(list) = find("URNIC_SET") {
            config.set_list(text(list, || Source::Env("URNIC_SET".to_owned()))?)?;
        }
        for (name, value) in &ours {
            if NOT_OPTIONS.contains(&name.as_str()) || name.starts_with("URNIC_TEST_") {
                continue;
            }
            let source = || Source::Env(name.clone());
            let Some(opt) = OPTIONS.iter().find(|opt| opt.variable() == *name) else {
                return Err(Error::unknown(name, OPTIONS.iter().map(Opt::variable), source()));
            };
            opt.set_text(&mut config, text(value, source)?, source())?;
        }
        config.check()?;
        Ok(config)
    }

    /// Sets one option from text, as `urnic run --set KEY=VALUE` does.
    ///
    /// # Errors
    /// [`Error::Unknown`], [`Error::Value`].
    pub fn set(&mut self, key: &str, value: &str, source: Source) -> Result<(), Error> {
        option(key, &source)?.set_text(self, value, source)
    }

    /// Sets what `KEY=VALUE,KEY=VALUE…` says. A piece without `=` goes on with the value before it, so that lists need no quotes.
    fn set_list(&mut self, list: &str) -> Result<(), Error> {
        let source = || Source::Env("URNIC_SET".to_owned());
        let mut pairs: Vec<(String, String)> = Vec::new();
        for piece in list.split(',').filter(|piece| !piece.trim().is_empty()) {
            match (piece.split_once('='), pairs.last_mut()) {
                (Some((key, value)), _) => pairs.push((key.trim().to_owned(), value.trim().to_owned())),
                (None, Some((_, value))) => {
                    value.push(',');
                    value.push_str(piece.trim());
                }
                (None, None) => {
                    return Err(Error::NotAPair {
                        text: piece.trim().escape_debug().to_string(),
                        at: source(),
                    });
                }
            }
        }
        pairs
            .iter()
            .try_for_each(|(key, value)| self.set(key, value, source()))
    }

    /// Sets what the TOML file at `path` says: options by their keys, sections by `[mpa]` or `mpa.crc = …` alike.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::Syntax`] and those of [`Config::set`].
    pub fn read_file(&mut self, path: &Path) -> Result<(), Error> {
        let bytes = slurp(path).map_err(|errno| Error::File {
            path: path.to_owned(),
            errno,
        })?;
        let syntax = |message| Error::Syntax {
            path: path.to_owned(),
            message,
        };
        let text = std::str::from_utf8(&bytes).map_err(|_| syntax("it is not UTF-8".to_owned()))?;
        self.set_file(text, path)
    }

    /// Sets the options that `text` names, a configuration file read from `path`.
    ///
    /// # Errors
    /// A line that is no option, or a value that is none of its.
    pub fn set_file(&mut self, text: &str, path: &Path) -> Result<(), Error> {
        let table = text.parse::<Table>().map_err(|error| Error::Syntax {
            path: path.to_owned(),
            message: explain(text, &error),
        })?;
        let lines = lines::of_keys(text);
        let source = |key: &str| Source::File(path.to_owned(), lines.get(key).copied());
        for (key, value) in flat("", &table) {
            match (key.as_str(), value) {
                ("peer", Value::Array(peers)) => {
                    let read =
                        |(number, peer)| Peer::read(peer, |key| source(&format!("peer.{number}{key}")));
                    self.peers = peers.iter().enumerate().map(read).collect::<Result<_, _>>()?;
                }
                (key, value) => option(key, &source(key))?.set_value(self, value, source(key))?,
            }
        }
        Ok(())
    }

    /// The options towards that address: the first [`Peer`] that it belongs to wins over everything else.
    pub fn facing(&self, address: IpAddr) -> Config {
        let mut config = self.clone();
        if let Some(peer) = self.peers.iter().find(|peer| peer.network.contains(address)) {
            for (key, value) in &peer.options {
                // They were found good when they were read.
                let _ = config.set(key, value, Source::Flag("[[peer]]"));
            }
        }
        config
    }

    /// What does not go together.
    fn check(&self) -> Result<(), Error> {
        match (&self.pcap, &self.device) {
            (None, _) | (_, Device::Inproc) => Ok(()),
            (Some(path), device) => Err(Error::Elsewhere {
                path: path.clone(),
                device: device.clone(),
            }),
        }
    }

    /// What is legal and yet worth a word in the log, for whoever starts the device to write there.
    pub fn warnings(&self) -> impl Iterator<Item = &'static str> {
        // RFC 5044 §4.4: CRCs should not be turned off unless something as strong checks end to end.
        let crc = "mpa.crc=false: nothing but TCP's checksum protects the data unless the peer asks for CRCs";
        (!self.mpa.crc).then_some(crc).into_iter()
    }
}

impl Peer {
    /// Reads a `[[peer]]`; `source` says where the section is, or one of its keys behind a dot.
    fn read(value: &Value, source: impl Fn(&str) -> Source) -> Result<Peer, Error> {
        let wrong = |message| Error::Peer {
            message,
            at: source(""),
        };
        let Value::Table(table) = value else {
            return Err(wrong("is a section of its own".to_owned()));
        };
        let address = table.get("address").and_then(Value::as_str).unwrap_or_default();
        let network = Network::parse(address).ok_or_else(|| {
            wrong("needs address = \"ADDRESS\" or \"NETWORK/BITS\" with nothing behind the bits".to_owned())
        })?;
        let mut options = Vec::new();
        if let Some(name) = table.get("profile") {
            let preset = name.as_str().and_then(profile::preset).ok_or_else(|| {
                let names: Vec<&str> = profile::PROFILES.iter().map(|(name, _)| *name).collect();
                wrong(format!("has profile = one of {}", names.join(", ")))
            })?;
            // What is said beside it comes later and wins.
            options.extend(preset.iter().map(|(key, value)| (*key, (*value).to_owned())));
        }
        let others = flat("", table);
        for (key, value) in others
            .into_iter()
            .filter(|(key, _)| key != "address" && key != "profile")
        {
            let at = source(&format!(".{key}"));
            let option = option(&key, &at)?;
            if !option.is_per_peer() {
                return Err(wrong(format!("cannot have {key}, which is for all alike")));
            }
            let text = options::text_of(value);
            option.set_text(&mut Config::default(), &text, at)?;
            options.push((option.key, text));
        }
        Ok(Peer { network, options })
    }
}

/// Values with their whole keys.
fn flat<'t>(prefix: &str, table: &'t Table) -> Vec<(String, &'t Value)> {
    let entries = table.iter().flat_map(|(name, value)| {
        let key = format!("{prefix}{name}");
        match value {
            Value::Table(inner) => flat(&format!("{key}."), inner),
            value => vec![(key, value)],
        }
    });
    entries.collect()
}

fn option(key: &str, source: &Source) -> Result<&'static Opt, Error> {
    let found = OPTIONS.iter().find(|opt| opt.key == key);
    found.ok_or_else(|| Error::unknown(key, OPTIONS.iter().map(|opt| opt.key.to_owned()), source.clone()))
}

/// The parser's complaint in one line, with the line it is about.
fn explain(text: &str, error: &toml::de::Error) -> String {
    let before = error
        .span()
        .and_then(|span| text.get(..span.start))
        .unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    format!(
        "line {line}: {}",
        error.message().lines().next().unwrap_or_default()
    )
}

fn text(value: &OsStr, source: impl Fn() -> Source) -> Result<&str, Error> {
    value.to_str().ok_or_else(|| Error::NotText { at: source() })
}

/// The whole of a small file, by raw system calls.
fn slurp(path: &Path) -> Result<Vec<u8>, Errno> {
    let fd = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match rustix::io::read(&fd, &mut chunk) {
            Ok(0) => return Ok(bytes),
            Ok(n) if bytes.len() + n > FILE_LIMIT => return Err(Errno::FBIG),
            Ok(n) => bytes.extend(chunk.iter().take(n)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests;
