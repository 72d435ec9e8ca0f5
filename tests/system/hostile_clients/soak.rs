//! Random attacks beside regular clients: the regular clients' data arrives, and the server returns
//! to its initial state.
//!
//! The seed is printed; `URNIC_SOAK_SEED` sets it. Threads run freely, so a seed gives the same
//! actions, not the same interleaving.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, ftruncate};
use urnic_device::command::{Command, Nothing, Opcode, PAYLOAD_LEN};
use urnic_device::stream::{Connect, Endpoint};
use urnic_device::wqe::{SendHeader, Sge};
use urnic_tests::build::{scratch, urnic};
use urnic_tests::hostile_client::{Answer, BASE, FREE, HostileClient, LEN, OwnPeer, memory};
use urnic_tests::program::Program;
use urnic_tests::random::Random;
use urnic_tests::wait::{TIME_LIMIT, descriptors, resident, until};
use urnic_tests::{Pair, Running, compiled, or_skip};
use urnic_vfio_user::{IrqAction, IrqData, RegionAccess, Request, SetIrqs, irq_index};

use super::lingering;

/// Attacking threads, at most as many clients.
const HOSTILE_THREADS: usize = 3;
/// The one address that hostile functions have and reach.
const THEIRS: &str = "127.0.0.78";

/// The resources of a server when it is idle.
#[derive(Debug, Clone, Copy)]
struct Resources {
    kib: u64,
    descriptors: usize,
    mappings: usize,
    threads: usize,
}

impl Resources {
    fn of(pid: u32) -> Self {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{pid}/{what}")).map_or(0, Iterator::count);
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("it runs");
        Self {
            kib: resident(pid),
            descriptors: descriptors(pid),
            mappings: maps.lines().count(),
            threads: count("task"),
        }
    }
}

/// One server, with a socket for regular clients and one for the others.
struct Scene {
    running: Running,
    honest: PathBuf,
    harmful: PathBuf,
}

impl Scene {
    fn start() -> Self {
        let socket = |name: &str| scratch().join(format!("soak-{name}-{}.sock", std::process::id()));
        let (honest, harmful) = (socket("honest"), socket("harmful"));
        let mut running = Program::plain(urnic())
            .args(["serve", "--log", "error", "--socket"])
            .arg(&honest)
            .args(["--addr", "host", "--socket"])
            .arg(&harmful)
            .args(["--addr", &format!("{THEIRS}/32")])
            .spawn();
        running.wait_for_output("that it serves", |printed| {
            (printed.matches("serving").count() == 2).then_some(())
        });
        Self {
            running,
            honest,
            harmful,
        }
    }

    /// The resources of the server after all its clients have left.
    fn idle_resources(&self) -> Resources {
        let pid = self.running.pid();
        let functions = || {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
            let name = |task: std::io::Result<std::fs::DirEntry>| {
                std::fs::read_to_string(task.ok()?.path().join("comm")).ok()
            };
            tasks
                .filter_map(name)
                .filter(|name| matches!(name.trim(), "urnic-function" | "urnic-device" | "urnic-helper"))
                .count()
        };
        let left = until(TIME_LIMIT, || {
            let left = functions() == 0;
            if !left {
                // Another client interrupts sessions that wait for a descriptor.
                drop(HostileClient::begin(&self.harmful));
            }
            left.then_some(())
        });
        assert!(
            left.is_some(),
            "{} threads of sessions stay:\n{}",
            functions(),
            self.running.output()
        );
        Resources::of(pid)
    }
}

/// The actions of one client.
struct Actions<'a> {
    client: HostileClient,
    random: &'a mut Random,
    files: Vec<File>,
    /// Descriptors that keep the server's sockets lingering, of this client and of earlier ones.
    kept: &'a mut Vec<OwnedFd>,
    /// Threads that close this side's descriptors.
    closing: &'a mut Vec<JoinHandle<()>>,
    peer: Option<OwnPeer>,
    stags: Vec<u32>,
}

/// Addresses that are likely to be valid, or to be at a border.
fn address(random: &mut Random) -> u64 {
    let page = random.below(64) as u64 * 4096;
    match random.below(8) {
        0..4 => BASE + page,
        4 => (64 << 30) - (8 << 12) + page,
        5 => (random.below(40) as u64 * (64 << 30)).wrapping_sub(page),
        6 => u64::MAX - page,
        _ => random.next(),
    }
}

