//! One fault: the occasions that fit it, and whether it strikes at one.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::devices::means;
use crate::kinds::{DeviceFault, Kind};
use crate::occasion::Occasion;
use crate::random::{fraction, number};
use crate::specified::{Specified, When};

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

    /// Whether the fault can strike at this time.
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

    /// Whether the fault strikes on this device without an occasion.
    pub(crate) fn begins_on(&self, device: &str) -> bool {
        self.specified.when == When::Begin && self.fits_device(device)
    }

    /// The kind of the fault, with its values.
    pub(crate) fn kind(&self) -> Kind {
        self.specified.kind
    }

    /// Strikes without an occasion, once on each device; `bit` is the bit of this device.
    pub(crate) fn begin(&self, index: u64, device: &str, bit: u64) -> Option<DeviceFault> {
        let fault = self.specified.kind.of_device()?;
        if self.begun.fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return None;
        }
        self.occasions.fetch_add(1, Ordering::Relaxed);
        if self.attempts.fetch_add(1, Ordering::Relaxed) >= self.limit() {
            return None;
        }
        let Specified {
            word, values, window, ..
        } = &self.specified;
        tracing::warn!("fault {}: {word}{values}{window}: on {device}", index + 1);
        Some(fault)
    }

    /// The effect of the fault at this occasion, if it strikes; `index` is its place in the plan.
    pub(crate) fn strike<F>(
        &self,
        seed: u64,
        index: u64,
        device: &str,
        occasion: &Occasion<'_, F>,
    ) -> Option<F> {
        let Specified {
            word, values, filter, ..
        } = &self.specified;
        let mut kind = occasion.kind(self.specified.kind, index)?;
        if !filter.fits(occasion) || !self.fits_device(device) {
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
        match kind.delay_mut() {
            Some(delay) => *delay = delay.drawn(random),
            None => tracing::warn!(
                "fault {}: {word}{values}: at {occasion}, its occasion {number_of}",
                index + 1
            ),
        }
        occasion.fault(kind)
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
