//! Hostile processes of the same host, of the same and of another user, beside devices that serve
//! each other (`tests/hostile`): the devices go on, and when the hostile processes have ended, the
//! devices are as before.
//!
//! The seed is printed; `URNIC_TEST_HOSTILE_SEED` sets it, and `URNIC_TEST_HOSTILE_SECONDS` the
//! time of the long test. Processes run freely, so a seed gives the same choices, not the same
//! interleaving.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use urnic_tests::netns::Netns;
use urnic_tests::program::Program;
use urnic_tests::served::in_process;
use urnic_tests::user::{OTHER_USER, Staged};
use urnic_tests::wait::{TIME_LIMIT, descriptors, resident, until};
use urnic_tests::{Running, compiled, or_skip};

/// The user of the victims, and one that nothing of theirs concerns.
const USER: u32 = OTHER_USER;
const STRANGER: u32 = OTHER_USER + 1;
/// Ports of the two victims and of the hostile listener; the network namespace is the test's own.
const VICTIMS: [u16; 2] = [7101, 7102];
const HOSTILE: u16 = 7103;
/// Seconds that a regular client waits for one step. The attacks take their share of the
/// processors.
const PATIENCE: &str = "20";
/// Seconds after which a hostile process ends in any case.
const SECONDS: &str = "3600";
/// Memory that a victim may keep, in KiB: what its allocator does not return.
const KEPT_KIB: u64 = 24 * 1024;

/// A hostile process: what it does, whose it is, and which port it needs.
#[derive(Debug, Clone, Copy)]
struct Attack {
    what: &'static str,
    user: u32,
    port: u16,
}

const fn attack(what: &'static str, user: u32, port: u16) -> Attack {
    Attack { what, user, port }
}

/// A program in the network namespace of the scene.
struct Scene {
    netns: Netns,
    staged: Staged,
    services: PathBuf,
    hostile: PathBuf,
    victims: Vec<Running>,
    seed: u64,
}

/// What a victim has while nobody is connected.
#[derive(Debug, Clone, Copy)]
struct Resources {
    kib: u64,
    descriptors: usize,
    mappings: usize,
    threads: usize,
}

impl Resources {
    fn of(pid: u32) -> Self {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
        Self {
            kib: resident(pid),
            descriptors: descriptors(pid),
            mappings: maps.lines().count(),
            threads,
        }
    }

    /// Whether these are no more than those before, but for memory that is kept for later.
    fn fit(&self, before: &Self) -> bool {
        self.kib < before.kib + KEPT_KIB
            && self.descriptors <= before.descriptors
            && self.mappings < before.mappings + 48
            && self.threads <= before.threads
    }
}

/// The time that a process has had on processors, in ticks.
fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or_default().split_whitespace();
    // utime and stime, fields 14 and 15 of proc_pid_stat(5).
    fields
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<u64>().ok())
        .sum()
}

impl Scene {
    fn start(seed: u64) -> Result<Self, String> {
        let netns = Netns::new()?;
        let staged = Staged::new();
        let mut scene = Scene {
            services: staged.add(&compiled("services")?),
            hostile: staged.add(Path::new(env!("CARGO_BIN_EXE_hostile"))),
            netns,
            staged,
            victims: Vec::new(),
            seed,
        };
        for port in VICTIMS {
            let mut victim = scene.services().args(["-p", &port.to_string()]).spawn();
            victim.wait_for_output("that it serves", |text| text.contains("serves").then_some(()));
            scene.victims.push(victim);
        }
        Ok(scene)
    }

    fn place(&self, user: u32, program: Program) -> Program {
        let program = self.staged.program(user, program.env("URNIC_IDENTITY", "roce"));
        self.netns.program(program)
    }

    /// `services`, with the RNIC, of the victims' user.
    fn services(&self) -> Program {
        self.place(USER, Program::new(&self.services))
    }

    fn attacked(&self, attack: Attack, number: u64) -> Running {
        let seed = self.seed.wrapping_add(number);
        let plugin = self.services.with_file_name("liburnic.so");
        let program = Program::plain(&self.hostile)
            .args([attack.what, "--seed", &seed.to_string(), "--seconds", SECONDS])
            .args(["--port", &attack.port.to_string()])
            .arg("--program")
            .arg(&self.services)
            .arg("--plugin")
            .arg(plugin);
        self.place(attack.user, program).spawn()
    }

