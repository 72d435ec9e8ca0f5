//! Programs that start another one as another user, such as sudo(8): they remove LD_PRELOAD, so the
//! program does not see the device. `urnic run` has to stand after them.

use std::env;
use std::ffi::OsString;
use std::path::Path;

use rustix::process::geteuid;
use urnic_process::executable::drops_environment;

use crate::environment::{program_file, quoted_words};

/// The folders in which sudo looks for programs, by its default (`secure_path`).
const SECURE_PATH: [&str; 4] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"];

/// Options whose next word is their value, of all these programs.
const WITH_VALUE: [&str; 18] = [
    "--user",
    "--group",
    "--host",
    "--chdir",
    "--chroot",
    "--prompt",
    "--role",
    "--type",
    "--command-timeout",
    "--close-from",
    "--other-user",
    "--login-class",
    "--auth-type",
    "--nice",
    "--unit",
    "--property",
    "--slice",
    "--setenv",
];

/// The warning about a command whose program cannot have the device, with the command to run
/// instead.
pub(crate) fn warning(command: &[OsString]) -> Option<String> {
    let (first, rest) = command.split_first()?;
    let name = Path::new(first).file_name()?.to_str()?;
    if !drops_environment(name.as_bytes()) || (name == "su" && keeps_environment(rest)) {
        return None;
    }
    let run = run(command.len());
    let instead = match name {
        "su" => format!("su USER -c '{run} COMMAND'"),
        _ => {
            let at = 1 + operand(name, rest);
            let (before, after) = command.split_at(at);
            match after.is_empty() {
                true => format!("{} {run} COMMAND", quoted_words(before)),
                false => format!("{} {run} {}", quoted_words(before), quoted_words(after)),
            }
        }
    };
    Some(format!(
        "{name} removes LD_PRELOAD, so what it starts will not see the device; run instead: {instead}"
    ))
}

/// `urnic run` with the options of this process, whose command has `len` words.
pub(crate) fn run(len: usize) -> String {
    let words: Vec<OsString> = env::args_os().skip(1).collect();
    let options = words.get(..words.len().saturating_sub(len)).unwrap_or_default();
    let mut all = vec![own_name()];
    all.extend_from_slice(options);
    if options.last().is_none_or(|last| last != "--") {
        all.push("--".into());
    }
    quoted_words(&all)
}

/// The name by which another user's shell finds this program.
fn own_name() -> OsString {
    let Ok(file) = program_file() else {
        return "urnic".into();
    };
    let found = |folder: &str| file.parent() == Some(Path::new(folder));
    match SECURE_PATH.into_iter().any(found) {
        true => file.file_name().unwrap_or(file.as_os_str()).to_owned(),
        false => file.into_os_string(),
    }
}

/// su(1) gains no privileges if root runs it, and keeps the environment but for a login shell.
fn keeps_environment(arguments: &[OsString]) -> bool {
    let is_login = |word: &OsString| ["-", "-l", "--login"].iter().any(|login| word == login);
    geteuid().is_root() && !arguments.iter().any(is_login)
}

/// The index of the program among the arguments of a program that starts it: after its options and
/// assignments to variables.
fn operand(name: &str, arguments: &[OsString]) -> usize {
    // sudo(8), doas(1); pkexec(1) and run0(1) have long ones, and run0 -u, -g and -D.
    let letters = match name {
        "sudo" | "sudo-rs" => "aCcDghpRrTtUu",
        "doas" => "aCu",
        _ => "ugD",
    };
    let mut is_value = false;
    let is_option = |word: &&OsString| {
        let word = word.to_string_lossy();
        if std::mem::take(&mut is_value) {
            return true;
        }
        is_value = match word.strip_prefix('-') {
            Some(_) if word.starts_with("--") => WITH_VALUE.contains(&&*word),
            // -nu root, -uroot
            Some(short) => {
                let first = short.find(|letter| letters.contains(letter));
                first.is_some_and(|at| at + 1 == short.len())
            }
            None => return word.split_once('=').is_some_and(|(name, _)| !name.contains('/')),
        };
        word != "--"
    };
    let options = arguments.iter().take_while(is_option).count();
    let is_end = arguments.get(options).is_some_and(|word| word == "--");
    options + usize::from(is_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn the_program_is_the_first_operand() {
        for (line, program) in [
            ("sudo ib_send_bw -d urnic0", "ib_send_bw"),
            ("sudo -n -u root ib_send_bw", "ib_send_bw"),
            ("sudo -nu root ib_send_bw", "ib_send_bw"),
            ("sudo -uroot -n A=1 ib_send_bw", "ib_send_bw"),
            ("sudo --user root --preserve-env ib_send_bw", "ib_send_bw"),
            ("sudo --user=root A=1 B=2 ib_send_bw x=y", "ib_send_bw"),
            ("sudo -E -- ib_send_bw -- x", "ib_send_bw"),
            ("doas -u root ib_send_bw", "ib_send_bw"),
            ("pkexec --user root ib_send_bw", "ib_send_bw"),
            ("sudo ./a=b/c", "./a=b/c"),
        ] {
            let all = words(line);
            let at = operand(all[0].to_str().expect("text"), &all[1..]);
            assert_eq!(all[1 + at], program, "{line}");
        }
        assert_eq!(operand("sudo", &words("-u root -i")), 3);
        assert_eq!(operand("sudo", &[]), 0);
    }

    #[test]
    fn only_programs_that_remove_the_variable_are_named() {
        for line in ["ib_send_bw", "setpriv --reuid=1 ib_send_bw", "env sudo", ""] {
            assert_eq!(warning(&words(line)), None, "{line}");
        }
        for line in ["sudo x", "/usr/bin/doas x", "pkexec x", "su -"] {
            assert!(warning(&words(line)).is_some(), "{line}");
        }
    }
}
