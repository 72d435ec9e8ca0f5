//! The folder of this user in which programs find the device, and names that others have taken.

use std::path::{Path, PathBuf};

use urnic_presence::{OwnFolder, Refusal, usual_name};

use super::finding::Finding;
use super::fixes;
use super::system::{has_number, own_uid_map};
use super::writable::can_have_folder;

const SUBJECT: &str = "presence folder";

/// The homes in the order in which programs try them, up to the one that has the folder.
pub(super) fn findings(homes: &[PathBuf]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut complaints = Vec::new();
    for home in homes {
        match OwnFolder::provide(home) {
            // The folder may exist already, on a file system that is read-only now.
            Ok(folder) => match can_have_folder(folder.path()) {
                Ok(()) => {
                    findings.push(used(home, &folder));
                    return findings;
                }
                Err(error) => complaints.push(format!("{}: {error}", folder.path().display())),
            },
            Err(refusal @ (Refusal::OfUser(_) | Refusal::Shared(_))) => {
                findings.push(unsafe_home(home, refusal));
                complaints.push(format!("{}: {refusal}", home.display()));
            }
            Err(refusal) => complaints.push(format!("{}: {refusal}", home.display())),
        }
    }
    let text = format!("nowhere to make a folder: {}", complaints.join("; "));
    // The reasons of all homes are in one line.
    findings.clear();
    findings.push(Finding::wrong(SUBJECT, text, fixes::presence_folder()));
    findings
}

/// The folder that programs use. If the usual name is taken, the device works nevertheless.
fn used(home: &Path, folder: &OwnFolder) -> Finding {
    let Some(taken) = folder.taken() else {
        return Finding::good(SUBJECT, folder.path().display());
    };
    let usual = home.join(usual_name());
    let fix = match taken {
        // That user's programs outside of the namespace may use it.
        Refusal::OfUser(user) if !has_number(&own_uid_map(), user) => None,
        Refusal::OfUser(_) | Refusal::Mounted => Some(format!("rm -r {}    # as root", usual.display())),
        _ => Some(format!("rm -r {}", usual.display())),
    };
    let text = format!(
        "{}, because {} is not used: {taken}; `urnic stat` looks there, too",
        folder.path().display(),
        usual.display()
    );
    Finding::note(SUBJECT, text, fix.as_deref())
}

/// A home that programs pass over, because another user could replace the folder in it.
fn unsafe_home(home: &Path, refusal: Refusal) -> Finding {
    let is_runtime = std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|runtime| runtime == *home);
    let fix = match refusal {
        Refusal::Shared(_) => format!("chmod +t {}    # as its owner", home.display()),
        _ if is_runtime => "unset XDG_RUNTIME_DIR    # it is another user's".to_owned(),
        _ => "unset URNIC_PRESENT_DIR".to_owned(),
    };
    let text = format!("{} is not used: {refusal}", home.display());
    Finding::note(SUBJECT, text, Some(&fix))
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, create_dir, set_permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::finding::Verdict;
    use super::*;

    #[test]
    fn a_home_that_does_not_exist_names_a_fix() {
        let findings = findings(&["/no/such/place".into()]);
        let [finding] = &findings[..] else {
            panic!("{findings:?}")
        };
        assert_eq!(finding.verdict, Verdict::Wrong);
        assert!(
            finding.to_string().contains("\n                       fix: "),
            "{finding}"
        );
    }

    #[test]
    fn a_taken_name_and_an_unsafe_home_are_noted() {
        let home = urnic_testkit::Folder::new("doctor-home");
        let usual = home.file(&usual_name());
        create_dir(&usual).expect("a folder");
        set_permissions(&usual, Permissions::from_mode(0o777)).expect("our folder");
        let shared = urnic_testkit::Folder::new("doctor-shared");
        set_permissions(shared.path(), Permissions::from_mode(0o777)).expect("our folder");
        let findings = findings(&[shared.path().to_owned(), home.path().to_owned()]);
        let [passed, taken] = &findings[..] else {
            panic!("{findings:?}")
        };
        assert_eq!((passed.verdict, taken.verdict), (Verdict::Note, Verdict::Note));
        assert!(passed.text.contains("mode 777"), "{passed}");
        assert!(
            taken.text.contains("other users may enter it (mode 777)")
                && taken.text.contains(&format!("{}-", usual.display())),
            "{taken}"
        );
    }
}
