//! Program memory that is inaccessible: unmapped, protected, or in a file that was truncated.
//!
//! A NIC has the pages of a region pinned, and continues. This device copies with the program's own
//! mappings, so such a copy faults. A few functions in assembly have the only instructions that
//! touch registered memory in this process. A signal handler recognises a fault there by the
//! program counter, and the access fails with [`Unreachable`]. Every other fault is the program's
//! own and gets the program's own action; [`install`] puts our handler in its place.

#[cfg(test)]
mod tests;

use crate::sys::SignalMask;
use libc::{c_int, c_void, siginfo_t};
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
use plain::{
    landing, urnic_guarded_compare_exchange, urnic_guarded_copy, urnic_guarded_load, urnic_guarded_probe,
};
use rustix::process::getpid;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use urnic_sync::Published;
use urnic_sys::Plain;

// Accesses to memory that may become inaccessible at any time.
//
// They are written in assembly, so that the handler can identify their instructions by address,
// and can end them: none of them moves the stack pointer.

/// Memory that was given to the device is not accessible any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("host memory is unreachable")]
pub struct Unreachable;

#[cfg(target_arch = "x86_64")]
std::arch::global_asm!(include_str!("x86_64.s"));
#[cfg(target_arch = "aarch64")]
std::arch::global_asm!(include_str!("aarch64.s"));

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" {
    safe static urnic_guarded_begin: u8;
    safe static urnic_guarded_end: u8;
    safe static urnic_guarded_failed: u8;
    fn urnic_guarded_copy(to: *mut u8, from: *const u8, len: usize) -> u32;
    fn urnic_guarded_probe(first: *const u8, last: *const u8) -> u32;
    fn urnic_guarded_load(word: *const u64, result: *mut u64) -> u32;
    fn urnic_guarded_compare_exchange(word: *mut u64, expected: u64, new: u64, found: *mut u64) -> u32;
}

/// The address at which a thread that faulted at `pc` continues, if `pc` is in an access of this
/// module.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
#[inline]
fn landing(pc: usize) -> Option<usize> {
    let begin = (&raw const urnic_guarded_begin).addr();
    let end = (&raw const urnic_guarded_end).addr();
    (begin..end)
        .contains(&pc)
        .then(|| (&raw const urnic_guarded_failed).addr())
}

fn outcome(failed: u32) -> Result<(), Unreachable> {
    match failed {
        0 => Ok(()),
        _ => Err(Unreachable),
    }
}

/// Copies bytes.
///
/// # Errors
/// A byte could not be read or written; those before it may have been copied.
///
/// # Safety
/// No reference of this program points into either range, with two exceptions: the caller may hold
/// `to` exclusively, and may hold `from` shared. The ranges do not overlap. Either range may be
/// inaccessible.
#[inline]
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, len: usize) -> Result<(), Unreachable> {
    // SAFETY: the caller guarantees the ranges; an access to inaccessible memory ends with 1.
    outcome(unsafe { urnic_guarded_copy(to, from, len) })
}

/// Reads a byte of each page of a range that is not empty.
///
/// # Errors
/// A page cannot be read at present.
#[inline]
pub(crate) fn probe(from: *const u8, len: usize) -> Result<(), Unreachable> {
    let last = from.wrapping_add(len.saturating_sub(1));
    // SAFETY: reading changes nothing, whatever is mapped; an access to inaccessible memory ends
    // with 1.
    outcome(unsafe { urnic_guarded_probe(from, last) })
}

/// Replaces the word by the result of `update` in one atomic step; returns the old word. `update`
/// may run more than once.
///
/// # Errors
/// The word cannot be read and written.
///
/// # Safety
/// `word` is aligned. References of this program to it, if any, are to atomics only. The word may
/// be inaccessible.
pub(crate) unsafe fn update(word: *mut u64, update: impl Fn(u64) -> u64) -> Result<u64, Unreachable> {
    let mut old = 0;
    // SAFETY: the caller guarantees that `word` is aligned, and it may be inaccessible; `old` is a
    // local.
    outcome(unsafe { urnic_guarded_load(word, &raw mut old) })?;
    loop {
        let mut found = 0;
        // SAFETY: the caller guarantees that `word` is aligned, and it may be inaccessible; `found`
        // is a local.
        outcome(unsafe { urnic_guarded_compare_exchange(word, old, update(old), &raw mut found) })?;
        if found == old {
            return Ok(old);
        }
        old = found;
    }
}

