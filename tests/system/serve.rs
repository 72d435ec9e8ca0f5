//! `urnic serve`: programs on a device in another process, next to hostile clients.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use urnic_tests::build::{example, scratch, tree, urnic};
use urnic_tests::or_skip;
use urnic_tests::program::{Ended, Program, Running};
use urnic_tests::served::Served;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, free_port, until};
use urnic_vfio_user::{Request, Version};

/// A server; ended when dropped.
struct Server {
    program: Running,
    socket: PathBuf,
}

fn server(name: &str, options: &str) -> Server {
    let socket = scratch().join(format!("{name}-{}.sock", std::process::id()));
    let mut program = Program::plain(urnic())
        .args(["serve", "--socket"])
        .arg(&socket)
        .line(options)
        .spawn();
    program.wait_for_output("that it serves", |text| {
        text.contains("urnic: serving ").then_some(())
    });
    Server { program, socket }
}

impl Server {
    /// `ibv_rc_pingpong` on the served device.
    fn pingpong(&self, port: u16, line: &str) -> Program {
        Program::new("ibv_rc_pingpong")
            .env("URNIC_DEVICE", format!("vfio-user:{}", self.socket.display()))
            .line(&format!("-d urnic0 -g 0 -p {port} {line}"))
    }

    /// Runs a whole pingpong to check that the server works.
    fn works(&self) {
        let port = free_port();
        let mut passive = self.pingpong(port, "-n 200").spawn();
        passive.wait_until_listening(port);
        self.pingpong(port, "-n 200 127.0.0.1").run().success();
        passive.wait().success();
    }

    /// A client that has completed the handshake.
    fn client(&self) -> UnixStream {
        let mut socket = UnixStream::connect(&self.socket).expect("a connection");
        let mut hello = Vec::new();
        Request::Version(Version::default()).emit(1, false, &mut hello);
        socket.write_all(&hello).expect("hello");
        let mut answer = [0; 16];
        socket.read_exact(&mut answer).expect("an answer");
        socket
    }
}

/// How often the threads of a process have slept or been preempted.
fn switches(pid: u32) -> u64 {
    let mut sum = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).expect("the process lives") {
        let path = task.expect("a thread").path().join("status");
        let status = std::fs::read_to_string(path).unwrap_or_default();
        let numbers = status
            .lines()
            .filter(|line| line.contains("ctxt_switches"))
            .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        sum += numbers.sum::<u64>();
    }
    sum
}

#[test]
fn programs_connect_through_a_served_device() {
    or_skip!(installed("ibv_rc_pingpong"));
    server("meet", "--addr host").works();
}

#[test]
fn garbage_floods_and_silence_disturb_no_other_client() {
    or_skip!(installed("ibv_rc_pingpong"));
    // More clients than fit at a time: a client that has left counts until its function is
    // released.
    let server = server("garbage", "--addr host --clients 64");
    let port = free_port();
    let mut passive = server.pingpong(port, "-n 3000").spawn();
    passive.wait_until_listening(port);
    let active = server.pingpong(port, "-n 3000 127.0.0.1").spawn();
    let mut silent = Vec::new();
    for round in 0..20u8 {
        // Every second client completes the handshake first.
        let mut client = match round % 2 {
            0 => UnixStream::connect(&server.socket).expect("a connection"),
            _ => server.client(),
        };
        let garbage: Vec<u8> = (0..5000u32)
            .map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 ^ round)
            .collect();
        // The server may have closed the connection before all is written.
        let _ = client.write_all(&garbage);
        let mut half = server.client();
        half.write_all(&[1, 0, 9, 0, 32, 0]).expect("half a header");
        if round < 3 {
            silent.push(half);
        }
    }
    active.wait().success();
    passive.wait().success();
}

#[test]
fn a_server_with_idle_clients_is_idle() {
    let server = server("rest", "--addr 127.0.0.1");
    let _clients = [server.client(), server.client()];
    let pid = server.program.pid();
    until(TIME_LIMIT, || {
        let before = switches(pid);
        std::thread::sleep(Duration::from_millis(300));
        (switches(pid) == before).then_some(())
    })
    .expect("a third of a second in which no thread runs");
}

#[test]
fn a_server_ends_cleanly_and_guards_its_socket() {
    let server = server("end", "--addr 127.0.0.1");
    let _client = server.client();
    let second = Program::plain(urnic())
        .args(["serve", "--socket"])
        .arg(&server.socket)
        .run();
    assert_eq!(second.status.code(), Some(1), "{second}");
    assert!(second.failure().contains("another server serves this socket"));
    let Server { program, socket } = server;
    program.signal(Signal::TERM);
    let end = program.wait();
    assert_eq!(end.status.code(), Some(0), "{end}");
    assert!(!Path::new(&socket).exists());
}

