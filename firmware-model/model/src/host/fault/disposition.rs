//! The program's actions for SIGSEGV and SIGBUS while the kernel has the handler of this module.

use libc::{c_int, c_void, siginfo_t};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicUsize, Ordering};

/// sigaction(2) of the C library, or of the next one that interposes it.
pub type SetAction =
    unsafe extern "C-unwind" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;

/// A handler with `SA_SIGINFO`.
pub(super) type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

pub(super) const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The program's action for a signal; its mask is the one that the kernel has.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) handler: AtomicUsize,
    pub(super) flags: AtomicI32,
}

static WANTED: [Wanted; 2] = [const {
    Wanted {
        handler: AtomicUsize::new(libc::SIG_DFL),
        flags: AtomicI32::new(0),
    }
}; 2];
/// A [`SetAction`]; null: that of the C library.
static SET_ACTION: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

pub(super) fn wanted(signal: c_int) -> Option<&'static Wanted> {
    let index = SIGNALS.iter().position(|known| *known == signal)?;
    WANTED.get(index)
}

/// Names the function by which the handler is installed, where sigaction(2) itself is interposed by
/// us.
pub fn set_action_by(set_action: SetAction) {
    SET_ACTION.store(set_action as *mut c_void, Ordering::Release);
}

/// Sets the kernel's action for a signal and returns the one before; `None` if that is refused.
pub(super) fn kernel(signal: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let set_action = SET_ACTION.load(Ordering::Acquire);
    let new = new.map_or(null(), std::ptr::from_ref);
    let mut old = MaybeUninit::zeroed();
    let done = if set_action.is_null() {
        // SAFETY: an action is a live one, and a local takes the old one.
        unsafe { libc::sigaction(signal, new, old.as_mut_ptr()) }
    } else {
        // SAFETY: the pointer is a `SetAction`, and the arguments are those of sigaction(2).
        unsafe { std::mem::transmute::<*mut c_void, SetAction>(set_action)(signal, new, old.as_mut_ptr()) }
    };
    // SAFETY: zeros are a valid `sigaction`, and so is what was filled in.
    (done == 0).then(|| unsafe { old.assume_init() })
}

impl Wanted {
    pub(super) fn note(&self, program: &libc::sigaction) {
        self.flags.store(program.sa_flags, Ordering::Relaxed);
        self.handler.store(program.sa_sigaction, Ordering::Release);
    }
}

/// The action for a received signal.
pub(super) enum Action {
    Default,
    Ignore,
    Handler(Handler),
}

/// The program's action for `signal` on this occasion.
pub(super) fn take(signal: c_int) -> Action {
    let Some(wanted) = wanted(signal) else {
        return Action::Default;
    };
    match wanted.handler.load(Ordering::Acquire) {
        libc::SIG_DFL => Action::Default,
        libc::SIG_IGN => Action::Ignore,
        handler => {
            if wanted.flags.load(Ordering::Relaxed) & libc::SA_RESETHAND != 0 {
                let once = (Ordering::AcqRel, Ordering::Relaxed);
                let _ = wanted
                    .handler
                    .compare_exchange(handler, libc::SIG_DFL, once.0, once.1);
            }
            // SAFETY: the program gave it to sigaction(2) as a handler.
            Action::Handler(unsafe { std::mem::transmute::<usize, Handler>(handler) })
        }
    }
}

/// Sets the kernel's default for `signal`: to end the process.
pub(super) fn back_to_default(signal: c_int) {
    // SAFETY: zeros are a valid `sigaction`: the default, no flags, an empty mask.
    kernel(signal, Some(&unsafe { std::mem::zeroed() }));
}
