//! The same commands over soft-iWARP, over soft-RoCE, and over urnic with both identities: urnic
//! must run what the device that it stands for runs. soft-iWARP and soft-RoCE are in one guest,
//! each with a pair of programs of its own. The commands are in [`COMMANDS`]; their results become
//! [`PAGE`].

use std::fmt::Write as _;
use std::time::Duration;

use urnic_tests::build::tree;
use urnic_tests::guest::{Guest, Packets};
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;

use super::table::Table;

/// The commands, one a line.
const COMMANDS: &str = "tests/fixtures/siw-and-rxe.commands";

/// The functions of the shell that run one of them.
const SHELL: &str = include_str!("../../fixtures/siw-and-rxe.sh");

/// The page with the results.
const PAGE: &str = "docs/reference/siw-and-rxe.md";

/// How often a command is tried that does not pass, but does so on the page: perftest's second
/// connection may be early, and a machine may be too busy for the time limit.
const TRIES: usize = 3;

/// The time limit of a command, in seconds. Some that do not work do not end.
const SECONDS: u32 = 15;

/// The time limit of a row on this machine: the command, its server's start and end.
const LIMIT: Duration = Duration::from_secs(120);

/// Both devices on interfaces of their own. rxe computes its checksums by the kernel's `crc32`.
const DEVICES: &str = "modprobe -a rdma_rxe crc32_generic dummy; rdma link del siw0
    for n in 0 1; do
        ip link add dummy$n type dummy 2>/dev/null
        ip link set dummy$n up && ip addr add 10.96.$n.1/24 dev dummy$n || exit 1
    done
    rdma link add siw0 type siw netdev dummy0 && rdma link add rxe0 type rxe netdev dummy1";

/// A line of [`COMMANDS`].
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    server: String,
    /// Empty for a program alone.
    client: String,
    note: String,
    /// Whether the note says why urnic does not run it.
    excuses: bool,
}

impl Row {
    fn parse(line: &str) -> Self {
        let (command, note, excuses) = match (line.split_once(" #! "), line.split_once(" # ")) {
            (Some((command, note)), _) => (command, note, true),
            (None, Some((command, note))) => (command, note, false),
            (None, None) => (line, "", false),
        };
        let (server, client) = command.split_once(" | ").unwrap_or((command, ""));
        let client = match client.strip_prefix("+ ") {
            Some(arguments) => format!("{server} {arguments}"),
            None => client.to_owned(),
        };
        Self {
            server: server.to_owned(),
            client,
            note: note.to_owned(),
            excuses,
        }
    }

    fn all() -> Vec<Self> {
        let text = std::fs::read_to_string(tree().join(COMMANDS)).expect("the commands");
        let lines = text.lines().map(str::trim);
        lines
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(Self::parse)
            .collect()
    }

    /// As the page shows it: what is the same in most rows is left out.
    fn shown(&self) -> String {
        let plain = |line: &str| {
            ["-d DEVICE ", "-p PORT ", "-F ", "-p PORT", " ADDRESS"]
                .iter()
                .fold(line.to_owned(), |line, word| line.replace(word, ""))
                .trim()
                .to_owned()
        };
        let (server, client) = (plain(&self.server), plain(&self.client));
        match client.is_empty() || client == server {
            true => format!("`{server}`"),
            false => format!("`{server}`, `{client}`"),
        }
    }
}

/// A device on which the commands run.
struct Place<'a> {
    /// Its column on the page.
    column: usize,
    /// The name for people, which is unique.
    name: &'static str,
    device: &'static str,
    gid: &'static str,
    address: &'static str,
    /// Where its kernel is; `None` is urnic with the identity `name`.
    guest: Option<&'a Guest>,
}

impl Place<'_> {
    /// Runs a row: `yes`, `stays` or `no`, and the ends of what both programs printed.
    fn run(&self, row: &Row) -> (String, String) {
        let port = free_port().to_string();
        let fill = |line: &str| {
            let values = [
                ("DEVICE", self.device),
                ("GID", self.gid),
                ("ADDRESS", self.address),
                ("PORT", &port),
            ];
            values
                .iter()
                .fold(line.to_owned(), |line, (name, value)| line.replace(name, value))
        };
        let name = format!("commands.{}.{}", std::process::id(), self.name);
        let script = format!(
            "{SHELL}\nrow {SECONDS} {name} '{}' '{}'",
            fill(&row.server),
            fill(&row.client)
        );
        let printed = match self.guest {
            Some(guest) => match guest.start(&script).tries() {
                Ok((_, printed)) | Err(printed) => printed,
            },
            None => {
                let shell = Program::new("sh")
                    .env("URNIC_IDENTITY", self.name)
                    .args(["-c", &script]);
                shell.run_for(LIMIT).output
            }
        };
        let result = printed
            .lines()
            .rev()
            .find_map(|line| line.strip_prefix("result: "));
        (result.unwrap_or("no").to_owned(), printed)
    }

    /// The results of all rows. `page` is the page so far, or empty.
    fn results(&self, rows: &[Row], page: &str) -> Vec<(String, String)> {
        let tried = |row: &Row| {
            let tries = if self.passes_on(page, row) { TRIES } else { 1 };
            let mut last = self.run(row);
            for _ in 1..tries {
                if last.0 != "no" {
                    break;
                }
                last = self.run(row);
            }
            last
        };
        rows.iter().map(tried).collect()
    }

    /// Whether the row passes here, as the page has it; a new row may.
    fn passes_on(&self, page: &str, row: &Row) -> bool {
        let start = format!("| {} | ", row.shown());
        let line = page.lines().find_map(|line| line.strip_prefix(&start));
        line.is_none_or(|line| line.split(" | ").nth(self.column) == Some("yes"))
    }
}

