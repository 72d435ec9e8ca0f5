//! Functions that run another program: a line on standard error if it uses libibverbs and the
//! loader does not load the plug-in into it. `urnic run` says so of the program that it runs; this
//! is for those that scripts run.
//!
//! A child between fork(2) or vfork(2) and its execve(2) calls these: nothing here allocates or
//! locks.

use std::ffi::{CStr, c_char, c_int};
use std::fmt::{self, Write};
use std::sync::atomic::Ordering;

use urnic_process::executable::{mentions_verbs, unsupported};

use super::{ACTIVE, exported, missing};
use crate::real::{self, Opaque};

type Strings = *const *mut c_char;

/// Longest path, with its end.
const PATH_LEN: usize = libc::PATH_MAX as usize;

/// Text of limited length; the rest is left out.
struct Text<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Text<N> {
    fn new() -> Text<N> {
        Text {
            bytes: [0; N],
            len: 0,
        }
    }

    fn push(&mut self, more: &[u8]) {
        let room = self.bytes.get_mut(self.len..).unwrap_or_default();
        let n = more.len().min(room.len());
        if let (Some(to), Some(from)) = (room.get_mut(..n), more.get(..n)) {
            to.copy_from_slice(from);
            self.len += n;
        }
    }

    fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }
}

impl<const N: usize> Write for Text<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

/// Looks at the program that this path, or name in `PATH`, stands for.
///
/// # Safety
/// `path` is null or a C string; `variables` is null or a list of such that ends with null.
unsafe fn look_at(path: *const c_char, in_path: bool, variables: Strings) {
    // SAFETY: the caller promises a list, if there is one.
    if path.is_null() || !ACTIVE.load(Ordering::Relaxed) || !unsafe { preloads(variables) } {
        return;
    }
    // SAFETY: libc's own place for the calling thread's errno.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { place.read() };
    // SAFETY: the caller promises a C string.
    let name = unsafe { CStr::from_ptr(path) };
    match in_path && !name.to_bytes().contains(&b'/') {
        true => {
            // SAFETY: the name is a C string; exec(3) reads the variable at the same moment.
            let folders = unsafe { libc::getenv(c"PATH".as_ptr()) };
            if !folders.is_null() {
                // SAFETY: not null, so a C string.
                search(name, unsafe { CStr::from_ptr(folders) });
            }
        }
        false => judge(name),
    }
    // SAFETY: as above.
    unsafe { place.write(before) };
}

/// Whether a program with these variables would get the plug-in.
///
/// # Safety
/// `variables` is null or a list of C strings that ends with null.
unsafe fn preloads(variables: Strings) -> bool {
    let mut at = variables;
    while !at.is_null() {
        // SAFETY: the list ends with null, and no null was found before.
        let variable = unsafe { *at };
        if variable.is_null() {
            break;
        }
        // SAFETY: an element of the list is a C string.
        let variable = unsafe { CStr::from_ptr(variable) }.to_bytes();
        let is_ours = |part: &[u8]| part == b"liburnic";
        if let Some(preloaded) = variable.strip_prefix(b"LD_PRELOAD=") {
            return preloaded.windows(b"liburnic".len()).any(is_ours);
        }
        // SAFETY: the list goes on behind an element that is not null.
        at = unsafe { at.add(1) };
    }
    false
}

/// Judges the first program of this name in a list of folders.
fn search(name: &CStr, folders: &CStr) {
    for folder in folders.to_bytes().split(|byte| *byte == b':') {
        let mut path = Text::<PATH_LEN>::new();
        path.push(folder);
        path.push(b"/");
        path.push(name.to_bytes_with_nul());
        if let Ok(path) = CStr::from_bytes_with_nul(path.bytes())
            && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
        {
            return judge(path);
        }
    }
}

fn judge(path: &CStr) {
    if let Some(reason) = unsupported(path)
        && mentions_verbs(path)
    {
        let mut line = Text::<{ PATH_LEN + 256 }>::new();
        line.push(b"urnic: warning: ");
        line.push(path.to_bytes());
        let _ = writeln!(line, " {reason}");
        // SAFETY: descriptor 2 is standard error, or not open, which is an error.
        let standard_error = unsafe { rustix::fd::BorrowedFd::borrow_raw(2) };
        let _ = rustix::io::write(standard_error, line.bytes());
    }
}

unsafe extern "C" {
    /// The variables of the process, which it may change.
    static mut environ: Strings;
}

/// One line per function: its name, its arguments behind the path, whether it looks the name up,
/// and its variables.
macro_rules! programs {
    ($($name:ident($($before:ident: $bt:ty),*; $($after:ident: $at:ty),*) $in_path:literal, $variables:expr, $fails:expr;)*) => {$(
        exported! { $name($($before: $bt,)* path: *const c_char $(, $after: $at)*) -> c_int }
        unsafe extern "C-unwind" fn $name($($before: $bt,)* path: *const c_char $(, $after: $at)*) -> c_int {
            let Some(next) = real::$name() else { return missing($fails) };
            // SAFETY: the C caller's path and variables, or those of the process.
            unsafe { look_at(path, $in_path, $variables) };
            // SAFETY: the C caller's arguments.
            unsafe { next($($before,)* path $(, $after)*) }
        }
    )*};
}

programs! {
    execve(; arguments: Strings, variables: Strings) false, variables, -1;
    execv(; arguments: Strings) false, (&raw const environ).read(), -1;
    execvp(; arguments: Strings) true, (&raw const environ).read(), -1;
    execvpe(; arguments: Strings, variables: Strings) true, variables, -1;
    posix_spawn(pid: Opaque; actions: Opaque, attributes: Opaque, arguments: Strings, variables: Strings) false, variables, libc::ENOSYS;
    posix_spawnp(pid: Opaque; actions: Opaque, attributes: Opaque, arguments: Strings, variables: Strings) true, variables, libc::ENOSYS;
}
