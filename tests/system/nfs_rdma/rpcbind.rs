//! The server's registration with Debian's rpcbind, in a network namespace with a `/run` of its
//! own.

use std::ffi::OsString;

use rustix::process::Signal;
use urnic_tests::guest::{Guest, HOST, Packets};
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::program::{Program, Running};
use urnic_tests::skip::{installed, root};
use urnic_tests::wait::{TIME_LIMIT, until};

use super::linux::{WITHOUT_CRC, guest_output, unmount};
use super::{folder, listening, pattern, read, urnic_nfs, write};

/// NFS, MOUNT, NFSACL.
const PROGRAMS: [&str; 3] = ["100003", "100005", "100227"];

/// A place in which programs find one `/run`, and on which network. It has an rpcbind or none.
struct Place {
    netns: Netns,
    first: Running,
}

impl Place {
    fn with(command: &str) -> Result<Self, String> {
        root()?;
        let netns = Netns::new()?;
        let run = format!("mount -t tmpfs tmpfs /run && echo mounted && exec {command}");
        let first = Program::plain("unshare").args(["--mount", "sh", "-c", &run]);
        let mut first = netns.program(first).spawn();
        first.wait_for_output("/run", |printed| printed.contains("mounted").then_some(()));
        Ok(Self { netns, first })
    }

    /// A place with an rpcbind that answers.
    fn of_rpcbind() -> Result<Self, String> {
        let rpcbind = installed("rpcbind")?;
        let mut place = Self::with(&format!("{} -f", rpcbind.display()))?;
        let answers = until(TIME_LIMIT, || {
            let (socket, ended) = (place.shell("test -S /run/rpcbind.sock"), place.first.ended());
            assert!(ended.is_none(), "rpcbind: {}", place.first.output());
            socket.run().ok().then_some(())
        });
        assert!(answers.is_some(), "rpcbind makes no socket");
        place.netns.listens(111);
        Ok(place)
    }

    fn program(&self, program: Program) -> Program {
        let mount = format!("--mount=/proc/{}/ns/mnt", self.first.pid());
        program
            .through(self.netns.entry())
            .through(["nsenter", &mount, "--"].map(OsString::from))
    }

    fn shell(&self, line: &str) -> Program {
        self.program(Program::plain("sh").args(["-c", line]))
    }

    /// A server in this place, at free ports, and the ports of TCP and RDMA. Signals end it also
    /// where the tests ignore them, as in the background of a shell.
    fn serves(&self, line: &str) -> (Running, String, String) {
        let serve = urnic_nfs("serve --memory 64M --tcp-port 0 --rdma-port 0")
            .line(line)
            .through(["env", "--default-signal=HUP,INT,TERM"]);
        let mut server = self.program(serve).spawn();
        let (tcp, rdma) = listening(&mut server);
        (server, tcp, rdma)
    }

    /// What rpcbind has of the server's programs: program, version, netid and address, sorted.
    fn registered(&self) -> Vec<String> {
        let listed = self.shell("rpcinfo 127.0.0.1").run().success();
        let lines = listed.lines().map(|line| {
            let words: Vec<_> = line.split_whitespace().take(4).collect();
            words.join(" ")
        });
        let ours = |line: &String| PROGRAMS.iter().any(|program| line.starts_with(program));
        let mut lines: Vec<_> = lines.filter(ours).collect();
        lines.sort();
        lines
    }

    /// Waits until rpcbind has these entries.
    #[track_caller]
    fn registers(&self, expected: &[String]) {
        let agrees = until(TIME_LIMIT, || (self.registered() == expected).then_some(()));
        assert!(agrees.is_some(), "{:#?}, not {expected:#?}", self.registered());
    }
}

/// The entries of a server that listens at these addresses, by netid.
fn entries(netids: &[(&str, &str, &str)]) -> Vec<String> {
    let mut entries = Vec::new();
    for program in PROGRAMS {
        for (netid, address, port) in netids {
            let [high, low] = port.parse::<u16>().expect("a port").to_be_bytes();
            entries.push(format!("{program} 3 {netid} {address}.{high}.{low}"));
        }
    }
    entries.sort();
    entries
}

#[test]
fn rpc_b_01_rpcbind_has_the_programs_until_the_server_ends() {
    let place = or_skip!(Place::of_rpcbind());
    for signal in [Signal::HUP, Signal::INT, Signal::TERM] {
        let (server, tcp, rdma) = place.serves("--rpcbind require");
        place.registers(&entries(&[("tcp", "0.0.0.0", &tcp), ("rdma", "0.0.0.0", &rdma)]));
        // Our client finds MOUNT there.
        let list = urnic_nfs(&format!("ls --rdma --port {rdma} 127.0.0.1:/"));
        place.program(list).run().success();
        server.signal(signal);
        let ended = server.wait();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&ended.status),
            Some(signal.as_raw()),
            "{ended}"
        );
        place.registers(&[]);
    }
}

