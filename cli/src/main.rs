//! `urnic`: runs programs with the RNIC present, and reports faults when it is not.

// Both panic when the write fails: see `urnic_console`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod answer;
mod cdi;
mod columns;
mod command_line;
mod conformance;
mod doctor;
mod environment;
mod explain;
mod fault;
mod fault_file;
mod files;
mod hosts;
mod info;
mod inherited;
mod manual;
mod options;
mod other_user;
mod program;
mod required;
mod serve;
mod signals;
mod stat;
mod top;
mod trace;
mod verbs;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use urnic_config::{Config, OPTIONS};

use answer::{print, wrapped};
use environment::Environment;
use options::Options;

/// A userspace iWARP RNIC: RDMA programs without RDMA hardware, kernel modules or root.
#[derive(Parser)]
#[command(
    name = "urnic",
    version,
    about,
    after_help = "`urnic run --help` documents every option."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run COMMAND with the device urnic0
    #[command(after_long_help = keys())]
    Run {
        #[command(flatten)]
        options: Options,
        /// End with status 87 if COMMAND succeeds, and none of its processes connected a queue pair
        /// of the device
        #[arg(long)]
        require: bool,
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND", num_args = 1..)]
        command: Vec<OsString>,
    },
    /// Run COMMAND on each of N hosts in this machine, each with an address and the device
    ///
    /// Hosts are network namespaces, and need no privileges. COMMAND finds its number, from 0 on,
    /// in HOST, its address in HOST_ADDRESS, and the addresses of all in HOSTS. The status is 0 if
    /// it is 0 on every host.
    Hosts {
        #[command(flatten)]
        options: Options,
        /// The number of hosts
        #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(hosts::MOST)))]
        count: u32,
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND", num_args = 1..)]
        command: Vec<OsString>,
    },
    /// Print the environment of `run`, for shells, CI, containers and programs
    #[command(after_long_help = keys())]
    Env {
        #[command(flatten)]
        options: Options,
        /// The format: `export` lines for a shell, lines for $GITHUB_ENV, ENV lines of a
        /// Dockerfile, JSON
        #[arg(long, value_name = "FORMAT", value_enum, default_value_t = environment::Format::Sh)]
        format: environment::Format,
    },
    /// Print a CDI specification: containers get the device by --device urnic.io/rnic=all
    ///
    /// podman, containerd, CRI-O and Docker read such files (Container Device Interface) in
    /// /etc/cdi and /run/cdi. A container gets the plug-in and `urnic` as read-only files, at the
    /// paths of the Debian package, and the variables of `urnic env`; it needs libibverbs of its
    /// own. The devices are `all`, and each by its name; a container takes one of these.
    #[command(after_long_help = keys())]
    Cdi {
        #[command(flatten)]
        args: cdi::CdiArgs,
    },
    /// Serve the device as a PCI function to other processes, over vfio-user
    ///
    /// A client is a program with --device vfio-user:PATH, or a guest: QEMU from 10.1 on, with
    /// memory that can be shared (-object memory-backend-memfd,share=on) and -device
    /// '{"driver":"vfio-user-pci","socket":{"type":"unix","path":"PATH"}}'. When a client
    /// disconnects, its function ends. SIGINT or SIGTERM ends the server.
    Serve {
        #[command(flatten)]
        offer: serve::Offer,
    },
    /// Check this machine, and print the command that solves each problem
    Doctor {
        #[command(flatten)]
        options: Options,
        /// Print one JSON object, with all checks
        #[arg(long)]
        json: bool,
    },
    /// Print the attributes of the device that programs get
    Info {
        #[command(flatten)]
        options: Options,
        /// Print JSON: an array of devices
        #[arg(long)]
        json: bool,
        /// Set in the process that `info` starts with the device
        #[arg(long, hide = true)]
        inside: bool,
    },
    /// Test the device against its datasheet, docs/reference/device.md: one line for each check
    ///
    /// Drives the device's registers, queues and doorbells itself, without libibverbs. No other
    /// program may use the device meanwhile: it is reset before each check. Its streams connect the
    /// function to its own addresses.
    Conformance {
        #[command(flatten)]
        options: Options,
        /// List the checks without running them
        #[arg(long)]
        list: bool,
        /// Run only the checks whose names contain this
        #[arg(value_name = "PART", default_value = "", hide_default_value = true)]
        part: String,
    },
    /// Show live counters of the processes of this user that have the device open
    ///
    /// ERRORS is the sum of CRC and marker errors, lost streams, Terminates sent and received, and
    /// completion queue overflows. A process is found by its files in $XDG_RUNTIME_DIR, /tmp,
    /// /dev/shm, or URNIC_PRESENT_DIR, in folders that no other user may enter. Processes of other
    /// users are not shown, also to root.
    Stat {
        #[command(flatten)]
        report: stat::ReportArgs,
    },
    /// Show processes, queue pairs and their rates on the terminal, live
    ///
    /// Keys: arrows select, Enter shows the queue pairs of a device, s changes the order (process,
    /// rate, errors), p pauses, h explains the columns, q quits. Columns for which the terminal is
    /// too narrow are left out.
    Top {
        #[command(flatten)]
        view: top::ViewArgs,
    },
    /// Add faults to a running process, or list or clear its faults
    ///
    /// The process runs under `urnic run --faults`, which may be `none`; without that, only calls,
    /// completions and events can fail. Occasions and positions (nth=, after=) count from this
    /// moment.
    Fault {
        /// The process; `urnic stat` lists those that have a device open
        #[arg(required_unless_present = "list")]
        pid: Option<u32>,
        /// The faults to add: KIND KEY=VALUE …, with semicolons between; or @FILE, or @SCENARIO
        #[arg(value_name = "FAULTS|@FILE")]
        faults: Vec<String>,
        /// Clear the faults of the process first. The effects of earlier faults are not undone
        #[arg(long, requires = "pid")]
        clear: bool,
        /// List the faults of the process, or without PID all kinds with their meaning
        #[arg(long, conflicts_with_all = ["clear", "faults"])]
        list: bool,
    },
    /// Read what `urnic run --trace FILE` has written
    ///
    /// The file itself opens in Perfetto (ui.perfetto.dev) and chrome://tracing.
    Trace {
        #[command(subcommand)]
        action: trace::Action,
    },
    /// Print a script that completes the words of `urnic` in a shell
    Completions {
        /// The shell
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Print the manual page of a command: urnic man run | man -l -
    Man {
        /// The command
        #[arg(required_unless_present = "into", value_name = "COMMAND")]
        of: Option<String>,
        /// Write the pages of all commands into this folder instead, as urnic-COMMAND.1
        #[arg(long, value_name = "FOLDER", conflicts_with = "of")]
        into: Option<PathBuf>,
    },
    /// Explain statuses of completions, vendor_err, and error numbers
    Explain {
        /// A status (10, REM_ACCESS_ERR), a vendor_err (0x1100c000), an error number (EINVAL, -22)
        #[arg(
            required = true,
            allow_negative_numbers = true,
            value_name = "STATUS|VENDOR_ERR|ERRNO"
        )]
        what: Vec<String>,
    },
}

