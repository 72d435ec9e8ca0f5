//! Peers on one host pass the bytes of a connection through memory, and only they.

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::netns::Netns;
use urnic_tests::pci_guest::{PORT, PciGuest};
use urnic_tests::program::Program;
use urnic_tests::served::in_process;
use urnic_tests::skip::{installed, root};
use urnic_tests::user::{OTHER_USER, Staged};
use urnic_tests::wait::free_port;
use urnic_tests::{Pair, compiled, or_skip};

use crate::rdma_cm::but_for_lost_races;

/// What the log says of a connection in memory.
const IN_MEMORY: &str = "passes its bytes through memory";

/// `program` at both ends, with a log of streams.
fn logged(program: Program) -> Pair {
    Pair::new(&program.env("URNIC_LOG", "urnic_model=debug"))
}

/// Runs both, and checks whether their connection passes its bytes through memory.
#[track_caller]
fn expect(pair: &Pair, in_memory: bool) {
    let both = pair.succeeds();
    for end in [both.server, both.client] {
        assert_eq!(end.output.contains(IN_MEMORY), in_memory, "{end}");
    }
}

#[test]
fn shm_01_memory_is_used_unless_one_end_does_not_want_it() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(installed("ibv_rc_pingpong"));
    or_skip!(installed("rping"));
    let pingpong = || logged(Program::new("ibv_rc_pingpong").line("-c -n 300"));
    expect(&pingpong(), true);
    expect(&pingpong().env("URNIC_IDENTITY", "roce"), true);
    let mut one = pingpong();
    one.client = one.client.env("URNIC_SAME_HOST", "off");
    expect(&one, false);
    let mut other = pingpong();
    other.server = other.server.env("URNIC_SAME_HOST", "off");
    expect(&other, false);
    let slow = logged(Program::new("ibv_rc_pingpong").line("-c -e -s 300000 -n 100"));
    expect(&slow, true);
}

#[test]
fn a_capture_has_its_bytes_on_tcp() {
    or_skip!(in_process("the capture is the other process's"));
    or_skip!(installed("ibv_rc_pingpong"));
    let folder = Folder::new("same-host");
    let file = folder.file("%p.pcapng");
    let pair = logged(Program::new("ibv_rc_pingpong").line("-n 50"));
    expect(&pair.env("URNIC_PCAP", file.to_str().expect("a path")), false);
}

#[test]
fn shm_08_two_network_namespaces_use_tcp() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(root());
    or_skip!(installed("ibv_rc_pingpong"));
    let [a, b] = or_skip!(Netns::pair());
    let mut pair = logged(Program::new("ibv_rc_pingpong").line("-g 0 -n 300")).at("10.77.0.1");
    pair.server = a.program(pair.server);
    pair.client = b.program(pair.client);
    let (server, client) = pair.start();
    for end in [server.wait().success(), client.wait().success()] {
        assert!(!end.contains(IN_MEMORY), "{end}");
    }
}

#[test]
fn shm_23_connections_between_two_users_take_tcp() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(root());
    or_skip!(installed("ibv_rc_pingpong"));
    let staged = Staged::new();
    for (server, client) in [(0, OTHER_USER), (OTHER_USER, 0), (OTHER_USER, OTHER_USER)] {
        let mut pair = logged(Program::new("ibv_rc_pingpong").line("-g 0 -c -n 300"));
        pair.server = staged.program(server, pair.server);
        pair.client = staged.program(client, pair.client);
        expect(&pair, server == client);
    }
}

/// What the log says of a peer whose memory the requester reaches by itself.
const IN_REACH: &str = "the memory of this peer is in reach";

/// Like [`expect`], in memory; checks whether both ends reach each other's memory.
#[track_caller]
fn expect_reach(pair: &Pair, in_reach: bool) {
    let both = pair.succeeds();
    for end in [both.server, both.client] {
        assert!(end.output.contains(IN_MEMORY), "{end}");
        assert_eq!(end.output.contains(IN_REACH), in_reach, "{end}");
    }
}

#[test]
fn shm_13_one_users_processes_reach_each_others_memory() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(root());
    or_skip!(installed("ib_write_lat"));
    let staged = Staged::new();
    for user in [0, OTHER_USER] {
        let mut pair = logged(Program::new("ib_write_lat").line("-d urnic0 -F -n 1000"));
        pair.server = staged.program(user, pair.server);
        pair.client = staged.program(user, pair.client);
        expect_reach(&pair, true);
    }
}

