//! Functions that run another program: a line on standard error if it uses libibverbs and the
//! loader does not load the plug-in into it, or if sudo(8) or a similar program starts such a
//! program. `urnic run` warns about the program that it runs; this code warns about programs that
//! scripts run.
//!
//! A child between fork(2) or vfork(2) and its execve(2) calls these: nothing here allocates or
//! locks.

use std::ffi::{CStr, c_char, c_int};
use std::fmt::{self, Write};
use std::marker::PhantomData;
use std::sync::atomic::Ordering;

use rustix::fs::FileType;
use urnic_process::executable::{AGAIN, drops_environment, mentions_verbs, unsupported};

use super::{ACTIVE, exported, missing};
use crate::guard::{errno, restore_errno};
use crate::log::standard_error;
use crate::real::{self, Opaque};

/// A list of C strings as C has it, which ends with null.
type List = *const *mut c_char;

/// The rest of a list of C strings.
#[derive(Clone, Copy)]
struct Strings<'a> {
    /// Null for no list.
    next: List,
    list: PhantomData<&'a CStr>,
}

impl Strings<'_> {
    /// # Safety
    /// `list` is null or a list of C strings that ends with null.
    unsafe fn of(list: List) -> Self {
        Strings {
            next: list,
            list: PhantomData,
        }
    }
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a CStr;

    fn next(&mut self) -> Option<&'a CStr> {
        if self.next.is_null() {
            return None;
        }
        // SAFETY: the promise of `of`; the list goes on after an element that is not null, and
        // only then is `next` moved.
        unsafe {
            let string = *self.next;
            (!string.is_null()).then(|| {
                self.next = self.next.add(1);
                CStr::from_ptr(string)
            })
        }
    }
}

/// Longest path, with its end.
const PATH_LEN: usize = libc::PATH_MAX as usize;

/// Text of limited length; further text is left out.
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

/// Examines the program with this path, or this name in `PATH`.
fn look_at(path: &CStr, in_path: bool, arguments: Strings<'_>, variables: Strings<'_>) {
    if !ACTIVE.load(Ordering::Relaxed) || !preloads(variables) {
        return;
    }
    let before = errno();
    match base_name(path) {
        starter if drops_environment(starter) => judge_arguments(starter, arguments),
        _ if in_path => drop(found(path, judge)),
        _ => judge(path),
    }
    restore_errno(before);
}

/// Whether a program with these variables would get the plug-in.
fn preloads(mut variables: Strings<'_>) -> bool {
    let preloaded = variables.find_map(|variable| variable.to_bytes().strip_prefix(b"LD_PRELOAD="));
    let is_ours = |part: &[u8]| part == b"liburnic";
    preloaded.is_some_and(|files| files.windows(b"liburnic".len()).any(is_ours))
}

fn base_name(path: &CStr) -> &[u8] {
    path.to_bytes()
        .rsplit(|byte| *byte == b'/')
        .next()
        .unwrap_or_default()
}

/// Applies `judge` to the file of a program, which is searched in `PATH` as execvp(3) does. `None`:
/// there is no such program.
fn found<T>(name: &CStr, judge: impl Fn(&CStr) -> T) -> Option<T> {
    let is_executable =
        |path: &CStr| rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok() && !is_folder(path);
    if name.to_bytes().contains(&b'/') {
        return is_executable(name).then(|| judge(name));
    }
    // SAFETY: the name is a C string, and so is the value, if there is one; exec(3) reads the
    // variable at the same moment.
    let folders = unsafe {
        let value = libc::getenv(c"PATH".as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))?
    };
    for folder in folders.to_bytes().split(|byte| *byte == b':') {
        let mut path = Text::<PATH_LEN>::new();
        path.push(folder);
        path.push(b"/");
        path.push(name.to_bytes_with_nul());
        if let Ok(path) = CStr::from_bytes_with_nul(path.bytes())
            && is_executable(path)
        {
            return Some(judge(path));
        }
    }
    None
}

fn is_folder(path: &CStr) -> bool {
    let is_folder = |mode| FileType::from_raw_mode(mode) == FileType::Directory;
    rustix::fs::stat(path).is_ok_and(|stat| is_folder(stat.st_mode))
}

/// Looks at the program that `starter`, such as sudo(8), is to start: the first argument that is
/// the name of one.
fn judge_arguments(starter: &[u8], arguments: Strings<'_>) {
    // Root's su(1) keeps the environment.
    if starter == b"su" && rustix::process::geteuid().is_root() {
        return;
    }
    for argument in arguments.skip(1) {
        if argument.to_bytes().starts_with(b"-") {
            continue;
        }
        if let Some(uses_verbs) = found(argument, mentions_verbs) {
            if uses_verbs {
                let parts: [&[u8]; 6] = [
                    starter,
                    b" removes LD_PRELOAD, so ",
                    argument.to_bytes(),
                    b" will not see the device; run instead: ",
                    starter,
                    b" ",
                ];
                warn(&parts, format_args!("{AGAIN}"));
            }
            return;
        }
    }
}

/// Writes a line to standard error.
fn warn(parts: &[&[u8]], rest: fmt::Arguments<'_>) {
    let mut line = Text::<{ PATH_LEN + 256 }>::new();
    line.push(b"urnic: warning: ");
    for part in parts {
        line.push(part);
    }
    let _ = writeln!(line, "{rest}");
    let _ = rustix::io::write(standard_error(), line.bytes());
}

fn judge(path: &CStr) {
    if let Some(reason) = unsupported(path)
        && mentions_verbs(path)
    {
        warn(&[path.to_bytes()], format_args!(" {reason}"));
    }
}

unsafe extern "C" {
    /// The variables of the process, which it may change.
    static mut environ: List;
}

/// One line per function: its name, its arguments after the path, whether it looks the name up,
/// and its variables.
macro_rules! programs {
    ($($name:ident($($before:ident: $bt:ty),*; $($after:ident: $at:ty),*) $in_path:literal, $arguments:expr, $variables:expr, $fails:expr;)*) => {$(
        exported! { $name($($before: $bt,)* path: *const c_char $(, $after: $at)*) -> c_int }
        unsafe extern "C-unwind" fn $name($($before: $bt,)* path: *const c_char $(, $after: $at)*) -> c_int {
            let Some(next) = real::$name.get() else { return missing($fails) };
            if !path.is_null() {
                // SAFETY: the C caller's path, which is a C string.
                let path = unsafe { CStr::from_ptr(path) };
                // SAFETY: the C caller's lists, or the variables of the process.
                let (arguments, variables) = unsafe { (Strings::of($arguments), Strings::of($variables)) };
                look_at(path, $in_path, arguments, variables);
            }
            // SAFETY: the C caller's arguments.
            unsafe { next($($before,)* path $(, $after)*) }
        }
    )*};
}

programs! {
    execve(; arguments: List, variables: List) false, arguments, variables, -1;
    execv(; arguments: List) false, arguments, (&raw const environ).read(), -1;
    execvp(; arguments: List) true, arguments, (&raw const environ).read(), -1;
    execvpe(; arguments: List, variables: List) true, arguments, variables, -1;
    posix_spawn(pid: Opaque; actions: Opaque, attributes: Opaque, arguments: List, variables: List) false, arguments, variables, libc::ENOSYS;
    posix_spawnp(pid: Opaque; actions: Opaque, attributes: Opaque, arguments: List, variables: List) true, arguments, variables, libc::ENOSYS;
}
