//! The RNIC as a PCI function of guests: Debian's own kernel and programs, vfio-pci, an IOMMU. Each
//! host is a network namespace.

use urnic_tests::build::tree;
use urnic_tests::debian::script;
use urnic_tests::netns::Netns;
use urnic_tests::page::Block;
use urnic_tests::pci_guest::{Machine, PORT, PciGuest, Server};
use urnic_tests::program::Program;
use urnic_tests::shell::{LIMIT, Task};
use urnic_tests::{compiled, or_skip};

/// Addresses of the two hosts that [`Netns::pair`] makes, and a further one of the first.
pub(crate) const FIRST: &str = "10.77.0.1";
pub(crate) const SECOND: &str = "10.77.0.2";
const ALSO_FIRST: &str = "10.77.0.3";

/// The port at which rping listens.
const CM_PORT: u16 = 7174;

/// One end of a test: a function of a guest, or a program on a host with the device inside.
pub(crate) enum End<'a> {
    Guest(&'a PciGuest<'a>, usize),
    Host(&'a Netns),
}

/// A running program at an end.
enum Started {
    There(Task),
    Here(urnic_tests::Running),
}

impl End<'_> {
    fn start(&self, line: &str) -> Started {
        match self {
            End::Guest(guest, function) => {
                Started::There(guest.start(&PciGuest::with_urnic(*function, line)))
            }
            End::Host(netns) => Started::Here(host_program(netns, line).spawn()),
        }
    }

    /// The host whose network this end uses.
    fn host(&self) -> &Netns {
        match self {
            End::Guest(guest, _) => guest.host(),
            End::Host(netns) => netns,
        }
    }

    /// Starts a program that listens at [`PORT`] of its machine.
    fn listener(&self, line: &str) -> Started {
        match self {
            End::Guest(guest, function) => {
                Started::There(guest.listener(&PciGuest::with_urnic(*function, line), PORT))
            }
            End::Host(netns) => {
                let mut running = host_program(netns, line).spawn();
                running.wait_until_listening(PORT);
                Started::Here(running)
            }
        }
    }
}

fn host_program(netns: &Netns, line: &str) -> Program {
    let (name, options) = line.split_once(' ').unwrap_or((line, ""));
    netns.program(Program::new(name).line(options))
}

impl Started {
    /// Whether the program succeeded, and its output.
    #[track_caller]
    fn ends(self) -> (bool, String) {
        self.tries().unwrap_or_else(|printed| panic!("{printed}"))
    }

    /// Whether the program succeeded, and its output.
    ///
    /// # Errors
    /// The output of a guest that has ended.
    #[track_caller]
    fn tries(self) -> Result<(bool, String), String> {
        match self {
            Started::There(task) => task.tries(),
            Started::Here(running) => {
                let ended = running.wait_for(LIMIT);
                Ok((ended.ok(), ended.to_string()))
            }
        }
    }
}

/// Runs a server at `to` and a client at `from`, which connects to this address; returns the output
/// of both.
#[track_caller]
fn succeed(server: (&End<'_>, &str), client: (&End<'_>, &str)) -> (String, String) {
    let there = server.0.listener(server.1);
    let (ok, ours) = client.0.start(client.1).ends();
    assert!(ok, "--- client, {}:\n{ours}", client.1);
    let (ok, theirs) = there.ends();
    assert!(ok, "--- server, {}:\n{theirs}\n--- client:\n{ours}", server.1);
    (ours, theirs)
}

/// The four programs, unmodified, between two ends: `to` is found at `meeting` by TCP, and has the
/// RNIC's address `address`.
#[track_caller]
pub(crate) fn programs_run(from: &End<'_>, to: &End<'_>, meeting: &str, address: &str) {
    let (ours, theirs) = succeed(
        (to, &format!("ibv_rc_pingpong -g 0 -p {PORT} -n 200")),
        (from, &format!("ibv_rc_pingpong -g 0 -p {PORT} -n 200 {meeting}")),
    );
    for printed in [ours, theirs] {
        assert!(printed.contains("200 iters in"), "{printed}");
    }
    let there = to.start(&format!("rping -s -a {address} -p {CM_PORT} -v -V -C 20"));
    to.host().listens(CM_PORT);
    let (_, ours) = from
        .start(&format!("rping -c -a {address} -p {CM_PORT} -v -V -C 20"))
        .ends();
    assert_eq!(ours.matches("rdma-ping-").count(), 20, "--- client:\n{ours}");
    let (_, theirs) = there.ends();
    assert_eq!(theirs.matches("rdma-ping-").count(), 20, "--- server:\n{theirs}");
    let line = format!("ib_write_bw -x 0 -F -n 50 -s 65536 -p {PORT}");
    let (ours, _) = succeed((to, &line), (from, &format!("{line} {meeting}")));
    assert!(ours.contains("65536"), "{ours}");
}

