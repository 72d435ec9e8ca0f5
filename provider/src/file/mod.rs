//! The objects that contexts on one open device file share: `ibv_import_device(3)` makes another
//! context of a file, and that context imports objects of the other contexts by their handles. A
//! kernel also keeps these objects with the file.

pub(crate) mod device_memory;
pub(crate) mod domain;
pub(crate) mod region;

use std::collections::BTreeMap;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use urnic_driver::Driver;
use urnic_presence::{Shown, registry};

use device_memory::DeviceMemory;
use domain::Domain;
use region::Region;

/// An open device file. It lives until its last context is closed, and its last descriptor.
pub(crate) struct File {
    /// The device as it was presented when the file was opened.
    pub(crate) shown: &'static Shown,
    pub(crate) driver: &'static Arc<Driver>,
    pub(crate) domains: Handles<Domain>,
    pub(crate) regions: Handles<Region>,
    pub(crate) device_memory: Handles<DeviceMemory>,
}

impl File {
    /// The file for the context that opened the device on `fd`.
    ///
    /// # Errors
    /// `EINVAL` if a context was already opened on `fd`, as in a kernel.
    pub(crate) fn open(
        fd: RawFd,
        shown: &'static Shown,
        driver: &'static Arc<Driver>,
    ) -> Result<Arc<File>, Errno> {
        let file = Arc::new(File {
            shown,
            driver,
            domains: Handles::default(),
            regions: Handles::default(),
            device_memory: Handles::default(),
        });
        if let Some(opened) = registry::device_file(fd) {
            let private = opened.private_data.set(file.clone());
            private.map_err(|_| Errno::INVAL)?;
        }
        Ok(file)
    }

    /// The file of an object, if the file still exists and this process is not a forked child. An
    /// object may outlive its file: some programs, such as pyverbs, close a context first and
    /// destroy its objects afterwards.
    pub(crate) fn upgraded(file: &Weak<File>) -> Option<Arc<File>> {
        file.upgrade().filter(|file| file.driver.check_process().is_ok())
    }

    /// The file of `fd`.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if `fd` is not a file of this process: a file of another process cannot be
    /// distinguished, and its device's objects are not in this process. `EINVAL` if no context was
    /// opened on `fd`.
    pub(crate) fn of(fd: RawFd) -> Result<Arc<File>, Errno> {
        let opened = registry::device_file(fd).ok_or(Errno::OPNOTSUPP)?;
        let private = opened.private_data.get().ok_or(Errno::INVAL)?;
        private.clone().downcast().map_err(|_| Errno::INVAL)
    }
}

/// The objects of one kind, by their handles.
pub(crate) struct Handles<T>(Mutex<BTreeMap<u32, Arc<T>>>);

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Handles(Mutex::default())
    }
}

impl<T> Handles<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u32, Arc<T>>> {
        self.0.lock()
    }

    /// Adds a new object.
    pub(crate) fn enter(&self, handle: u32, object: Arc<T>) {
        self.lock().insert(handle, object);
    }

    /// Adds a new object under the lowest free handle, and returns the handle.
    pub(crate) fn enter_anywhere(&self, object: Arc<T>) -> u32 {
        let mut objects = self.lock();
        let free = (0..).zip(objects.keys()).find(|(free, taken)| free != *taken);
        let handle = free.map_or(objects.len() as u32, |(free, _)| free);
        objects.insert(handle, object);
        handle
    }

    /// The object with this handle.
    ///
    /// Errors: NOENT.
    pub(crate) fn find(&self, handle: u32) -> Result<Arc<T>, Errno> {
        self.lock().get(&handle).cloned().ok_or(Errno::NOENT)
    }

    /// The number of objects that `is_counted` is true for.
    pub(crate) fn count(&self, is_counted: impl Fn(&T) -> bool) -> u32 {
        let objects = self.lock();
        let counted = objects.values().filter(|object| is_counted(object));
        counted.count() as u32
    }

    /// Checks that this handle still belongs to `object`.
    ///
    /// Errors: NOENT.
    pub(crate) fn check(&self, handle: u32, object: &Arc<T>) -> Result<(), Errno> {
        let found = self
            .lock()
            .get(&handle)
            .is_some_and(|found| Arc::ptr_eq(found, object));
        if found { Ok(()) } else { Err(Errno::NOENT) }
    }

    /// Removes `object` from its handle, so that it cannot be imported any more; of several callers
    /// one succeeds.
    ///
    /// Errors: NOENT if the handle does not belong to `object` any more.
    pub(crate) fn withdraw(&self, handle: u32, object: &Arc<T>) -> Result<(), Errno> {
        self.withdraw_if(handle, object, || true)
    }

    /// Removes `object` from its handle unless the object is in use: the check excludes concurrent
    /// imports.
    ///
    /// Errors: those of [`Handles::withdraw`]; BUSY.
    pub(crate) fn withdraw_if(
        &self,
        handle: u32,
        object: &Arc<T>,
        unused: impl FnOnce() -> bool,
    ) -> Result<(), Errno> {
        let mut objects = self.lock();
        if !objects
            .get(&handle)
            .is_some_and(|found| Arc::ptr_eq(found, object))
        {
            return Err(Errno::NOENT);
        }
        if !unused() {
            return Err(Errno::BUSY);
        }
        objects.remove(&handle);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_withdrawn_once_and_its_successor_stays() {
        let handles = Handles::default();
        let (first, second) = (Arc::new(1), Arc::new(2));
        handles.enter(7, first.clone());
        assert_eq!(handles.find(7).as_deref(), Ok(&1));
        assert_eq!(handles.find(8), Err(Errno::NOENT));
        assert_eq!(handles.withdraw_if(7, &first, || false), Err(Errno::BUSY));
        assert_eq!(handles.withdraw(7, &first), Ok(()));
        assert_eq!(handles.withdraw(7, &first), Err(Errno::NOENT));
        handles.enter(7, second.clone());
        assert_eq!(handles.withdraw(7, &first), Err(Errno::NOENT));
        assert_eq!(handles.check(7, &first), Err(Errno::NOENT));
        assert_eq!(handles.check(7, &second), Ok(()));
    }

    #[test]
    fn handles_are_the_lowest_that_are_free() {
        let handles = Handles::default();
        let objects: Vec<_> = (0..3).map(Arc::new).collect();
        let given: Vec<_> = objects
            .iter()
            .map(|o| handles.enter_anywhere(o.clone()))
            .collect();
        assert_eq!(given, [0, 1, 2]);
        assert_eq!(handles.withdraw(1, &objects[1]), Ok(()));
        assert_eq!(handles.enter_anywhere(objects[1].clone()), 1);
        assert_eq!(handles.enter_anywhere(Arc::new(3)), 3);
    }
}
