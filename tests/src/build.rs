//! Builds of the programs under test; and our own small verbs programs, compiled like those of any
//! user of libibverbs.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};

/// The root of the source tree.
pub fn tree() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("tests/ is in the tree")
}

/// Folder of the build that this program belongs to, `target/debug` or `target/release`.
pub fn target() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    // Tests lie one folder deeper than programs.
    let folders = program
        .ancestors()
        .skip(1)
        .find(|folder| !folder.ends_with("deps"));
    folders.expect("a program is in a folder").to_owned()
}

/// A folder for what tests write, inside the target folder.
pub fn scratch() -> PathBuf {
    let folder = target().join("system-tests");
    std::fs::create_dir_all(&folder).expect("a folder in the target folder");
    folder
}

/// The `XDG_RUNTIME_DIR` of programs: the folders that they would use otherwise, in /tmp and
/// /dev/shm, have names that another user can take.
pub fn runtime_folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = scratch().join("runtime");
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.expect("a folder in the target folder");
        folder
    })
}

/// `liburnic.so`, up to date; `URNIC_LIB` names another one.
pub fn plugin() -> &'static Path {
    static PLUGIN: OnceLock<PathBuf> = OnceLock::new();
    PLUGIN.get_or_init(|| match std::env::var_os("URNIC_LIB") {
        Some(path) => std::path::absolute(path).expect("URNIC_LIB is a path"),
        None => built().join("liburnic.so"),
    })
}

/// The command-line program `urnic`, up to date.
pub fn urnic() -> PathBuf {
    built().join("urnic")
}

fn built() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| build(".", &["-p", "urnic-provider", "-p", "urnic-cli"]))
}

/// An optimised, current build of `liburnic.so`, in the form that users have, independent of the
/// profile of this program.
pub fn optimised_plugin() -> PathBuf {
    let folder = target()
        .parent()
        .expect("a profile is in the target folder")
        .to_owned();
    cargo(".", &folder, &["--release", "-p", "urnic-provider"]);
    folder.join("release/liburnic.so")
}

/// Writes this file without debug information: an emulated machine reads that as slowly as the
/// rest.
///
/// # Errors
/// The reason for a skip.
pub fn stripped(file: &Path, to: &Path) -> Result<(), String> {
    let strip = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .args([to, file])
        .status();
    match strip {
        Ok(status) if status.success() => Ok(()),
        _ => Err("strip is not installed".to_owned()),
    }
}

/// The program `urnic-nfs`, up to date.
pub fn nfs() -> PathBuf {
    build("rpc-rdma/nfs", &[]).join("urnic-nfs")
}

/// An example of the crate in this folder of the tree, up to date.
pub fn example(folder: &str, name: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    build(folder, &["--example", name]).join("examples").join(name)
}

/// Builds these targets in the profile of this program, by cargo in this folder of the tree: of the
/// folder's crate, or of its workspace. Returns the folder of the result. With `URNIC_TEST_BUILT`
/// they are built already, with all that `scripts/test` builds at once: a build of some packages
/// compiles what they use once more, with the features of that part.
fn build(folder: &str, what: &[&str]) -> PathBuf {
    let target = target();
    if std::env::var_os("URNIC_TEST_BUILT").is_some() {
        return target;
    }
    let targets = target.parent().expect("a profile is in the target folder");
    let release = target.ends_with("release").then_some("--release");
    cargo(folder, targets, &[what, release.as_slice()].concat());
    target
}

fn cargo(folder: &str, target: &Path, what: &[&str]) {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo
        .args(["build", "--quiet"])
        .args(what)
        .current_dir(tree().join(folder));
    let status = cargo
        .env("CARGO_TARGET_DIR", target)
        .status()
        .expect("cargo runs");
    assert!(
        status.success(),
        "cargo build {} failed in {folder}",
        what.join(" ")
    );
}

/// Compiles `tests/programs/NAME.c`, as any user would, against the system's libibverbs and
/// librdmacm.
///
/// # Errors
/// The reason for a skip: no compiler, or no headers.
pub fn compiled(name: &str) -> Result<PathBuf, String> {
    compiled_with(name, name, &["-O2"])
}

/// What a program is compiled against.
struct Libraries {
    /// Headers, and the packages that have them.
    headers: &'static [(&'static str, &'static str)],
    link: &'static [&'static str],
}

const VERBS: Libraries = Libraries {
    headers: &[
        ("infiniband/verbs.h", "libibverbs-dev"),
        ("rdma/rdma_cma.h", "librdmacm-dev"),
    ],
    link: &["-lrdmacm", "-libverbs", "-lpthread"],
};

const UCX: Libraries = Libraries {
    headers: &[("ucp/api/ucp.h", "libucx-dev")],
    link: &["-lucp", "-lucs"],
};

/// Compiles `tests/programs/NAME.c` with these options, as a program of its own.
///
/// # Errors
/// The reason for a skip or a failed build, as for [`compiled`].
pub fn compiled_with(name: &str, program: &str, options: &[&str]) -> Result<PathBuf, String> {
    compile(name, program, options, &VERBS)
}

/// Compiles `tests/programs/NAME.c` against the system's UCX.
///
/// # Errors
/// The reason for a skip or a failed build, as for [`compiled`].
pub fn compiled_for_ucx(name: &str) -> Result<PathBuf, String> {
    compile(name, name, &["-O2"], &UCX)
}

fn compile(name: &str, program: &str, options: &[&str], libraries: &Libraries) -> Result<PathBuf, String> {
    static COMPILER: Mutex<()> = Mutex::new(());
    let _one_at_a_time = COMPILER.lock().unwrap_or_else(|poisoned| poisoned.into_inner());

    crate::skip::installed("cc")?;
    for (header, package) in libraries.headers {
        if !Path::new("/usr/include").join(header).exists() {
            return Err(format!("{package} is not installed"));
        }
    }
    let folder = tree().join("tests/programs");
    let source = folder.join(format!("{name}.c"));
    let program = scratch().join(program);
    let newer = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    let sources = ["rc.h", "cm.h"].map(|header| newer(&folder.join(header)));
    if newer(&program) < sources.into_iter().max().flatten().max(newer(&source)) {
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu17", "-g", "-Wall", "-Wextra", "-Werror"])
            .args(options)
            .arg("-o")
            .arg(&program)
            .arg(&source);
        cc.arg("-Wl,--as-needed").args(libraries.link);
        let out = cc.output().expect("cc runs");
        assert!(
            out.status.success(),
            "{}:\n{}",
            source.display(),
            String::from_utf8_lossy(&out.stderr)
        );
    }
    Ok(program)
}