impl Actions<'_> {
    fn file(&mut self) -> usize {
        if self.files.len() > 4 {
            return self.random.below(self.files.len());
        }
        let flags = match self.random.below(6) {
            0 => MemfdFlags::HUGETLB,
            1 => MemfdFlags::ALLOW_SEALING,
            _ => MemfdFlags::empty(),
        };
        let unit = if flags == MemfdFlags::HUGETLB {
            2 << 20
        } else {
            4096
        };
        let len = unit << self.random.below(14);
        self.files.push(memory("harm", len, flags));
        self.files.len() - 1
    }

    /// A descriptor of any kind.
    fn descriptor(&mut self) -> OwnedFd {
        match self.random.below(5) {
            0 => eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            1 => rustix::pipe::pipe().expect("a pipe").0,
            2 => File::open("/dev/null").expect("it is there").into(),
            3 => {
                let (socket, peer, listener) = lingering();
                self.kept.extend([peer.into(), listener.into()]);
                // The client lags a little, which keeps the socket lingering.
                let excess = self.kept.len().saturating_sub(16);
                self.kept.drain(..excess);
                socket.into()
            }
            _ => memory("harm", 4096, MemfdFlags::empty()).into(),
        }
    }

    fn change_mappings(&mut self) -> Answer<()> {
        let at = address(self.random) & !0xfff;
        let size = 4096 << self.random.below(28);
        let done = match self.random.below(6) {
            0..3 => {
                let file = self.file();
                let offset = self.random.below(4) as u64 * 4096;
                let file = self.files[file]
                    .as_fd()
                    .try_clone_to_owned()
                    .expect("a descriptor");
                self.client.map_memory(at, size, offset, &file)
            }
            3 => self.client.unmap_memory(0, 1 << 63),
            _ => self.client.unmap_memory(at, size),
        };
        ignore_refusal(done)
    }

    fn truncate(&mut self) {
        let file = self.file();
        let len = match self.random.below(3) {
            0 => 0,
            _ => 4096 << self.random.below(12),
        };
        // Files of huge pages take other lengths.
        let _ = ftruncate(&self.files[file], len);
        if self.random.below(64) == 0 {
            let _ = ftruncate(self.client.memory(), 0);
            let _ = ftruncate(self.client.memory(), LEN);
        }
    }

    fn command(&mut self) -> Answer<()> {
        let opcode = Opcode::from_raw(self.random.below(64) as u16).unwrap_or(Opcode::QueryDevice);
        let mut command = Command::new(opcode, &Nothing {});
        for place in command.payload[..PAYLOAD_LEN].as_chunks_mut::<8>().0 {
            let value = match self.random.below(4) {
                0 => address(self.random),
                1 => u64::from(self.stags.first().copied().unwrap_or(7)),
                _ => (self.random.below(8) as u64) << 32 | self.random.below(8) as u64,
            };
            place.copy_from_slice(&value.to_le_bytes());
        }
        if opcode == Opcode::StreamConnect {
            // No address outside of this host is used.
            let there: std::net::SocketAddr = format!("{THEIRS}:{}", 1 + self.random.below(60_000))
                .parse()
                .expect("an address");
            let connect = Connect {
                remote: Endpoint::from(there),
                ..Connect::default()
            };
            command = Command::new(opcode, &connect);
        }
        command.input = address(self.random).into();
        command.output = (BASE + FREE + self.random.below(16) as u64 * 4096).into();
        command.input_len = (self.random.below(1 << 16) as u32).into();
        command.output_len = (self.random.below(1 << 14) as u32).into();
        ignore_refusal(self.client.execute(command).map(drop))
    }

    fn doorbell(&mut self) -> Answer<()> {
        for _ in 0..8 {
            let value = (self.random.below(7) as u64) << 56
                | (self.random.below(8) as u64) << 32
                | self.random.next() & 0xffff_ffff >> self.random.below(32);
            self.client.store(self.random.below(1 << 16) as u64 & !7, value);
        }
        let access = RegionAccess {
            offset: self.random.next() >> self.random.below(64),
            region: self.random.below(10) as u32,
            count: self.random.below(5000) as u32,
        };
        ignore_refusal(self.client.request(&Request::RegionRead(access), &[]).map(drop))?;
        if let Some(peer) = &self.peer {
            self.client.ring(peer)?;
        }
        Ok(())
    }

    /// Requests over memory that may be invalid, and words written over rings and records.
    fn work(&mut self) -> Answer<()> {
        if self.peer.is_none() {
            self.peer = match self.client.own_peer() {
                Ok(peer) => Some(peer),
                Err(refused) => return ignore_refusal(Err(refused)),
            };
        }
        let Some(mut peer) = self.peer.take() else {
            return Ok(());
        };
        if self.stags.len() < 4 {
            let registered = self.client.register_every_second_page(peer.pd, BASE, 64);
            match registered {
                Ok(stag) => self.stags.push(stag),
                Err(refused) => ignore_refusal(Err(refused))?,
            }
        }
        let stag = self.stags.last().copied().unwrap_or(0);
        for _ in 0..self.random.below(20) {
            let header = SendHeader {
                opcode: self.random.below(12) as u8,
                remote_offset: (self.random.below(1 << 18) as u64).into(),
                stag: stag.into(),
                ..SendHeader::default()
            };
            let from = Sge {
                offset: (self.random.below(1 << 18) as u64).into(),
                len: (self.random.below(1 << 17) as u32).into(),
                stag: stag.into(),
            };
            self.client.post(&mut peer, header, &[from]);
        }
        for _ in 0..self.random.below(4) {
            let at = 0x2000 + 4 * self.random.below(0x1000) as u64;
            let value = self.random.next() as u32 >> self.random.below(32);
            self.client.write(at, &value.to_le_bytes());
        }
        self.client.ring(&peer)?;
        self.peer = Some(peer);
        Ok(())
    }

    fn interrupts(&mut self) -> Answer<()> {
        let count = self.random.below(3) as u32;
        let eventfds: Vec<OwnedFd> = (0..count)
            .map(|_| eventfd(0, EventfdFlags::CLOEXEC).expect("one"))
            .collect();
        let fds: Vec<BorrowedFd<'_>> = eventfds.iter().map(AsFd::as_fd).collect();
        let set = |count, data| {
            Request::SetIrqs(SetIrqs {
                index: irq_index::MSIX,
                start: 0,
                count,
                action: IrqAction::Trigger,
                data,
            })
        };
        ignore_refusal(self.client.request(&set(count, IrqData::Eventfd), &fds).map(drop))?;
        if self.random.below(8) == 0 && !eventfds.is_empty() {
            // From here on the server does not answer this client.
            let _ = rustix::io::write(&eventfds[0], &(u64::MAX - 1).to_ne_bytes());
            let _ = fcntl_setfl(&eventfds[0], OFlags::empty());
            self.client.send(&set(1, IrqData::None), true, &[])?;
            return Err(urnic_tests::hostile_client::Refused::Closed);
        }
        ignore_refusal(self.client.request(&set(1, IrqData::None), &[]).map(drop))
    }

    fn reset(&mut self) -> Answer<()> {
        self.peer = None;
        self.stags.clear();
        ignore_refusal(self.client.request(&Request::DeviceReset, &[]).map(drop))?;
        ignore_refusal(self.client.unmap_memory(BASE, LEN))?;
        ignore_refusal(self.client.enable())
    }

    /// Ends the connection in a hostile way.
    fn leave(&mut self) -> Answer<()> {
        let fd = self.descriptor();
        let left = match self.random.below(4) {
            0 => self.client.send(&Request::DeviceReset, true, &[fd.as_fd()]),
            1 => self.client.send_raw(&[1, 0, 2, 0, 64, 0], &[fd.as_fd()]),
            2 => {
                let len = 1 + self.random.below(3000);
                let bytes = self.random.bytes(len);
                self.client.send_raw(&bytes, &[fd.as_fd()])
            }
            _ => self.client.send(&Request::DeviceReset, true, &[fd.as_fd(); 30]),
        };
        self.closing.retain(|thread| !thread.is_finished());
        self.closing.push(std::thread::spawn(move || drop(fd)));
        left
    }

    fn step(&mut self) -> Answer<()> {
        match self.random.below(20) {
            0..5 => self.change_mappings(),
            5..7 => {
                self.truncate();
                Ok(())
            }
            7..11 => self.command(),
            11..14 => self.doorbell(),
            14..17 => self.work(),
            17 => self.interrupts(),
            18 => self.reset(),
            _ => Ok(()),
        }
    }
}