    /// The output and the threads of the victims.
    fn diagnosis(&self) -> String {
        let victim = |victim: &Running| {
            let (pid, output) = (victim.pid(), victim.output());
            format!("victim {pid}:\n{output}its threads:\n{}", threads(pid))
        };
        self.victims.iter().map(victim).collect()
    }

    /// A regular client gets all services of every victim.
    #[track_caller]
    fn serve(&self) {
        for port in VICTIMS {
            let visit = self
                .services()
                .args(["-t", PATIENCE, "-v", &port.to_string()])
                .run();
            assert!(
                visit.ok(),
                "a regular client failed: {visit}\n{}",
                self.diagnosis()
            );
        }
    }

    /// A victim is a client of this port, and says how that went.
    #[track_caller]
    fn visit(&mut self, victim: usize, port: u16, patience: &str) -> String {
        let from = self.victims[victim].output().len();
        self.victims[victim].write_stdin(&format!("visit {port} {patience}\n"));
        // The device's own log lines may come in between.
        let said = format!("visited {port}: ");
        self.victims[victim].wait_for_output_from(from, "how its visit went", |text| {
            let (_, how) = text.split_once(&said)?;
            Some(format!("{said}{}", how.lines().next().unwrap_or_default()))
        })
    }

    /// Each victim is a client of the other one.
    #[track_caller]
    fn serve_each_other(&mut self) {
        for victim in 0..VICTIMS.len() {
            let visited = self.visit(victim, VICTIMS[1 - victim], PATIENCE);
            assert!(
                visited.contains(": ok"),
                "victim {victim}: {visited}\n{}",
                self.diagnosis()
            );
        }
    }

    /// Waits until the victims have what they had before.
    #[track_caller]
    fn recover(&self, before: &[Resources]) {
        for (victim, before) in self.victims.iter().zip(before) {
            let pid = victim.pid();
            let back = until(TIME_LIMIT, || Resources::of(pid).fit(before).then_some(()));
            let now = Resources::of(pid);
            assert!(
                back.is_some(),
                "{before:?} before the attack, {now:?} after it:\n{}",
                large_mappings(pid)
            );
            let idle = until(TIME_LIMIT, || {
                let then = ticks(pid);
                std::thread::sleep(Duration::from_millis(500));
                (ticks(pid) - then < 5).then_some(())
            });
            assert!(idle.is_some(), "process {pid} does not come to rest");
            assert!(!victim.output().contains("panicked"), "process {pid} panicked");
        }
    }

    fn resources(&self) -> Vec<Resources> {
        self.victims
            .iter()
            .map(|victim| Resources::of(victim.pid()))
            .collect()
    }

    /// These attacks at the same time, for this long, beside regular clients.
    #[track_caller]
    fn endure(&mut self, attacks: &[Attack], time: Duration, round: u64) {
        let before = self.resources();
        let attackers: Vec<Running> = (0..)
            .zip(attacks)
            .map(|(number, attack)| self.attacked(*attack, (round << 8) + number))
            .collect();
        let listens = attacks.iter().any(|attack| attack.what == "server");
        let begun = Instant::now();
        let mut times = 0;
        while begun.elapsed() < time {
            self.serve();
            self.serve_each_other();
            for victim in 0..VICTIMS.len() * usize::from(listens) {
                // Whatever comes of it, it comes to an end.
                self.visit(victim, HOSTILE, "1");
            }
            times += 1;
        }
        for (attacker, attack) in attackers.into_iter().zip(attacks) {
            let done = attacker.wait().success();
            println!("{attack:?} beside {times} rounds of services: {}", done.trim());
        }
        self.serve();
        self.serve_each_other();
        self.recover(&before);
    }

    /// SIGTERM ends the victims.
    fn end(mut self) {
        for victim in std::mem::take(&mut self.victims) {
            victim.signal(Signal::TERM);
            victim.wait();
        }
    }
}

