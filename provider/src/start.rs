//! The actions at load time of the plug-in: as few as possible, since a preloaded shell loads the
//! plug-in into every process.

// The test binary must not interpose itself, so nothing starts there.
#![cfg_attr(test, allow(dead_code))]

use std::ffi::{CStr, c_int, c_void};

use urnic_model::host::fault;
use urnic_presence::fork;

use crate::first_search::{SEARCHED, first_search};
use crate::guard::guarded;
use crate::refusals::PLACES;
use crate::register::{self, REGISTERED};
use crate::strict::{self, CallSite, Kind, Rule};
use crate::{call_site, exit, interpose, real, trace};
use urnic_sys::loader::{base_of, definition};

unsafe extern "C" {
    fn pthread_atfork(
        prepare: Option<unsafe extern "C" fn()>,
        parent: Option<unsafe extern "C" fn()>,
        child: Option<unsafe extern "C" fn()>,
    ) -> c_int;
}

/// Found by name in the program's search order: the first library with this symbol is the plug-in
/// in charge.
#[cfg_attr(not(test), unsafe(no_mangle))]
static URNIC_PLUG_IN: u8 = 0;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    let _ = guarded(|| {
        real::look_up_all();
        if !is_first_copy() {
            interpose::deactivate();
            return Ok(());
        }
        urnic_presence::install();
        interpose::signals::look_up();
        // SAFETY: three functions that live as long as this library, which is never unloaded while
        // it interposes.
        unsafe {
            pthread_atfork(
                Some(before_fork),
                Some(after_fork_in_parent),
                Some(after_fork_in_child),
            )
        };
        if !preloaded() {
            // libibverbs loaded this plug-in as one of its drivers.
            first_search();
            register::with_every_libibverbs()?;
        }
        Ok(())
    });
}

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".fini_array")]
static DESTRUCTOR: extern "C" fn() = destructor;

/// Runs at exit(3), after the program's own handlers and destructors: they may still destroy queue
/// pairs, so atexit(3) would be too early. Lets completed work arrive.
extern "C" fn destructor() {
    let mut status = None;
    let _ = guarded(|| {
        status = exit::say();
        urnic_driver::exit();
        if let Some(trace) = trace::trace() {
            trace.end();
        }
        Ok(())
    });
    if let Some(status) = status {
        // SAFETY: null stands for all streams of the program, which exit(3) would write out after
        // this function; nothing else of the process is left to run.
        unsafe {
            libc::fflush(std::ptr::null_mut());
            libc::_exit(status);
        }
    }
}

/// False in a second copy of the plug-in.
fn is_first_copy() -> bool {
    is_defined_here(c"URNIC_PLUG_IN")
}

/// True when the program's calls reach this plug-in.
fn preloaded() -> bool {
    is_defined_here(c"openat")
}

/// Whether the first definition of a symbol is that of this plug-in.
fn is_defined_here(name: &CStr) -> bool {
    base_of(definition(name)) == base_of(constructor as *mut c_void)
}

unsafe extern "C" fn before_fork() {
    let _ = guarded(|| {
        check_fork();
        Ok(())
    });
    fork::before();
}

/// Reports a fork with registered memory and without `ibv_fork_init`, if `strict` is on and
/// libibverbs answers that it is necessary.
fn check_fork() {
    let Some(strict) = strict::current() else { return };
    let regions = strict.objects.count(Kind::MemoryRegion);
    let state = definition(c"ibv_is_fork_initialized");
    if regions == 0 || state.is_null() {
        return;
    }
    // SAFETY: libibverbs' function of this name, which has no arguments.
    let state = unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(state) };
    const IBV_FORK_DISABLED: c_int = 0;
    if state() == IBV_FORK_DISABLED {
        strict
            .findings
            .report(Rule::ForkWithoutInit, &CallSite::here(), || {
                format!(
                    "the process forks with {}, and ibv_fork_init was not called: on this kernel, parent or \
                 child may write to pages that an adapter does not see",
                    Kind::MemoryRegion.counted(regions)
                )
            });
    }
}

unsafe extern "C" fn after_fork_in_parent() {
    fork::in_parent();
}

unsafe extern "C" fn after_fork_in_child() {
    urnic_driver::abandon_in_child();
    fork::in_child();
    SEARCHED.after_fork_in_child();
    REGISTERED.after_fork_in_child();
    PLACES.after_fork_in_child();
    call_site::after_fork_in_child();
    fault::after_fork_in_child();
    strict::after_fork_in_child();
}