/// Plain accesses, for processors without guarded ones in assembly: a fault there is not recovered.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod plain {
    use std::sync::atomic::{AtomicU64, Ordering};

    pub(super) unsafe fn urnic_guarded_copy(to: *mut u8, from: *const u8, len: usize) -> u32 {
        // SAFETY: as promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
        0
    }

    pub(super) unsafe fn urnic_guarded_probe(_first: *const u8, _last: *const u8) -> u32 {
        0
    }

    pub(super) unsafe fn urnic_guarded_load(word: *const u64, result: *mut u64) -> u32 {
        // SAFETY: as promised by the caller.
        unsafe { *result = AtomicU64::from_ptr(word.cast_mut()).load(Ordering::Acquire) };
        0
    }

    pub(super) unsafe fn urnic_guarded_compare_exchange(
        word: *mut u64,
        old: u64,
        new: u64,
        found: *mut u64,
    ) -> u32 {
        // SAFETY: as promised by the caller.
        let word = unsafe { AtomicU64::from_ptr(word) };
        let was = word.compare_exchange(old, new, Ordering::AcqRel, Ordering::Acquire);
        // SAFETY: as promised by the caller.
        unsafe { *found = was.unwrap_or_else(|was| was) };
        0
    }

    pub(super) fn landing(_pc: usize) -> Option<usize> {
        None
    }
}

// The program's actions for SIGSEGV and SIGBUS while the kernel has the handler of this module.

/// sigaction(2) of the C library, or of the next one that interposes it.
pub type SetAction =
    unsafe extern "C-unwind" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;

/// A handler with `SA_SIGINFO`.
type Handler = unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void);

const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// The program's action for a signal; its mask is the one that the kernel has.
#[derive(Debug)]
struct Wanted {
    handler: AtomicUsize,
    flags: AtomicI32,
}

static WANTED: [Wanted; 2] = [const {
    Wanted {
        handler: AtomicUsize::new(libc::SIG_DFL),
        flags: AtomicI32::new(0),
    }
}; 2];
/// Without a value: sigaction(2) of the C library.
static SET_ACTION: Published<SetAction> = Published::new();

fn wanted(signal: c_int) -> Option<&'static Wanted> {
    let index = SIGNALS.iter().position(|known| *known == signal)?;
    WANTED.get(index)
}

/// Names the function by which the handler is installed, where sigaction(2) itself is interposed by
/// us. The first function that is named stays.
pub fn set_action_by(set_action: SetAction) {
    SET_ACTION.get_or_init(|| set_action);
}

/// Sets the kernel's action for a signal and returns the one before; `None` if that is refused.
fn kernel(signal: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let new = new.map_or(null(), std::ptr::from_ref);
    let mut old = libc::sigaction::zeroes();
    let done = match SET_ACTION.get() {
        // SAFETY: an action is a live one, and a local takes the old one.
        None => unsafe { libc::sigaction(signal, new, &raw mut old) },
        // SAFETY: the arguments are those of sigaction(2), as above.
        Some(set_action) => unsafe { set_action(signal, new, &raw mut old) },
    };
    (done == 0).then_some(old)
}

impl Wanted {
    fn note(&self, program: &libc::sigaction) {
        self.flags.store(program.sa_flags, Ordering::Relaxed);
        self.handler.store(program.sa_sigaction, Ordering::Release);
    }
}

/// The action for a received signal.
enum Action {
    Default,
    Ignore,
    Handler(Handler),
}

