//! Links the plug-in so that the code lies in the file where it lies in memory: perf takes the
//! addresses of the static probes for positions in the file. Finds out whether the compiler can
//! define variadic functions, as libc's `open` is (`src/interpose/exported.rs`).

use std::io::Write;
use std::process::{Command, Stdio};

/// Source that a compiler with stable variadic functions accepts: Rust 1.99 and later.
const VARIADIC: &[u8] = b"#![no_std]\npub unsafe extern \"C\" fn variadic(_first: i32, _more: ...) {}\n";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-check-cfg=cfg(c_variadic)");
    if compiles(VARIADIC).unwrap_or(false) {
        println!("cargo:rustc-cfg=c_variadic");
    }
    println!("cargo:rerun-if-env-changed=RUSTC_LINKER");
    // The linker of zig, which makes the packages, does not know the option.
    let linker = std::env::var("RUSTC_LINKER").unwrap_or_default();
    if !linker.contains("zigcc") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,separate-code");
    }
}

/// Whether the compiler accepts a crate, with its standard library for the target.
fn compiles(source: &[u8]) -> std::io::Result<bool> {
    let variable = |name| std::env::var_os(name).unwrap_or_default();
    let mut rustc = Command::new(variable("RUSTC"))
        .args([
            "--edition=2024",
            "--crate-type=lib",
            "--crate-name=probe",
            "--emit=metadata",
            "--target",
        ])
        .arg(variable("TARGET"))
        .arg("--out-dir")
        .arg(variable("OUT_DIR"))
        .arg("-")
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    // A compiler that stops before it has read everything has refused the crate.
    let _ = rustc.stdin.take().map(|mut stdin| stdin.write_all(source));
    Ok(rustc.wait()?.success())
}
