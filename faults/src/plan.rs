//! The plan of the process, and its decisions.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::devices::Devices;
use crate::fault::Fault;
use crate::kinds::{CallFault, DeviceFault, Kind};
use crate::occasion::{self, Occasion};
use crate::origins::{Origin, Origins};
use crate::parse::parse;
use crate::specified::Specified;
use crate::time::now;

/// Most faults of a process that are in force.
const MOST: usize = 64;
/// Most faults of a process in its life, with those that were cleared: each keeps its place.
const MOST_EVER: usize = 1024;

/// What is to go wrong. Faults can be added and cleared while it is in use.
#[derive(Debug)]
pub struct Plan {
    faults: [OnceLock<Fault>; MOST_EVER],
    /// The number of faults that were cleared: the first ones.
    cleared: AtomicUsize,
    seed: AtomicU64,
    /// Connections and datagrams ask this plan.
    has_network: AtomicBool,
    /// A device of the process has connections that do not ask this plan.
    is_passed_by: AtomicBool,
    devices: Devices,
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

    /// Like [`Plan::strikes`].
    pub fn strikes<F>(&self, occasion: &Occasion<'_, F>) -> Vec<F> {
        self.plan.strikes(&self.device, occasion)
    }

    /// Like [`Plan::port_down_for`].
    pub fn port_down_for(&self) -> Option<Duration> {
        self.plan.port_down_for(&self.device)
    }

    /// The positions from which faults count on a connection that begins now.
    pub fn origins(&self) -> Origins {
        Origins::beginning(self.plan.ever())
    }

    /// Faults that were added since the last call count from `here` on.
    pub fn note(&self, origins: &mut Origins, here: Origin) {
        origins.note(self.plan.ever(), here);
    }
}

impl Plan {
    #[cold]
    fn fails(&self, device: &str, call: &str) -> Option<i32> {
        let strikes = self.strikes(device, &occasion::call(call));
        strikes.into_iter().next().map(|CallFault::Fail(errno)| errno)
    }

