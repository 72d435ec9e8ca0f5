//! Race detectors: ThreadSanitizer, and valgrind's helgrind.
//!
//! They derive the order of the threads' work from the locks that they observe. The queues of the
//! provider order work by atomic operations that the detectors do not observe, so this module
//! announces that order: work of a thread before it posts precedes work of a thread after it polled
//! a completion. Helgrind, which follows all code, also observes the provider's threads and the
//! program's work on registered memory, in turns that the protocols order; it gets a request to
//! ignore such memory.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;

use urnic_sys::loader::definition;

/// The process's race detector.
enum Detector {
    Absent,
    ThreadSanitizer {
        release: Annotation,
        acquire: Annotation,
    },
    /// Any valgrind tool; tools other than helgrind ignore the requests.
    Valgrind,
}

/// A function of ThreadSanitizer's interface (`<sanitizer/tsan_interface.h>`). Its argument is a
/// name, for which any address is valid.
type Annotation = extern "C" fn(*mut c_void);

/// One object orders everything that is posted and polled: completions of one queue pair may result
/// from requests posted to another.
static ORDER: u8 = 0;

fn detector() -> &'static Detector {
    static DETECTOR: OnceLock<Detector> = OnceLock::new();
    DETECTOR.get_or_init(|| {
        if valgrind::is_present() {
            return Detector::Valgrind;
        }
        match (annotation(c"__tsan_release"), annotation(c"__tsan_acquire")) {
            (Some(release), Some(acquire)) => Detector::ThreadSanitizer { release, acquire },
            _ => Detector::Absent,
        }
    })
}

fn annotation(name: &CStr) -> Option<Annotation> {
    // SAFETY: null, or the function of that name.
    unsafe { std::mem::transmute::<*mut c_void, Option<Annotation>>(definition(name)) }
}

/// Whether this process has a race detector.
pub(crate) fn present() -> bool {
    !matches!(detector(), Detector::Absent)
}

/// Announces that earlier work of this thread precedes work of a thread after [`taken`].
pub(crate) fn handed_over() {
    match detector() {
        Detector::Absent => {}
        Detector::ThreadSanitizer { release, .. } => release((&raw const ORDER).cast_mut().cast()),
        Detector::Valgrind => valgrind::request(valgrind::USERSO_SEND_PRE, (&raw const ORDER).addr(), 0),
    }
}

/// Announces that this thread continues after the work that other threads have [`handed_over`].
pub(crate) fn taken() {
    match detector() {
        Detector::Absent => {}
        Detector::ThreadSanitizer { acquire, .. } => acquire((&raw const ORDER).cast_mut().cast()),
        Detector::Valgrind => valgrind::request(valgrind::USERSO_RECV_POST, (&raw const ORDER).addr(), 0),
    }
}

/// Announces that the device works on this memory from now on.
pub(crate) fn registered(address: usize, len: usize) {
    // A longer range is not a piece of memory but an address space (implicit on-demand paging).
    const LARGEST: usize = 1 << 40;
    if matches!(detector(), Detector::Valgrind) && len < LARGEST {
        valgrind::request(valgrind::ARANGE_MAKE_UNTRACKED, address, len);
    }
}

/// Client requests (`<valgrind/valgrind.h>`, `<valgrind/helgrind.h>`): instructions that do nothing
/// on a processor.
mod valgrind {
    /// `VG_USERREQ__RUNNING_ON_VALGRIND`.
    const RUNNING_ON_VALGRIND: usize = 0x1001;
    /// `VG_USERREQ_TOOL_BASE('H','G')` and 256.
    const HELGRIND: usize = (b'H' as usize) << 24 | (b'G' as usize) << 16 | 0x100;
    /// `_VG_USERREQ__HG_USERSO_SEND_PRE`: a name.
    pub(super) const USERSO_SEND_PRE: usize = HELGRIND + 0x21;
    /// `_VG_USERREQ__HG_USERSO_RECV_POST`: a name.
    pub(super) const USERSO_RECV_POST: usize = HELGRIND + 0x22;
    /// `_VG_USERREQ__HG_ARANGE_MAKE_UNTRACKED`: an address and a length.
    pub(super) const ARANGE_MAKE_UNTRACKED: usize = HELGRIND + 0x27;

    pub(super) fn is_present() -> bool {
        ask(RUNNING_ON_VALGRIND, 0, 0) != 0
    }

    pub(super) fn request(code: usize, first: usize, second: usize) {
        ask(code, first, second);
    }

    /// The tool's answer; 0 without a tool.
    #[cfg(target_arch = "x86_64")]
    fn ask(code: usize, first: usize, second: usize) -> usize {
        let request = [code, first, second, 0, 0, 0];
        let mut answer = 0_usize;
        // SAFETY: rotations by 128 bits in total, and an exchange of a register with itself, change
        // only the flags. Valgrind reads `request` through rax and answers in rdx.
        unsafe {
            std::arch::asm!(
                "rol rdi, 3",
                "rol rdi, 13",
                "rol rdi, 61",
                "rol rdi, 51",
                "xchg rbx, rbx",
                in("rax") request.as_ptr(),
                inout("rdx") answer,
                options(nostack)
            );
        }
        answer
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn ask(_: usize, _: usize, _: usize) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_do_nothing_on_a_processor() {
        assert!(!valgrind::is_present());
        assert!(!present());
        handed_over();
        taken();
        registered(0, 4096);
    }
}
