//! `urnic fault`: the kinds of faults, and those of a process that runs.

use std::fmt::Write as _;

use urnic_config::Config;
use urnic_driver::watch;
use urnic_faults::{CATALOGUE, Entry};

use crate::answer::Failure;
use crate::fault_file;

/// The kinds, in words.
pub(crate) fn list() -> String {
    let mut text = String::new();
    for Entry {
        usage,
        does,
        stands_for,
        ..
    } in CATALOGUE
    {
        let _ = writeln!(text, "{usage}\n      {does}\n      stands for: {stands_for}");
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