/// What the log says of datagrams that go through memory.
const MAIL: &str = "pass through memory";

/// ibv_ud_pingpong, with a log of ports.
fn datagrams() -> Pair {
    logged(
        Program::new("ibv_ud_pingpong")
            .line("-g 3 -n 300")
            .env("URNIC_IDENTITY", "roce"),
    )
}

/// Runs both, and checks whether datagrams go through memory both ways.
#[track_caller]
fn expect_mail(pair: &Pair, in_memory: bool) {
    let both = pair.succeeds();
    for end in [both.server, both.client] {
        assert_eq!(end.output.contains(MAIL), in_memory, "{end}");
    }
}

#[test]
fn shm_14_one_users_datagrams_pass_through_memory() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(root());
    or_skip!(installed("ibv_ud_pingpong"));
    expect_mail(&datagrams(), true);
    expect_mail(&datagrams().env("URNIC_SAME_HOST", "off"), false);
    let staged = Staged::new();
    for (server, client) in [(OTHER_USER, OTHER_USER), (0, OTHER_USER), (OTHER_USER, 0)] {
        let mut pair = datagrams();
        pair.server = staged.program(server, pair.server);
        pair.client = staged.program(client, pair.client);
        expect_mail(&pair, server == client);
    }
}

#[test]
fn shm_14_datagrams_between_network_namespaces_use_udp() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(root());
    or_skip!(installed("ibv_ud_pingpong"));
    let [a, b] = or_skip!(Netns::pair());
    let mut pair = datagrams().at("10.77.0.1");
    pair.server = a.program(pair.server);
    pair.client = b.program(pair.client);
    let (server, client) = pair.start();
    for end in [server.wait().success(), client.wait().success()] {
        assert!(!end.contains(MAIL), "{end}");
    }
}

/// As in two containers of one pod: two pid namespaces, one network namespace; of one user, or of
/// two.
#[test]
fn shm_13_pid_namespaces_pass_bytes_through_the_ring() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(root());
    or_skip!(installed("ib_write_lat"));
    let staged = Staged::new();
    let unshare = ["unshare", "--pid", "--fork", "--kill-child"];
    for user in [0, OTHER_USER] {
        let mut pair = logged(Program::new("ib_write_lat").line("-d urnic0 -F -n 300"));
        pair.server = staged.program(user, pair.server).through(unshare);
        pair.client = staged.program(user, pair.client).through(unshare);
        expect_reach(&pair, false);
    }
}

/// The client writes without a pause when it is stopped or killed, at random moments.
#[test]
fn shm_11_memory_does_not_change_when_it_is_deregistered() {
    or_skip!(in_process("the requester is the other process"));
    let program = or_skip!(compiled("revoke"));
    for options in ["-n 100", "-n 100 -k", "-n 100 -s", "-n 100 -s -k"] {
        let pair = Pair::new(&Program::new(&program).line(options));
        let both = pair.succeeds();
        assert!(
            both.server.output.contains("100 rounds, no byte changed"),
            "{}",
            both.server
        );
    }
}

/// Of a connection whose requests complete when the stream has taken them, the peer wakes the
/// device only for requests that wait for those before them.
#[test]
fn shm_03_a_write_that_waits_wakes_its_sleeping_device() {
    let program = or_skip!(compiled("sleeps"));
    for completion in ["taken", "delivered"] {
        let both = Pair::new(&Program::new(&program).env("URNIC_COMPLETION", completion)).succeeds();
        assert!(both.client.output.contains("1000 rounds"), "{}", both.client);
    }
}

#[test]
fn device_memory_is_written_and_read_by_a_peer() {
    let both = Pair::new(&Program::new(or_skip!(compiled("device_memory")))).succeeds();
    for end in [both.server, both.client] {
        assert!(end.output.contains("every byte as written"), "{end}");
    }
}

/// The names of the listeners' sockets are free for all users. This one has the name that clients
/// of a port try first, says what it is sent, and answers.
const IMPOSTOR: &str = r#"
import socket, sys
port = int(sys.argv[1])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(f"\0urnic/127.0.0.1/{port}")
listener.listen()
print("listening", flush=True)
peer, _ = listener.accept()
try:
    peer.send(b"x")
except OSError:
    pass