/// The program's action for `signal` on this occasion.
fn take(signal: c_int) -> Action {
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
fn back_to_default(signal: c_int) {
    // The default, no flags, an empty mask.
    kernel(signal, Some(&libc::sigaction::zeroes()));
}

// The handler of SIGSEGV and SIGBUS. It uses nothing but atomics and, on the way to the process's
// end, system calls.

/// `si_code` of a memory error that is reported before anybody touches the memory.
const BUS_MCEERR_AO: c_int = 5;
/// `si_code` of a memory tag error that is reported late.
const SEGV_MTEAERR: c_int = 8;

/// Whether the signal was raised by the instruction at the program counter, which would raise it
/// again.
fn is_of_instruction(signal: c_int, code: c_int) -> bool {
    // 0 and less: another process or thread sent the signal (sigaction(2)).
    code > 0
        && !(signal == libc::SIGBUS && code == BUS_MCEERR_AO)
        && !(signal == libc::SIGSEGV && code == SEGV_MTEAERR)
}

/// Makes the thread continue after an access of this module, if the fault was there.
fn recover(context: *mut c_void) -> bool {
    // SAFETY: the kernel passes the thread's context to a handler with SA_SIGINFO, and resumes with
    // what is in there afterwards.
    let Some(context) = (unsafe { context.cast::<libc::ucontext_t>().as_mut() }) else {
        return false;
    };
    #[cfg(target_arch = "x86_64")]
    {
        let pc = &mut context.uc_mcontext.gregs[libc::REG_RIP as usize];
        if let Some(landing) = landing(*pc as usize) {
            *pc = landing as i64;
            return true;
        }
    }
    #[cfg(target_arch = "aarch64")]
    if let Some(landing) = landing(context.uc_mcontext.pc as usize) {
        context.uc_mcontext.pc = landing as u64;
        return true;
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = (context, landing(0));
    false
}

/// A fault, as [`watch`] shows it.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// The address of the memory.
    pub addr: usize,
    /// The address of the instruction.
    pub pc: usize,
    /// The instruction belongs to this library.
    pub ours: bool,
    /// Bytes that the handler has left on the program's stack for signals; `None`: it runs on the
    /// stack of the thread.
    pub stack_left: Option<usize>,
}

/// Looks at a fault first. Returns whether the instruction can run again.
pub type Watch = fn(Fault) -> bool;

static WATCH: Published<Watch> = Published::new();

/// Calls `watch` at each fault from now on. It runs in a signal handler.
pub fn watch(watch: &'static Watch) {
    WATCH.refer_to(watch);
}

fn watched(addr: usize, context: *mut c_void) -> bool {
    let Some(watch) = WATCH.get() else {
        return false;
    };
    let pc = program_counter(context);
    watch(Fault {
        addr,
        pc,
        ours: landing(pc).is_some(),
        stack_left: stack_left(context),
    })
}

/// Bytes below this function's frame on the program's stack for signals, if it is used.
fn stack_left(context: *mut c_void) -> Option<usize> {
    // SAFETY: the kernel passes the thread's context to a handler with SA_SIGINFO.
    let stack = unsafe { context.cast::<libc::ucontext_t>().as_ref() }?.uc_stack;
    let frame = (&raw const stack).addr();
    let left = frame.checked_sub(stack.ss_sp.addr())?;
    (stack.ss_flags & libc::SS_DISABLE == 0 && left < stack.ss_size).then_some(left)
}

/// The program counter of a thread that was interrupted; 0 on other processors.
fn program_counter(context: *mut c_void) -> usize {
    // SAFETY: the kernel passes the thread's context to a handler with SA_SIGINFO.
    let Some(context) = (unsafe { context.cast::<libc::ucontext_t>().as_ref() }) else {
        return 0;
    };
    #[cfg(target_arch = "x86_64")]
    return context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    #[cfg(target_arch = "aarch64")]
    return context.uc_mcontext.pc as usize;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = context;
        0
    }
}

/// The function that the kernel calls. The kernel has already set the mask and the stack that the
/// program's own action requires.
extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO.
    let own = is_of_instruction(signal, unsafe { (*info).si_code });
    // SAFETY: as above; the address is that of a memory error.
    if own && (watched(unsafe { (*info).si_addr() }.addr(), context) || recover(context)) {
        return;
    }
    match take(signal) {
        // SAFETY: this is the program's handler for this signal. A handler without SA_SIGINFO takes
        // the first argument, and does not read the others.
        Action::Handler(handler) => unsafe { handler(signal, info, context) },
        // A fault that is ignored ends the process in any case (sigaction(2)).
        Action::Ignore if !own => {}
        Action::Ignore | Action::Default => {
            back_to_default(signal);
            if !own {
                // The thread gets it as soon as this returns.
                send_again(signal, info);
            }
            // Otherwise the instruction runs again, and the core dump shows it.
        }
    }
}