#[test]
fn programs_in_a_guest_use_its_functions() {
    let [first, second] = or_skip!(Netns::pair());
    let own_peer = or_skip!(compiled("selfpost"));
    first.ip(&format!("addr add {ALSO_FIRST}/24 dev veth0"));
    // The two functions may connect to each other, although their addresses are those of one host.
    let server = Server::start(&first, &[FIRST, ALSO_FIRST], "--allow 10.77.0.0/24");
    let guest = or_skip!(PciGuest::boot(&first, &server.sockets()));
    let printed = guest.run("lspci -nn");
    assert_eq!(
        printed.matches("Network controller [0280]").count(),
        2,
        "{printed}"
    );
    assert_eq!(printed.matches("[fffe:524e]").count(), 2, "{printed}");
    for function in 0..2 {
        guest.bind(function);
        let printed = guest.run(&PciGuest::with_urnic(function, "ibv_devinfo -v"));
        let gid = ["ffff:0a4d:0001", "ffff:0a4d:0003"][function];
        for expected in ["urnic0", "PORT_ACTIVE", gid] {
            assert!(printed.contains(expected), "no {expected:?} in:\n{printed}");
        }
    }
    let printed = guest.run(&format!(
        "/urnic/urnic conformance --device vfio:{}",
        PciGuest::address(0)
    ));
    assert!(printed.contains(" 0 failed, 0 not applicable"), "{printed}");
    guest.bring(&own_peer);
    // A median, and a percentile: from the doorbell to the completion, all in the device.
    let printed = guest.run(&PciGuest::with_urnic(0, "/urnic/selfpost 500"));
    let times: Vec<f64> = printed
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    assert!(
        times.len() == 2 && times.iter().all(|time| *time > 0.0),
        "{printed}"
    );
    let host = End::Host(&second);
    programs_run(
        &End::Guest(&guest, 0),
        &End::Guest(&guest, 1),
        "127.0.0.1",
        ALSO_FIRST,
    );
    programs_run(&End::Guest(&guest, 0), &host, SECOND, SECOND);
    programs_run(&host, &End::Guest(&guest, 1), FIRST, ALSO_FIRST);
}

/// The packets are those of RoCE v2: UDP port 4791 is that of the server's process.
#[test]
fn a_function_of_a_guest_exchanges_packets_of_roce() {
    let [first, second] = or_skip!(Netns::pair());
    let server = Server::start(&first, &[FIRST], "");
    let guest = or_skip!(PciGuest::boot(&first, &server.sockets()));
    guest.bind(0);
    let (there, host) = (End::Guest(&guest, 0), End::Host(&second));
    let program = "env URNIC_IDENTITY=roce URNIC_WIRE=roce";
    for command in [
        "ibv_rc_pingpong -g 3 -c -n 100",
        "ibv_ud_pingpong -g 3 -c -n 50 -s 1000",
        "ib_read_bw -x 3 -F -n 20 -u 16",
    ] {
        let line = format!("{program} {command} -p {PORT}");
        succeed((&there, &line), (&host, &format!("{line} {FIRST}")));
        succeed((&host, &line), (&there, &format!("{line} {SECOND}")));
    }
}

/// The commands of the page on functions in a guest, block by block, for the one function of this
/// guest.
fn vfio_page() -> Vec<String> {
    let blocks = Block::of(&tree().join("docs/guide/vfio.md"));
    let blocks = blocks.into_iter().filter(Block::is_commands);
    // The guest has no other user.
    blocks
        .map(|block| block.text.replace("chown user", "chown root"))
        .collect()
}

/// `blocks`, in one shell of the guest, which prints what they print.
fn follow(guest: &PciGuest<'_>, blocks: &[String]) -> (bool, String) {
    // A block may end with a comment.
    let lines = blocks.join("\n") + "\n(exit $?)";
    guest.start(&format!("export PATH=/urnic:$PATH\n{lines}")).ends()
}

