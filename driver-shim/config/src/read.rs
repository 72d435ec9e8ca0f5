//! Reads a configuration from environment, file, list and flags.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use toml::{Table, Value};

use crate::error::{Error, Source};
use crate::names::MAX_DEVICES;
use crate::options::{self, OPTIONS, Opt};
use crate::settings::{Config, Device, Llp, Peer, Section, Wire};
use crate::{lines, profile};
use urnic_faults::Network;
use urnic_process::usage;

/// Largest configuration file in bytes; a larger file is an error.
const FILE_LIMIT: usize = 1 << 20;

/// `URNIC_…` variables that are no options: the file, the list, and the variables that the command
/// line and the tests use internally.
pub(crate) const NOT_OPTIONS: [&str; 5] = [
    "URNIC_CONFIG",
    "URNIC_SET",
    "URNIC_LIB",
    "URNIC_CACHE",
    usage::VARIABLE,
];

impl Config {
    /// Reads the configuration that this process's environment describes, with the file that it
    /// names.
    ///
    /// # Errors
    /// The first error, in one line that names the wrong setting: see [`Error`].
    pub fn from_env() -> Result<Self, Error> {
        Self::from_vars(std::env::vars_os())
    }

    /// Reads the configuration that `vars` describe. Variables that do not begin with `URNIC_` are
    /// ignored.
    ///
    /// # Errors
    /// The errors of [`Config::from_env`].
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
    /// [`Error::Unknown`] for an option that does not exist, [`Error::Value`] for a value that the
    /// option does not accept.
    pub fn set(&mut self, key: &str, value: &str, source: Source) -> Result<(), Error> {
        option(key, &source)?.set_text(self, value, source)
    }

    /// Sets the options of the list `KEY=VALUE,KEY=VALUE…`. A piece without `=` continues the value
    /// before it, so that lists need no quotes.
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

    /// Sets the options in the TOML file at `path`: options by their keys, sections as `[mpa]` or
    /// as `mpa.crc = …`.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read, [`Error::Syntax`] if it is not TOML, and the
    /// errors of [`Config::set`].
    pub fn read_file(&mut self, path: &Path) -> Result<(), Error> {
        let bytes = read_file(path).map_err(|errno| Error::File {
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

    /// Sets the options in `text`, the content of a configuration file read from `path`.
    ///
    /// # Errors
    /// A line that is no option, or a value that its option does not accept.
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
                ("device", Value::Array(devices)) => {
                    let read = |(number, device)| {
                        Section::read(device, |key| source(&format!("device.{number}{key}")))
                    };
                    self.sections = devices.iter().enumerate().map(read).collect::<Result<_, _>>()?;
                    if self.sections.len() > MAX_DEVICES as usize {
                        return Err(Error::Devices(format!(
                            "{}: {} [[device]] sections: a process has at most {MAX_DEVICES} devices",
                            path.display(),
                            self.sections.len()
                        )));
                    }
                }
                (key, value) => option(key, &source(key))?.set_value(self, value, source(key))?,
            }
        }
        Ok(())
    }

    /// The options for connections with `address`: the options of the first [`Peer`] that contains
    /// the address override all others.
    pub fn facing(&self, address: IpAddr) -> Config {
        let mut config = self.clone();
        if let Some(peer) = self.peers.iter().find(|peer| peer.network.contains(address)) {
            for (key, value) in &peer.options {
                // The values were checked when they were read.
                let _ = config.set(key, value, Source::Flag("[[peer]]"));
            }
        }
        config
    }

    /// The lower layer of connections with `address`.
    pub fn llp_facing(&self, address: IpAddr) -> Llp {
        match self.peers.is_empty() {
            true => self.llp,
            false => self.facing(address).llp,
        }
    }

    /// The lower layers over which listeners accept connections: those of all peers. Only a RoCE
    /// NIC has queue pairs of kind UC, whose streams are those of TCP.
    pub fn llps(&self) -> Vec<Llp> {
        let of_peers = self.peers.iter().flat_map(|peer| &peer.options);
        let named = of_peers
            .filter(|(key, _)| *key == "llp")
            .filter_map(|(_, name)| Llp::named(name));
        let always = self.identity.is_roce().then_some(Llp::Tcp);
        let llps: BTreeSet<Llp> = named.chain(always).chain([self.llp]).collect();
        llps.into_iter().collect()
    }

    /// Whether connected queue pairs whose peer is at `address` speak RoCE v2.
    pub fn speaks_roce_to(&self, address: IpAddr) -> bool {
        let of_peer = self.peers.iter().find(|peer| peer.network.contains(address));
        let named = of_peer.and_then(|peer| {
            let named = peer.options.iter().rev().find(|(key, _)| *key == "wire");
            Wire::named(&named?.1)
        });
        self.identity.is_roce() && named.unwrap_or(self.wire) == Wire::Roce
    }

    /// Whether connected queue pairs speak RoCE v2 to some peer.
    pub fn speaks_roce_to_some(&self) -> bool {
        let of_peers = self.peers.iter().flat_map(|peer| &peer.options);
        let mut named = of_peers
            .filter(|(key, _)| *key == "wire")
            .filter_map(|(_, name)| Wire::named(name));
        self.identity.is_roce() && (self.wire == Wire::Roce || named.any(|wire| wire == Wire::Roce))
    }

    /// Checks for options that exclude each other.
    fn check(&self) -> Result<(), Error> {
        self.check_devices()?;
        let devices = self.each_device();
        let remote = devices.into_iter().find(|device| device.device != Device::Inproc);
        match (&self.pcap, remote) {
            (None, _) | (_, None) => Ok(()),
            (Some(path), Some(remote)) => Err(Error::RemoteCapture {
                path: path.clone(),
                device: remote.device.to_string(),
            }),
        }
    }

    /// Warnings about legal settings; the code that starts the device writes them to the log.
    pub fn warnings(&self) -> impl Iterator<Item = &'static str> {
        // RFC 5044 §4.4: CRCs should not be turned off unless an equally strong check exists end to
        // end.
        let crc = "mpa.crc=false: only TCP's checksum protects the data unless the peer requests CRCs";
        (!self.mpa.crc).then_some(crc).into_iter()
    }
}

impl Peer {
    /// Reads a `[[peer]]`. `source` returns the place of the section, or of a key of it, given with
    /// a dot before the key.
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
            wrong("needs address = \"ADDRESS\" or \"NETWORK/BITS\" with nothing after the bits".to_owned())
        })?;
        let mut options = Vec::new();
        if let Some(name) = table.get("profile") {
            let preset = name.as_str().and_then(profile::preset).ok_or_else(|| {
                let names: Vec<&str> = profile::PROFILES.iter().map(|(name, _)| *name).collect();
                wrong(format!("has profile = one of {}", names.join(", ")))
            })?;
            // The section's own options come later and win.
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

/// The values of a table with their whole keys.
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

/// The parser's message in one line, with the line of the error.
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

/// The bytes of a file of at most a mebibyte, by raw system calls.
///
/// # Errors
/// Those of open(2) and read(2); `EFBIG` for a larger file.
pub fn read_file(path: &Path) -> Result<Vec<u8>, Errno> {
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
