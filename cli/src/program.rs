//! Replaces this process by the requested program, and detects beforehand the programs into which
//! the loader does not load the plug-in.

use std::ffi::{CString, OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use crate::answer::Failure;
use crate::environment::Environment;
use crate::inherited;

/// The reason why a program does not find the RNIC.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unsupported {
    /// No dynamic loader, so LD_PRELOAD has no effect.
    Static,
    /// The loader ignores LD_PRELOAD for programs that gain privileges (ld.so(8), secure-execution
    /// mode).
    Privileged(&'static str),
    /// The plug-in is 64-bit.
    Machine,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static => f.write_str("is statically linked, so nothing can be preloaded: it will not see the device; link it dynamically"),
            Self::Privileged(how) => write!(f, "has {how}, so the loader preloads nothing: it will not see the device; run a copy without"),
            Self::Machine => f.write_str("is not a 64-bit program for this machine's architecture: it will not see the device"),
        }
    }
}

/// Replaces this process by the command; returns only when that fails.
pub(crate) fn run(env: &Environment, command: &[OsString]) -> Result<ExitCode, Failure> {
    let Some((name, args)) = command.split_first() else {
        return Err(Failure::usage("no command was given"));
    };
    if let Some(path) = find(name)
        && let Some(reason) = unsupported(&path)
    {
        urnic_console::complain("urnic", &format!("warning: {} {reason}", path.display()));
    }
    let mut command = Command::new(name);
    command.args(args).envs(env.variables());
    let error = inherited::passed_on(&mut command).exec();
    Err(not_run(name, &error))
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

/// The reason why this program cannot load the plug-in, as far as its file shows.
pub(crate) fn unsupported(path: &Path) -> Option<Unsupported> {
    let metadata = path.metadata().ok()?;
    let me = rustix::process::geteuid().as_raw();
    if metadata.mode() & 0o4000 != 0 && metadata.uid() != me {
        return Some(Unsupported::Privileged("the set-user-id bit"));
    }
    if metadata.mode() & 0o2000 != 0 && metadata.gid() != rustix::process::getegid().as_raw() {
        return Some(Unsupported::Privileged("the set-group-id bit"));
    }
    if me != 0 && has_capabilities(path) {
        return Some(Unsupported::Privileged("file capabilities"));
    }
    let mut file = File::open(path).ok()?;
    let mut head = [0; 64];
    file.read_exact(&mut head).ok()?;
    elf_unsupported(&head, |at, buffer| file.read_exact_at(buffer, at).is_ok())
}

fn has_capabilities(path: &Path) -> bool {
    let Ok(path) = CString::new(path.as_os_str().as_bytes()) else {
        return false;
    };
    let mut value = [0u8; 64];
    rustix::fs::getxattr(path.as_c_str(), c"security.capability", &mut value).is_ok_and(|len| len > 0)
}

/// Reads the program headers of an ELF file; `read` fills a buffer from an offset. Other files,
/// such as scripts, return `None`.
fn elf_unsupported(head: &[u8; 64], read: impl Fn(u64, &mut [u8]) -> bool) -> Option<Unsupported> {
    const PT_INTERP: u32 = 3;
    const CLASS_64: u8 = 2;
    const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    // Limits the count of headers, which comes from the untrusted file.
    const MOST_HEADERS: u16 = 128;

    if !head.starts_with(b"\x7fELF") {
        return None;
    }
    let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    if head[4] != CLASS_64 || half(18) != MACHINE {
        return Some(Unsupported::Machine);
    }
    let table = u64::from_le_bytes([
        head[32], head[33], head[34], head[35], head[36], head[37], head[38], head[39],
    ]);
    let (size, count) = (u64::from(half(54)), half(56).min(MOST_HEADERS));
    let mut kind = [0; 4];
    let dynamic = (0..u64::from(count)).any(|index| {
        let at = size
            .checked_mul(index)
            .and_then(|offset| table.checked_add(offset));
        at.is_some_and(|at| read(at, &mut kind)) && u32::from_le_bytes(kind) == PT_INTERP
    });
    (!dynamic).then_some(Unsupported::Static)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(class: u8, machine: u8, kinds: &[u32]) -> Vec<u8> {
        let mut file = vec![0; 64];
        file[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', class]);
        file[18] = machine;
        file[32] = 64;
        file[54] = 56;
        file[56] = kinds.len() as u8;
        for kind in kinds {
            file.extend(kind.to_le_bytes());
            file.resize(file.len() + 52, 0);
        }
        file
    }

    fn judge(file: &[u8]) -> Option<Unsupported> {
        let head = file[..64].try_into().expect("64 bytes");
        elf_unsupported(head, |at, buffer| {
            let at = at as usize;
            file.get(at..at + buffer.len())
                .map(|bytes| buffer.copy_from_slice(bytes))
                .is_some()
        })
    }

    #[cfg(target_arch = "x86_64")]
    const MACHINE: u8 = 62;
    #[cfg(target_arch = "aarch64")]
    const MACHINE: u8 = 183;

    #[test]
    fn a_program_with_an_interpreter_is_supported() {
        assert_eq!(judge(&elf(2, MACHINE, &[6, 3, 1])), None);
        assert_eq!(unsupported(&std::env::current_exe().expect("this test")), None);
    }

    #[test]
    fn a_static_program_is_unsupported() {
        assert_eq!(judge(&elf(2, MACHINE, &[1, 1])), Some(Unsupported::Static));
    }

    #[test]
    fn a_program_for_another_machine_is_unsupported() {
        assert_eq!(judge(&elf(1, 3, &[3])), Some(Unsupported::Machine));
    }

    #[test]
    fn scripts_can_be_preloaded() {
        let mut script = [b' '; 64];
        script[..9].copy_from_slice(b"#!/bin/sh");
        assert_eq!(judge(&script), None);
    }

    #[test]
    fn names_are_looked_up_as_exec_does() {
        assert!(find(OsStr::new("sh")).is_some_and(|path| path.is_absolute()));
        assert_eq!(find(OsStr::new("no-such-program-anywhere")), None);
        assert_eq!(find(OsStr::new("/etc/passwd")), None);
    }
}