try:
    offer, fds, _, _ = socket.recv_fds(peer, 4096, 3)
except ConnectionResetError:
    # The device closed without reading the byte. The error comes before what it sent.
    offer, fds, _, _ = socket.recv_fds(peer, 4096, 3)
print("was sent", len(offer), "bytes and", len(fds), "descriptors", flush=True)
sys.stdin.read()
"#;

#[test]
fn shm_06_another_user_with_a_listeners_name_gets_no_message() {
    or_skip!(in_process("the log is the other process's"));
    or_skip!(root());
    or_skip!(installed("rping"));
    // Not the first one in PATH, which may be in root's own folder.
    let python = "/usr/bin/python3";
    or_skip!(installed(python));
    let (server, client) = but_for_lost_races(|| {
        let port = free_port();
        let mut impostor = Program::plain("setpriv")
            .line(&format!("--reuid {OTHER_USER} --clear-groups {python} -c"))
            .arg(IMPOSTOR)
            .arg(port.to_string())
            .spawn();
        impostor.wait_for_output("its socket", |text| text.contains("listening").then_some(()));
        let rping = logged(Program::new("rping").line(&format!("-a 127.0.0.1 -C 3 -v -p {port}")));
        let mut server = rping.server.arg("-s").spawn();
        server.wait_until_listening(port);
        let client = rping.client.arg("-c").spawn();
        let sent = impostor.wait_for_output("what it was sent", |text| {
            text.lines()
                .find(|line| line.starts_with("was sent"))
                .map(str::to_owned)
        });
        assert_eq!(sent, "was sent 0 bytes and 0 descriptors");
        let client = client.wait();
        impostor.signal(Signal::KILL);
        (server.wait(), client)
    });
    let text = client.success();
    assert!(text.contains("another user has the name of a port"), "{text}");
    assert!(!text.contains(IN_MEMORY), "{text}");
    server.success();
}

/// Killed at the beginning and in the middle of a transfer: the completions of the other end say
/// so.
#[test]
fn shm_05_a_killed_peer_is_noticed_in_memory() {
    or_skip!(in_process("the log is the other process's"));
    let program = Program::new(or_skip!(compiled("transfer")));
    let program = program.line("-o send -b 200000000 -c 1003");
    for milliseconds in [1, 60] {
        let (server, mut client) = logged(program.clone()).start();
        client.wait_for_output("the connection", |text| text.contains(IN_MEMORY).then_some(()));
        std::thread::sleep(std::time::Duration::from_millis(milliseconds));
        client.signal(Signal::KILL);
        client.wait();
        server.wait().failure();
    }
}

/// Debian's kernel has Yama, and this one may not: an ordinary user's programs in a guest. With
/// scope 1 only ancestors of a process may attach to it, unless it lets others; with 2, nobody.
#[test]
fn shm_13_yama_decides_whether_processes_reach_each_other() {
    let [host, _other] = or_skip!(Netns::pair());
    let as_user = or_skip!(compiled("as_user"));
    let guest = or_skip!(PciGuest::boot(&host, &[]));
    guest.bring(&as_user);
    let user = "/urnic/as_user 1000";
    // The process is another user's until it executes `sleep`.
    let attach = format!(
        "{user} sleep 1000 & \
         for i in $(seq 1000); do grep -q sleep /proc/$!/comm && break; sleep 0.01; done; \
         {user} timeout 2 strace -o /dev/null -p $!; kill $!"
    );
    let ping = format!(
        "{user} env LD_PRELOAD=/urnic/liburnic.so URNIC_LOG=urnic_model=debug \
         ib_write_lat -d urnic0 -F -n 200 -p {PORT}"
    );
    for (scope, in_reach) in [(0, true), (1, true), (2, false)] {
        guest.run(&format!("echo {scope} >/proc/sys/kernel/yama/ptrace_scope"));
        let refused = guest.start(&attach).ends().1.contains("Operation not permitted");
        assert_eq!(refused, scope > 0, "Yama does not decide in scope {scope}");
        let server = guest.listener(&ping, PORT);
        let client = guest.start(&format!("{ping} 127.0.0.1"));
        for (ok, printed) in [client.ends(), server.ends()] {
            assert!(ok && printed.contains(IN_MEMORY), "scope {scope}:\n{printed}");
            assert_eq!(printed.contains(IN_REACH), in_reach, "scope {scope}:\n{printed}");
        }
    }
}
