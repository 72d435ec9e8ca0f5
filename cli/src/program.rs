//! Replaces this process by the requested program.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::answer::Failure;
use crate::environment::{Environment, quoted_words};
use crate::{inherited, other_user, required};
use urnic_process::executable;

/// Replaces this process by the command; returns only when that fails. With `require`, runs the
/// command as a child, and fails if it does not use the device.
pub(crate) fn run(env: &Environment, command: &[OsString], require: bool) -> Result<ExitCode, Failure> {
    let Some((name, args)) = command.split_first() else {
        return Err(Failure::usage("no command was given"));
    };
    if let Some(warning) = find(name).and_then(|path| unseen(&path, command)) {
        urnic_console::complain("urnic", &format!("warning: {warning}"));
    }
    let mut command = Command::new(name);
    command.args(args).envs(env.variables());
    if require {
        let refused = |error: &io::Error| not_run(name, error);
        return required::run(command, name, env.config.identity, refused);
    }
    let error = inherited::passed_on(&mut command).exec();
    Err(not_run(name, &error))
}

/// Why the program in this file, which runs the command, will not see the device, and what to run
/// instead.
fn unseen(path: &Path, command: &[OsString]) -> Option<String> {
    if let Some(warning) = other_user::warning(command) {
        return Some(warning);
    }
    let file = CString::new(path.as_os_str().as_bytes()).ok()?;
    let reason = executable::unsupported(&file)?.to_string();
    let again = format!("{} {}", other_user::run(command.len()), quoted_words(command));
    Some(format!(
        "{} {}",
        path.display(),
        reason.replace(executable::AGAIN, &again)
    ))
}

/// The failure of a command that could not be run. The statuses are the shell's: 127 for a command
/// that does not exist, 126 for a command that cannot be run.
fn not_run(name: &OsStr, error: &io::Error) -> Failure {
    let path = Path::new(name);
    let is_path = name.as_bytes().contains(&b'/');
    let reason = match error.kind() {
        ErrorKind::NotFound if name.is_empty() => "the command is empty".to_owned(),
        ErrorKind::NotFound if !is_path => "there is no such command in PATH".to_owned(),
        ErrorKind::NotFound if path.exists() => format!(
            "its interpreter{} does not exist",
            interpreter(path).map_or_else(String::new, |name| format!(" {name}"))
        ),
        ErrorKind::NotFound => "there is no such file".to_owned(),
        ErrorKind::PermissionDenied if path.is_dir() => "it is a directory".to_owned(),
        ErrorKind::PermissionDenied if is_path && path.is_file() && find(name).is_none() => {
            format!("it is not executable: chmod +x {}", path.display())
        }
        _ => error.to_string(),
    };
    let status = match error.kind() {
        ErrorKind::NotFound => 127,
        _ => 126,
    };
    Failure {
        message: format!("cannot run {}: {reason}", path.display()),
        status,
    }
}

/// The interpreter that the first line of a script names.
fn interpreter(script: &Path) -> Option<String> {
    let mut head = [0; 256];
    let len = File::open(script).ok()?.read(&mut head).ok()?;
    let line = head[..len]
        .strip_prefix(b"#!")?
        .split(|byte| *byte == b'\n')
        .next()?;
    let words = String::from_utf8_lossy(line);
    words.split_whitespace().next().map(str::to_owned)
}

/// The file that `name` refers to, by PATH as in `exec`.
pub(crate) fn find(name: &OsStr) -> Option<PathBuf> {
    let runnable = |path: &Path| {
        path.metadata()
            .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    if name.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(name)).filter(|path| runnable(path));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|path| runnable(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_searched_as_by_exec() {
        assert!(find(OsStr::new("sh")).is_some_and(|path| path.is_absolute()));
        assert_eq!(find(OsStr::new("no-such-program-anywhere")), None);
        assert_eq!(find(OsStr::new("/etc/passwd")), None);
    }
}