#[test]
fn rpc_b_01_ipv6_has_the_netids_rdma6_and_tcp6() {
    let place = or_skip!(Place::of_rpcbind());
    let (server, tcp, rdma) = place.serves("--rpcbind require --listen ::1");
    place.registers(&entries(&[("tcp6", "::1", &tcp), ("rdma6", "::1", &rdma)]));
    server.stopped();
    let (server, tcp, rdma) = place.serves("--rpcbind require --listen ::");
    place.registers(&entries(&[
        ("tcp", "0.0.0.0", &tcp),
        ("tcp6", "::", &tcp),
        ("rdma", "0.0.0.0", &rdma),
        ("rdma6", "::", &rdma),
    ]));
    // As registered, RDMA listens at both families.
    for host in ["127.0.0.1", "[::1]"] {
        let list = urnic_nfs(&format!("ls --rdma --port {rdma} --mount-port {tcp} {host}:/"));
        place.program(list).run().success();
    }
    server.stopped();
    place.registers(&[]);
}

#[test]
fn rpcbind_without_its_socket_is_reached_by_tcp() {
    let place = or_skip!(Place::of_rpcbind());
    place.shell("rm /run/rpcbind.sock").run().success();
    let (server, tcp, rdma) = place.serves("--rpcbind require");
    place.registers(&entries(&[("tcp", "0.0.0.0", &tcp), ("rdma", "0.0.0.0", &rdma)]));
    server.stopped();
    place.registers(&[]);
}

#[test]
fn the_registration_of_another_server_is_kept() {
    let place = or_skip!(Place::of_rpcbind());
    let (first, tcp, rdma) = place.serves("--rpcbind require");
    let of_first = entries(&[("tcp", "0.0.0.0", &tcp), ("rdma", "0.0.0.0", &rdma)]);
    place.registers(&of_first);
    let again = urnic_nfs("serve --memory 64M --tcp-port 0 --rdma-port 0 --rpcbind require");
    let printed = place.program(again).run().failure();
    assert!(
        printed.contains("rpcbind has another address for program 100003 version 3, tcp 0.0.0.0."),
        "{printed}"
    );
    let (mut second, ..) = place.serves("--rpcbind warn");
    second.wait_for_output("a warning", |printed| {
        printed
            .contains("rpcbind has another address for program 100003")
            .then_some(())
    });
    second.stopped();
    place.registers(&of_first);
    first.stopped();
    place.registers(&[]);
}

#[test]
fn a_missing_rpcbind_is_a_warning_or_an_error() {
    let place = or_skip!(Place::with("sleep infinity"));
    let require = urnic_nfs("serve --memory 64M --tcp-port 0 --rdma-port 0 --rpcbind require");
    let printed = place.program(require).run().failure();
    assert!(printed.contains("no rpcbind: /run/rpcbind.sock: "), "{printed}");
    let (mut server, tcp, _) = place.serves("--rpcbind warn");
    server.wait_for_output("a warning", |printed| {
        printed.contains("clients must be told the ports").then_some(())
    });
    let list = urnic_nfs(&format!("ls --port {tcp} 127.0.0.1:/"));
    place.program(list).run().success();
    let (mut silent, ..) = place.serves("");
    silent.signal(Signal::TERM);
    let ended = until(TIME_LIMIT, || silent.ended());
    assert!(
        ended.is_some() && !silent.output().contains("rpcbind"),
        "{}",
        silent.output()
    );
}

/// Linux needs no port: it takes 20049 for NFS over RDMA, and asks rpcbind for the port of MOUNT.
#[test]
#[ignore = "make interop"]
fn rpc_b_01_linux_mounts_without_ports() {
    let place = or_skip!(Place::of_rpcbind());
    let folder = folder("no-ports");
    let bytes = pattern(100_001);
    write(&folder.file("there"), &bytes);
    let serve = urnic_nfs("serve --no-root-squash --rpcbind require").arg(folder.path());
    let (name, value) = WITHOUT_CRC;
    let mut server = place.program(serve.env(name, value)).spawn();
    assert_eq!(listening(&mut server), ("2049".to_owned(), "20049".to_owned()));
    let skipped = place.netns.within(|| {
        let guest = Guest::boot(1, 512, Packets::Passing)?;
        guest_output(
            &guest,
            &format!(
                "modprobe -a nfsv3 rpcrdma && mkdir -p /mnt && \
                 mount -t nfs -o addr={HOST},vers=3,proto=rdma,nolock {HOST}:/ /mnt && \
                 grep -q proto=rdma,.*port=20049 /proc/mounts && cp /mnt/there /mnt/back && sync"
            ),
        );
        unmount(&guest);
        Ok::<_, String>(())
    });
    or_skip!(skipped);
    assert!(read(&folder.file("back")) == bytes);
}
