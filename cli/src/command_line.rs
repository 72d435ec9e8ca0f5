//! The command lines of processes, as `/proc` has them.

use std::fs::File;
use std::io::Read as _;

/// Most bytes that are read: a terminal has no room for more.
const MOST: u64 = 1024;

/// The command line of a process whose program has this name, truncated; or the name, if `/proc`
/// does not show the process, or shows another one with this number.
pub(crate) fn of_process(pid: u32, name: &str) -> String {
    let mut bytes = Vec::new();
    let file = File::open(format!("/proc/{pid}/cmdline"));
    let read = file.and_then(|file| file.take(MOST).read_to_end(&mut bytes));
    let words = read.ok().and_then(|_| words(&bytes, name));
    words.unwrap_or_else(|| name.to_owned())
}

/// The words of a command line, without the folder of the program. `None`: it is of another program
/// than the one of this name, which the kernel cuts to 15 bytes.
fn words(cmdline: &[u8], name: &str) -> Option<String> {
    let text = String::from_utf8_lossy(cmdline);
    let text = text.trim_end_matches('\0');
    let (program, arguments) = text.split_once('\0').unwrap_or((text, ""));
    let program = program.rsplit('/').next().unwrap_or(program);
    if name.is_empty() || !program.starts_with(name) {
        return None;
    }
    let line = format!("{program} {}", arguments.replace('\0', " "));
    Some(line.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_has_no_folder() {
        let line = |cmdline: &str, name| words(cmdline.as_bytes(), name);
        let of = |text: &str| Some(text.to_owned());
        assert_eq!(
            line("/usr/bin/ib_send_bw\0-q\x004\0", "ib_send_bw"),
            of("ib_send_bw -q 4")
        );
        assert_eq!(line("sleep\0", "sleep"), of("sleep"));
        assert_eq!(
            line("a-program-with-a-long-name\0-x\0", "a-program-with-"),
            of("a-program-with-a-long-name -x")
        );
        assert_eq!(line("/usr/bin/python3\0a.py\0", "worker"), None, "it was renamed");
        assert_eq!(line("", "kworker"), None);
        assert_eq!(line("x", ""), None);
    }

    #[test]
    fn a_process_that_is_not_there_has_its_name() {
        assert_eq!(of_process(u32::MAX, "gone"), "gone");
    }
}