/// A line of the page's table.
fn line(row: &Row, results: &[&str; 4]) -> String {
    let cells = results.map(|result| match result {
        "stays" => "yes",
        result => result,
    });
    format!("| {} | {} | {} |\n", row.shown(), cells.join(" | "), row.note)
}

fn page(rows: &[Row], results: &[[&str; 4]]) -> String {
    let passes = |column: usize| results.iter().filter(|row| row[column] != "no").count();
    let mut text = format!(
        "# Commands over siw, rxe and urnic\n\n\
         The commands below ran over Linux's soft-iWARP (`siw`) and soft-RoCE (`rdma_rxe`) in one guest with Debian 12's\n\
         kernel, and over urnic with both identities, between two programs of one host. \"yes\" means that the\n\
         client succeeded, and so did the server if it ended. A command that runs over siw must run over urnic with\n\
         `identity=iwarp`, and one that runs over rxe with `identity=roce`, except where the last column has a reason.\n\n\
         Generated from `{COMMANDS}` by `URNIC_REGENERATE=1 cargo test -p urnic-tests --test system --\n\
         --ignored interop::commands`. `make interop` runs that test, which fails if a result of urnic differs. Device, port, address\n\
         and `-F` are left out.\n\n\
         | command | siw | urnic | rxe | urnic, `roce` | |\n|---|---|---|---|---|---|\n"
    );
    for (row, results) in rows.iter().zip(results) {
        text += &line(row, results);
    }
    let _ = write!(
        text,
        "\nOf {} commands {} pass over siw and {} over urnic; {} over rxe and {} over urnic with `identity=roce`.\n",
        rows.len(),
        passes(0),
        passes(1),
        passes(2),
        passes(3)
    );
    text
}

/// The four devices, in the order of the page's columns.
fn places(guest: &Guest) -> [Place<'_>; 4] {
    let place = |column, name, device, gid, address| Place {
        column,
        name,
        device,
        gid,
        address,
        guest: (device != "urnic0").then_some(guest),
    };
    [
        place(0, "siw", "siw0", "0", "10.96.0.1"),
        place(1, "iwarp", "urnic0", "0", "127.0.0.1"),
        place(2, "rxe", "rxe0", "1", "10.96.1.1"),
        place(3, "roce", "urnic0", "0", "127.0.0.1"),
    ]
}

#[test]
#[ignore = "make interop"]
fn urnic_runs_what_siw_and_rxe_run() {
    for name in ["ibv_rc_pingpong", "rping", "ib_send_bw", "qperf"] {
        or_skip!(installed(name));
    }
    let guest = or_skip!(Guest::boot(2, 1024, Packets::Passing));
    guest.start(DEVICES).success();
    let places = places(&guest);
    let rows = Row::all();
    let path = tree().join(PAGE);
    let regenerates = std::env::var_os("URNIC_REGENERATE").is_some();
    let there = match regenerates {
        true => String::new(),
        false => std::fs::read_to_string(&path).unwrap_or_default(),
    };
    let columns = std::thread::scope(|scope| {
        let running = places
            .each_ref()
            .map(|place| scope.spawn(|| place.results(&rows, &there)));
        running.map(|column| column.join().expect("its rows ran"))
    });
    let heads = ["command", "siw", "urnic", "rxe", "urnic, roce"];
    let mut table = Table::new("commands", "The same commands over siw, rxe and urnic", &heads);
    let (mut results, mut wrong) = (Vec::new(), Vec::new());
    for (at, row) in rows.iter().enumerate() {
        let cells = columns.each_ref().map(|column| column[at].0.as_str());
        table.row(&[&row.shown(), cells[0], cells[1], cells[2], cells[3]]);
        for (theirs, ours) in [(0, 1), (2, 3)] {
            let passes = cells[ours] != "no";
            let must = cells[theirs] != "no" && !row.excuses;
            let differs = !regenerates && passes != places[ours].passes_on(&there, row);
            if (must && !passes) || differs {
                let (name, printed) = (places[ours].name, &columns[ours][at].1);
                wrong.push(format!("{name}: {} | {}\n{printed}", row.server, row.client));
            }
        }
        results.push(cells);
    }
    if regenerates {
        std::fs::write(&path, page(&rows, &results)).expect("the page is written");
    }
    assert!(
        wrong.is_empty(),
        "other results than siw, rxe or {PAGE}:\n{}",
        wrong.join("\n")
    );
}
