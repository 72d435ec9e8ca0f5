//! The kernel's other interfaces: RDMA netlink for `rdma(8)`, and the files of sysfs that other
//! programs read.

use std::path::Path;

use urnic_tests::build::plugin;
use urnic_tests::guest::Guest;
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::served::Served;
use urnic_tests::skip::{installed, root};
use urnic_tests::target_process::{Role, TargetProcess};
use urnic_tests::user::{NOBODY, Staged};
use urnic_tests::wait::{TIME_LIMIT, free_port, until};

const IDENTITIES: [(&str, &str, &str); 2] = [("iwarp", "rnic", "4: RNIC"), ("roce", "ca", "1: CA")];

fn rdma(line: &str) -> Program {
    Program::new(installed("rdma").expect("checked")).line(line)
}

#[test]
fn rdma_shows_the_device_and_its_port() {
    or_skip!(installed("rdma"));
    // A place of its own: other tests' processes have devices meanwhile.
    let folder = urnic_testkit::Folder::inside(&urnic_tests::build::scratch(), "doors-device");
    for (identity, kind, _) in IDENTITIES {
        let rdma = |line: &str| {
            rdma(line)
                .env("URNIC_PRESENT_DIR", folder.path())
                .env("URNIC_IDENTITY", identity)
                .run()
                .success()
        };
        let devices = rdma("dev");
        assert!(
            devices.starts_with(&format!("1073741824: urnic0: node_type {kind} fw ")),
            "{devices}"
        );
        assert!(rdma("link").starts_with("link urnic0/1 state ACTIVE physical_state LINK_UP netdev "));
        assert!(rdma("system").contains("copy-on-fork on"));
        let resources = rdma("res");
        assert!(
            resources.starts_with("1073741824: urnic0: pd 0 cq 0 qp 0 cm_id 0 mr 0 ctx 0 srq 0"),
            "{resources}"
        );
        let counters = rdma("statistic");
        assert!(counters.starts_with("link urnic0/1 tx_bytes "), "{counters}");
        assert!(rdma("statistic qp mode").contains("qp auto off"));
    }
}

#[test]
fn rdma_lists_the_devices_in_their_order() {
    or_skip!(installed("rdma"));
    let three = rdma("-j dev").env("URNIC_DEVICES", "3").run().success();
    let names = [
        r#""ifname":"urnic0""#,
        r#""ifname":"urnic1""#,
        r#""ifname":"urnic2""#,
    ];
    let places = names.map(|name| three.find(name).unwrap_or_else(|| panic!("{name}: {three}")));
    assert!(places.is_sorted(), "{three}");
}

#[test]
fn rdma_lists_the_queue_pairs_of_other_processes() {
    or_skip!(installed("rdma"));
    let folder = urnic_testkit::Folder::inside(&urnic_tests::build::scratch(), "doors");
    let place = folder.path().to_str().expect("our path");
    let mut target = or_skip!(TargetProcess::start(&[("URNIC_PRESENT_DIR", place)]));
    let link = target.link(Role::Responder);
    let pid = target.process().pid();
    let rdma = |line: &str| rdma(line).env("URNIC_PRESENT_DIR", place).run().success();
    let pairs = rdma("res show qp");
    assert!(
        pairs.contains(" type RC state RTS ") && pairs.contains(&format!(" pid {pid} comm target_process")),
        "{pairs}"
    );
    for kind in ["cq", "mr", "pd", "ctx"] {
        let all = rdma(&format!("res show {kind}"));
        assert!(all.contains(&format!(" pid {pid} ")), "{kind}: {all}");
    }
    let resources = rdma("res");
    let pairs = pairs.lines().filter(|line| line.contains(" lqpn ")).count();
    assert!(
        resources.contains(&format!(" qp {pairs} ")) && resources.contains(" ctx 1 "),
        "{resources}"
    );
    drop(link);
}

#[test]
fn rdma_lists_the_ids_of_a_listener() {
    or_skip!(installed("rdma"));
    or_skip!(installed("rping"));
    let folder = urnic_testkit::Folder::inside(&urnic_tests::build::scratch(), "doors-cm");
    let port = free_port();
    for (identity, ..) in IDENTITIES {
        let place = |program: Program| {
            program
                .env("URNIC_PRESENT_DIR", folder.path())
                .env("URNIC_IDENTITY", identity)
        };
        let server = place(Program::new("rping"))
            .line(&format!("-s -a 127.0.0.1 -p {port}"))
            .spawn();
        let wanted = format!(" state LISTEN ps TCP pid {} comm rping ", server.pid());
        let listed = until(TIME_LIMIT, || {
            let ids = place(rdma("res show cm_id")).run().success();
            (ids.contains(&wanted) && ids.contains(&format!("src-addr 127.0.0.1:{port} "))).then_some(())
        });
        assert!(
            listed.is_some(),
            "{wanted}: {}",
            place(rdma("res show cm_id")).run()
        );
    }
}

#[test]
fn changes_are_refused_with_the_kernels_errors() {
    or_skip!(installed("rdma"));
    or_skip!(root());
    let refused = rdma("dev set urnic0 name other0").run().failure();
    assert!(refused.contains("Operation not supported"), "{refused}");
    let staged = Staged::new();
    let refused = staged
        .program(NOBODY, rdma("dev set urnic0 name other0"))
        .run()
        .failure();
    assert!(refused.contains("Operation not permitted"), "{refused}");
}

#[test]
fn libibverbs_searches_by_netlink() {
    or_skip!(installed("ibv_devices"));
    or_skip!(installed("strace"));
    let traced = Program::new("ibv_devices").through(["strace", "-f", "-e", "trace=sendmsg,sendto,openat"]);
    let ended = traced.run();
    assert!(ended.ok());
    let text = ended.success();
    assert!(text.contains("urnic0"), "{text}");
    assert!(
        !text.contains("sys/class/infiniband_verbs/uverbs0/ibdev"),
        "{text}"
    );
}

