//! Objects that peers share: each is opened once for all connections that use it.

use crate::stream::descriptor::Descriptor;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::fstat;
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use urnic_sync::Mutex;

/// The time for which the last value stays without a connection: a program may connect again and
/// again, and close each connection before the next one.
const STAY: Duration = Duration::from_secs(1);

/// Device and inode number of a file.
type File = (u64, u64);

/// Values by the files that peers passed, as long as a connection uses them.
#[derive(Debug)]
pub(super) struct ByFile<T> {
    values: Mutex<HashMap<File, Weak<T>>>,
    /// The value that was used last, and when.
    last: Mutex<Option<(Arc<T>, Instant)>>,
}

impl<T> Default for ByFile<T> {
    fn default() -> ByFile<T> {
        ByFile {
            values: Mutex::default(),
            last: Mutex::default(),
        }
    }
}

impl<T> ByFile<T> {
    /// The value of a file, which `open` makes if it is not there. The file is known to be sealed
    /// memory: asking for the attributes of another one may wait for the process that made it.
    pub(super) fn get(
        &self,
        file: &Descriptor,
        open: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<Arc<T>, Errno> {
        let file = number_of(file.as_fd())?;
        let mut values = self.values.lock();
        let known = values.get(&file).and_then(Weak::upgrade);
        let value = match known {
            Some(known) => known,
            None => {
                values.retain(|_, value| value.strong_count() > 0);
                let value = Arc::new(open()?);
                values.insert(file, Arc::downgrade(&value));
                value
            }
        };
        drop(values);
        Ok(self.note_used(value))
    }

    /// The value of a file, which is known to be sealed memory, if it is there.
    pub(super) fn find(&self, file: BorrowedFd<'_>) -> Option<Arc<T>> {
        let file = number_of(file).ok()?;
        let known = self.values.lock().get(&file)?.upgrade();
        known.map(|value| self.note_used(value))
    }

    /// A value for which `is_it` holds.
    pub(super) fn any(&self, is_it: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let values: Vec<_> = self.values.lock().values().filter_map(Weak::upgrade).collect();
        values.into_iter().find(|value| is_it(value))
    }

    fn note_used(&self, value: Arc<T>) -> Arc<T> {
        let before = self.last.lock().replace((value.clone(), Instant::now()));
        // Not under the lock: it may close files.
        drop(before);
        value
    }

    /// Lets the last value go if it was not used for a while; returns when to call this again, if
    /// the value stays.
    pub(super) fn expire(&self) -> Option<Duration> {
        let mut last = self.last.lock();
        let (_, used) = last.as_ref()?;
        let left = STAY.saturating_sub(used.elapsed());
        if !left.is_zero() {
            return Some(left);
        }
        let expired = last.take();
        drop(last);
        drop(expired);
        None
    }
}

fn number_of(file: BorrowedFd<'_>) -> Result<File, Errno> {
    let stat = fstat(file)?;
    Ok((stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::descriptor::Descriptors;
    use rustix::fs::{MemfdFlags, memfd_create};

    #[test]
    fn the_last_value_stays_without_a_connection() {
        let descriptors = Descriptors::new(2, None);
        let file = || {
            let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
            descriptors.adopt(file).unwrap()
        };
        let (one, other) = (file(), file());
        let values = ByFile::default();
        let found = |file: &Descriptor| values.find(file.as_fd()).map(|value| *value);
        assert_eq!((found(&one), values.expire()), (None, None));
        drop(values.get(&one, || Ok(1)).unwrap());
        assert_eq!(found(&one), Some(1));
        assert!(values.expire().is_some_and(|left| left <= STAY));
        let held = values.get(&other, || Ok(2)).unwrap();
        assert_eq!((found(&one), found(&other)), (None, Some(2)), "one stays");
        assert_eq!(values.any(|value| *value == 2), Some(held));
        assert_eq!(values.any(|value| *value == 1), None);
    }
}