/// A refusal of the server is an answer; a closed connection ends the client.
fn ignore_refusal(answer: Answer<()>) -> Answer<()> {
    use urnic_tests::hostile_client::Refused;
    match answer {
        Err(Refused::Errno(_) | Refused::Status(_)) => Ok(()),
        other => other,
    }
}

/// Runs one client from its beginning to its end; returns the number of its actions.
fn run_hostile_client(
    socket: &Path,
    random: &mut Random,
    kept: &mut Vec<OwnedFd>,
    closing: &mut Vec<JoinHandle<()>>,
    stop: &AtomicBool,
) -> usize {
    let Ok(client) = HostileClient::begin(socket) else {
        return 0;
    };
    let mut actions = Actions {
        client,
        random,
        files: Vec::new(),
        kept,
        closing,
        peer: None,
        stags: Vec::new(),
    };
    if actions.client.enable().is_err() {
        return 0;
    }
    let steps = 1 + actions.random.below(400);
    for step in 0..steps {
        if stop.load(Ordering::Relaxed) || actions.step().is_err() {
            return step;
        }
    }
    let _ = actions.leave();
    steps
}

/// Runs hostile clients for this time; returns the number of their actions.
fn run_hostile_clients(scene: &Scene, seed: u64, round: u64, time: Duration) -> usize {
    let (stop, actions) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for number in 0..HOSTILE_THREADS as u64 {
            let (stop, actions) = (&stop, &actions);
            scope.spawn(move || {
                let mut random =
                    Random((seed ^ ((round << 8) + number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1);
                let (mut kept, mut closing) = (Vec::new(), Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    let done = run_hostile_client(&scene.harmful, &mut random, &mut kept, &mut closing, stop);
                    actions.fetch_add(done, Ordering::Relaxed);
                }
                drop(kept);
                closing
                    .into_iter()
                    .for_each(|thread| thread.join().expect("it closes"));
            });
        }
        let begun = Instant::now();
        while begun.elapsed() < time {
            std::thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
    actions.into_inner()
}

/// Two regular clients transfer and compare until `stop` is set; returns the number of rounds.
fn transfer(scene: &Scene, program: &Path, stop: &AtomicBool) -> usize {
    let device = format!("vfio-user:{}", scene.honest.display());
    let program = Program::new(program).env("URNIC_DEVICE", device);
    let mut times = 0;
    while !stop.load(Ordering::Relaxed) {
        let operation = ["send", "write", "read"][times % 3];
        // Up to 34 s to reach the peer: the harm takes its share of the processors.
        let line = format!("-o {operation} -b 16777216 -c 100003 -t 20");
        Pair::new(&program.clone().line(&line)).succeeds();
        times += 1;
    }
    times
}

const ROUNDS: u64 = 4;

fn run_soak(round: Duration) {
    let program = or_skip!(compiled("transfer"));
    let given = std::env::var("URNIC_SOAK_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    let seed: u64 = given.unwrap_or(now.as_nanos() as u64);
    println!("URNIC_SOAK_SEED={seed}");
    let scene = Scene::start();
    let mut first = None;
    for number in 0..ROUNDS {
        let stop = AtomicBool::new(false);
        let (actions, times) = std::thread::scope(|scope| {
            let honest = scope.spawn(|| transfer(&scene, &program, &stop));
            let actions = run_hostile_clients(&scene, seed, number, round);
            stop.store(true, Ordering::Relaxed);
            (actions, honest.join().expect("what they transfer arrives"))
        });
        let now = scene.idle_resources();
        println!("round {number}: {actions} actions, {times} transfers, {now:?}");
        assert!(actions > 0 && times > 0, "{actions} actions, {times} transfers");
        // The first round makes what is kept for later: memory of the allocator, blocks of
        // addresses.
        let before = *first.get_or_insert(now);
        assert!(now.kib < before.kib + 24 * 1024, "{before:?}, then {now:?}");
        assert!(now.descriptors <= before.descriptors, "{before:?}, then {now:?}");
        assert!(now.mappings < before.mappings + 48, "{before:?}, then {now:?}");
        assert!(now.threads <= before.threads, "{before:?}, then {now:?}");
    }
    let mut running = scene.running;
    running.signal(rustix::process::Signal::TERM);
    let ended = until(TIME_LIMIT, || running.ended());
    assert!(ended.is_some_and(|how| how.success()), "{}", running.output());
}

#[test]
fn regular_clients_work_next_to_hostile_ones() {
    run_soak(Duration::from_secs(2));
}

#[test]
#[ignore = "ten minutes"]
fn regular_clients_work_next_to_hostile_ones_for_long() {
    run_soak(Duration::from_secs(150));
}
