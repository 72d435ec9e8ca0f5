//! Links the plug-in so that the code lies in the file where it lies in memory: perf takes the
//! addresses of the static probes for positions in the file.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=RUSTC_LINKER");
    // The linker of zig, which makes the packages, does not know the option.
    let linker = std::env::var("RUSTC_LINKER").unwrap_or_default();
    if !linker.contains("zigcc") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,separate-code");
    }
}
