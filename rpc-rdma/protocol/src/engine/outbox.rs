//! The actions and events that a connection holds for its transport and its consumer.

use super::action::Action;
use super::event::Event;
use super::id::WorkId;

/// Actions and events that the transport and the consumer have not taken yet.
pub(super) struct Outbox<M> {
    pub(super) actions: Vec<Action<M>>,
    pub(super) events: Vec<Event<M>>,
    pub(super) works: u64,
}

impl<M> Outbox<M> {
    pub(super) fn work(&mut self) -> WorkId {
        self.works += 1;
        WorkId(self.works)
    }
}
