//! Links the plug-in so that the code lies in the file where it lies in memory: perf and bpftrace
//! take the addresses of the static probes for positions in the file.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,separate-code");
}