    /// A plan without faults.
    pub const fn new() -> Plan {
        Plan {
            faults: [const { OnceLock::new() }; MOST_EVER],
            cleared: AtomicUsize::new(0),
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

    /// Changes the plan of a process that runs: adds the faults of a specification, and clears
    /// those before if `clear` is set. What has struck is not undone. A fault that is added counts
    /// occasions, positions and times from now on; one of the device strikes at once, if its
    /// specification does not say when.
    ///
    /// # Errors
    /// Those of [`Plan::add`]; a fault of connections or datagrams, if none asks this plan. Nothing
    /// is changed then.
    pub fn change(&self, text: &str, clear: bool) -> Result<(), String> {
        let (mut faults, seed) = parse(text)?;
        if let Some(fault) = faults.iter().find(|fault| !self.reaches(fault.kind)) {
            return Err(format!(
                "{}: the connections of this process pass by faults: start it with --faults none",
                fault.word
            ));
        }
        faults.iter_mut().for_each(Specified::begin_at_once);
        self.put(faults, seed, clear)
    }

    /// Whether a fault of this kind would have an effect on the connections of the process.
    fn reaches(&self, kind: Kind) -> bool {
        match kind.of_device() {
            // A device in another process has its connections there.
            Some(DeviceFault::PortDown(_)) => !self.is_passed_by.load(Ordering::Relaxed),
            _ => !kind.is_of_network() || self.has_network.load(Ordering::Relaxed),
        }
    }

    /// Adds the faults of a specification. The process has a plan from now on, even if there are
    /// none.
    ///
    /// # Errors
    /// A message: the specification is wrong, or there are too many faults.
    pub fn add(&self, text: &str) -> Result<(), String> {
        let (faults, seed) = parse(text)?;
        self.put(faults, seed, false)
    }

    /// Clears all faults if `clear` is set, and adds these; all, or nothing if there is no room.
    fn put(&self, faults: Vec<Specified>, seed: Option<u64>, clear: bool) -> Result<(), String> {
        let ever = self.ever() as usize;
        let first = if clear { ever } else { self.first() };
        // Another thread may clear later faults meanwhile.
        if ever.saturating_sub(first) + faults.len() > MOST {
            return Err(format!("more than {MOST} faults"));
        }
        let no_place = || format!("more than {MOST_EVER} faults since the process began: start it again");
        if ever + faults.len() > MOST_EVER {
            return Err(no_place());
        }
        self.cleared.fetch_max(first, Ordering::Relaxed);
        if let Some(seed) = seed {
            self.seed.store(seed, Ordering::Relaxed);
        }
        let since = now();
        for specified in faults {
            let mut fault = Some(Fault::new(specified, since));
            for place in &self.faults {
                fault = fault.and_then(|fault| place.set(fault).err());
            }
            if fault.is_some() {
                return Err(no_place());
            }
        }
        ON.store(true, Ordering::Release);
        Ok(())
    }

    /// The number of faults that there were.
    fn ever(&self) -> u64 {
        let is_there = |fault: &OnceLock<Fault>| fault.get().is_some();
        // Places are taken in their order.
        self.faults.partition_point(is_there) as u64
    }

    /// The index of the first fault that is in force.
    fn first(&self) -> usize {
        self.cleared.load(Ordering::Relaxed)
    }

    fn all(&self) -> impl Iterator<Item = (u64, &Fault)> {
        let all = (0..).zip(self.faults.iter().map_while(OnceLock::get));
        all.skip(self.first())
    }

    /// Each fault by its number, with the numbers of its occasions and strikes, in words.
    pub fn list(&self) -> Vec<String> {
        self.all()
            .map(|(index, fault)| format!("fault {}: {fault}", index + 1))
            .collect()
    }

    /// What is to go wrong at this occasion on a device: each fault that strikes, in the order of
    /// the specification.
    pub fn strikes<F>(&self, device: &str, occasion: &Occasion<'_, F>) -> Vec<F> {
        self.strikes_at(now(), device, occasion)
    }

    fn strikes_at<F>(&self, now: Duration, device: &str, occasion: &Occasion<'_, F>) -> Vec<F> {
        let seed = self.seed.load(Ordering::Relaxed);
        let open = self.all().filter(|(_, fault)| fault.is_open(now));
        let strike = |(index, fault): (u64, &Fault)| {
            let strike = fault.strike(seed, index, device, occasion)?;
            self.take_port_down(now, device, fault);
            Some(strike)
        };
        open.filter_map(strike).collect()
    }

    /// What befalls a device by itself now; and the time until something else will.
    pub fn due(&self, device: &str) -> (Vec<DeviceFault>, Option<Duration>) {
        self.due_at(now(), device)
    }

    fn due_at(&self, now: Duration, device: &str) -> (Vec<DeviceFault>, Option<Duration>) {
        let (mut strikes, mut next) = (Vec::new(), None);
        for (index, fault) in self.all().filter(|(_, fault)| fault.begins_on(device)) {
            if let Some(left) = fault.time_left(now) {
                next = [next, Some(left)].into_iter().flatten().min();
            } else if fault.is_open(now)
                && let Some(bit) = self.devices.bit(device)
                && let Some(strike) = fault.begin(index, device, bit)
            {
                self.take_port_down(now, device, fault);
                strikes.push(strike);
            }
        }
        (strikes, next)
    }

    /// Notes that the port is down, if that is what this fault does, which has struck.
    fn take_port_down(&self, now: Duration, device: &str, fault: &Fault) {
        if let Some(DeviceFault::PortDown(time)) = fault.kind().of_device() {
            self.devices.take_down(device, now + time);
        }
    }

    /// For how long the port of this device is still down; `None`: it is up.
    pub fn port_down_for(&self, device: &str) -> Option<Duration> {
        let until = self.devices.down_until(device);
        let left = (!until.is_zero()).then(|| until.saturating_sub(now()));
        left.filter(|left| !left.is_zero())
    }
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::new()
    }
}

#[cfg(test)]
mod tests;
