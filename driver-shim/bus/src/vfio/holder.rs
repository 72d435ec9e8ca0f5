//! Finds the process that has a function open: only one process can, and error messages name it.

use std::fmt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::process::{Pid, getpid};

use super::function::{device_number, names_in};

/// A process that has one of a function's files open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// Process number.
    pub pid: i32,
    /// The process's name.
    pub name: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.as_str() {
            "" => write!(f, "process {}", self.pid),
            name => write!(f, "process {} ({name})", self.pid),
        }
    }
}

/// Finds the first other process that has one of these device files open. Files are compared by
/// device number; only processes that this user may inspect are considered.
pub fn holder_of(files: &[PathBuf]) -> Option<Holder> {
    let wanted: Vec<u64> = files.iter().filter_map(|file| device_number(file)).collect();
    if wanted.is_empty() {
        return None;
    }
    let pids = names_in(Path::new("/proc"))
        .into_iter()
        .filter_map(|name| name.parse().ok());
    pids.filter(|pid| Pid::from_raw(*pid) != Some(getpid()))
        .find(|pid| holds(*pid, &wanted))
        .map(|pid| Holder {
            pid,
            name: name_of(pid).unwrap_or_default(),
        })
}

fn holds(pid: i32, wanted: &[u64]) -> bool {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    names_in(&folder)
        .into_iter()
        .any(|fd| device_number(&folder.join(fd)).is_some_and(|number| wanted.contains(&number)))
}

fn name_of(pid: i32) -> Option<String> {
    let file = open(
        format!("/proc/{pid}/comm"),
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .ok()?;
    let mut bytes = [0; 64];
    let len = rustix::io::read(&file, &mut bytes).ok()?;
    Some(String::from_utf8_lossy(bytes.get(..len)?).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    #[test]
    fn holders_of_a_device_file_are_named() {
        // A new terminal of the child stands for the group's file: no other process has it open.
        let master =
            rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY).unwrap();
        rustix::pty::unlockpt(&master).unwrap();
        let name = rustix::pty::ptsname(&master, Vec::new())
            .unwrap()
            .into_string()
            .unwrap();
        let files = [PathBuf::from(&name)];
        assert_eq!(holder_of(&files), None, "nobody has it open, and we do not count");
        let mut child = Command::new("sh")
            .args(["-c", "exec 5<>\"$0\"; echo open; read -r line", &name])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let holder = holder_of(&files);
        drop(child.stdin.take());
        child.wait().unwrap();
        let holder = holder.expect("found");
        assert_eq!((holder.pid, holder.name.as_str()), (child.id() as i32, "sh"));
        assert_eq!(holder.to_string(), format!("process {} (sh)", child.id()));
        assert_eq!(
            holder_of(&[PathBuf::from("/no/such/file"), PathBuf::from("/")]),
            None
        );
    }
}