/// The driver of the datasheet's last chapter.
#[test]
fn the_example_of_a_driver_drives_the_function() {
    or_skip!(installed("python3"));
    let served = Served::start();
    let device = served.device();
    let socket = device.split_once(':').expect("a socket").1;
    let driver = tree().join("examples/driver.py");
    let shown = Program::plain("python3")
        .arg(&driver)
        .args([socket, "--show"])
        .run()
        .success();
    assert!(shown.ends_with("received 'hello', written 'hello'\n"), "{shown}");
    // The same commands and completions are in the datasheet; the STag is the device's choice.
    let page = std::fs::read_to_string(tree().join("docs/reference/device.md")).expect("the datasheet");
    let is_stag = |line: &&str| line.starts_with("< 01000000 ");
    for line in shown.lines().filter(|line| !is_stag(line)) {
        assert!(page.contains(line), "not in device.md: {line}");
    }
    // The driver in Rust does the same.
    let driver = example("verbs-api/device-checks", "driver");
    let also = Program::plain(driver).args([socket, "--show"]).run().success();
    let without_stag = |shown: &str| {
        shown
            .lines()
            .filter(|line| !is_stag(line))
            .collect::<Vec<_>>()
            .join("\n")
    };
    assert_eq!(without_stag(&also), without_stag(&shown));
}

/// Runs the example in Python with these lines in front of its start.
fn changed_example(socket: &str, change: &str) -> Ended {
    let folder = tree().join("examples");
    let program = format!(
        "import sys; sys.path.insert(0, {folder:?}); sys.dont_write_bytecode = True\n\
         import driver\n{change}\nsys.exit(driver.main({socket:?}, False))"
    );
    Program::plain("python3").args(["-c", &program]).run()
}

/// What a mistake in the arguments prints is one line, of both examples.
#[test]
fn mistakes_in_an_examples_arguments_are_one_line() {
    or_skip!(installed("python3"));
    let python = || Program::plain("python3").arg(tree().join("examples/driver.py"));
    let rust = example("verbs-api/device-checks", "driver");
    for (program, arguments, said) in [
        (python(), "", "usage: driver.py PATH"),
        (python(), "--help", "usage: driver.py PATH"),
        (python(), "/no/such/socket", "/no/such/socket: [Errno 2]"),
        (Program::plain(&rust), "", "usage: driver PATH"),
        (
            Program::plain(&rust),
            "/no/such/socket",
            "/no/such/socket: No such file",
        ),
    ] {
        let end = program.line(arguments).run();
        let printed = end.to_string();
        assert_eq!(end.status.code(), Some(1), "{printed}");
        let printed = end.failure();
        assert!(
            printed.contains(said) && printed.lines().count() == 1,
            "{printed}"
        );
    }
}

/// A device that stops over the driver's rings, and a server that ends, end the driver, too.
#[test]
fn an_example_ends_when_its_device_stops() {
    or_skip!(installed("python3"));
    let served = Served::start();
    let device = served.device();
    let socket = device.split_once(':').expect("a socket").1;
    let end = changed_example(socket, "driver.COMMANDS = 1 << 30");
    let printed = end.failure();
    assert!(printed.contains("FATAL, with FATAL_CODE 1"), "{printed}");
    let pid = served.server().pid();
    let kill = format!(
        "import os, signal\n\
         real = driver.Driver.command\n\
         def command(self, *arguments):\n    \
             os.kill({pid}, signal.SIGKILL)\n    \
             return real(self, *arguments)\n\
         driver.Driver.command = command"
    );
    let printed = changed_example(socket, &kill).failure();
    let said = ["ConnectionError", "BrokenPipeError", "ConnectionResetError"];
    assert!(said.iter().any(|said| printed.contains(said)), "{printed}");
}

/// A doorbell that reaches no queue is one line in the server's log.
#[test]
fn the_log_names_doorbells_that_reach_no_queue() {
    or_skip!(installed("python3"));
    let served = Served::through(&["env", "URNIC_LOG=debug"].map(Into::into), "");
    let device = served.device();
    let socket = device.split_once(':').expect("a socket").1;
    // Another number in the slot of the queue pair, and its own number in the next slot.
    let wrong = "real = driver.Function.doorbell\n\
         def doorbell(self, kind, queue, index):\n    \
             number, slot = queue\n    \
             real(self, kind, (number ^ 0x800000, slot), index)\n    \
             self.write(0x38, 1)\n    \
             real(self, kind, (number, slot - 8), index)\n    \
             self.write(0x38, 1)\n    \
             real(self, kind, queue, index)\n\
         driver.Function.doorbell = doorbell";
    changed_example(socket, wrong).success();
    let output = served.server().output();
    for said in [
        "ignored doorbell 0x0280000100000001 in page 0: no queue pair has the number 8388609",
        "ignored doorbell 0x0200000100000001 in page 0: no queue has the slot at 0x",
    ] {
        assert!(output.contains(said), "no {said:?} in:\n{output}");
    }
}
