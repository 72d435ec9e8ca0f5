//! Objects that peers share: each is opened once for all connections that use it.

use crate::stream::descriptor::Descriptor;
use rustix::fd::BorrowedFd;
use rustix::fs::fstat;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use urnic_sync::Mutex;

/// Values by the files that peers passed, as long as a connection uses them.
#[derive(Debug)]
pub(super) struct ByFile<T>(Mutex<HashMap<(u64, u64), Weak<T>>>);

impl<T> Default for ByFile<T> {
    fn default() -> ByFile<T> {
        ByFile(Mutex::default())
    }
}

impl<T> ByFile<T> {
    /// The value of a file, if a connection uses it. The file is known to be sealed memory, as for
    /// [`ByFile::get`].
    pub(super) fn find(&self, file: BorrowedFd<'_>) -> Option<Arc<T>> {
        let stat = fstat(file).ok()?;
        self.0.lock().get(&(stat.st_dev, stat.st_ino))?.upgrade()
    }

    /// A value that a connection uses, and that `is_it`.
    pub(super) fn any(&self, is_it: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let by_file = self.0.lock();
        by_file
            .values()
            .filter_map(Weak::upgrade)
            .find(|value| is_it(value))
    }

    /// The value of a file, which `open` makes if it is not there. The file is known to be sealed
    /// memory: asking for the attributes of another one may wait for the process that made it.
    pub(super) fn get(
        &self,
        file: &Descriptor,
        open: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<Arc<T>, Errno> {
        let stat = fstat(file)?;
        let mut by_file = self.0.lock();
        let key = (stat.st_dev, stat.st_ino);
        if let Some(known) = by_file.get(&key).and_then(Weak::upgrade) {
            return Ok(known);
        }
        by_file.retain(|_, value| value.strong_count() > 0);
        let value = Arc::new(open()?);
        by_file.insert(key, Arc::downgrade(&value));
        Ok(value)
    }
}
