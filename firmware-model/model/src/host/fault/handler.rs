//! The handler of SIGSEGV and SIGBUS. It uses nothing but atomics and, on the way to the process's
//! end, system calls.

use super::access::landing;
use super::disposition::{self, Action};
use libc::{c_int, c_void, siginfo_t};
use std::sync::atomic::{AtomicPtr, Ordering};

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

/// Makes the thread continue behind an access of this library, if the fault was there.
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
    /// The instruction is one of this library.
    pub ours: bool,
    /// Bytes that the handler has left on the program's stack for signals; `None`: it runs on the
    /// stack of the thread.
    pub stack_left: Option<usize>,
}

/// Looks at a fault first. Returns whether the instruction can run again.
pub type Watch = fn(Fault) -> bool;

static WATCH: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// Lets `watch` look at each fault from now on. It runs in a signal handler.
pub fn watch(watch: Watch) {
    WATCH.store(watch as *mut (), Ordering::Release);
}

fn watched(addr: usize, context: *mut c_void) -> bool {
    let watch = WATCH.load(Ordering::Acquire);
    if watch.is_null() {
        return false;
    }
    // SAFETY: the pointer is null, or was made from a function of this type.
    let watch = unsafe { std::mem::transmute::<*mut (), Watch>(watch) };
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
pub(super) extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO.
    let own = is_of_instruction(signal, unsafe { (*info).si_code });
    // SAFETY: as above; the address is that of a memory error.
    if own && (watched(unsafe { (*info).si_addr() }.addr(), context) || recover(context)) {
        return;
    }
    match disposition::take(signal) {
        // SAFETY: this is the program's handler for this signal. A handler without SA_SIGINFO takes
        // the first argument, and does not read the others.
        Action::Handler(handler) => unsafe { handler(signal, info, context) },
        // A fault that is ignored ends the process in any case (sigaction(2)).
        Action::Ignore if !own => {}
        Action::Ignore | Action::Default => {
            disposition::back_to_default(signal);
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
