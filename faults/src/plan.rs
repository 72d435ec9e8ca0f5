//! The plan of the process, and its decisions.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::fault::Fault;
use crate::kind::{Action, Kind};
use crate::occasion::Occasion;
use crate::origins::{Origin, Origins};
use crate::parse::parse;

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

    /// Where the faults count from on a connection that begins now.
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
        let strikes = self.strikes(device, &Occasion::Call(call));
        strikes.into_iter().find_map(|action| match action {
            Action::Do(Kind::Fail { errno, .. }) => Some(errno),
            _ => None,
        })
    }

    /// A plan without faults.
    pub const fn new() -> Plan {
        Plan {
            faults: [const { OnceLock::new() }; MOST_EVER],
            cleared: AtomicUsize::new(0),
            seed: AtomicU64::new(1),
            has_network: AtomicBool::new(false),
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

    /// Changes the plan of a process that runs: adds the faults of a specification, and clears
    /// those before if `clear` is set. What has struck is not undone. A fault that is added counts
    /// occasions and positions from now on.
    ///
    /// # Errors
    /// Those of [`Plan::add`]; a fault of connections or datagrams, if none asks this plan. Nothing
    /// is changed then.
    pub fn change(&self, text: &str, clear: bool) -> Result<(), String> {
        let (faults, _) = parse(text)?;
        let network = faults.iter().find(|fault| fault.kind.is_of_network());
        if let Some(fault) = network
            && !self.has_network.load(Ordering::Relaxed)
        {
            return Err(format!(
                "{}: the connections of this process pass by faults: start it with --faults none",
                fault.kind.word()
            ));
        }
        let before = self.ever() as usize;
        let in_force = if clear { 0 } else { before - self.first() };
        self.has_room(before, in_force, faults.len())?;
        if clear {
            self.cleared.store(before, Ordering::Relaxed);
        }
        self.add(text)
    }

    /// Whether there is room for so many more faults.
    fn has_room(&self, ever: usize, in_force: usize, more: usize) -> Result<(), String> {
        if in_force + more > MOST {
            return Err(format!("more than {MOST} faults"));
        }
        match ever + more > MOST_EVER {
            true => Err(format!(
                "more than {MOST_EVER} faults since the process began: start it again"
            )),
            false => Ok(()),
        }
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

    /// Adds the faults of a specification. The process has a plan from now on, even if there are
    /// none.
    ///
    /// # Errors
    /// A message: the specification is wrong, or there are too many faults.
    pub fn add(&self, text: &str) -> Result<(), String> {
        let (faults, seed) = parse(text)?;
        let ever = self.ever() as usize;
        self.has_room(ever, ever - self.first().min(ever), faults.len())?;
        if let Some(seed) = seed {
            self.seed.store(seed, Ordering::Relaxed);
        }
        for specified in faults {
            let mut fault = Some(Fault::new(specified));
            for place in &self.faults {
                fault = fault.and_then(|fault| place.set(fault).err());
            }
            if fault.is_some() {
                return Err(format!("more than {MOST_EVER} faults"));
            }
        }
        ON.store(true, Ordering::Release);
        Ok(())
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
    pub fn strikes(&self, device: &str, occasion: &Occasion<'_>) -> Vec<Action> {
        let seed = self.seed.load(Ordering::Relaxed);
        self.all()
            .filter_map(|(index, fault)| fault.strike(seed, index, device, occasion))
            .collect()
    }
}

impl Default for Plan {
    fn default() -> Plan {
        Plan::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind::{Lateness, Position};
    use std::net::{IpAddr, Ipv4Addr};
    use std::time::Duration;
    use urnic_device::vocabulary::WcStatus;

    const PEER: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

    fn of(text: &str) -> Plan {
        let plan = Plan::new();
        plan.add(text).unwrap();
        plan
    }

    /// The numbers of the occasions, of a hundred, at which something strikes.
    fn struck(plan: &Plan, occasion: &Occasion<'_>) -> Vec<u32> {
        (1..=100)
            .filter(|_| !plan.strikes("urnic0", occasion).is_empty())
            .collect()
    }

    #[test]
    fn a_fault_strikes_at_its_occasions() {
        let datagram = Occasion::Datagram(PEER);
        assert_eq!(struck(&of("drop"), &datagram), [1]);
        assert_eq!(struck(&of("drop nth=7"), &datagram), [7]);
        assert_eq!(struck(&of("drop every=30"), &datagram), [30, 60, 90]);
        assert_eq!(struck(&of("drop every=30 count=2"), &datagram), [30, 60]);
        assert_eq!(struck(&of("drop p=1 count=3"), &datagram), [1, 2, 3]);
        assert_eq!(struck(&of("drop p=0"), &datagram), [0u32; 0]);
        assert_eq!(struck(&of("refuse"), &datagram), [0u32; 0]);
        assert_eq!(struck(&of("drop peer=192.0.3.0/24"), &datagram), [0u32; 0]);
    }

    #[test]
    fn one_seed_has_one_run() {
        let run = |seed: u64| {
            struck(
                &of(&format!("drop p=0.3; seed={seed}")),
                &Occasion::Datagram(PEER),
            )
        };
        assert_eq!(run(5), run(5));
        assert_ne!(run(5), run(6));
        assert!((10..50).contains(&run(5).len()));
    }

    #[test]
    fn only_occasions_that_fit_count() {
        let plan = of("complete status=REM_OP_ERR opcode=RDMA_READ nth=2");
        assert!(
            plan.strikes("urnic0", &Occasion::Completion("RDMA_READ", 1))
                .is_empty()
        );
        assert!(
            plan.strikes("urnic0", &Occasion::Completion("SEND", 1))
                .is_empty()
        );
        let strikes = plan.strikes("urnic0", &Occasion::Completion("RDMA_READ", 1));
        assert_eq!(strikes, [Action::Do(Kind::Complete(WcStatus::RemOpErr))]);
        assert_eq!(
            plan.list(),
            ["fault 1: complete status=REM_OP_ERR nth=2 opcode=RDMA_READ: struck 1 times at 2 occasions"]
        );
    }

    #[test]
    fn a_position_is_passed_once() {
        let plan = of("reset after=100 every=1");
        let origins = Origins::beginning(1);
        let passed = |bytes| Occasion::Passed {
            peer: PEER,
            bytes,
            messages: 0..0,
            origins: &origins,
        };
        assert!(plan.strikes("urnic0", &passed(0..100)).is_empty());
        let reset = Action::Do(Kind::Reset(Position::Bytes(100)));
        assert_eq!(plan.strikes("urnic0", &passed(100..130)), [reset]);
        assert!(plan.strikes("urnic0", &passed(130..200)).is_empty());
    }

    #[test]
    fn messages_are_counted_by_their_ends() {
        let plan = of("silence after=3msg every=1");
        let origins = Origins::beginning(1);
        let passed = |bytes, messages| Occasion::Passed {
            peer: PEER,
            bytes,
            messages,
            origins: &origins,
        };
        assert!(plan.strikes("urnic0", &passed(0..100, 0..0)).is_empty());
        assert!(plan.strikes("urnic0", &passed(100..200, 0..2)).is_empty());
        let silence = Action::Do(Kind::Silence(Position::Messages(3)));
        assert_eq!(plan.strikes("urnic0", &passed(200..300, 2..5)), [silence]);
        assert!(plan.strikes("urnic0", &passed(300..400, 5..6)).is_empty());
        let at_once = of("close after=0msg").strikes("urnic0", &passed(0..20, 0..0));
        assert_eq!(at_once, [Action::Do(Kind::Close(Position::Messages(0)))]);
    }

    #[test]
    fn a_delay_has_a_time_a_jitter_and_a_rate() {
        let plan = of("delay time=10us jitter=2us rate=8gbit");
        for _ in 0..100 {
            let strikes = plan.strikes("urnic0", &Occasion::Send(PEER, 1000));
            let [Action::Late(Lateness { transfer, time })] = strikes[..] else {
                panic!("{strikes:?}")
            };
            assert_eq!(transfer, Duration::from_micros(1));
            assert!((8..=12).contains(&time.as_micros()), "{time:?}");
        }
    }

    #[test]
    fn faults_of_the_network_need_a_network_that_asks() {
        let plan = Plan::new();
        let refused = plan.change("reset", false).unwrap_err();
        assert!(refused.contains("--faults none"), "{refused}");
        plan.change("lose-event", false).unwrap();
        plan.note_network();
        plan.change("reset", false).unwrap();
        assert_eq!(plan.list().len(), 2);
    }

    #[test]
    fn a_fault_may_be_of_one_device() {
        let plan = of("drop device=urnic1 nth=1");
        let occasion = Occasion::Datagram(PEER);
        assert!(plan.strikes("urnic0", &occasion).is_empty());
        assert_eq!(plan.strikes("urnic1", &occasion), [Action::Do(Kind::Drop)]);
    }

    #[test]
    fn cleared_faults_strike_no_more() {
        let plan = of("drop every=1; refuse");
        let datagram = Occasion::Datagram(PEER);
        assert_eq!(plan.strikes("urnic0", &datagram), [Action::Do(Kind::Drop)]);
        plan.note_network();
        plan.change("", true).unwrap();
        assert!(plan.strikes("urnic0", &datagram).is_empty());
        assert!(plan.list().is_empty());
        plan.change("duplicate every=1", false).unwrap();
        plan.change("reorder every=1 count=2", true).unwrap();
        assert_eq!(plan.strikes("urnic0", &datagram), [Action::Do(Kind::Reorder)]);
        let listed = "fault 4: reorder every=1 count=2: struck 1 times at 1 occasions";
        assert_eq!(plan.list(), [listed]);
    }

    #[test]
    fn a_change_that_is_wrong_clears_nothing() {
        let plan = of("lose-event");
        for wrong in ["rest", "reset"] {
            plan.change(wrong, true).unwrap_err();
            assert_eq!(plan.list().len(), 1);
        }
    }

    #[test]
    fn there_is_a_limit_of_faults_in_force() {
        let plan = Plan::new();
        let error = (0..=MOST).find_map(|_| plan.add("drop").err()).unwrap();
        assert_eq!(error, "more than 64 faults");
        plan.note_network();
        assert_eq!(plan.change("drop", false).unwrap_err(), error);
        plan.change("drop", true).unwrap();
        assert_eq!(plan.list().len(), 1);
    }

    #[test]
    fn there_is_a_limit_of_faults_in_a_life() {
        let plan = Plan::new();
        let changes = (0..).map(|_| plan.change("lose-event", true));
        let well = changes.take_while(Result::is_ok).count();
        assert_eq!(well, MOST_EVER);
        let error = plan.change("lose-event", true).unwrap_err();
        assert!(error.contains("1024 faults since the process began"), "{error}");
        plan.change("", true).unwrap();
        assert!(plan.list().is_empty());
    }
}
