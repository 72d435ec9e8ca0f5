//! The options that commands share.

use std::path::PathBuf;

use clap::Args;

/// Options that every command takes. A flag overrides a variable, a variable overrides the file.
#[derive(Args, Debug, Default)]
pub(crate) struct Options {
    /// The RNIC: inproc, vfio-user:PATH or vfio:DDDD:BB:DD.F
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
    /// The name of the device that programs see; with several devices, the first name
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// The number of devices that programs see: urnic0, urnic1, …
    #[arg(long, value_name = "N")]
    pub(crate) devices: Option<String>,
    /// The kind of device that programs see: iwarp or roce
    #[arg(long, value_name = "KIND")]
    pub(crate) identity: Option<String>,
    /// Hide the real RDMA devices of the machine from programs
    #[arg(long)]
    pub(crate) only: bool,
    /// Read options from this TOML file [variable: URNIC_CONFIG]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Set one option; may be given more than once [variable: URNIC_SET, with commas]
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) set: Vec<String>,
    /// Capture the wire into this file (pcapng, for Wireshark); `%p` is the process number
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
    /// At the exit of each process append a report (JSON) to this file; `%p` is its number
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// Write the life of each work request to this file, for Perfetto and `urnic trace`
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Check how the program uses verbs, and report mistakes: on, or error (then also exit status
    /// 86)
    #[arg(long, value_name = "MODE", num_args = 0..=1, require_equals = true, default_missing_value = "on")]
    pub(crate) strict: Option<String>,
    /// Findings of --strict to leave out, one on each line of this file
    #[arg(long, value_name = "FILE")]
    pub(crate) suppressions: Option<PathBuf>,
    /// Faults that occur on purpose: "reset after=64k", @FILE, @SCENARIO; see `urnic fault --list`
    #[arg(long, value_name = "FAULTS|@FILE")]
    pub(crate) faults: Option<String>,
    /// What to log on standard error: off, error, warn, info, debug, trace, or a filter
    #[arg(long, value_name = "FILTER")]
    pub(crate) log: Option<String>,
}
