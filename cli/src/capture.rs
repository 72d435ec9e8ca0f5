//! The file of `--pcap`.

use std::path::Path;

use rustix::io::Errno;
use urnic_model::capture::CaptureFile;

use crate::answer::Failure;

/// Truncates the capture file, or reports immediately why it cannot be written.
pub(crate) fn prepare(path: &Path) -> Result<(), Failure> {
    CaptureFile::prepare(path).map_err(|errno| {
        let reason = match errno {
            Errno::NOTSUP => "it is no regular file; name another".to_owned(),
            errno => std::io::Error::from(errno).to_string(),
        };
        Failure::usage(format!("--pcap {}: {reason}", path.display()))
    })
}
