//! Places in the program: the return addresses of a call, without those in this library.

use std::ffi::{CStr, c_void};
use std::fmt;
use std::path::Path;

/// Most frames of a place.
const MOST_FRAMES: usize = 24;
/// Frames that a line of the log shows.
const SHOWN: usize = 6;

/// A place in the program. Equal places have equal addresses.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct CallSite {
    addresses: Vec<usize>,
}

impl CallSite {
    /// The place from which the running verb was called.
    pub(crate) fn here() -> CallSite {
        let mut addresses = Vec::new();
        backtrace::trace(|frame| {
            addresses.push(frame.ip().addr());
            addresses.len() < MOST_FRAMES
        });
        CallSite { addresses }
    }

    /// The place of an instruction.
    pub(super) fn of_instruction(pc: usize) -> CallSite {
        // Frames have the address behind their call.
        CallSite {
            addresses: vec![pc.wrapping_add(1)],
        }
    }

    /// The frames of the program and its libraries, innermost first.
    pub(crate) fn frames(&self) -> Vec<String> {
        let ours = object_of(CallSite::here as *const () as usize).map(|object| object.base);
        let is_ours = |address: &&usize| object_of(**address).map(|object| object.base) == ours;
        let theirs = self.addresses.iter().skip_while(is_ours);
        let frames = theirs.flat_map(|address| described(*address));
        let mut frames: Vec<String> = frames.skip_while(|frame| is_passing_on(frame)).collect();
        // What started `main`, or the thread, is the same everywhere.
        if let Some(end) = frames.iter().position(|frame| is_start(frame)) {
            frames.truncate(end.max(1));
        }
        frames
    }
}

impl fmt::Display for CallSite {
    /// The innermost frames, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let frames = self.frames();
        f.write_str(
            &frames
                .iter()
                .take(SHOWN)
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", in "),
        )
    }
}

/// The file that contains an address.
struct Object {
    name: String,
    base: usize,
}

fn object_of(address: usize) -> Option<Object> {
    // SAFETY: plain data, filled by dladdr.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: a local, and any address.
    let found = unsafe { libc::dladdr(address as *const c_void, &mut info) } != 0;
    (found && !info.dli_fname.is_null()).then(|| Object {
        // SAFETY: dladdr gives the name of a loaded file.
        name: unsafe { CStr::from_ptr(info.dli_fname) }
            .to_string_lossy()
            .into_owned(),
        base: info.dli_fbase.addr(),
    })
}

/// Whether a frame only passes the call on to this library.
fn is_passing_on(frame: &str) -> bool {
    ["(verbs.h:", "(libibverbs.so", "(register-atfork.c:", "(fork.c:"]
        .iter()
        .any(|place| frame.contains(place))
}

/// Whether a frame is of libc's code that starts `main` or a thread.
fn is_start(frame: &str) -> bool {
    let function = frame.split(' ').next().unwrap_or(frame);
    [
        "__libc_start_call_main",
        "__libc_start_main_impl",
        "_start",
        "start_thread",
    ]
    .contains(&function)
}

/// The function with its file and line, and those into which it is inlined; without debug
/// information, the function and its library.
fn described(address: usize) -> Vec<String> {
    // The call is before the address to which it returns. `resolve` looks there by itself.
    let call = address.wrapping_sub(1);
    let mut frames = Vec::new();
    backtrace::resolve(address as *mut c_void, |symbol| {
        let Some(name) = symbol.name() else { return };
        let name = format!("{name:#}");
        frames.push(match (symbol.filename(), symbol.lineno(), object_of(call)) {
            (Some(file), Some(line), _) => format!("{name} ({}:{line})", file_name(file)),
            (_, _, Some(object)) => format!("{name} ({})", file_name(Path::new(&object.name))),
            _ => name,
        });
    });
    if frames.is_empty() {
        frames.extend(object_of(call).map(|object| {
            let offset = call.wrapping_sub(object.base);
            format!("{}+{offset:#x}", file_name(Path::new(&object.name)))
        }));
    }
    frames
}

fn file_name(path: &Path) -> String {
    path.file_name()
        .unwrap_or(path.as_os_str())
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_equal_if_their_calls_are() {
        let places: Vec<CallSite> = (0..2).map(|_| CallSite::here()).collect();
        assert_eq!(places[0], places[1]);
        assert_ne!(places[0], CallSite::here());
    }

    #[test]
    fn a_frame_names_the_function() {
        let frames = CallSite::here().addresses;
        let frames: Vec<String> = frames.iter().flat_map(|at| described(*at)).collect();
        let own = "a_frame_names_the_function";
        assert!(frames.iter().any(|frame| frame.contains(own)), "{frames:?}");
    }
}
