//! `urnic fault`: the kinds of faults, and those of a process that runs.

use std::fmt::Write as _;

use urnic_config::Config;
use urnic_driver::watch;

use crate::answer::Failure;
use crate::fault_file;

/// The kinds: with their keys, what they do, and the trouble that they stand for; as in
/// docs/guide/faults.md.
const CATALOGUE: [(&str, &str, &str); 21] = [
    (
        "reset after=N",
        "a connection is reset when it has passed so many bytes, or messages",
        "a crash of the peer, a firewall",
    ),
    (
        "close after=N",
        "a connection is closed in order at this position",
        "a peer that exits in the middle",
    ),
    (
        "silence after=N",
        "a connection passes nothing more, in either direction, and does not end",
        "a pulled cable, a lost route",
    ),
    (
        "terminate code=NUMBER after=N",
        "the peer seems to end a connection by a Terminate; the code has layer, error type and error",
        "what the peer refuses; 0x1202: it has no receive posted (RNR)",
    ),
    (
        "corrupt after=BYTES",
        "one bit of the byte at this position of what is sent changes",
        "bad memory in a switch, a bad cable: CRC errors",
    ),
    (
        "delay time=T jitter=T rate=N",
        "what a connection sends is late, and passes at this rate",
        "distance, a busy switch, a slow link",
    ),
    (
        "refuse",
        "an attempt to connect is refused",
        "a server that is not there yet",
    ),
    (
        "unreachable",
        "an attempt to connect finds no route",
        "a wrong route, a port that is down",
    ),
    (
        "unanswered",
        "an attempt to connect is never answered",
        "a firewall that drops, a hung server",
    ),
    (
        "reject",
        "the peer seems to reject an attempt to connect",
        "a server that is full, or of another version",
    ),
    ("drop", "a datagram is lost", "congestion"),
    ("duplicate", "a datagram arrives twice", "a route that changes"),
    (
        "reorder",
        "a datagram arrives behind the next one",
        "several paths",
    ),
    (
        "fail call=VERB errno=NAME",
        "a verb returns an error; resolve_addr reports it by an event",
        "an adapter without room, a limit of locked memory, a name without a route",
    ),
    (
        "complete status=NAME opcode=NAME qp=N",
        "a request that was done completes in error, and its queue pair fails",
        "a lost acknowledgement, an error of the adapter",
    ),
    (
        "late-completion time=T jitter=T",
        "the poll that finds a completion takes longer",
        "a busy processor, an adapter under load",
    ),
    (
        "cq-overflow",
        "a completion queue overflows: it shows nothing more, and its queue pairs fail",
        "a queue that is too small for what is posted",
    ),
    (
        "lose-event",
        "a completion event does not come",
        "a lost interrupt",
    ),
    (
        "port-down for=T",
        "the port is down: the program is told, and nothing passes; after the time it is active again",
        "a link that flaps, a rail that fails",
    ),
    (
        "gid-change",
        "the program is told that the addresses of the port changed",
        "DHCP, a failover of a bond",
    ),
    (
        "device-fatal for=T",
        "the device stops, and can be opened again after the time, or at once",
        "a firmware crash and restart, an adapter that is unplugged",
    ),
];

/// The kinds, in words.
pub(crate) fn list() -> String {
    let mut text = String::new();
    for (kind, does, stands_for) in CATALOGUE {
        let _ = writeln!(text, "{kind}\n      {does}\n      stands for: {stands_for}");
    }
    text += "\nWith each: nth=N (the Nth occasion; the first without), every=N, p=PROBABILITY, count=N at most; at=T, until=T: the time\n\
             in which it can strike; device=NAME, or the number at its end; peer=ADDRESS[/LEN] for connections and datagrams. seed=N is\n\
             for all. after: 64k, 1M (bytes), 100msg (messages); T: 10us, 1ms, 5s; rate: 25Gbit.\n\
             Scenarios:\n";
    for (name, path) in fault_file::scenarios() {
        let _ = writeln!(text, "@{name} ({})", path.display());
        let content = std::fs::read_to_string(&path).unwrap_or_default();
        for line in content.lines() {
            let _ = writeln!(text, "      {}", line.trim_start_matches("# "));
        }
    }
    text
}

/// Clears the faults of a process if `clear` is set, adds those of `given`, and lists all.
pub(crate) fn change(pid: u32, given: &str, clear: bool) -> Result<String, Failure> {
    let faults =
        fault_file::specification(given).map_err(|error| Failure::usage(format!("{given}: {error}")))?;
    let config = Config::from_env().map_err(Failure::usage)?;
    match watch::change_faults(&watch::homes(config.present.dir), pid, &faults, clear) {
        Some(Ok(all)) if all.is_empty() => Ok("no faults\n".to_owned()),
        Some(Ok(all)) => Ok(all
            .iter()
            .map(|fault| urnic_console::escaped(fault) + "\n")
            .collect()),
        Some(Err(error)) => Err(Failure::runtime(error)),
        None => Err(Failure::runtime(format!(
            "process {pid} has no urnic device open, is another user's, or does not answer: `urnic stat` lists those that do"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_catalogue_has_every_kind_in_order() {
        let kinds = CATALOGUE.map(|(kind, _, _)| kind.split(' ').next().unwrap_or(kind));
        assert_eq!(kinds, urnic_faults::Kind::WORDS);
    }

    #[test]
    fn the_guide_has_the_same_catalogue() {
        let guide = include_str!("../../docs/guide/faults.md");
        let section = guide
            .split("\n## ")
            .find(|section| section.starts_with("Kinds\n"))
            .expect("Kinds");
        let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
        let expected =
            CATALOGUE.map(|(kind, does, stands_for)| format!("| `{kind}` | {does} | {stands_for} |"));
        assert_eq!(rows, expected);
    }
}
