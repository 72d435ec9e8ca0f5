//! Call sites in the program: the return addresses of a call. The shown frames begin at the
//! program's own, after those of this library, of libibverbs and librdmacm, and of libc. No debug
//! information of those libraries is read: it may take tens of MiB.

use std::ffi::{OsStr, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use urnic_sync::Mutex;
use urnic_sys::loader::{Containing, base_of, file_of};

/// Most frames of a place.
pub(crate) const MOST_FRAMES: usize = 24;
/// Most frames of a handler of signals, up to the kernel's.
const MOST_OF_HANDLER: usize = 16;
/// Frames that a line of the log shows.
const SHOWN: usize = 6;

/// Libraries that only carry out what the program requested from them. A name is followed by a
/// version.
const CARRIERS: [&str; 11] = [
    "libc.so",
    "libc-2",
    "libpthread",
    "ld-linux",
    "ld-musl",
    "libc.musl",
    "libibverbs.so",
    "librdmacm.so",
    "libasan.so",
    "libtsan.so",
    "libclang_rt.",
];
/// Inline functions of rdma-core's headers and of libc's (`_FORTIFY_SOURCE`), by their file, and
/// functions of sanitizers, which clang links into the program.
const CARRYING: [&str; 10] = [
    "(verbs.h:",
    "(rdma_verbs.h:",
    "_fortified.h:",
    "(stdio2.h:",
    "(unistd.h:",
    "(socket2.h:",
    "__interceptor_",
    "___interceptor_",
    "__asan_mem",
    "__tsan_mem",
];

/// A place in the program. Equal places have equal addresses.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct CallSite {
    addresses: Vec<usize>,
}

impl CallSite {
    /// The place from which the running verb was called.
    pub(crate) fn here() -> CallSite {
        let mut addresses = Vec::with_capacity(MOST_FRAMES);
        walk(|frame| {
            addresses.push(frame.ip().addr());
            addresses.len() < MOST_FRAMES
        });
        CallSite { addresses }
    }

    /// The place with these addresses, from [`of_interrupted`].
    pub(crate) fn of_addresses(addresses: Vec<usize>) -> CallSite {
        CallSite { addresses }
    }

    /// The frames outside this library, with their names.
    pub(crate) fn frames(&self) -> Frames {
        let ours = own_base();
        let (mut all, mut of_program, mut end) = (Vec::new(), None, 0);
        for &address in &self.addresses {
            // The call is before the address to which it returns.
            let object = object_of(address.wrapping_sub(1));
            if object.as_ref().map(|object| object.base) == ours {
                continue;
            }
            if let Some(carrier) = object.as_ref().filter(|object| is_carrier(object)) {
                let frame = exported(address, carrier);
                // Its caller is the program's `_start`, which has no name in a stripped program.
                if frame.starts_with("__libc_start_main ") {
                    break;
                }
                all.push(frame);
                continue;
            }
            for frame in described(address, object.as_ref()) {
                if !CARRYING.iter().any(|part| frame.contains(part)) {
                    of_program.get_or_insert(all.len());
                }
                all.push(frame);
                end = all.len();
            }
        }
        forget_debug_information();
        // If the stack could not be walked to a frame of the program, libc's function is shown.
        let of_program = of_program.unwrap_or(0);
        // The frames of libc that started `main`, or the thread, are the same for all call sites.
        all.truncate(end.max(of_program + 1));
        Frames { all, of_program }
    }

    /// The names of all frames, for tests, in which this library and its user are one program.
    #[cfg(test)]
    pub(crate) fn functions(&self) -> Vec<String> {
        let frames = self.addresses.iter();
        frames
            .flat_map(|at| described(*at, object_of(*at).as_ref()))
            .collect()
    }

    /// Whether librdmacm called the verb.
    pub(crate) fn is_in_librdmacm(&self) -> bool {
        let ours = own_base();
        let objects = self
            .addresses
            .iter()
            .filter_map(|address| object_of(address.wrapping_sub(1)));
        let mut callers =
            objects.filter(|object| Some(object.base) != ours && !is_named(object, "libibverbs.so"));
        callers
            .next()
            .is_some_and(|caller| is_named(&caller, "librdmacm.so"))
    }
}

/// The frames of a place, innermost first.
#[derive(Debug)]
pub(crate) struct Frames {
    all: Vec<String>,
    /// The index of the program's innermost frame.
    of_program: usize,
}

impl Frames {
    /// The frames from the program's innermost one on.
    pub(crate) fn of_program(&self) -> &[String] {
        self.all.get(self.of_program..).unwrap_or_default()
    }

    /// All frames, for suppressions, which may name a function of a library.
    pub(crate) fn all(&self) -> &[String] {
        &self.all
    }
}

impl fmt::Display for Frames {
    /// The program's innermost frames, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.of_program();
        f.write_str(&shown.get(..SHOWN).unwrap_or(shown).join(", in "))
    }
}

