//! Folders that users share: what another user, or a hostile process of the same user, puts there.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{
    FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, flock, memfd_create, open,
};
use rustix::io::IoSliceMut;
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use urnic_testkit::Folder;
use urnic_tests::build::urnic;
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::{installed, root};
use urnic_tests::target_process::TargetProcess;
use urnic_tests::user::{NOBODY, OTHER_USER, Staged, as_user};

const NONE: &str = "no process of yours has a urnic device open\n";

/// A home as `/tmp` is: every user may make folders in it.
fn home(name: &str) -> Folder {
    let home = Folder::inside(&std::env::temp_dir(), &format!("urnic-home-{name}"));
    permit(home.path(), 0o1777);
    home
}

fn permit(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("our own file");
}

fn usual_name(user: u32) -> String {
    format!("urnic-{user}")
}

fn me() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A folder of this owner in the place of that user's.
fn squatted(home: &Folder, user: u32, owner: u32) -> PathBuf {
    let folder = home.file(&usual_name(user));
    std::fs::create_dir(&folder).expect("our own home");
    permit(&folder, 0o777);
    chown(&folder, Some(owner), Some(owner)).expect("we are root, or it is ours");
    folder
}

fn command(home: &Path, line: &str) -> Program {
    Program::plain(urnic()).line(line).env("URNIC_PRESENT_DIR", home)
}

/// A socket that answers as a process would, in a folder.
fn listening(folder: &Path) -> UnixDatagram {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("proc");
    let boot = boot.get(..8).expect("a boot id");
    let name = folder.join(format!("4242-{boot}-0000000000000007.stat"));
    let socket = UnixDatagram::bind(&name).expect("a short path");
    permit(&name, 0o777);
    socket
}

/// Receives a request, with the descriptor for its answer.
fn requested(socket: &UnixDatagram) -> OwnedFd {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut text = [0; 64];
    let flags = RecvFlags::CMSG_CLOEXEC;
    recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags).expect("a request");
    let fds = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fds.expect("a request has a descriptor")
}

fn answer(reader: &OwnedFd, fd: &OwnedFd) {
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let text = [IoSlice::new(b"!")];
    // The reader may have ended.
    let _ = sendmsg(reader, &text, &mut ancillary, SendFlags::NOSIGNAL);
}

/// A snapshot with a name that would change a terminal, in JSON.
fn forged() -> String {
    let snapshot = include_str!("forged_snapshot.json");
    assert!(snapshot.contains("\\u001b[2J"));
    snapshot.to_owned()
}

fn memory(text: &str, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memory");
    rustix::io::write(&file, text.as_bytes()).expect("memory");
    fcntl_add_seals(&file, seals).expect("seals");
    file
}

fn zero() -> OwnedFd {
    open("/dev/zero", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).expect("a device")
}

/// A socket whose close waits, and its peer.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let slow = TcpStream::connect(listener.local_addr().expect("an address")).expect("a listener");
    let (peer, _) = listener.accept().expect("a connection");
    slow.set_nonblocking(true).expect("a socket");
    while rustix::io::write(&slow, &[0; 1 << 16]).is_ok() {}
    set_socket_linger(&slow, Some(Duration::from_secs(10_000))).expect("a socket");
    (slow.into(), peer)
}

#[test]
fn no_process_in_another_users_folder_gets_a_request() {
    or_skip!(root());
    let home = home("asked");
    let folder = squatted(&home, me(), NOBODY);
    let socket = listening(&folder);
    let ended = command(home.path(), "stat").run().success();
    assert_eq!(ended, NONE);
    command(home.path(), "stat --json").run().success();
    command(home.path(), "fault 4242 drop").run().failure();
    socket.set_nonblocking(true).expect("a socket");
    let asked = socket.recv(&mut [0; 64]);
    assert_eq!(
        asked.expect_err("no request").kind(),
        std::io::ErrorKind::WouldBlock
    );
}

#[test]
fn a_folder_that_others_can_write_is_not_read() {
    let home = home("written");
    let folder = squatted(&home, me(), me());
    let socket = listening(&folder);
    assert_eq!(command(home.path(), "stat").run().success(), NONE);
    socket.set_nonblocking(true).expect("a socket");
    socket.recv(&mut [0; 64]).expect_err("no request");
}

#[test]
fn a_link_to_a_folder_of_ours_is_not_followed() {
    let home = home("link");
    let (place, elsewhere) = (home.file(&usual_name(me())), home.file("elsewhere"));
    std::fs::create_dir(&elsewhere).expect("our own home");
    permit(&elsewhere, 0o700);
    std::os::unix::fs::symlink(&elsewhere, &place).expect("our own home");
    let socket = listening(&elsewhere);
    assert_eq!(command(home.path(), "stat").run().success(), NONE);
    socket.set_nonblocking(true).expect("a socket");
    socket.recv(&mut [0; 64]).expect_err("no request");
}

/// What `urnic stat` prints if a process of the same user answers with this descriptor.
fn shown(line: &str, fd: OwnedFd) -> String {
    let home = home("shown");
    let folder = squatted(&home, me(), me());
    permit(&folder, 0o700);
    let socket = listening(&folder);
    let running = command(home.path(), line).spawn();
    let reader = requested(&socket);
    answer(&reader, &fd);
    // If the program has ended already, this close may wait, until the peer is gone.
    std::thread::spawn(move || drop((reader, fd)));
    running.wait().success()
}

