//! urnic beside soft-iWARP: one guest, one kernel, one address; perftest with `-R` between two
//! programs there, both without CRCs and both with. And plain TCP between two programs that
//! busy-poll, the minimum for any program in user space: siw receives in the kernel, within its
//! peer's system call.

use urnic_tests::build::{optimised_plugin, scratch, stripped};
use urnic_tests::guest::{Guest, Packets};
use urnic_tests::pair::{CONNECT_ATTEMPTS, was_rejected};
use urnic_tests::skip::installed;
use urnic_tests::{compiled, or_skip};

use super::table::Table;

/// The path of the plug-in in the guest.
const PLUGIN: &str = "/lib/liburnic.so";

/// The path of the plain TCP program in the guest.
const TCP: &str = "/bin/tcp_spin";

/// The guest's own address: siw is on this interface, not on the loopback.
const ADDRESS: &str = "10.0.2.15";

/// How often each program is measured, siw and urnic by turns; the median counts.
const ROUNDS: usize = 3;

/// A program with its options, the column of its result, and the aim: which side of siw's figure
/// ours should be on.
const PROGRAMS: [(&str, usize, &str); 6] = [
    ("ib_send_lat -n 5000", 4, "at most 1.0"),
    ("ib_write_lat -n 5000", 4, ""),
    ("ib_read_lat -n 5000", 4, ""),
    ("ib_send_bw -n 2000", 3, "at least 1.0"),
    ("ib_write_bw -n 2000", 3, "at least 1.0"),
    ("ib_read_bw -n 2000", 3, "at least 1.0"),
];

/// One message each way, as plain TCP takes it.
fn is_ping_pong(line: &str) -> bool {
    line.starts_with("ib_send_lat") || line.starts_with("ib_write_lat")
}

/// The result of one run.
#[derive(Debug, Clone, Copy)]
struct Measured {
    /// Microseconds or MB/s.
    result: f64,
    /// Seconds, user and system, of both programs.
    programs: f64,
    /// Seconds in which a processor was not idle: with siw's threads in the kernel.
    machine: f64,
}

/// Runs a pair in the guest; returns the output of both ends, and the share of its processors' time
/// that the pair used.
fn run(guest: &Guest, environment: &str, line: &str) -> (bool, String) {
    let port = guest.port;
    // The kernel may close the last server's listener only after that has ended. Busy is in
    // hundredths of seconds: user, nice, system, idle, iowait, irq, softirq.
    let script = format!(
        "busy() {{ awk '/^cpu / {{ print \"busy\", $2+$3+$4+$7+$8 }}' /proc/stat; }}
         both() {{ env {environment} time -f 'took %U %S' {line} -p {port} $1; }}
         listens() {{ netstat -ltn | grep -q ':{port} '; }}
         n=0; while listens; do n=$((n+1)); [ $n -lt 300 ] || break; sleep 0.1; done
         busy
         both >/tmp/server 2>&1 & server=$!
         n=0; until listens; do n=$((n+1)); [ $n -lt 300 ] || break; sleep 0.1; done
         both {ADDRESS}; client=$?
         [ $client = 0 ] || kill $server
         wait $server && [ $client = 0 ]; ok=$?
         busy
         cat /tmp/server
         [ $ok = 0 ]"
    );
    guest.start(&script).ends()
}

fn measured(guest: &Guest, environment: &str, line: &str, column: usize) -> Measured {
    let mut printed = String::new();
    for _ in 0..CONNECT_ATTEMPTS {
        let (ok, words) = run(guest, environment, line);
        printed = words;
        if ok {
            break;
        }
        assert!(was_rejected(&printed), "{environment} {line}:\n{printed}");
        guest.stop();
    }
    let number = |word: &str| word.parse::<f64>().ok();
    let numbers = |mark: &str| -> Vec<f64> {
        let lines = printed.lines().filter_map(|line| line.trim().strip_prefix(mark));
        lines.flat_map(str::split_whitespace).filter_map(number).collect()
    };
    let (busy, took) = (numbers("busy "), numbers("took "));
    let row = printed.lines().find_map(|line| {
        let words: Option<Vec<f64>> = line.split_whitespace().map(number).collect();
        words.filter(|words| words.len() > column)
    });
    assert!(busy.len() == 2 && took.len() == 4, "{printed}");
    Measured {
        result: row.unwrap_or_else(|| panic!("no result:\n{printed}"))[column],
        programs: took.iter().sum(),
        machine: (busy[1] - busy[0]) / 100.0,
    }
}

fn median(runs: &[Measured], of: impl Fn(&Measured) -> f64) -> f64 {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
#[ignore = "make interop"]
fn urnic_and_siw_in_one_guest() {
    or_skip!(installed("ib_send_bw"));
    let plugin = scratch().join(format!("interop-{}.so", std::process::id()));
    or_skip!(stripped(&optimised_plugin(), &plugin));
    let guest = or_skip!(Guest::boot(2, 1024, Packets::Passing));
    guest.bring(&plugin, PLUGIN);
    guest.bring(&or_skip!(compiled("tcp_spin")), TCP);
    let _ = std::fs::remove_file(&plugin);
    let title = format!(
        "perftest -R from one program to another in a guest of two emulated processors: ratios are urnic to siw, medians of {ROUNDS} runs by turns; \
         TCP is plain, between two programs that spin; CPU in seconds, of both programs and of the whole machine"
    );
    let heads = [
        "program",
        "CRC",
        "siw",
        "urnic",
        "TCP",
        "unit",
        "ratio",
        "aim",
        "CPU siw",
        "CPU urnic",
        "ratio",
        "machine siw",
        "machine urnic",
        "ratio",
    ];
    let mut table = Table::new("speed", &title, &heads);
    for (crc, required, wanted) in [("no", 0, "false"), ("yes", 1, "true")] {
        guest.set(&[("mpa_crc_required", required)]);
        let preload = format!("LD_PRELOAD={PLUGIN} URNIC_MPA_CRC={wanted}");
        for (line, column, aim) in PROGRAMS {
            let (mut theirs, mut ours, mut plain) = (Vec::new(), Vec::new(), Vec::new());
            let perftest = format!("{line} -R -F");
            for _ in 0..ROUNDS {
                theirs.push(measured(&guest, "", &perftest, column));
                ours.push(measured(&guest, &preload, &perftest, column));
                if is_ping_pong(line) {
                    plain.push(measured(&guest, "", &format!("{TCP} -n 5000"), column));
                }
            }
            let tcp = match is_ping_pong(line) {
                true => format!("{:.2}", median(&plain, |run| run.result)),
                false => String::new(),
            };
            let unit = if column == 3 { "MB/s" } else { "us" };
            let pair = |of: fn(&Measured) -> f64| {
                let (siw, urnic) = (median(&theirs, of), median(&ours, of));
                [siw, urnic, urnic / siw].map(|value| format!("{value:.2}"))
            };
            let [siw, urnic, ratio] = pair(|run| run.result);
            let [programs_siw, programs_urnic, programs] = pair(|run| run.programs);
            let [machine_siw, machine_urnic, machine] = pair(|run| run.machine);
            table.row(&[
                line,
                crc,
                &siw,
                &urnic,
                &tcp,
                unit,
                &ratio,
                aim,
                &programs_siw,
                &programs_urnic,
                &programs,
                &machine_siw,
                &machine_urnic,
                &machine,
            ]);
        }
    }
}
