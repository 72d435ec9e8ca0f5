//! The program in which urnic runs.

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

/// The program's name, as `ps` shows it.
pub fn name() -> String {
    let name = || {
        let file = open("/proc/self/comm", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut name = [0; 64];
        let len = rustix::io::read(file, &mut name)?;
        Ok::<_, Errno>(
            String::from_utf8_lossy(name.get(..len).unwrap_or_default())
                .trim_end()
                .to_owned(),
        )
    };
    name().unwrap_or_default()
}