impl fmt::Display for CallSite {
    /// The program's innermost frames, in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.frames().fmt(f)
    }
}

/// Whether a file is a version of this library.
fn is_named(file: &Containing, library: &str) -> bool {
    name_of(file).starts_with(library)
}

/// The name of a file without its folders.
fn name_of(file: &Containing) -> String {
    file_name(Path::new(OsStr::from_bytes(file.name.to_bytes())))
}

/// The address at which this library is loaded.
fn own_base() -> Option<usize> {
    base_of((CallSite::here as *const ()).cast::<c_void>())
}

/// The file that contains an address.
fn object_of(address: usize) -> Option<Containing> {
    file_of(std::ptr::without_provenance(address))
}

/// Gives `take` the addresses of the place whose instruction at `pc` a signal has interrupted, at
/// most [`MOST_FRAMES`]. For the handler of the signal: allocates nothing. (Before glibc 2.35 the
/// unwinder takes the loader's lock, which the thread itself may hold.) Where the stack cannot be
/// walked, the instruction's is the only address.
pub(crate) fn of_interrupted(pc: usize, mut take: impl FnMut(usize)) {
    // Other frames have the address after their call.
    take(pc.wrapping_add(1));
    let (mut taken, mut is_interrupted, mut of_handler) = (1, false, 0);
    let mut each = |frame: &backtrace::Frame| {
        let address = frame.ip().addr();
        if is_interrupted {
            take(address);
            taken += 1;
        } else {
            is_interrupted = address == pc;
            of_handler += 1;
        }
        taken < MOST_FRAMES && (is_interrupted || of_handler < MOST_OF_HANDLER)
    };
    walk(|frame| each(frame));
}

/// Gives `each` the frames of the calling thread, until it returns false. Takes no lock.
fn walk(each: impl FnMut(&backtrace::Frame) -> bool) {
    // SAFETY: a thread walks its own stack, by libgcc's unwinder, which synchronises what it shares
    // with other threads; the crate's lock is for platforms whose unwinder does not.
    unsafe { backtrace::trace_unsynchronized(each) };
}

/// The lock of the debug information that `backtrace` has read.
static DEBUG_INFORMATION: Mutex<()> = Mutex::new(());
/// Whether a thread of the parent had that lock at the fork: what it has left is then not used.
static IS_LEFT_HALF_READ: AtomicBool = AtomicBool::new(false);

/// To be called in the child after every fork.
pub(crate) fn after_fork_in_child() {
    if DEBUG_INFORMATION.try_lock().is_none() {
        IS_LEFT_HALF_READ.store(true, Ordering::Relaxed);
    }
}

/// Gives `each` the function at an address, and those into which it is inlined, if they are known.
fn resolve(address: usize, each: impl FnMut(&backtrace::Symbol)) {
    if IS_LEFT_HALF_READ.load(Ordering::Relaxed) {
        return;
    }
    let _read = DEBUG_INFORMATION.lock();
    // SAFETY: only this function and the next one call this part of the crate, one thread at a
    // time; in a child never after a call that the fork has ended.
    unsafe { backtrace::resolve_unsynchronized(address as *mut c_void, each) };
}

/// Gives the memory of the debug information back: a warning must not cost the program its memory.
fn forget_debug_information() {
    if IS_LEFT_HALF_READ.load(Ordering::Relaxed) {
        return;
    }
    let _read = DEBUG_INFORMATION.lock();
    backtrace::clear_symbol_cache();
}

/// Whether a library only carries out what the program requested from it.
fn is_carrier(object: &Containing) -> bool {
    CARRIERS.iter().any(|name| is_named(object, name))
}

/// The function that a library exports at an address, and the library.
fn exported(address: usize, object: &Containing) -> String {
    match &object.symbol {
        Some(symbol) => format!("{} ({})", symbol.to_string_lossy(), name_of(object)),
        None => offset(address, object),
    }
}

/// The place of an address in its file.
fn offset(address: usize, object: &Containing) -> String {
    let offset = address.wrapping_sub(1).wrapping_sub(object.base);
    format!("{}+{offset:#x}", name_of(object))
}

/// The function with its file and line, and those into which it is inlined; without debug
/// information, the function and its library.
fn described(address: usize, object: Option<&Containing>) -> Vec<String> {
    let mut frames = Vec::new();
    // `resolve` looks before the address by itself.
    resolve(address, |symbol| {
        let Some(name) = symbol.name() else { return };
        let name = format!("{name:#}");
        frames.push(match (symbol.filename(), symbol.lineno(), object) {
            (Some(file), Some(line), _) => format!("{name} ({}:{line})", file_name(file)),
            (_, _, Some(object)) => format!("{name} ({})", name_of(object)),
            _ => name,
        });
    });
    if frames.is_empty() {
        frames.extend(object.map(|object| offset(address, object)));
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
        let frames = CallSite::here().functions();
        let own = "a_frame_names_the_function";
        assert!(frames.iter().any(|frame| frame.contains(own)), "{frames:?}");
    }
}