#[test]
fn rdma_sees_a_served_device() {
    or_skip!(installed("rdma"));
    let served = Served::start();
    let program = installed("rdma").expect("checked");
    let link = served
        .program(program.to_str().expect("a path"))
        .line("link")
        .run()
        .success();
    assert!(link.contains("link urnic0/1 state ACTIVE"), "{link}");
}

#[test]
fn sysfs_has_the_files_of_an_adapter() {
    let place = urnic_testkit::Folder::inside(&urnic_tests::build::scratch(), "doors-files");
    for (identity, _, node_type) in IDENTITIES {
        let read = |file: &str| {
            let path = format!("/sys/class/infiniband/urnic0/{file}");
            let text = Program::new("cat")
                .arg(path)
                .env("URNIC_PRESENT_DIR", place.path())
                .env("URNIC_IDENTITY", identity)
                .run()
                .success();
            text.trim_end().to_owned()
        };
        assert_eq!(read("node_type"), node_type);
        assert_eq!(read("device/vendor"), "0xfffe");
        assert_eq!(read("device/device"), "0x524e");
        assert_eq!(read("device/class"), "0x028000");
        assert_eq!(read("device/numa_node"), "-1");
        assert_eq!(read("device/uevent"), "DRIVER=urnic");
        assert_eq!(read("ports/1/counters/port_xmit_data"), "0");
        // From the folder in which the device is, as programs search for its numa_node.
        assert_eq!(read("../../numa_node"), "-1");
    }
    let link = Program::new("readlink")
        .arg("/sys/class/infiniband/urnic0")
        .run()
        .success();
    let folder = Path::new("/sys/class/infiniband")
        .join(link.trim_end())
        .join("device/vendor");
    let plain = "/sys/devices/urnic/urnic0:00.0/vendor";
    assert!(
        folder
            .to_string_lossy()
            .contains("devices/urnic/urnic0:00.0/infiniband/urnic0")
    );
    assert_eq!(Program::new("cat").arg(plain).run().success(), "0xfffe\n");
}

#[test]
fn hwloc_shows_the_device() {
    let lstopo = or_skip!(installed("lstopo-no-graphics"));
    let text = Program::new(lstopo).line("--of console").run().success();
    assert!(text.contains("OpenFabrics \"urnic0\""), "{text}");
}

#[test]
fn ibstat_lists_what_libibumad_lists() {
    let ibstat = or_skip!(installed("ibstat"));
    let of = |identity: &str| {
        Program::new(&ibstat)
            .env("URNIC_IDENTITY", identity)
            .run()
            .success()
    };
    assert!(of("roce").contains("CA 'urnic0'"));
    assert_eq!(of("iwarp"), "", "it passes over RNICs of a kernel, too");
    let ibstatus = or_skip!(installed("ibstatus"));
    for (identity, ..) in IDENTITIES {
        let text = Program::new(&ibstatus)
            .env("URNIC_IDENTITY", identity)
            .run()
            .success();
        assert!(
            text.contains("device 'urnic0' port 1") && text.contains("4: ACTIVE"),
            "{text}"
        );
    }
}

/// The plug-in in the guest.
const PLUGIN: &str = "/tmp/liburnic.so";

/// A kernel with a device of its own, siw0, and urnic beside it.
#[test]
fn real_devices_are_shown_in_the_requested_order() {
    let guest = or_skip!(Guest::borrowed());
    let folder = urnic_testkit::Folder::inside(&urnic_tests::build::scratch(), "doors-guest");
    let stripped = folder.file("liburnic.so");
    let strip = Program::plain(or_skip!(installed("strip")));
    strip
        .args(["-o".as_ref(), stripped.as_os_str(), plugin().as_os_str()])
        .run()
        .success();
    guest.bring(&stripped, PLUGIN);
    let run = |options: &str, line: &str| {
        let line = format!("{options} LD_PRELOAD={PLUGIN} {line}");
        guest.start(&line).success()
    };
    let place = |text: &str, name: &str| text.find(name).unwrap_or_else(|| panic!("{name}: {text}"));
    for (list, ours, theirs) in [
        ("rdma dev", ": urnic0:", "0: siw0:"),
        ("rdma link", "link urnic0/1 ", "link siw0/1 "),
        ("rdma res", ": urnic0:", "0: siw0:"),
        ("ibv_devinfo -l", "urnic0", "siw0"),
    ] {
        let last = run("", list);
        assert!(place(&last, ours) < place(&last, theirs), "{last}");
        let first = run("URNIC_REAL_DEVICES=first", list);
        assert!(place(&first, theirs) < place(&first, ours), "{first}");
        let hidden = run("URNIC_REAL_DEVICES=hidden", list);
        assert!(hidden.contains(ours) && !hidden.contains("siw0"), "{hidden}");
    }
    assert!(run("", "rdma dev").contains("1073741824: urnic0:"));
    // What names the kernel's device is the kernel's answer, and both can be opened.
    assert!(run("", "rdma link show siw0/1").contains("link siw0/1 state ACTIVE"));
    assert!(run("", "ibv_devinfo -d siw0").contains("transport:\t\t\tiWARP"));
    assert!(run("", "ibv_devinfo -d urnic0").contains("vendor_id:\t\t\t0xfffe"));
    let same_name = run("URNIC_NAME=siw0 URNIC_REAL_DEVICES=hidden", "ibv_devinfo");
    assert!(
        same_name.contains("hca_id:\tsiw0") && same_name.contains("0xfffe"),
        "{same_name}"
    );
    guest.start(&format!("rm {PLUGIN}")).success();
}
