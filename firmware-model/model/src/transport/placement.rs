//! Scatter lists: the places for the bytes of a receive or a Read Response.

use super::params::Env;
use crate::host::Unreachable;
use crate::memory::{Accessor, MemoryAccess, Need, Violation, Window};
use rustix::thread::Timespec;
use urnic_device::wqe::Sge;

/// A place in a scatter or gather list.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    index: usize,
    offset: u32,
}

impl Cursor {
    /// The place `offset` bytes into a list.
    pub(crate) fn at(list: &impl Fn(usize) -> Option<Sge>, offset: u32) -> Cursor {
        let mut cursor = Cursor { index: 0, offset };
        while let Some(sge) = list(cursor.index)
            && cursor.offset >= sge.len.get()
        {
            cursor.offset -= sge.len.get();
            cursor.index += 1;
        }
        cursor
    }

    /// The access to the list's next extent of at most `max` bytes; `None` at the list's end. Empty
    /// elements are skipped, and their STags are not checked (VRB-M-07).
    #[inline]
    pub(crate) fn access(
        &mut self,
        list: &impl Fn(usize) -> Option<Sge>,
        max: usize,
        need: Need,
    ) -> Option<MemoryAccess> {
        loop {
            let sge = list(self.index)?;
            let left = sge.len.get().saturating_sub(self.offset);
            if left > 0 {
                return Some(MemoryAccess {
                    stag: sge.stag.get(),
                    offset: sge.offset.get().wrapping_add(self.offset.into()),
                    len: max.min(left as usize) as u64,
                    need,
                });
            }
            *self = Cursor {
                index: self.index + 1,
                offset: 0,
            };
        }
    }

    /// The place of the byte `at` of the list; `None` if the list is shorter.
    pub(crate) fn of_byte(list: &impl Fn(usize) -> Option<Sge>, at: usize) -> Option<Cursor> {
        let mut cursor = Cursor::default();
        let mut left = at;
        while left > 0 {
            let n = cursor.access(list, left, Need::LocalWrite)?.len as usize;
            cursor.advance(n);
            left -= n;
        }
        Some(cursor)
    }

    /// Moves on within the element.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        self.offset += n as u32;
    }
}

/// Moves over the list's next `len` bytes, whose places are checked as if they were written.
pub(crate) fn pass(
    pd: u32,
    env: &Env<'_>,
    list: impl Fn(usize) -> Option<Sge>,
    cursor: &mut Cursor,
    len: usize,
) -> Result<(), Violation> {
    let mut left = len;
    while left > 0 {
        let (_, n) = window(pd, env, &list, cursor, left)?;
        cursor.advance(n);
        left -= n;
    }
    Ok(())
}

/// Copies `bytes` to the list's next places. `pd` is the protection domain of the list: a shared
/// receive queue may have another protection domain than the queue pair.
#[inline]
pub(crate) fn scatter(
    pd: u32,
    env: &Env<'_>,
    list: impl Fn(usize) -> Option<Sge>,
    cursor: &mut Cursor,
    bytes: &[u8],
) -> Result<(), Violation> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let (window, n) = window(pd, env, &list, cursor, rest.len())?;
        let (head, tail) = rest.split_at(n);
        window.copy_in(0, head).map_err(|_| Violation::InvalidStag)?;
        window.keep(&env.recent);
        cursor.advance(n);
        rest = tail;
    }
    Ok(())
}

/// The list's next place of at most `max` bytes, checked for writing, and its length.
#[inline]
pub(crate) fn window<'t>(
    pd: u32,
    env: &Env<'t>,
    list: &impl Fn(usize) -> Option<Sge>,
    cursor: &mut Cursor,
    max: usize,
) -> Result<(Window<'t>, usize), Violation> {
    let access = cursor
        .access(list, max, Need::LocalWrite)
        .ok_or(Violation::Bounds)?;
    let by = Accessor { pd, qid: env.qp.qid };
    let window = env.memory.check_again(&env.recent, by, access)?;
    Ok((window, access.len as usize))
}

/// The least time for which a program can see the last byte of a segment without the others.
const ONLY_LAST_BYTE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000,
};

/// Copies `bytes`, which are not empty, to the window's beginning, and the last byte before the
/// others.
#[cold]
pub(crate) fn last_first(window: &Window<'_>, bytes: &[u8]) -> Result<(), Unreachable> {
    let others = bytes.len() - 1;
    window.copy_in(others as u64, &bytes[others..])?;
    // A sleep: the program may be waiting for this processor.
    let _ = rustix::thread::nanosleep(&ONLY_LAST_BYTE);
    window.copy_in(0, &bytes[..others])
}