/// The table of options, as `--help` prints it.
fn keys() -> String {
    let defaults = Config::default();
    let mut text = String::from(
        "Keys, for --set, for files (TOML; \"mpa.crc = false\" or a section [mpa]) and for URNIC_SET:\n",
    );
    for opt in OPTIONS {
        let value = match opt.value(&defaults) {
            value if value.is_empty() => "nothing".to_owned(),
            value => value,
        };
        let _ = write!(text, "\n  {}\n", opt.key);
        for line in wrapped(opt.help, 72, 0) {
            let _ = writeln!(text, "      {line}");
        }
        let _ = writeln!(
            text,
            "      Takes {}. Default: {value}. Variable: {}",
            opt.takes,
            opt.variable()
        );
    }
    text.push_str(
        "\nA file may have [[peer]] sections with an address (\"192.0.2.7\" or \"192.0.2.0/24\") and mpa and cm keys: they are for \
         rdma_cm\nconnections with such peers, from either side; llp is for all connections with them. The first section that matches overrides all other\n\
         sources. profile = \"siw\", \"cxgb4\", \"irdma\" or \"strict\" in it sets what soft-iWARP, Chelsio's or Intel's adapters support, or exactly the rules of the RFCs.\n",
    );
    text
}

fn main() -> ExitCode {
    let (cli, matches) = match urnic_console::parsed::<Cli>(Cli::command()) {
        Ok(parsed) => parsed,
        Err(status) => return status,
    };
    let outcome = match cli.command {
        Command::Run {
            options,
            require,
            command,
        } => {
            let prepared = Environment::new(&options).and_then(|env| {
                files::check(&env.config)?;
                (env.config.pcap.as_deref()).map_or(Ok(()), files::prepare_capture)?;
                Ok(env)
            });
            prepared.and_then(|env| program::run(&env, &command, require))
        }
        Command::Hosts {
            options,
            count,
            command,
        } => Environment::new(&options).and_then(|env| {
            files::check(&env.config)?;
            hosts::run(&env, count, &command)
        }),
        Command::Env { options, format } => {
            Environment::new(&options).and_then(|env| print(&env.printed(format)))
        }
        Command::Cdi { args } => cdi::specify(&args),
        Command::Serve { offer } => match matches.subcommand_matches("serve") {
            Some(matches) => serve::serve(&offer, matches),
            None => unreachable!("the subcommand is `serve`"),
        },
        Command::Doctor { options, json } => doctor::examine(&options, json),
        Command::Info {
            inside: true, json, ..
        } => info::describe(json).and_then(|text| print(&text)),
        Command::Info {
            options,
            json,
            inside: false,
        } => Environment::new(&options).and_then(|env| info::reexecute(&env, json)),
        Command::Conformance { list: true, part, .. } => conformance::list(&part),
        Command::Conformance { options, part, .. } => conformance::run(&options, &part),
        Command::Stat { report } => stat::show(&report),
        Command::Top { view } => top::show(&view),
        Command::Trace { action } => trace::act(&action).and_then(|text| print(&text)),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "urnic", &mut script);
            print(&String::from_utf8_lossy(&script))
        }
        Command::Man {
            into: Some(folder), ..
        } => manual::write(Cli::command(), &folder).map(|()| ExitCode::SUCCESS),
        Command::Man { of, .. } => {
            manual::page(Cli::command(), &of.unwrap_or_default()).and_then(|text| print(&text))
        }
        Command::Fault { pid: None, .. } => print(&fault::list()),
        Command::Fault {
            pid: Some(pid),
            faults,
            clear,
            ..
        } => fault::change(pid, &faults.join(" "), clear).and_then(|text| print(&text)),
        Command::Explain { what } => explain::explain(&what).and_then(|text| print(&text)),
    };
    outcome.unwrap_or_else(|failure| failure.report())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn help_documents_every_option() {
        let mut cli = Cli::command();
        let run = cli.find_subcommand_mut("run").expect("run");
        let help = run.render_long_help().to_string();
        for opt in OPTIONS {
            assert!(help.contains(&format!("  {}\n", opt.key)), "{}", opt.key);
            assert!(help.contains(&opt.variable()), "{}", opt.variable());
        }
    }

    #[test]
    fn the_manual_page_documents_every_option_with_its_default() {
        let page = include_str!("../../docs/urnic.1").replace("\\-", "-");
        for opt in OPTIONS {
            let entry = format!(".B {}\n", opt.key);
            let at = page
                .find(&entry)
                .unwrap_or_else(|| panic!("docs/urnic.1 lacks {}", opt.key));
            let text = page[at + entry.len()..].split(".TP").next().expect("an entry");
            let value = opt.value(&Config::default());
            assert!(
                value.is_empty() || text.contains(&format!("Default: {value}.")),
                "{}: {text}",
                opt.key
            );
        }
    }

    #[test]
    fn the_manual_page_lists_every_command_of_the_help() {
        let page = include_str!("../../docs/urnic.1").replace("\\-", "-");
        let (synopsis, rest) = page.split_once(".SH DESCRIPTION\n").expect("a description");
        let description = rest.split(".SH ").next().expect("a section");
        let mut cli = Cli::command();
        cli.build();
        let commands = cli.get_subcommands().filter(|command| !command.is_hide_set());
        let names: Vec<&str> = commands.map(clap::Command::get_name).collect();
        assert!(names.contains(&"top") && names.contains(&"help"), "{names:?}");
        for name in names {
            let is_usage = |line: &str| {
                line.strip_prefix(".B urnic ")
                    .is_some_and(|rest| rest.split_whitespace().next() == Some(name))
            };
            assert!(synopsis.lines().any(is_usage), "no {name} in the synopsis");
            let entry = format!(".TP\n.B {name}\n");
            assert!(description.contains(&entry), "no {name} in the description");
        }
    }

    #[test]
    fn arguments_after_the_command_belong_to_it() {
        let cli = Cli::try_parse_from(["urnic", "run", "--log", "debug", "--", "prog", "--log", "-x"])
            .expect("good");
        let Command::Run { options, command, .. } = cli.command else {
            panic!("run")
        };
        assert_eq!(options.log.as_deref(), Some("debug"));
        assert_eq!(command, ["prog", "--log", "-x"]);
    }
}
