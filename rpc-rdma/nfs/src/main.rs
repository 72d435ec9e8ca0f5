//! `urnic-nfs`: serves a directory or a tree in memory by NFSv3, and moves files from and to NFS
//! servers.

// Both panic when the write fails: see `urnic_console`.
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

mod cli;

use clap::{CommandFactory, Parser, Subcommand};
use cli::{acl, bench, list, serve, transfer};
use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit, setrlimit, umask};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use std::process::ExitCode;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// An NFSv3 server in user space, and a client tool
#[derive(Parser)]
#[command(name = "urnic-nfs", version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a directory, or a tree in memory
    Serve(serve::Serve),
    /// Copy a file from a server
    Get(transfer::Get),
    /// Copy a file to a server
    Put(transfer::Put),
    /// List a directory of a server, or one file
    Ls(list::List),
    /// Print the access control lists of a file of a server, or set them
    Acl(acl::Show),
    /// Measure a server: reading, writing, small operations, empty calls
    Bench(bench::Bench),
}

fn main() -> ExitCode {
    let filter = std::env::var("URNIC_LOG")
        .ok()
        .and_then(|filter| filter.parse().ok());
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    let levels = filter
        .iter()
        .map(|(_, level)| level)
        .chain(filter.default_level());
    tracing_subscriber::fmt()
        .with_max_level(levels.max().unwrap_or(LevelFilter::ERROR))
        .with_writer(std::io::stderr)
        .finish()
        .with(filter)
        .init();
    let (cli, _) = match urnic_console::parsed::<Cli>(Cli::command()) {
        Ok(parsed) => parsed,
        Err(status) => return status,
    };
    let done = match cli.command {
        Command::Serve(serve) => prepare_process().and_then(|descriptors| serve.run(descriptors)),
        Command::Get(get) => get.run(),
        Command::Put(put) => put.run(),
        Command::Ls(list) => list.run(),
        Command::Acl(acl) => acl.run(),
        Command::Bench(bench) => bench.run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            urnic_console::complain("urnic-nfs", &why);
            ExitCode::FAILURE
        }
    }
}

/// Sets the process up for a server: a umask of 0, because clients choose the modes of new files,
/// as many descriptors as possible, up to the number that a directory uses, and no capability that
/// callers must not have. Returns the limit of descriptors.
fn prepare_process() -> Result<u64, String> {
    const MOST: u64 = 1 << 16;
    umask(Mode::empty());
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum.map_or(Some(MOST), |most| Some(most.min(MOST)));
    let _ = setrlimit(Resource::Nofile, limit);
    drop_sys_resource().map_err(|errno| format!("capset: {errno}"))?;
    Ok(getrlimit(Resource::Nofile).current.unwrap_or(MOST))
}

/// Drops CAP_SYS_RESOURCE, with which root exceeds quotas and takes blocks that a file system
/// reserves. The kernel removes the capabilities for file systems from a thread that takes the ids
/// of a caller, but not this one. Threads that start later inherit the sets of this thread.
fn drop_sys_resource() -> Result<(), Errno> {
    let mut sets = capabilities(None)?;
    for set in [&mut sets.effective, &mut sets.permitted, &mut sets.inheritable] {
        set.remove(CapabilitySet::SYS_RESOURCE);
    }
    set_capabilities(None, sets)
}
