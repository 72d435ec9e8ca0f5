//! Scatter lists: where the bytes of a receive or a Read Response go.

use super::params::Env;
use crate::host::Unreachable;
use crate::memory::{Need, Violation, Window};
use crate::rdmap::params::Identity;
use rustix::thread::Timespec;
use urnic_device::wqe::Sge;

/// A place in a scatter or gather list.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    index: usize,
    offset: u32,
}

impl Cursor {
    /// The list's next extent of at most `max` bytes, and its length; `None` behind the list's
    /// end. Empty elements are skipped, and their STags are not checked (VRB-M-07).
    #[inline]
    pub(crate) fn extent(
        &mut self,
        list: &impl Fn(usize) -> Option<Sge>,
        max: usize,
    ) -> Option<(Sge, u64, usize)> {
        loop {
            let sge = list(self.index)?;
            let left = sge.len.get().saturating_sub(self.offset);
            if left > 0 {
                let at = sge.offset.get().wrapping_add(self.offset.into());
                return Some((sge, at, max.min(left as usize)));
            }
            *self = Cursor {
                index: self.index + 1,
                offset: 0,
            };
        }
    }

    /// Moves on within the extent.
    #[inline]
    pub(crate) fn advance(&mut self, n: usize) {
        self.offset += n as u32;
    }
}

/// Copies `bytes` to the list's next places.
#[inline]
pub(crate) fn scatter(
    qp: &Identity,
    pd: u32,
    env: &Env<'_>,
    list: impl Fn(usize) -> Option<Sge>,
    cursor: &mut Cursor,
    bytes: &[u8],
) -> Result<(), Violation> {
    let mut rest = bytes;
    while !rest.is_empty() {
        let (window, n) = window(qp, pd, env, &list, cursor, rest.len())?;
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
pub(super) fn window<'t>(
    qp: &Identity,
    pd: u32,
    env: &Env<'t>,
    list: &impl Fn(usize) -> Option<Sge>,
    cursor: &mut Cursor,
    max: usize,
) -> Result<(Window<'t>, usize), Violation> {
    let (sge, at, n) = cursor.extent(list, max).ok_or(Violation::Bounds)?;
    let (stag, by) = (sge.stag.get(), (pd, qp.qid));
    let window = env
        .memory
        .check_again(&env.recent, stag, by, at, n as u64, Need::LocalWrite)?;
    Ok((window, n))
}

/// The least time for which a program can see the last byte of a segment without the others.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000,
};

/// Copies `bytes`, which are not empty, to the window's beginning: the last one first.
#[cold]
pub(super) fn last_first(window: &Window<'_>, bytes: &[u8]) -> Result<(), Unreachable> {
    let others = bytes.len() - 1;
    window.copy_in(others as u64, &bytes[others..])?;
    // A sleep: the program may be waiting for this processor.
    let _ = rustix::thread::nanosleep(&LOOK);
    window.copy_in(0, &bytes[..others])
}