/// Sends the signal to this thread again, with the same information.
fn send_again(signal: c_int, info: *mut siginfo_t) {
    // SAFETY: a signal to the calling thread itself, and the information that came with it.
    unsafe {
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            libc::syscall(libc::SYS_getpid),
            libc::syscall(libc::SYS_gettid),
            signal,
            info,
        );
    }
}

// Replaces the program's handlers of SIGSEGV and SIGBUS by the device's.
//
// The plug-in interposes the program's calls of sigaction(2) and related functions ([`replace`]).
// The kernel then has our handler, with the mask and the flags that the program requested; so the
// kernel still handles masks, alternate stacks, `SA_NODEFER` and `SA_RESTART`, and our handler
// calls the program's as a function. `SA_RESETHAND` is done here. If a program makes the system
// call itself, it replaces our handler, and faults in our copies go to its handler. If a program
// ignores one of these signals and then calls execve(2), the new program has the default action
// instead, because the kernel resets handlers.

/// The process to which these actions belong; 0: the handler is not installed. A child of vfork(2)
/// shares this memory, but not its parent's actions.
static OWNER: AtomicI32 = AtomicI32::new(0);
static LOCKED: AtomicBool = AtomicBool::new(false);

/// Runs `f`, one call at a time in this process. No handler that makes such a call may run during
/// it.
fn alone<T>(f: impl FnOnce() -> T) -> T {
    let mask = SignalMask::EVERY.exchange();
    while LOCKED.swap(true, Ordering::Acquire) {
        rustix::thread::sched_yield();
    }
    let result = f();
    LOCKED.store(false, Ordering::Release);
    mask.exchange();
    result
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == on_fault as *const () as usize
}

/// The action that is set in the kernel for `program`, the program's own action.
fn in_its_place(program: &libc::sigaction) -> libc::sigaction {
    let kept = match program.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
        _ => program.sa_flags & (libc::SA_ONSTACK | libc::SA_RESTART | libc::SA_NODEFER),
    };
    libc::sigaction {
        sa_sigaction: on_fault as *const () as usize,
        sa_flags: kept | libc::SA_SIGINFO,
        ..*program
    }
}

/// Replaces the kernel's action for `signal` by ours, unless it is ours already.
fn take_place(signal: c_int) {
    let (Some(wanted), Some(before)) = (wanted(signal), kernel(signal, None)) else {
        return;
    };
    if !is_ours(&before) {
        wanted.note(&before);
        kernel(signal, Some(&in_its_place(&before)));
    }
}

/// Makes this process recover from faults in accesses of this library from now on. Where a library
/// refuses the handler, such faults end the process as before.
pub fn install() {
    alone(|| {
        let own = getpid().as_raw_nonzero().get();
        if OWNER.swap(own, Ordering::AcqRel) != own {
            SIGNALS.into_iter().for_each(take_place);
        }
    });
}

/// After the program set its action past us, while [`install`] was under way in another thread.
pub fn install_again(signal: c_int) {
    alone(|| take_place(signal));
}

/// Whether the program's action for `signal` is kept here, and set by [`replace`].
pub fn is_in_place(signal: c_int) -> bool {
    SIGNALS.contains(&signal)
        && match OWNER.load(Ordering::Acquire) {
            0 => false,
            owner => owner == getpid().as_raw_nonzero().get(),
        }
}

/// sigaction(2) for a signal that [is in place](is_in_place): sets the program's action, if there
/// is a new one, and returns the one before. `None` if the C library refuses.
pub fn replace(signal: c_int, new: Option<&libc::sigaction>) -> Option<libc::sigaction> {
    let wanted = wanted(signal)?;
    alone(|| {
        let before = match new {
            None => kernel(signal, None)?,
            Some(new) => kernel(signal, Some(&in_its_place(new)))?,
        };
        let old = match is_ours(&before) {
            true => libc::sigaction {
                sa_sigaction: wanted.handler.load(Ordering::Relaxed),
                sa_flags: wanted.flags.load(Ordering::Relaxed),
                ..before
            },
            // Set past us.
            false => before,
        };
        if let Some(new) = new {
            wanted.note(new);
        }
        Some(old)
    })
}

/// For a child of fork(2), whose actions are copies of its parent's.
pub fn after_fork_in_child() {
    LOCKED.store(false, Ordering::Release);
    if OWNER.load(Ordering::Acquire) != 0 {
        OWNER.store(getpid().as_raw_nonzero().get(), Ordering::Release);
    }
}
