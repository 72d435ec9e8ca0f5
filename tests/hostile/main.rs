//! A hostile process beside two devices of the same host. It attacks what devices of one host
//! share: their abstract sockets, the messages and descriptors that pass there, and the shared
//! memory.
//!
//! It knows no layout of messages or memory. A valid message is one that a real device was about
//! to send: `hostile` runs a verbs program under the plug-in and changes its system calls and its
//! memory (see `tampered`). So it stays right when a layout changes.
//!
//! It ends after `--seconds`, or at the end of its standard input. It belongs in a network
//! namespace of its own, because it attacks every device there. The seed determines the choices,
//! not how the kernel interleaves the processes.

use std::process::ExitCode;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

mod descriptors;
mod interception;
mod memory;
mod offers;
mod options;
mod sockets;
mod squatter;
mod tampered;

use options::Options;

const USAGE: &str =
    "hostile offers|squat|client|server --seed SEED --seconds N [--port PORT --program FILE --plugin FILE]";

fn main() -> ExitCode {
    let Some(options) = Options::from_arguments() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    options::watch_input();
    // As many descriptors as this process may have.
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            ..limit
        },
    );
    let done = match options.attack.as_str() {
        "offers" => offers::run(options),
        "squat" => squatter::run(options),
        "client" | "server" => tampered::run(options),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    println!("{done}");
    ExitCode::SUCCESS
}
