//! `urnic-nfs`: serves a directory or a tree in memory by NFSv3, and moves files from and to NFS
//! servers.

// Both panic when the write fails: see `urnic_console`.
#![deny(clippy::print_stdout, clippy::print_stderr)]
#![forbid(unsafe_code)]

mod cli;

use clap::{CommandFactory, Parser, Subcommand};
use cli::{acl, bench, list, serve, transfer};
use rustix::fs::Mode;
use rustix::process::{Resource, getrlimit, setrlimit, umask};
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
        Command::Serve(serve) => serve.run(prepare_process()),
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
/// and as many descriptors as possible, up to the number that a directory uses. Returns the limit
/// of descriptors.
fn prepare_process() -> u64 {
    const MOST: u64 = 1 << 16;
    umask(Mode::empty());
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum.map_or(Some(MOST), |most| Some(most.min(MOST)));
    let _ = setrlimit(Resource::Nofile, limit);
    getrlimit(Resource::Nofile).current.unwrap_or(MOST)
}
