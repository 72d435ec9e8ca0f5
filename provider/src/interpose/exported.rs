//! The symbols under which the program, and every library in the process, finds the functions of
//! this module.
//!
//! Two callers need different things of such a symbol. A thread of the program may be cancelled, or
//! jump out of a signal handler, while libc's function waits: glibc then unwinds through every
//! frame between, so the Rust functions here are `extern "C-unwind"`, and have nothing to drop
//! while libc's function runs. Rust's standard library, which is a part of this file, calls some of
//! these symbols as `extern "C"` functions with the C declaration's own arguments, and the compiler
//! checks that a definition agrees.
//!
//! So each symbol is a function of its own, with exactly C's signature and no frame: one jump to
//! the Rust function. Nothing is ever unwound in it, and it leaves every register as the caller
//! set it, also those of variadic arguments.

/// The instruction that continues at another function as if that function had been called.
#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {}"
    };
}
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("urnic-provider has no jump instruction for this processor: add one in interpose/exported.rs");

/// Defines the symbol for the function of the same name in the calling module. A semicolon precedes
/// an argument that C passes by `...`. A compiler that cannot define variadic functions, before
/// Rust 1.99, has no check of these symbols either (`build.rs` sets `c_variadic`).
macro_rules! exported {
    ($name:ident($($arg:ident: $ty:ty),* $(; $more:ident: $mt:ty)?) $(-> $ret:ty)?) => {
        const _: () = {
            const _: unsafe extern "C-unwind" fn($($ty,)* $($mt)?) $(-> $ret)? = self::$name;

            // SAFETY: the Rust function has the same arguments, which the C ABIs of Linux pass in
            // the same registers, named or not, and it returns to the caller of this one.
            #[unsafe(naked)]
            // The test binary must not interpose itself.
            #[cfg_attr(not(test), unsafe(no_mangle))]
            unsafe extern "C" fn $name(
                $($arg: $ty,)*
                $(#[cfg(c_variadic)] $more: ..., #[cfg(not(c_variadic))] $more: $mt)?
            ) $(-> $ret)? {
                std::arch::naked_asm!(
                    ".cfi_startproc",
                    $crate::interpose::exported::jump!(),
                    ".cfi_endproc",
                    sym self::$name,
                )
            }
        };
    };
}

pub(super) use {exported, jump};
