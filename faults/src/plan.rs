//! The plan of the process, and its decisions.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::clock;
use crate::devices::{Devices, means};
use crate::kind::{Action, Delay, Kind, Lateness, Position};
use crate::occasion::Occasion;
use crate::parse::{Specified, When, parse};
use crate::random::{fraction, number};

/// Longest delay, whatever the rate.
const LONGEST: Duration = Duration::from_secs(60);
/// Most faults of a process.
const MOST: usize = 64;

/// What is to go wrong. Faults can be added while it is in use, and are never removed.
#[derive(Debug)]
pub struct Plan {
    faults: [OnceLock<Fault>; MOST],
    seed: AtomicU64,
    /// Connections and datagrams ask this plan.
    has_network: AtomicBool,
    /// A device of the process has connections that do not ask this plan.
    is_passed_by: AtomicBool,
    devices: Devices,
}

#[derive(Debug)]
struct Fault {
    specified: Specified,
    /// The time when it was added.
    since: Duration,
    /// The devices on which it struck by itself.
    begun: AtomicU64,
    /// The number of its occasions so far.
    occasions: AtomicU64,
    /// The number of occasions at which it was to strike; it does so up to its limit.
    attempts: AtomicU64,
}

static PLAN: Plan = Plan::new();
static ON: AtomicBool = AtomicBool::new(false);

/// Whether this process has a plan.
#[inline]
pub fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// The plan of this process.
pub fn plan() -> &'static Plan {
    &PLAN
}

/// The error number of Linux with which a call of this name, without `ibv_`, is to fail on a
/// device.
#[inline]
pub fn fails(device: &str, call: &str) -> Option<i32> {
    match is_on() {
        false => None,
        true => PLAN.fails(device, call),
    }
}

/// A plan, as it is for one device.
#[derive(Debug, Clone)]
pub struct DevicePlan {
    plan: &'static Plan,
    device: Arc<str>,
}

impl DevicePlan {
    /// The plan for the device of this name.
    pub fn new(plan: &'static Plan, device: &str) -> DevicePlan {
        DevicePlan {
            plan,
            device: device.into(),
        }
    }

    /// As [`Plan::strikes`].
    pub fn strikes(&self, occasion: &Occasion<'_>) -> Vec<Action> {
        self.plan.strikes(&self.device, occasion)
    }

    /// As [`Plan::port_down_for`].
    pub fn port_down_for(&self) -> Option<Duration> {
        self.plan.port_down_for(&self.device)
    }
}

impl Plan {
    #[cold]
    fn fails(&self, device: &str, call: &str) -> Option<i32> {
        let strikes = self.strikes(device, &Occasion::Call(call));
        strikes.into_iter().find_map(|action| match action {
            Action::Do(Kind::Fail { errno, .. }) => Some(errno),
            _ => None,
        })
    }

    /// A plan without faults.
    pub const fn new() -> Plan {
        Plan {
            faults: [const { OnceLock::new() }; MOST],
            seed: AtomicU64::new(1),
            has_network: AtomicBool::new(false),
            is_passed_by: AtomicBool::new(false),
            devices: Devices::new(),
        }
    }

    /// Checks a specification.
    ///
    /// # Errors
    /// A message that says what is wrong with it.
    pub fn check(text: &str) -> Result<(), String> {
        parse(text).map(drop)
    }

    /// Connections and datagrams ask this plan from now on.
    pub fn note_network(&self) {
        self.has_network.store(true, Ordering::Relaxed);
    }

    /// A device has connections and datagrams that do not ask this plan.
    pub fn note_passed_by(&self) {
        self.is_passed_by.store(true, Ordering::Relaxed);
    }

    /// Adds the faults of a specification to the plan of a process that runs. A fault of the device
    /// strikes at once, if its specification does not say when.
    ///
    /// # Errors
    /// Those of [`Plan::add`]; a fault of connections or datagrams, if none asks this plan.
    pub fn add_later(&self, text: &str) -> Result<(), String> {
        let (mut faults, seed) = parse(text)?;
        let has_network = self.has_network.load(Ordering::Relaxed);
        let is_passed_by = self.is_passed_by.load(Ordering::Relaxed);
        let without_effect = |kind: &Kind| match kind {
            // A device in another process has its connections there.
            Kind::PortDown(_) => is_passed_by,
            kind => kind.is_of_network() && !has_network,
        };
        if let Some(fault) = faults.iter().find(|fault| without_effect(&fault.kind)) {
            return Err(format!(
                "{}: the connections of this process pass by faults: start it with --faults none",
                fault.kind.word()
            ));
        }
        for Specified {
            kind, filter, when, ..
        } in &mut faults
        {
            if *when == When::First && filter.fits_begin(kind) {
                *when = When::Begin;
            }
        }
        self.put(faults, seed)
    }

    /// Adds the faults of a specification. The process has a plan from now on, even if there are
    /// none.
    ///
    /// # Errors
    /// A message: the specification is wrong, or there are too many faults.
    pub fn add(&self, text: &str) -> Result<(), String> {
        let (faults, seed) = parse(text)?;
        self.put(faults, seed)
    }

