//! A generator of legal verbs programs: many queue pairs between two sides, everything that a
//! reliable connection can do, checked against a model of memory and completions. `plan` defines
//! what is legal. A failure names the seed and the round; the same seed produces the same rounds.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

mod arena;
mod host;
mod layout;
mod plan;
mod rng;
mod side;
mod verbs;

const USAGE: &str = "stress [--seed SEED] [--rounds N | --seconds N] [--links N] [--processes 1|2]";

#[derive(Debug, Clone)]
struct Options {
    seed: u64,
    rounds: u64,
    seconds: u64,
    links: usize,
    processes: usize,
    /// In the second process: the socket to the first.
    peer: Option<i32>,
}

fn options() -> Option<Options> {
    let mut options = Options {
        seed: std::process::id().into(),
        rounds: u64::MAX,
        seconds: u64::MAX,
        links: 8,
        processes: 1,
        peer: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.as_str() {
            "--seed" => options.seed = value.parse().ok()?,
            "--rounds" => options.rounds = value.parse().ok()?,
            "--seconds" => options.seconds = value.parse().ok()?,
            "--links" => options.links = value.parse().ok()?,
            "--processes" => options.processes = value.parse().ok()?,
            "--peer" => options.peer = Some(value.parse().ok()?),
            _ => return None,
        }
    }
    (options.links > 0 && (1..=2).contains(&options.processes)).then_some(options)
}

/// Runs one side. The first side decides when the run ends.
fn play(number: usize, mut socket: UnixStream, options: &Options) {
    use std::io::{Read, Write};

    let mut world = plan::World::new(options.seed, options.links);
    let mut progress = Progress {
        seed: options.seed,
        round: 0,
    };
    let end = Instant::now().checked_add(Duration::from_secs(options.seconds));
    let mut side = side::Side::new(number, socket.try_clone().expect("a descriptor"), &world);
    loop {
        let mut go = [u8::from(
            progress.round < options.rounds && end.is_none_or(|end| Instant::now() < end),
        )];
        match number {
            0 => socket.write_all(&go).expect("the other side"),
            _ => socket.read_exact(&mut go).expect("the other side"),
        }
        if go == [0] {
            break;
        }
        let round = world.round();
        side.play(&world, &round);
        progress.round += 1;
    }
    println!(
        "side {number}: {} rounds, {} completions",
        progress.round,
        side.completions()
    );
}

/// Prints the place of a failure, when one happened.
struct Progress {
    seed: u64,
    round: u64,
}

impl Drop for Progress {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed in round {}; again: --seed {}", self.round, self.seed);
            // Otherwise the other side would wait for ever.
            std::process::exit(1);
        }
    }
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    };
    if let Some(peer) = options.peer {
        // SAFETY: the first process passed this descriptor to this process, and nothing else here
        // owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(peer) };
        play(1, socket.into(), &options);
        return ExitCode::SUCCESS;
    }
    println!("seed {}", options.seed);
    let (mine, theirs) = UnixStream::pair().expect("a socket pair");
    if options.processes == 1 {
        std::thread::scope(|scope| {
            scope.spawn(|| play(1, theirs, &options));
            play(0, mine, &options);
        });
        return ExitCode::SUCCESS;
    }
    let mut child = Command::new(std::env::current_exe().expect("our own path"));
    child.args(std::env::args().skip(1));
    child.args([
        "--seed",
        &options.seed.to_string(),
        "--peer",
        &theirs.as_raw_fd().to_string(),
    ]);
    let fd = theirs.as_raw_fd();
    // SAFETY: one system call between fork and exec.
    unsafe {
        child.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    let mut child = child.spawn().expect("a second process");
    drop(theirs);
    play(0, mine, &options);
    match child.wait().expect("our own child").success() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
