//! The other Debian: the same plug-in with the libibverbs and programs of another release, in a
//! chroot.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use urnic_sync::{Mutex, MutexGuard};

use crate::build::{plugin, tree};
use crate::program::Program;

/// Runs inside a private mount namespace, so that no mount remains: $1 is the root, $2 the plug-in,
/// $3 the folder of rdma-core's tests (or empty); the rest is the program.
const ENTER: &str = r#"
set -e
root=$1 plugin=$2 tests=$3
shift 3
mount --make-rprivate /
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount --rbind /proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mkdir -m 755 "$root/tmp/urnic"
cp "$plugin" "$root/tmp/urnic/liburnic.so"
if [ -n "$tests" ]; then
    mkdir "$root/tmp/urnic/tests" "$root/tmp/urnic/bin"
    mount --bind "$tests" "$root/tmp/urnic/tests"
    # They ask `rdma link` for a network device first, and sysfs if it names none. It asks the kernel, and fails on one without RDMA.
    printf '#!/bin/sh\necho "[]"\n' >"$root/tmp/urnic/bin/rdma"
    chmod 755 "$root/tmp/urnic/bin/rdma"
    PATH=/tmp/urnic/bin:$PATH
fi
exec chroot "$root" "$@"
"#;

/// A lock for rdma-core's tests of librdmacm: every version uses port 7471.
pub fn suites_turn() -> MutexGuard<'static, ()> {
    static PORT: Mutex<()> = Mutex::new(());
    PORT.lock()
}

/// A root of another Debian release.
#[derive(Debug, Clone)]
pub struct Debian {
    /// The code name of the release.
    pub suite: String,
    root: PathBuf,
}

impl Debian {
    /// The Debian release that this machine does not run, of the two on which urnic is tested.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn other() -> Result<Self, String> {
        static OTHER: OnceLock<Result<Debian, String>> = OnceLock::new();
        OTHER
            .get_or_init(|| {
                crate::skip::root()?;
                let suite = script("other-debian", &[])?;
                let root = PathBuf::from(script("debian-root", &[&suite])?);
                Ok(Self { suite, root })
            })
            .clone()
    }

    /// The program, run inside; programs there find the plug-in.
    pub fn program(&self, program: Program) -> Program {
        self.enter(program, "")
    }

    /// The program, run inside with rdma-core's own tests of that release at `/tmp/urnic/tests`.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn program_with_tests(&self, program: Program) -> Result<Program, String> {
        let root = self.root.to_string_lossy();
        Ok(self.enter(program, &script("rdma-core-tests", &[&root])?))
    }

    /// The path outside the root for a path inside.
    pub fn outside(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    fn enter(&self, program: Program, tests: &str) -> Program {
        let (root, library) = (self.root.to_string_lossy(), plugin().to_string_lossy());
        let words = [
            "unshare", "--mount", "sh", "-c", ENTER, "enter", &root, &library, tests,
        ];
        program.plugin_at("/tmp/urnic/liburnic.so").through(words)
    }
}

/// The last line that a script of the tree prints.
///
/// # Errors
/// The error message of the script: the reason for a skip.
pub fn script(name: &str, args: &[&str]) -> Result<String, String> {
    let out = Command::new(tree().join("scripts").join(name))
        .args(args)
        .output();
    let out = out.map_err(|error| format!("scripts/{name}: {error}"))?;
    let last = |bytes: &[u8]| {
        String::from_utf8_lossy(bytes)
            .lines()
            .last()
            .unwrap_or_default()
            .to_owned()
    };
    match out.status.success() {
        true => Ok(last(&out.stdout)),
        false => Err(last(&out.stderr)),
    }
}
