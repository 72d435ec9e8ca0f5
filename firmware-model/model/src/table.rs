//! Tables of objects by number: lock-free to look up, changed under a lock.

use arc_swap::{ArcSwapOption, Guard};
use std::cell::Cell as LocalCell;
use std::collections::VecDeque;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::LocalKey;
use urnic_sync::Mutex;

const CHUNK: usize = 256;
/// A freed number waits until this many others were freed before it is used again, so that a late
/// message about a destroyed object does not reach a new one.
const QUARANTINE: usize = 1024;

#[derive(Debug)]
struct Cell<T> {
    object: ArcSwapOption<T>,
    /// The address of the object, for comparison.
    address: AtomicPtr<T>,
}

impl<T> Cell<T> {
    fn empty() -> Cell<T> {
        Cell {
            object: ArcSwapOption::empty(),
            address: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn set(&self, object: Arc<T>) {
        let address = Arc::as_ptr(&object).cast_mut();
        self.object.store(Some(object));
        self.address.store(address, Ordering::Release);
    }

    fn clear(&self) -> Option<Arc<T>> {
        self.address.store(ptr::null_mut(), Ordering::Release);
        self.object.swap(None)
    }

    /// Whether the slot has this object.
    #[inline]
    fn has(&self, object: &Arc<T>) -> bool {
        ptr::eq(self.address.load(Ordering::Acquire), Arc::as_ptr(object))
    }
}

/// Cells, made when the first of them is needed.
type Chunk<T> = OnceLock<Box<[Cell<T>]>>;

/// Objects numbered from 1.
#[derive(Debug)]
pub(crate) struct Table<T> {
    chunks: Box<[Chunk<T>]>,
    limit: usize,
    quarantine: usize,
    numbers: Mutex<Numbers>,
}

#[derive(Debug, Default)]
struct Numbers {
    last: u32,
    freed: VecDeque<u32>,
    live: usize,
}

/// An object that was looked up. While this value exists, the object may be removed from the table,
/// but is not dropped.
pub(crate) struct Found<T>(Guard<Option<Arc<T>>>);

impl<T> Deref for Found<T> {
    type Target = Arc<T>;

    #[inline]
    fn deref(&self) -> &Arc<T> {
        match &*self.0 {
            Some(object) => object,
            None => unreachable!("made only of what was found"),
        }
    }
}

/// The object that a thread found last. A thread mostly needs the same object again, and a lookup
/// in a table takes two locked instructions. Another object cannot be mistaken for it, because no
/// other object has its address while it exists.
pub(crate) struct Last<T>(LocalCell<Option<Arc<T>>>);

impl<T> Last<T> {
    /// None.
    pub(crate) const fn none() -> Last<T> {
        Last(LocalCell::new(None))
    }
}

impl<T> Table<T> {
    pub(crate) fn new(limit: u32) -> Table<T> {
        Self::with_quarantine(limit, QUARANTINE)
    }

    /// A table whose numbers go up to `limit` only, and are used again at once.
    pub(crate) fn dense(limit: u32) -> Table<T> {
        Self::with_quarantine(limit, 0)
    }

    fn with_quarantine(limit: u32, quarantine: usize) -> Table<T> {
        let limit = limit as usize;
        Table {
            chunks: (0..(limit + quarantine + 1).div_ceil(CHUNK))
                .map(|_| OnceLock::new())
                .collect(),
            limit,
            quarantine,
            numbers: Mutex::default(),
        }
    }

    #[inline]
    fn cell(&self, id: u32) -> Option<&Cell<T>> {
        let chunk = self.chunks.get(id as usize / CHUNK)?.get()?;
        chunk.get(id as usize % CHUNK)
    }

    /// The object of that number.
    #[inline]
    pub(crate) fn find(&self, id: u32) -> Option<Found<T>> {
        let guard = self.cell(id)?.object.load();
        guard.is_some().then_some(Found(guard))
    }

    /// Passes the object with this number to `act`. If it is removed from the table during the
    /// call, it is dropped when the thread finds another object.
    #[inline]
    pub(crate) fn find_again<R>(
        &self,
        id: u32,
        last: &'static LocalKey<Last<T>>,
        act: impl FnOnce(&Arc<T>) -> R,
    ) -> Option<R> {
        let cell = self.cell(id)?;
        // A thread that is ending keeps none.
        let kept = last.try_with(|last| last.0.take()).ok().flatten();
        let object = match kept.filter(|kept| cell.has(kept)) {
            Some(object) => object,
            None => cell.object.load_full()?,
        };
        let result = act(&object);
        let _ = last.try_with(|last| last.0.set(Some(object)));
        Some(result)
    }

    /// Adds an object under the number that is passed to `make`; `None` if there are too many
    /// objects or `make` makes none.
    pub(crate) fn insert_with<E>(
        &self,
        full: E,
        make: impl FnOnce(u32) -> Result<T, E>,
    ) -> Result<Arc<T>, E> {
        let mut numbers = self.numbers.lock();
        if numbers.live >= self.limit {
            return Err(full);
        }
        let reuse =
            numbers.freed.len() > self.quarantine || numbers.last as usize >= self.limit + self.quarantine;
        let id = match numbers.freed.front() {
            Some(id) if reuse => *id,
            _ => numbers.last + 1,
        };
        let object = Arc::new(make(id)?);
        if numbers.freed.front() == Some(&id) {
            numbers.freed.pop_front();
        } else {
            numbers.last = id;
        }
        numbers.live += 1;
        let chunk =
            self.chunks[id as usize / CHUNK].get_or_init(|| (0..CHUNK).map(|_| Cell::empty()).collect());
        chunk[id as usize % CHUNK].set(object.clone());
        Ok(object)
    }

    /// Takes an object out. A thread that found the object before may still use it.
    pub(crate) fn remove(&self, id: u32) -> Option<Arc<T>> {
        let object = self.cell(id)?.clear()?;
        let mut numbers = self.numbers.lock();
        numbers.live -= 1;
        numbers.freed.push_back(id);
        Some(object)
    }

    /// All objects at present.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        let cells = self.chunks.iter().filter_map(|c| c.get()).flatten();
        cells.filter_map(|cell| cell.object.load_full()).collect()
    }

    /// The present number of objects.
    pub(crate) fn len(&self) -> usize {
        self.numbers.lock().live
    }

    /// Takes all objects out.
    pub(crate) fn drain(&self) -> Vec<Arc<T>> {
        let last = self.numbers.lock().last;
        (0..=last).filter_map(|id| self.remove(id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_reused_late() {
        let table = Table::<u32>::new(5000);
        let first = table.insert_with((), Ok).unwrap();
        assert_eq!((*first, **table.find(1).unwrap()), (1, 1));
        assert!(table.find(0).is_none() && table.find(2).is_none() && table.find(u32::MAX).is_none());
        table.remove(1).unwrap();
        assert!(table.find(1).is_none() && table.remove(1).is_none());
        for _ in 0..QUARANTINE {
            let id = *table.insert_with((), Ok).unwrap();
            assert_ne!(id, 1);
            table.remove(id);
        }
        assert_eq!(*table.insert_with((), Ok).unwrap(), 1);
    }

    #[test]
    fn the_object_found_last_is_not_mistaken_for_another() {
        thread_local!(static LAST: Last<u32> = const { Last::none() });
        let tables = [Table::<u32>::dense(2), Table::dense(2)];
        let find = |table: usize, id| tables[table].find_again(id, &LAST, |object| **object);
        for (n, table) in tables.iter().enumerate() {
            table.insert_with((), |_| Ok::<_, ()>(n as u32)).unwrap();
        }
        for n in [0, 0, 1, 0, 1, 1] {
            assert_eq!(find(n as usize, 1), Some(n));
        }
        assert_eq!(find(0, 2), None);
        tables[0].remove(1).unwrap();
        assert_eq!(find(0, 1), None);
        tables[0].insert_with((), |_| Ok::<_, ()>(7)).unwrap();
        assert_eq!((find(0, 1), find(1, 1)), (Some(7), Some(1)));
    }

    #[test]
    fn a_dense_table_keeps_its_numbers_small() {
        let table = Table::<u32>::dense(3);
        for round in 0..100 {
            let ids: Vec<u32> = (0..3).map(|_| *table.insert_with((), Ok).unwrap()).collect();
            assert!(
                ids.iter().all(|id| (1..=3).contains(id)),
                "round {round}: {ids:?}"
            );
            assert_eq!(table.insert_with((), Ok), Err(()));
            ids.into_iter().for_each(|id| drop(table.remove(id)));
        }
    }

    #[test]
    fn a_full_table_refuses_and_recovers() {
        let table = Table::<u32>::new(3);
        let ids: Vec<u32> = (0..3).map(|_| *table.insert_with("", Ok).unwrap()).collect();
        assert_eq!(table.insert_with("full", Ok), Err("full"));
        table.remove(ids[0]).unwrap();
        assert_eq!(table.insert_with("full", |_| Err("made none")), Err("made none"));
        for _ in 0..1000 {
            let id = *table.insert_with("full", Ok).unwrap();
            assert_eq!(table.insert_with("full", Ok), Err("full"));
            assert_eq!(table.all().len(), 3);
            table.remove(id).unwrap();
        }
        assert_eq!(table.drain().len(), 2);
        assert!(table.all().is_empty());
    }
}