#[test]
fn a_descriptor_that_is_no_answer_is_left_out() {
    for (what, fd) in [
        ("zero", zero()),
        ("pipe", rustix::pipe::pipe().expect("a pipe").0),
        ("unsealed", memory(&forged(), SealFlags::empty())),
    ] {
        assert_eq!(shown("stat", fd), NONE, "{what}");
    }
    let (slow, peer) = lingering();
    assert_eq!(shown("stat", slow), NONE);
    drop(peer);
}

#[test]
fn names_of_other_processes_do_not_reach_the_terminal() {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    for line in ["stat", "stat 4242"] {
        let text = shown(line, memory(&forged(), seals));
        assert!(text.contains("urnic\\u{1b}[2J0"), "{text}");
        let raw = text.chars().find(|c| c.is_control() && *c != '\n');
        assert_eq!(raw, None, "{text}");
    }
    let json = shown("stat --json", memory(&forged(), seals));
    let raw = json.trim_end().chars().find(|c| c.is_control());
    assert_eq!(raw, None, "{json}");
    let read: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(read[0]["name"], "urnic\u{1b}[2J0");
    assert_eq!(read[0]["command"], "\u{9b}31m\u{202e}root\u{7f}\nforged");
}

#[test]
fn a_taken_name_takes_no_device_away() {
    or_skip!(root());
    or_skip!(installed("ibv_devices"));
    let home = home("taken");
    squatted(&home, me(), NOBODY);
    let devices = Program::new("ibv_devices").env("URNIC_PRESENT_DIR", home.path());
    let text = devices.run().success();
    assert!(text.contains("urnic0"), "{text}");
    let target = or_skip!(TargetProcess::start(&[(
        "URNIC_PRESENT_DIR",
        home.path().to_str().expect("our path")
    )]));
    let pid = target.process().pid();
    let text = command(home.path(), "stat").run().success();
    assert!(text.contains("target_process"), "{text}");
    command(home.path(), &format!("fault {pid}")).run().success();
    target.quits();
    let folders = home.names();
    assert_eq!(folders.len(), 2, "all programs share one: {folders:?}");
}

#[test]
fn doctor_names_a_taken_folder_and_its_owner() {
    or_skip!(root());
    let home = home("doctor");
    let taken = squatted(&home, me(), NOBODY);
    let text = command(home.path(), "doctor").run().output;
    let line = text
        .lines()
        .find(|line| line.contains("presence folder"))
        .unwrap_or_default();
    for part in [
        "note",
        taken.to_str().expect("our path"),
        &format!("it belongs to user {NOBODY}"),
    ] {
        assert!(line.contains(part), "no {part:?} in {text}");
    }
    assert!(
        text.contains(&format!("fix: rm -r {}", taken.display())),
        "{text}"
    );
}

#[test]
fn a_home_of_another_user_is_passed_over() {
    or_skip!(root());
    or_skip!(installed("ibv_devices"));
    let home = home("owned");
    permit(home.path(), 0o777);
    chown(home.path(), Some(NOBODY), Some(NOBODY)).expect("we are root");
    let text = Program::new("ibv_devices")
        .env("XDG_RUNTIME_DIR", home.path())
        .run()
        .success();
    assert!(text.contains("urnic0"), "{text}");
    assert_eq!(home.names(), [""; 0]);
    let refused = Program::new("ibv_devices")
        .env("URNIC_PRESENT_DIR", home.path())
        .run();
    assert!(
        refused.output.contains(&format!("it belongs to user {NOBODY}")),
        "{refused}"
    );
}

/// The tree of the only presence in a home.
fn tree(home: &Folder) -> PathBuf {
    let folder = home.file(&usual_name(me()));
    let mut entries = std::fs::read_dir(&folder).expect("the user's folder");
    entries.next().expect("a tree").expect("an entry").path()
}

#[test]
fn a_locked_tree_takes_no_device_away() {
    or_skip!(installed("ibv_devices"));
    let home = home("locked");
    let devices = || {
        let devices = Program::new("ibv_devices").env("URNIC_PRESENT_DIR", home.path());
        let text = devices.run().success();
        assert!(text.contains("urnic0"), "{text}");
    };
    devices();
    let tree = tree(&home);
    let locked = std::fs::File::open(&tree).expect("our own tree");
    flock(&locked, FlockOperation::NonBlockingLockExclusive).expect("nobody uses it");
    devices();
    drop(locked);
    devices();
    assert!(tree.exists());
}

#[test]
fn other_users_can_neither_read_stat_nor_add_faults_nor_lock() {
    or_skip!(root());
    or_skip!(installed("flock"));
    let home = home("strangers");
    let path = home.path().to_str().expect("our path");
    let target = or_skip!(TargetProcess::start(&[("URNIC_PRESENT_DIR", path)]));
    let pid = target.process().pid();
    let staged = Staged::new();
    let urnic = staged.add(&urnic());
    let by = |user: u32, line: &str| {
        let program = Program::plain(&urnic).line(line).env("URNIC_PRESENT_DIR", path);
        as_user(user, program).run()
    };
    for user in [NOBODY, OTHER_USER] {
        assert_eq!(by(user, "stat").success(), NONE);
        by(user, &format!("stat {pid}")).failure();
        let refused = by(user, &format!("fault {pid} drop")).failure();
        assert!(refused.contains("another user's"), "{refused}");
        let folder = home.file(&usual_name(me()));
        for entry in std::fs::read_dir(&folder).expect("our own folder") {
            let entry = entry.expect("an entry").path();
            let lock = Program::plain("flock").args(["-x", "-n"]).arg(&entry).arg("true");
            let refused = as_user(user, lock).run().failure();
            assert!(refused.contains("Permission denied"), "{refused}");
        }
    }
    let text = command(home.path(), &format!("fault {pid}")).run().success();
    assert_eq!(text, "no faults\n");
    target.quits();
}
