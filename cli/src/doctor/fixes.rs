//! Fixes that depend on the fault: the command that may fix it.

use std::env;
use std::path::{Path, PathBuf};

use urnic_presence::safe_home;

use super::writable::can_have_folder;

/// The first rdma-core with a provider ABI that the plug-in supports.
const OLDEST: u32 = 34;

/// Makes a sandbox permit the denied call.
pub(super) const SANDBOX: &str =
    "allow the call in the sandbox; for a container: docker run --security-opt seccomp=unconfined";

/// Sets a writable folder for the presence, when the usual folders are not writable: the first
/// writable folder here, else a folder in memory.
pub(super) fn presence_folder() -> String {
    let home = env::var_os("HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute());
    let places = home.into_iter().chain(["/var/tmp".into(), "/run".into()]);
    presence_folder_in(places.chain(env::current_dir().ok()))
}

fn presence_folder_in(places: impl IntoIterator<Item = PathBuf>) -> String {
    places
        .into_iter()
        .find(|place| safe_home(place).is_ok() && can_have_folder(place).is_ok())
        .map_or_else(
            || "mount -t tmpfs tmpfs /tmp    # as root; for a container: docker run --tmpfs /tmp".to_owned(),
            |place| format!("export URNIC_PRESENT_DIR='{}'", place.display()),
        )
}

/// Installs a libibverbs that the plug-in supports. `file` is the libibverbs that was found, and
/// `version` is its rdma-core version.
pub(super) fn libibverbs(file: &Path, version: Option<&str>, library_path: Option<&str>) -> String {
    let number = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    let is_chosen = |dir: &str| !dir.is_empty() && file.starts_with(dir);
    if library_path.is_some_and(|list| list.split(':').any(is_chosen)) {
        return "unset LD_LIBRARY_PATH    # the distribution's libibverbs is used then".to_owned();
    }
    match number {
        Some(number) if number >= OLDEST => {
            "install a newer urnic (git pull && make build && make install): this one does not support that libibverbs".to_owned()
        }
        Some(number) => format!(
            "use a release with rdma-core {OLDEST} or later (Debian 12, Ubuntu 22.04): {number} is too old"
        ),
        None => "apt-get install --reinstall libibverbs1    # this file is not the distribution's".to_owned(),
    }
}

/// The command that the log recommends, if the log names one; else `otherwise`.
pub(super) fn named_in(log: &str, otherwise: &str) -> String {
    match log.split('`').nth(1) {
        Some(command) if log.split('`').count() > 2 && !command.starts_with("urnic doctor") => {
            command.to_owned()
        }
        _ if log.contains("Too many open files") => "ulimit -n 1024".to_owned(),
        _ if log.contains("raise the memory limit") => {
            "ulimit -v unlimited && ulimit -d unlimited    # for a container: docker run --memory".to_owned()
        }
        _ if log.contains("seccomp profile") => SANDBOX.to_owned(),
        _ => otherwise.to_owned(),
    }
}

/// The most informative line of a program's standard error: urnic's first error, else its last
/// warning, else the last line. A warning of a cause says more than that of the verb that fails.
pub(super) fn first_error(stderr: &str) -> &str {
    let of_level = |level| {
        let texts = stderr
            .lines()
            .filter_map(move |line| Some(line.split_once(level)?.1));
        texts.filter(|text| text.starts_with("urnic"))
    };
    let is_of_verb = |text: &&str| text.starts_with("urnic::refusals");
    let cause = || of_level(" WARN ").rfind(|text| !is_of_verb(text));
    let verb = || of_level(" WARN ").rfind(is_of_verb);
    (of_level(" ERROR ").next().or_else(cause).or_else(verb))
        .or_else(|| stderr.lines().last())
        .unwrap_or("it printed nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_offered_only_if_it_can_be_written() {
        let nowhere = PathBuf::from("/proc/nothing");
        let good = env::temp_dir();
        let fix = presence_folder_in([nowhere.clone(), good.clone()]);
        assert_eq!(fix, format!("export URNIC_PRESENT_DIR='{}'", good.display()));
        assert!(presence_folder_in([nowhere]).starts_with("mount -t tmpfs"));
    }

    #[test]
    fn an_unsupported_libibverbs_is_not_installed_again() {
        let file = Path::new("/opt/ofed/lib/libibverbs.so.1.14.99.0");
        let fix = |version, path| libibverbs(file, version, path);
        assert!(fix(Some("99.0"), Some("/usr/lib:/opt/ofed/lib")).starts_with("unset LD_LIBRARY_PATH"));
        assert!(fix(Some("99.0"), None).contains("newer urnic"));
        assert!(fix(Some("28.0"), Some("")).contains("too old"));
        assert!(fix(None, None).contains("--reinstall"));
    }

    #[test]
    fn the_log_names_the_fix() {
        let stderr = "a line\n2026-01-01T00:00:00Z pid 7 ERROR urnic::opening: cannot open urnic0: socketpair failed: \
                    Too many open files (os error 24): raise the limit on open files, as by `ulimit -n 1024`\nthe end";
        let line = first_error(stderr);
        assert!(
            line.starts_with("urnic::opening: cannot open urnic0: socketpair failed"),
            "{line}"
        );
        assert_eq!(named_in(line, "x"), "ulimit -n 1024");
        assert_eq!(named_in("see `urnic doctor`", "x"), "x");
        let threads =
            "clone3 failed: raise the limit, as by `ulimit -u \"$(ulimit -Hu)\"`, or that of the container";
        assert_eq!(named_in(threads, "x"), "ulimit -u \"$(ulimit -Hu)\"");
        let memory = "Cannot allocate memory (os error 12): raise the memory limit of the process";
        assert!(named_in(memory, "x").starts_with("ulimit -v unlimited && "));
        let warned = "t pid 7  WARN urnic_model::stream: no socket for a command: Too many open files\n\
                    t pid 7  WARN urnic::refusals: ibv_create_qp refused: Cannot allocate memory (ENOMEM)\nCouldn't create QP";
        assert!(first_error(warned).starts_with("urnic_model::stream: no socket"));
        assert_eq!(named_in(first_error(warned), "x"), "ulimit -n 1024");
        assert_eq!(first_error("one\ntwo"), "two");
        assert_eq!(first_error(""), "it printed nothing");
    }
}
