//! Executable files into which the loader does not load the plug-in.
//!
//! All of it may run between fork(2) and execve(2): system calls, and memory on the stack.

use rustix::fd::OwnedFd;
use rustix::fs::{FileType, Mode, OFlags, open, stat};
use rustix::io::pread;
use std::ffi::CStr;
use std::fmt;

/// The command in messages that runs a program with the RNIC.
pub const AGAIN: &str = "urnic run -- COMMAND";

/// Whether a program with this name removes LD_PRELOAD from the environment of programs that it
/// starts.
pub fn drops_environment(name: &[u8]) -> bool {
    let known: [&[u8]; 6] = [b"sudo", b"sudo-rs", b"doas", b"pkexec", b"run0", b"su"];
    known.contains(&name)
}

/// The reason why a program does not find the RNIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsupported {
    /// No dynamic loader, so LD_PRELOAD has no effect.
    Static,
    /// The loader ignores LD_PRELOAD for programs that gain privileges (ld.so(8), secure-execution
    /// mode): by this, which the given user does not need.
    Privileged(&'static str, Option<u32>),
    /// The plug-in is 64-bit.
    Machine,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Static => f.write_str("is statically linked, so nothing can be preloaded: it will not see the device; link it dynamically"),
            Self::Privileged(how, owner) => {
                write!(f, "has {how}, so the loader preloads nothing: it will not see the device; run a copy without")?;
                match owner {
                    Some(0) => write!(f, ", or: sudo {AGAIN}"),
                    Some(user) => write!(f, ", or: sudo -u '#{user}' {AGAIN}"),
                    None => Ok(()),
                }
            }
            Self::Machine => f.write_str("is not a 64-bit program for this machine's architecture: it will not see the device"),
        }
    }
}

/// The reason why the program in this file cannot load the plug-in, as far as the file shows.
pub fn unsupported(path: &CStr) -> Option<Unsupported> {
    let metadata = stat(path).ok()?;
    if FileType::from_raw_mode(metadata.st_mode) != FileType::RegularFile {
        return None;
    }
    let me = rustix::process::geteuid().as_raw();
    if metadata.st_mode & 0o4000 != 0 && metadata.st_uid != me {
        return Some(Unsupported::Privileged(
            "the set-user-id bit",
            Some(metadata.st_uid),
        ));
    }
    if metadata.st_mode & 0o2000 != 0 && metadata.st_gid != rustix::process::getegid().as_raw() {
        return Some(Unsupported::Privileged("the set-group-id bit", None));
    }
    if me != 0 && has_capabilities(path) {
        return Some(Unsupported::Privileged("file capabilities", Some(0)));
    }
    let file = opened(path)?;
    let mut head = [0; 64];
    elf_unsupported(read_exact(&file, 0, &mut head).then_some(&head)?, |at, buffer| {
        read_exact(&file, at, buffer)
    })
}

/// Whether the file has the name of libibverbs in it: a program that uses it, or that has it linked
/// in, does, because that library's messages have it.
pub fn mentions_verbs(path: &CStr) -> bool {
    const NAME: &[u8] = b"libibverbs";
    // Each run of a larger program would take longer than anybody wants to wait.
    const MOST: u64 = 32 << 20;
    let Some(file) = opened(path) else { return false };
    let mut buffer = [0; 32 << 10];
    let mut at = 0;
    while at < MOST {
        let Ok(len @ 1..) = pread(&file, &mut buffer, at) else {
            return false;
        };
        let bytes = buffer.get(..len).unwrap_or_default();
        if bytes.windows(NAME.len()).any(|part| part == NAME) {
            return true;
        }
        // The name may lie across the end.
        at += len.saturating_sub(NAME.len() - 1).max(1) as u64;
    }
    false
}

fn opened(path: &CStr) -> Option<OwnedFd> {
    open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY,
        Mode::empty(),
    )
    .ok()
}

fn read_exact(file: &OwnedFd, mut at: u64, buffer: &mut [u8]) -> bool {
    let mut rest = buffer;
    while !rest.is_empty() {
        let Ok(len @ 1..) = pread(file, &mut *rest, at) else {
            return false;
        };
        rest = rest.get_mut(len..).unwrap_or_default();
        at += len as u64;
    }
    true
}

fn has_capabilities(path: &CStr) -> bool {
    let mut value = [0u8; 64];
    rustix::fs::getxattr(path, c"security.capability", &mut value).is_ok_and(|len| len > 0)
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
    use std::os::unix::ffi::OsStrExt;

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
        let test = std::env::current_exe().expect("this test");
        let test = std::ffi::CString::new(test.as_os_str().as_bytes()).expect("a name");
        assert_eq!(unsupported(&test), None);
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
    fn a_program_that_uses_libibverbs_has_its_name_in_it() {
        let folder = std::env::temp_dir().join(format!("urnic-executable-{}", std::process::id()));
        let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).expect("a name");
        for (before, expected) in [(0, true), ((32 << 10) - 5, true), (100_000, true)] {
            let mut bytes = vec![b'l'; before];
            bytes.extend_from_slice(b"libibverbs.so.1\0");
            std::fs::write(&folder, &bytes).expect("a file");
            assert_eq!(mentions_verbs(&path), expected, "{before}");
        }
        std::fs::write(&folder, vec![b'l'; 100_000]).expect("a file");
        assert!(!mentions_verbs(&path));
        std::fs::remove_file(&folder).expect("the file");
        assert!(!mentions_verbs(&path));
    }
}
