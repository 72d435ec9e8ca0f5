//! The end of an [introduction](super::super::introduction): from then on the two ends may access
//! each other's memory.

use super::super::layout::{END_WORDS, EndWords};
use super::LocalPeer;
use crate::memory::RemoteAccessTable;
use crate::stream::same_host::layout::Direction;
use rustix::process::Pid;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl LocalPeer {
    /// Lets the peer access our memory, within its permit.
    pub(super) fn admit(&mut self, here: Option<(Arc<RemoteAccessTable>, Pid)>) {
        let Some((table, process)) = here.filter(|_| self.admission.is_none()) else {
            return;
        };
        let [ours, theirs] = [self.outgoing, self.outgoing.other()].map(|end| END_WORDS.of(end));
        let hazard = theirs + offset_of!(EndWords, hazard);
        let permit = ours + offset_of!(EndWords, permit);
        self.admission = Some(table.admit(process, self.ours.memory(), hazard, permit));
        let (pd, rights) = self.permitted;
        self.permit(pd, rights);
    }

    /// Ends the introduction.
    #[cold]
    fn be_introduced(&self) -> Option<(Arc<RemoteAccessTable>, Pid)> {
        let introduction = self.introduction.lock().take();
        let (reach, traceable) = introduction?.conclude();
        let _ = self.process.set(reach.there);
        if reach.here.is_some() {
            let _ = self.traceable.set(traceable);
        }
        reach.here
    }

    /// Whether the introduction has ended, so that it is known if we may access the peer's memory.
    /// For an initiator it ends when the responder has confirmed some bytes.
    #[inline]
    pub(super) fn is_introduced(&self) -> bool {
        self.process.get().is_some() || (self.confirmed() > 0 && self.initiator_is_introduced())
    }

    /// Ends the introduction if the peer's part in it has come.
    #[inline]
    pub(crate) fn check_introduction(&mut self) {
        if self.process.get().is_none() {
            self.introduce_if_due();
        }
    }

    #[cold]
    fn introduce_if_due(&mut self) {
        if self.is_initiator() {
            self.is_introduced();
        } else if self.incoming.tail.load(Ordering::Acquire) > 0 {
            self.end_introduction();
        }
    }

    /// Called at a responder that has bytes of the initiator, and thus the initiator's disclosure:
    /// reads it, and sends its own. The initiator must get that before it finds its bytes
    /// confirmed.
    pub(super) fn end_introduction(&mut self) {
        if self.process.get().is_none() && !self.is_initiator() {
            let here = self.be_introduced();
            self.admit(here);
        }
    }

    #[cold]
    fn initiator_is_introduced(&self) -> bool {
        if self.is_initiator() {
            // The responder is admitted already.
            self.be_introduced();
        }
        self.process.get().is_some()
    }

    /// Whether this is the end that connected.
    fn is_initiator(&self) -> bool {
        matches!(self.outgoing, Direction::FromInitiator)
    }

    /// Whether we reach the peer's memory, or may do so when it has processed something.
    #[inline]
    pub(crate) fn may_be_reachable(&self) -> bool {
        self.process.get().is_none_or(Option::is_some)
    }

    /// Whether we reach the peer's memory.
    #[inline]
    pub(crate) fn is_reachable(&self) -> bool {
        self.is_introduced() && self.process().is_some()
    }
}