/// What each thread of a process does: its name, its state and where it waits in the kernel.
fn threads(pid: u32) -> String {
    let folder = std::fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let thread = |path: PathBuf| {
        let read = |name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
        let stat = read("stat");
        let state = stat
            .rsplit(") ")
            .next()
            .unwrap_or_default()
            .get(..1)
            .unwrap_or_default();
        format!(
            "{} {state} {} {}\n",
            read("comm").trim(),
            read("wchan"),
            read("syscall").trim()
        )
    };
    folder.map(|entry| thread(entry.path())).collect()
}

/// The mappings of a process that have at least a MiB of memory, as /proc/PID/smaps names them.
fn large_mappings(pid: u32) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let mut mapping = "";
    let mut large = String::new();
    for line in text.lines() {
        if let Some(resident) = line.strip_prefix("Rss:") {
            let kib = resident.trim().trim_end_matches(" kB").parse::<u64>();
            if kib.is_ok_and(|kib| kib >= 1024) {
                let _ = writeln!(large, "{}: {mapping}", resident.trim());
            }
        } else if line.split(' ').next().is_some_and(|word| word.contains('-')) {
            mapping = line;
        }
    }
    large
}

impl Drop for Scene {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!("{}", self.diagnosis());
        }
    }
}

fn seed() -> u64 {
    let given = std::env::var("URNIC_TEST_HOSTILE_SEED").ok();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let seed = given
        .and_then(|text| text.parse().ok())
        .unwrap_or(now.as_nanos() as u64);
    println!("URNIC_TEST_HOSTILE_SEED={seed}");
    seed
}

/// Messages and names of a stranger, and devices of two users that go wrong.
const OFFERS: Attack = attack("offers", STRANGER, 0);
const SQUAT: Attack = attack("squat", STRANGER, 0);
const STRANGERS: [Attack; 2] = [
    attack("client", STRANGER, VICTIMS[0]),
    attack("server", STRANGER, HOSTILE),
];
const OWN: [Attack; 2] = [
    attack("client", USER, VICTIMS[0]),
    attack("server", USER, HOSTILE),
];

/// Runs each group of attacks, and again until this time has passed.
fn withstand(groups: &[&[Attack]], time: Duration) {
    or_skip!(in_process("the devices are in the programs' processes"));
    let mut scene = or_skip!(Scene::start(seed()));
    // What is kept for later is made by the first clients.
    for _ in 0..2 {
        scene.serve();
        scene.serve_each_other();
    }
    // Without an attack they keep nothing.
    scene.endure(&[], Duration::ZERO, 0);
    let begun = Instant::now();
    for round in 0.. {
        if round > 0 && begun.elapsed() >= time {
            break;
        }
        for (number, attacks) in (0..).zip(groups) {
            scene.endure(attacks, ROUND, round * 16 + number);
        }
    }
    scene.end();
}

/// How long one group of attacks goes on.
const ROUND: Duration = Duration::from_secs(4);

#[test]
fn strangers_messages_stop_no_device() {
    withstand(&[&[OFFERS]], Duration::ZERO);
}

#[test]
fn names_taken_by_strangers_stop_no_device() {
    withstand(&[&[SQUAT]], Duration::ZERO);
}

#[test]
fn a_strangers_broken_device_stops_no_device() {
    withstand(&[&STRANGERS], Duration::ZERO);
}

#[test]
fn a_broken_device_of_the_same_user_stops_no_other() {
    withstand(&[&OWN], Duration::ZERO);
}

#[test]
#[ignore = "a minute, or as long as URNIC_TEST_HOSTILE_SECONDS says"]
fn hostile_processes_of_all_kinds_stop_no_device() {
    let given = std::env::var("URNIC_TEST_HOSTILE_SECONDS").ok();
    let seconds = given.map_or(60, |text| text.parse().expect("seconds"));
    // One process can have the port of the hostile listener.
    let together = [OFFERS, SQUAT, STRANGERS[0], OWN[0], OWN[1]];
    let groups: [&[Attack]; 5] = [&[OFFERS], &[SQUAT], &STRANGERS, &OWN, &together];
    withstand(&groups, Duration::from_secs(seconds));
}