#[test]
fn the_page_on_functions_leads_a_guest_to_the_device() {
    let [first, _second] = or_skip!(Netns::pair());
    let server = Server::start(&first, &[FIRST], "");
    let guest = or_skip!(PciGuest::boot(&first, &server.sockets()));
    let page = vfio_page();
    let [find, assign, run] = page.as_slice() else {
        panic!("the page has other blocks: {page:#?}");
    };
    let (_, printed) = follow(&guest, std::slice::from_ref(find));
    for said in [
        "ok    IOMMU group",
        "WRONG driver           none has it",
        "drivers_probe",
    ] {
        assert!(printed.contains(said), "no {said:?} in:\n{printed}");
    }
    let (ok, printed) = follow(&guest, &[find.clone(), assign.clone(), find.clone(), run.clone()]);
    assert!(ok, "{printed}");
    for said in ["all well: urnic run -- COMMAND", "hca_id:", "PORT_ACTIVE"] {
        assert!(printed.contains(said), "no {said:?} in:\n{printed}");
    }
}

#[test]
fn doctor_names_the_iommu_that_a_guest_lacks() {
    let [first, _second] = or_skip!(Netns::pair());
    let server = Server::start(&first, &[FIRST], "");
    let guest = or_skip!(PciGuest::boot_as(
        Machine::StockNoIommu,
        &first,
        &server.sockets()
    ));
    let (ok, printed) = follow(&guest, &vfio_page()[..1]);
    for said in [
        "WRONG IOMMU group      none: this QEMU guest has no IOMMU",
        "-device intel-iommu",
    ] {
        assert!(!ok && printed.contains(said), "no {said:?} in:\n{printed}");
    }
}

/// QEMU migrates a machine with the function, and loses its state; the page has a device that
/// prevents this. When QEMU itself refuses, the page needs that no more.
#[test]
fn the_page_prevents_a_migration_that_loses_the_function() {
    let [host, _second] = or_skip!(Netns::pair());
    let qemu = or_skip!(script("qemu-guest", &[])) + "/qemu";
    let page = std::fs::read_to_string(tree().join("docs/guide/serve-and-qemu.md")).expect("the page");
    let (_, blocking) = page
        .split_once("blocks both: `")
        .expect("the page blocks migration");
    let (blocking, _) = blocking.split_once('`').expect("the options end");
    let server = Server::start(&host, &[FIRST], "");
    let socket = &server.sockets()[0];
    let migrates = |options: &str| {
        let function = format!(
            r#"{{"driver":"vfio-user-pci","x-msg-timeout":60000,"socket":{{"type":"unix","path":"{}"}}}}"#,
            socket.display()
        );
        let program = Program::plain(&qemu)
            .line("-accel tcg -S -nodefaults -no-user-config -display none -monitor stdio")
            .line("-machine q35,memory-backend=memory")
            .line("-object memory-backend-memfd,id=memory,size=64M,share=on")
            .args(["-device", &function])
            .line(options);
        let mut qemu = host.program(program).spawn();
        qemu.write_stdin("migrate exec:cat>/dev/null\ninfo migrate\nquit\n");
        qemu.wait().to_string()
    };
    let printed = migrates("");
    assert!(printed.contains("completed"), "{printed}");
    let printed = migrates(blocking);
    assert!(printed.contains("Migration is disabled"), "{printed}");
}

#[test]
fn programs_in_two_guests_talk_to_each_other() {
    let [first, second] = or_skip!(Netns::pair());
    let servers = [
        Server::start(&first, &[FIRST], ""),
        Server::start(&second, &[SECOND], ""),
    ];
    let one = or_skip!(PciGuest::boot(&first, &servers[0].sockets()));
    let two = or_skip!(PciGuest::boot(&second, &servers[1].sockets()));
    one.bind(0);
    two.bind(0);
    programs_run(&End::Guest(&one, 0), &End::Guest(&two, 0), SECOND, SECOND);
    programs_run(&End::Guest(&two, 0), &End::Guest(&one, 0), FIRST, FIRST);
}

