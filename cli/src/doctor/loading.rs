//! Whether the loader loads the plug-in into a program.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{StatVfsMountFlags, statvfs};

use super::finding::Finding;
use super::origin;
use super::writable::can_have_folder;
use crate::environment::program_file;

const SUBJECT: &str = "plug-in";

/// The plug-in in this file, loaded into a copy of this program.
pub(super) fn finding(plugin: &Path) -> Finding {
    match complaint(plugin) {
        None => Finding::good(
            SUBJECT,
            format!("{}, of {}", plugin.display(), origin::of(plugin)),
        ),
        Some(complaint) => {
            let fix = fix(plugin, &complaint);
            Finding::wrong(SUBJECT, format!("the loader does not load it: {complaint}"), fix)
        }
    }
}

/// The loader's error message; `None` if there is none.
fn complaint(plugin: &Path) -> Option<String> {
    let mut trial = Command::new(program_file().ok()?);
    trial
        .arg("--version")
        .env("LD_PRELOAD", plugin)
        .stdin(Stdio::null());
    let output = trial.output().ok()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let plugin = plugin.to_string_lossy();
    let about = stderr.lines().find(|line| line.contains(&*plugin));
    about.map(|line| line.trim_end_matches(": ignored.").to_owned())
}

fn fix(plugin: &Path, complaint: &str) -> String {
    let file = plugin.display();
    if complaint.contains("version `GLIBC") {
        return "make build && make install    # in the source tree, here: that file needs a newer glibc"
            .to_owned();
    }
    if is_noexec(plugin) {
        return match executable_places().next() {
            Some(place) => {
                let place = place.display();
                format!(
                    "cp '{file}' '{place}/' && export URNIC_LIB='{place}/liburnic.so'    # where it is, noexec is set"
                )
            }
            None => format!("mount -o remount,exec \"$(findmnt -n -o TARGET -T '{file}')\"    # as root"),
        };
    }
    if std::fs::File::open(plugin).is_err() {
        return format!("chmod a+r '{file}'    # as its owner; each folder above needs a+x");
    }
    "ausearch -m avc -ts recent    # or journalctl -k: a security policy may deny it; else install urnic again".to_owned()
}

fn is_noexec(path: &Path) -> bool {
    statvfs(path).is_ok_and(|fs| fs.f_flag.contains(StatVfsMountFlags::NOEXEC))
}

/// Folders to which this user can copy a library.
fn executable_places() -> impl Iterator<Item = PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let places = home.into_iter().chain(["/var/tmp".into(), "/tmp".into()]);
    places.filter(|place| place.is_absolute() && !is_noexec(place) && can_have_folder(place).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_complaint_of_the_loader_has_a_fix() {
        let here = std::env::current_exe().expect("this test");
        for (plugin, complaint, expected) in [
            (&*here, "version `GLIBC_2.39' not found", "make build"),
            (
                Path::new("/no/such/file"),
                "cannot open shared object file",
                "chmod a+r",
            ),
            (&*here, "failed to map segment from shared object", "ausearch"),
        ] {
            let fix = fix(plugin, complaint);
            assert!(fix.starts_with(expected), "{complaint}: {fix}");
        }
    }
}