    fn put(&self, faults: Vec<Specified>, seed: Option<u64>) -> Result<(), String> {
        let since = clock::now();
        if let Some(seed) = seed {
            self.seed.store(seed, Ordering::Relaxed);
        }
        for specified in faults {
            let mut fault = Some(Fault {
                specified,
                since,
                begun: AtomicU64::new(0),
                occasions: AtomicU64::new(0),
                attempts: AtomicU64::new(0),
            });
            for place in &self.faults {
                fault = fault.and_then(|fault| place.set(fault).err());
            }
            if fault.is_some() {
                return Err(format!("more than {MOST} faults"));
            }
        }
        ON.store(true, Ordering::Release);
        Ok(())
    }

    fn all(&self) -> impl Iterator<Item = (u64, &Fault)> {
        (0..).zip(self.faults.iter().map_while(OnceLock::get))
    }

    /// Each fault, with the numbers of its occasions and strikes, in words.
    pub fn list(&self) -> Vec<String> {
        self.all()
            .map(|(_, fault)| {
                let Specified {
                    kind, window, when, ..
                } = &fault.specified;
                let when = match when {
                    When::First => " nth=1".to_owned(),
                    When::Begin if window.at.is_none() => " at=0ms".to_owned(),
                    When::Begin => String::new(),
                    When::Nth(n) => format!(" nth={n}"),
                    When::Every(n) => format!(" every={n}"),
                    When::Probability(p) => format!(" p={p}"),
                };
                let strikes = fault.attempts.load(Ordering::Relaxed).min(fault.limit());
                let occasions = fault.occasions.load(Ordering::Relaxed);
                format!("{kind}{when}{window}: struck {strikes} times at {occasions} occasions")
            })
            .collect()
    }

    /// What is to go wrong at this occasion on a device: each fault that strikes, in the order of
    /// the specification.
    pub fn strikes(&self, device: &str, occasion: &Occasion<'_>) -> Vec<Action> {
        self.strikes_at(clock::now(), device, occasion)
    }

    fn strikes_at(&self, now: Duration, device: &str, occasion: &Occasion<'_>) -> Vec<Action> {
        let seed = self.seed.load(Ordering::Relaxed);
        let strikes = self.all().filter(|(_, fault)| fault.is_open(now));
        let strikes: Vec<Action> = strikes
            .filter_map(|(index, fault)| fault.strike(seed, index, device, occasion))
            .collect();
        self.take_ports_down(now, device, &strikes);
        strikes
    }

    /// What befalls a device by itself now; and the time until something else will.
    pub fn due(&self, device: &str) -> (Vec<Action>, Option<Duration>) {
        self.due_at(clock::now(), device)
    }

    fn due_at(&self, now: Duration, device: &str) -> (Vec<Action>, Option<Duration>) {
        let (mut strikes, mut next) = (Vec::new(), None);
        for (index, fault) in self.all().filter(|(_, fault)| fault.begins_on(device)) {
            let at = fault.since + fault.specified.window.at.unwrap_or_default();
            if at > now {
                next = [next, Some(at - now)].into_iter().flatten().min();
            } else if fault.is_open(now)
                && let Some(bit) = self.devices.bit(device)
            {
                strikes.extend(fault.begin(index, device, bit));
            }
        }
        self.take_ports_down(now, device, &strikes);
        (strikes, next)
    }

    fn take_ports_down(&self, now: Duration, device: &str, strikes: &[Action]) {
        for strike in strikes {
            if let Action::Do(Kind::PortDown(time)) = strike {
                self.devices.take_down(device, now + *time);
            }
        }
    }

    /// For how long the port of this device is still down; `None`: it is up.
    pub fn port_down_for(&self, device: &str) -> Option<Duration> {
        let until = self.devices.down_until(device);
        let left = (!until.is_zero()).then(|| until.saturating_sub(clock::now()));
        left.filter(|left| !left.is_zero())
    }
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::new()
    }
}

impl Fault {
    /// Most strikes.
    fn limit(&self) -> u64 {
        self.specified.count.unwrap_or(u64::MAX)
    }

    /// Whether it can strike at this time.
    fn is_open(&self, now: Duration) -> bool {
        self.specified.window.contains(now.saturating_sub(self.since))
    }

    fn fits_device(&self, device: &str) -> bool {
        let wanted = self.specified.filter.device.as_deref();
        wanted.is_none_or(|wanted| means(wanted, device))
    }

    /// Whether it strikes on this device by itself.
    fn begins_on(&self, device: &str) -> bool {
        self.specified.when == When::Begin && self.fits_device(device)
    }

    /// Strikes by itself, once on each device; `bit` is that of this one.
    fn begin(&self, index: u64, device: &str, bit: u64) -> Option<Action> {
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
    fn fits(&self, device: &str, occasion: &Occasion<'_>) -> bool {
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
            (Kind::Corrupt(at), Occasion::Sending { from, to, .. }) => (*from..*to).contains(at),
            (
                Kind::Reset(after)
                | Kind::Close(after)
                | Kind::Silence(after)
                | Kind::Terminate { after, .. },
                Occasion::Passed { bytes, messages, .. },
            ) => match *after {
                Position::Bytes(at) => bytes.contains(&at),
                // At once.
                Position::Messages(0) => bytes.contains(&0),
                Position::Messages(n) => messages.contains(&(n - 1)),
            },
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

    fn strike(&self, seed: u64, index: u64, device: &str, occasion: &Occasion<'_>) -> Option<Action> {
        if !self.fits(device, occasion) {
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
        Some(Action::Do(kind.clone()))
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

#[cfg(test)]
mod tests;