#[test]
fn a_guest_reaches_neither_its_host_nor_addresses_of_others() {
    let [first, _second] = or_skip!(Netns::pair());
    first.ip(&format!("addr add {ALSO_FIRST}/24 dev veth0"));
    let server = Server::start(&first, &[FIRST], "");
    let guest = or_skip!(PciGuest::boot(&first, &server.sockets()));
    guest.bind(0);
    // A program listens there, even for iWARP.
    let listener = host_program(&first, "rping -s -P -p 7174").spawn();
    for address in ["127.0.0.1", ALSO_FIRST] {
        // rping may wait for more after that.
        let line = PciGuest::with_urnic(0, &format!("rping -c -a {address} -p 7174 -C 1 -v"));
        let printed = guest.run(&format!(
            "env {line} >/tmp/printed 2>&1 & p=$!; n=0
             until grep -q rdma_connect /tmp/printed || [ $n -ge 600 ]; do n=$((n+1)); sleep 0.2; done
             kill -9 $p; cat /tmp/printed"
        ));
        assert!(
            printed.contains("rdma_connect: Permission denied"),
            "{address}:\n{printed}"
        );
    }
    drop(listener);
    for address in [ALSO_FIRST, SECOND] {
        let line = PciGuest::with_urnic(0, &format!("timeout 60 rping -s -a {address} -p 7175 -C 1 -v"));
        let (ok, printed) = guest.start(&line).ends();
        assert!(!ok && printed.contains("rdma_bind_addr"), "{address}:\n{printed}");
    }
}

#[test]
fn the_end_of_program_qemu_or_server_is_reported() {
    let [first, second] = or_skip!(Netns::pair());
    let mut server = Server::start(&first, &[FIRST], "");
    let host = End::Host(&second);
    let busy = format!("ib_write_bw -x 0 -F -D 60 -p {PORT}");
    let guest = or_skip!(PciGuest::boot(&first, &server.sockets()));
    guest.bind(0);
    // A program in the guest is killed first: its peer gets an event, and the function serves the
    // next program.
    let there = End::Guest(&guest, 0).listener(&busy);
    let here = host.start(&format!("{busy} {FIRST}"));
    transfers(&guest);
    guest.run("kill -9 $(pidof ib_write_bw)");
    let (ok, printed) = here.ends();
    assert!(!ok, "{printed}");
    there.ends();
    // Then QEMU is killed: the peer of the guest gets an event, and the server serves the next
    // QEMU.
    let there = End::Guest(&guest, 0).listener(&busy);
    let here = host.start(&format!("{busy} {FIRST}"));
    transfers(&guest);
    guest.kill();
    let (ok, printed) = here.ends();
    assert!(!ok, "{printed}");
    drop(there);

    let guest = or_skip!(PciGuest::boot(&first, &server.sockets()));
    guest.bind(0);
    let (ours, _) = succeed(
        (&host, &format!("ibv_rc_pingpong -g 0 -p {PORT} -n 50")),
        (
            &End::Guest(&guest, 0),
            &format!("ibv_rc_pingpong -g 0 -p {PORT} -n 50 {SECOND}"),
        ),
    );
    assert!(ours.contains("50 iters in"), "{ours}");
    // Finally the server is killed: both programs end.
    let there = host.listener(&busy);
    let here = End::Guest(&guest, 0).start(&format!("{busy} {SECOND}"));
    transfers(&guest);
    server.kill();
    // QEMU 11.1 itself may stop then, over an error that it sets twice: `error_setv: Assertion
    // `*errp == NULL' failed`.
    let unless_qemu_stopped = |program: Started| match program.tries() {
        Ok(ended) => Some(ended),
        Err(printed) => {
            let console = guest.console();
            assert!(console.contains("error_setv: Assertion"), "{printed}\n{console}");
            None
        }
    };
    let in_guest = unless_qemu_stopped(here);
    let (ok, printed) = there.ends();
    assert!(!ok, "on the host:\n{printed}");
    let Some((ok, printed)) = in_guest else { return };
    assert!(!ok, "in the guest:\n{printed}");
    if let Some((_, printed)) =
        unless_qemu_stopped(Started::There(guest.start("lspci -s 00:10.0 -xxx | tail -n +2")))
    {
        assert!(
            printed.contains("ff ff ff ff"),
            "a function whose server has ended still answers:\n{printed}"
        );
    }
}

/// Waits until the process of the guest's function has sent or received data, by its counters.
#[track_caller]
fn transfers(guest: &PciGuest<'_>) {
    guest.run(
        "n=0; until /urnic/urnic stat --json 2>/dev/null | grep -Eq '\"[tr]x_bytes\": ?[0-9]{7}'; do
             n=$((n+1)); [ $n -lt 200 ] || { /urnic/urnic stat --json; exit 1; }; sleep 0.1
         done",
    );
}
