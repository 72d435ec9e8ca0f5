//! Refusals that were sent, so that a repeated REQ is refused again without asking the program
//! again.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use urnic_wire::mad::Mad;

use super::peer::Numbered;
use crate::mpa_startup::Time;

/// Most refusals that are remembered. Beyond this limit the oldest one is forgotten.
pub(super) const MAX_REFUSALS: usize = 1024;
/// How long a requester may go on with its REQ: sixteen attempts of Linux.
const REMEMBERED: Duration = Duration::from_secs(80);

/// The refusals by the requester's number of the connection. Forgetting one is safe: a repeated REQ
/// is then a new request.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    sent: HashMap<Numbered, Mad>,
    by_time: VecDeque<(Time, Numbered)>,
}

impl Refusals {
    pub(super) fn add(&mut self, now: Time, requester: Numbered, refusal: Mad) {
        self.forget(now);
        if self.by_time.len() >= MAX_REFUSALS
            && let Some((_, oldest)) = self.by_time.pop_front()
        {
            self.sent.remove(&oldest);
        }
        if self.sent.insert(requester, refusal).is_none() {
            self.by_time.push_back((now, requester));
        }
    }

    /// The refusal of the REQ with this transaction.
    pub(super) fn find(&mut self, now: Time, requester: &Numbered, transaction_id: u64) -> Option<&Mad> {
        self.forget(now);
        let refusal = self.sent.get(requester)?;
        (refusal.transaction_id == transaction_id).then_some(refusal)
    }

    fn forget(&mut self, now: Time) {
        while let Some((since, oldest)) = self.by_time.front()
            && *since + REMEMBERED < now
        {
            self.sent.remove(oldest);
            self.by_time.pop_front();
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        assert_eq!(self.sent.len(), self.by_time.len());
        self.sent.len()
    }
}
