//! One fault: the occasions that fit it, and whether it strikes at one.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::devices::means;
use crate::kind::{Action, Delay, Kind, Lateness, Position};
use crate::occasion::Occasion;
use crate::random::{fraction, number};
use crate::specified::{Specified, When};

/// Longest delay, whatever the rate.
const LONGEST: Duration = Duration::from_secs(60);

/// A fault, and what became of it so far.
#[derive(Debug)]
pub(crate) struct Fault {
    specified: Specified,
    /// The time when it was added.
    pub(crate) since: Duration,
    /// The devices on which it struck by itself.
    begun: AtomicU64,
    /// The number of its occasions so far.
    occasions: AtomicU64,
    /// The number of occasions at which it was to strike; it does so up to its limit.
    attempts: AtomicU64,
}

impl Fault {
    pub(crate) fn new(specified: Specified, since: Duration) -> Fault {
        Fault {
            specified,
            since,
            begun: AtomicU64::new(0),
            occasions: AtomicU64::new(0),
            attempts: AtomicU64::new(0),
        }
    }

    /// Most strikes.
    fn limit(&self) -> u64 {
        self.specified.count.unwrap_or(u64::MAX)
    }

    /// Whether it can strike at this time.
    pub(crate) fn is_open(&self, now: Duration) -> bool {
        self.specified.window.contains(now.saturating_sub(self.since))
    }

    /// The time until its window begins; `None`: it has begun.
    pub(crate) fn time_left(&self, now: Duration) -> Option<Duration> {
        let at = self.since + self.specified.window.at.unwrap_or_default();
        at.checked_sub(now).filter(|left| !left.is_zero())
    }

    fn fits_device(&self, device: &str) -> bool {
        let wanted = self.specified.filter.device.as_deref();
        wanted.is_none_or(|wanted| means(wanted, device))
    }

    /// Whether it strikes on this device by itself.
    pub(crate) fn begins_on(&self, device: &str) -> bool {
        self.specified.when == When::Begin && self.fits_device(device)
    }

    /// Strikes by itself, once on each device; `bit` is that of this one.
    pub(crate) fn begin(&self, index: u64, device: &str, bit: u64) -> Option<Action> {
        if self.begun.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return None;
        }
        self.occasions.fetch_add(1, Ordering::Relaxed);
        if self.attempts.fetch_add(1, Ordering::Relaxed) >= self.limit() {
            return None;
        }
        let Specified { kind, window, .. } = &self.specified;
        tracing::warn!("fault {}: {kind}{window}: on {device}", index + 1);
        Some(Action::Do(kind.clone()))
    }

    /// Whether this is an occasion for it.
    fn fits(&self, index: u64, device: &str, occasion: &Occasion<'_>) -> bool {
        let Specified { kind, filter, .. } = &self.specified;
        let fits_kind = match (kind, occasion) {
            (Kind::Refuse | Kind::Unreachable | Kind::Unanswered | Kind::Reject, Occasion::Connect(_))
            | (Kind::Drop | Kind::Duplicate | Kind::Reorder, Occasion::Datagram(_))
            | (Kind::Delay(_), Occasion::Send(..))
            | (Kind::LoseEvent, Occasion::Event)
            | (
                Kind::Complete(_)
                | Kind::LateCompletion(_)
                | Kind::CqOverflow
                | Kind::PortDown(_)
                | Kind::GidChange
                | Kind::DeviceFatal(_),
                Occasion::Completion(..),
            ) => true,
            (Kind::Fail { call, .. }, Occasion::Call(called)) => call == called,
            (
                Kind::Corrupt(at),
                Occasion::Sending {
                    from, to, origins, ..
                },
            ) => origins
                .of(index)
                .is_some_and(|origin| (*from..*to).contains(&origin.sent.saturating_add(*at))),
            (
                Kind::Reset(after)
                | Kind::Close(after)
                | Kind::Silence(after)
                | Kind::Terminate { after, .. },
                Occasion::Passed {
                    bytes,
                    messages,
                    origins,
                    ..
                },
            ) => origins.of(index).is_some_and(|origin| match *after {
                Position::Bytes(at) => bytes.contains(&origin.passed.saturating_add(at)),
                // At once.
                Position::Messages(0) => bytes.contains(&origin.passed),
                Position::Messages(n) => messages.contains(&origin.messages.saturating_add(n - 1)),
            }),
            _ => false,
        };
        let fits_completion = match occasion {
            Occasion::Completion(opcode, qp) => {
                filter.opcode.as_deref().is_none_or(|wanted| wanted == *opcode)
                    && filter.qp.is_none_or(|wanted| wanted == *qp)
            }
            _ => true,
        };
        let fits_peer = match (filter.peer, occasion.peer()) {
            (Some(network), Some(peer)) => network.contains(peer),
            (Some(_), None) => false,
            (None, _) => true,
        };
        fits_kind && fits_completion && fits_peer && self.fits_device(device)
    }

    /// What it does at this occasion, if it strikes; `index` is its place in the plan.
    pub(crate) fn strike(
        &self,
        seed: u64,
        index: u64,
        device: &str,
        occasion: &Occasion<'_>,
    ) -> Option<Action> {
        if !self.fits(index, device, occasion) {
            return None;
        }
        let number_of = self.occasions.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let random = number(seed, index, number_of);
        let strikes = match self.specified.when {
            When::First => number_of == 1,
            When::Begin => false,
            When::Nth(n) => number_of == n,
            When::Every(n) => number_of.is_multiple_of(n),
            When::Probability(p) => fraction(random) < p,
        };
        if !strikes {
            return None;
        }
        if self.attempts.fetch_add(1, Ordering::Relaxed) >= self.limit() {
            return None;
        }
        let kind = &self.specified.kind;
        match (kind, occasion) {
            (Kind::Delay(delay), Occasion::Send(_, len)) => {
                return Some(Action::Late(Lateness {
                    transfer: delay.transfer(*len),
                    time: delay.time(random),
                }));
            }
            (Kind::LateCompletion(delay), _) => return Some(Action::Wait(delay.time(random))),
            _ => {}
        }
        tracing::warn!(
            "fault {}: {kind}: at {occasion}, its occasion {number_of}",
            index + 1
        );
        Some(match (kind, occasion) {
            (Kind::Corrupt(at), Occasion::Sending { origins, .. }) => {
                let origin = origins.of(index).unwrap_or_default();
                Action::Damage(origin.sent.saturating_add(*at))
            }
            _ => Action::Do(kind.clone()),
        })
    }
}

impl fmt::Display for Fault {
    /// The specification, and how often it struck.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let strikes = self.attempts.load(Ordering::Relaxed).min(self.limit());
        let occasions = self.occasions.load(Ordering::Relaxed);
        write!(
            f,
            "{}: struck {strikes} times at {occasions} occasions",
            self.specified
        )
    }
}

impl Delay {
    /// The time that this many bytes take at the rate.
    fn transfer(&self, len: usize) -> Duration {
        if self.rate == 0 {
            return Duration::ZERO;
        }
        limited(len as f64 * 8.0 * 1e9 / self.rate as f64)
    }

    /// The time apart from the rate.
    fn time(&self, random: u64) -> Duration {
        let jitter = self.jitter.as_nanos() as f64 * (2.0 * fraction(random) - 1.0);
        limited(self.time.as_nanos() as f64 + jitter)
    }
}

/// So many nanoseconds, but no delay that would be an end.
fn limited(nanos: f64) -> Duration {
    Duration::from_nanos(nanos.max(0.0) as u64).min(LONGEST)
}
