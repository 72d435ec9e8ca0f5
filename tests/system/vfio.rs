//! The way of a PCI function from the kernel to a program and back: binding, permissions, limits,
//! holders, unplugging.

use urnic_tests::netns::Netns;
use urnic_tests::pci_guest::{PORT, PciGuest, Server};
use urnic_tests::program::Program;
use urnic_tests::shell::LIMIT;
use urnic_tests::{compiled, or_skip};

const ADDRESS: &str = "10.77.0.1";
const OTHER: &str = "10.77.0.2";

/// Runs a command line as a user of the guest whose programs may lock this many KiB.
fn as_user(guest: &PciGuest<'_>, memlock: u32, line: &str) -> (bool, String) {
    let line = format!(
        "printf 'root:x:0:0::/:/bin/sh\\nuser:x:1000:1000::/tmp:/bin/sh\\n' >/tmp/passwd &&
         {{ mountpoint -q /etc/passwd || mount --bind /tmp/passwd /etc/passwd; }} &&
         su user -s /run/bin/sh -c 'ulimit -l {memlock}; export HOME=/tmp; {line}'"
    );
    guest.start(&line).ends()
}

fn doctor() -> String {
    format!("/urnic/urnic doctor --device vfio:{}", PciGuest::address(0))
}

/// The command that doctor prints for root.
#[track_caller]
fn fix_command(printed: &str) -> &str {
    printed
        .lines()
        .find_map(|line| line.trim().strip_prefix("fix: as root: "))
        .unwrap_or_else(|| panic!("no fix in:\n{printed}"))
}

/// Starts a program that keeps the function, and waits until the program has it. The output is in
/// `/tmp/watch`.
#[track_caller]
fn holder(guest: &PciGuest<'_>) -> urnic_tests::shell::Task {
    let task = guest.start(&PciGuest::with_urnic(0, "ibv_asyncwatch >/tmp/watch 2>&1"));
    guest.run("n=0; until grep -q 'async event FD' /tmp/watch; do n=$((n+1)); [ $n -lt 300 ] || exit 1; sleep 0.1; done");
    task
}

#[test]
fn the_doctors_commands_give_a_function_to_a_user() {
    let [host, _other] = or_skip!(Netns::pair());
    let server = Server::start(&host, &[ADDRESS], "");
    let guest = or_skip!(PciGuest::boot(&host, &server.sockets()));
    let (_, printed) = guest.start(&doctor()).ends();
    assert!(printed.contains("WRONG driver"), "{printed}");
    guest.run(fix_command(&printed));
    let printed = guest.run(&doctor());
    assert!(printed.contains("all well"), "{printed}");

    let (ok, printed) = as_user(&guest, 16384, &doctor());
    assert!(!ok && printed.contains("WRONG its files"), "{printed}");
    guest.run(fix_command(&printed));
    let (ok, printed) = as_user(&guest, 16384, &doctor());
    assert!(ok && printed.contains("all well"), "{printed}");
    let program = PciGuest::with_urnic(0, "ibv_devinfo -d urnic0");
    let (ok, printed) = as_user(&guest, 64, &program);
    assert!(!ok && printed.contains("ulimit -l"), "{printed}");
    let (ok, printed) = as_user(&guest, 16384, &program);
    assert!(ok && printed.contains("PORT_ACTIVE"), "{printed}");

    let held = holder(&guest);
    let (ok, printed) = guest.start(&program).ends();
    let one = printed.contains("in use by process") && printed.contains("(ibv_asyncwatch)");
    assert!(!ok && one, "{printed}");
    let (ok, printed) = guest.start(&doctor()).ends();
    assert!(!ok && printed.contains("(ibv_asyncwatch)"), "{printed}");
    // A process that is killed leaves the function in its initial state, too.
    guest.run("kill -9 $(pidof ibv_asyncwatch)");
    held.ends();
    let printed = guest.run(&doctor());
    assert!(printed.contains("all well"), "{printed}");
    let printed = guest.run(&program);
    assert!(printed.contains("PORT_ACTIVE"), "{printed}");
}

#[test]
fn completed_sends_arrive_from_a_function_that_was_reset() {
    let [host, other] = or_skip!(Netns::pair());
    let program = or_skip!(compiled("stream"));
    let server = Server::start(&host, &[ADDRESS], "");
    let guest = or_skip!(PciGuest::boot(&host, &server.sockets()));
    guest.bind(0);
    guest.bring(&program);
    // _exit: none of our code runs in the program after it.
    for size in [64, 65_536] {
        let line = format!("-p {PORT} -d exit -n 64 -s {size}");
        let mut there = other.program(Program::new(&program).line(&line)).spawn();
        there.wait_until_listening(PORT);
        guest.run(&PciGuest::with_urnic(0, &format!("/urnic/stream {line} {OTHER}")));
        let ended = there.wait_for(LIMIT);
        assert!(ended.ok(), "{size}: {ended}");
    }
}

/// Takes the first function out, like unplugging (QEMU 11.1 itself aborts at `device_del` of a
/// vfio-user device). The kernel waits until the program that has the function releases it.
#[track_caller]
fn take_out(guest: &PciGuest<'_>) {
    guest.run(&format!(
        "echo 1 >/sys/bus/pci/devices/{}/remove",
        PciGuest::address(0)
    ));
}

/// Puts the function in again.
#[track_caller]
fn put_in(guest: &PciGuest<'_>) {
    guest.run("echo 1 >/sys/bus/pci/rescan");
    guest.bind(0);
}

#[test]
fn a_removed_function_is_a_fatal_event_and_may_return() {
    let [host, _other] = or_skip!(Netns::pair());
    let program = or_skip!(compiled("lost"));
    let server = Server::start(&host, &[ADDRESS], "");
    let guest = or_skip!(PciGuest::boot(&host, &server.sockets()));
    guest.bind(0);
    let held = holder(&guest);
    take_out(&guest);
    // The program that has the function stays alive.
    guest.run("kill $(pidof ibv_asyncwatch)");
    held.ends();
    let printed = guest.run("cat /tmp/watch");
    assert!(printed.contains("IBV_EVENT_DEVICE_FATAL"), "{printed}");

    // A program in the middle of transfers, which tracks every completion.
    put_in(&guest);
    guest.bring(&program);
    let line = PciGuest::with_urnic(0, "/urnic/lost >/tmp/lost 2>&1");
    let lost = guest.start(&format!("{line}; status=$?; cat /tmp/lost; [ $status = 0 ]"));
    guest.run("n=0; until grep -q flowing /tmp/lost; do n=$((n+1)); [ $n -lt 600 ] || { cat /tmp/lost; exit 1; }; sleep 0.1; done");
    take_out(&guest);
    let printed = lost.success();
    assert!(printed.contains(" flushed"), "{printed}");

    put_in(&guest);
    let printed = guest.run(&PciGuest::with_urnic(0, "ibv_devinfo -d urnic0"));
    assert!(printed.contains("PORT_ACTIVE"), "{printed}");
}
