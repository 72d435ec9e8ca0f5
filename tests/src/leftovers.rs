//! Files that programs leave behind under fixed names, which then disturb programs of other users.

use std::io::ErrorKind;

/// Files for XRC domains, made by programs before they find XRC domains unsupported. They are
/// removed when this is dropped.
#[derive(Debug)]
pub struct XrcDomains(&'static [&'static str]);

impl XrcDomains {
    /// The XRC domains of ibv_xsrq_pingpong.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn of_pingpong() -> Result<XrcDomains, String> {
        XrcDomains::at(&["/tmp/xrc_domain"])
    }

    /// The XRC domains of perftest.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn of_perftest() -> Result<XrcDomains, String> {
        XrcDomains::at(&["/tmp/xrc_domain_server", "/tmp/xrc_domain_client"])
    }

    fn at(paths: &'static [&'static str]) -> Result<XrcDomains, String> {
        match paths.iter().find(|path| !removed(path)) {
            None => Ok(XrcDomains(paths)),
            Some(path) => Err(format!("{path} is another user's")),
        }
    }
}

impl Drop for XrcDomains {
    fn drop(&mut self) {
        for path in self.0 {
            let _ = removed(path);
        }
    }
}

/// Whether the file does not exist (any more).
fn removed(path: &str) -> bool {
    match std::fs::remove_file(path) {
        Ok(()) => true,
        Err(error) => error.kind() == ErrorKind::NotFound,
    }
}
