//! Programs of other projects in Debian's packages: libfabric, storage, migration.
//! docs/reference/programs.md lists them.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use urnic_tests::build::{compiled, scratch};
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::pair::Pair;
use urnic_tests::program::{Program, Running};
use urnic_tests::random::Random;
use urnic_tests::skip::installed;
use urnic_tests::wait::{free_port, until};

const LIMIT: Duration = Duration::from_secs(120);

/// A temporary file, removed on drop.
struct Own(PathBuf);

impl Own {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = scratch().join(format!("{name}-{}", std::process::id()));
        fs::write(&path, bytes).expect("a temporary file");
        Self(path)
    }

    fn path(&self) -> String {
        self.0.display().to_string()
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn ports_of_rdma_cm_ids_are_kept_shared_and_refused() {
    let program = Program::new(or_skip!(compiled("cm_ports")));
    program.arg("127.0.0.1").run_for(LIMIT).success();
}

#[test]
fn receives_two_seconds_late_lose_nothing() {
    let program = Program::new(or_skip!(compiled("cm_ports")));
    program.line("127.0.0.1 late").run_for(LIMIT).success();
}

#[test]
fn perftest_atomics() {
    or_skip!(installed("ib_atomic_lat"));
    for name in ["ib_atomic_lat", "ib_atomic_bw"] {
        for options in ["-A FETCH_AND_ADD", "-A CMP_AND_SWAP -R"] {
            Pair::line(&format!("{name} {options} -F -n 200"))
                .within(LIMIT)
                .succeeds();
        }
    }
}

/// Runs these tests of qperf, one second each, with ends of this identity.
#[track_caller]
fn qperf(identity: &str, manager: u8, tests: &str) {
    let port = free_port();
    let qperf = |line: &str| {
        Program::new("qperf")
            .env("URNIC_IDENTITY", identity)
            .line(&format!("{line} -lp {port}"))
    };
    let mut server = qperf("").spawn();
    server.wait_until_listening(port);
    // qperf's two ends must agree within 5 s, which a loaded machine may exceed.
    let line = format!("127.0.0.1 -t 1 -to 100 -cm {manager}");
    let client = qperf(&line).line(tests);
    let printed = client.run_for(LIMIT).success();
    for test in tests.split_whitespace() {
        assert!(printed.contains(&format!("{test}:")), "{test}: {printed}");
    }
    qperf("127.0.0.1").arg("quit").run_for(LIMIT).success();
    server.wait_for(LIMIT);
}

#[test]
fn qperf_over_both_ways_to_connect() {
    or_skip!(installed("qperf"));
    let tests = "rc_lat rc_bw rc_rdma_read_lat rc_rdma_write_bw rc_fetch_add_mr ver_rc_compare_swap";
    for identity in ["iwarp", "roce"] {
        for manager in [0, 1] {
            qperf(identity, manager, tests);
        }
    }
}

/// qperf has no connection manager for UC. Its UD tests make address handles without a GID, which
/// every RoCE NIC refuses.
#[test]
fn qperf_of_uc_queue_pairs() {
    or_skip!(installed("qperf"));
    let uc = "uc_lat uc_bw uc_bi_bw uc_rdma_write_bw uc_rdma_write_lat uc_rdma_write_poll_lat";
    qperf("roce", 0, uc);
}

/// libfabric's verbs provider needs an interface other than the loopback, which a test machine may
/// lack: hence the network namespace.
#[test]
fn libfabric_of_both_endpoint_types() {
    or_skip!(installed("fi_pingpong"));
    let [host, _peer] = or_skip!(Netns::pair());
    for (provider, kind) in [("verbs", "msg"), ("verbs;ofi_rxm", "rdm")] {
        let port = free_port();
        let program = Program::new("fi_pingpong").args(["-p", provider, "-e", kind, "-I", "50", "-c"]);
        let server = host.program(program.clone().line(&format!("-B {port}"))).spawn();
        host.listens(port);
        let client = program.line(&format!("-P {port} 10.77.0.1"));
        host.program(client).run_for(LIMIT).success();
        server.wait_for(LIMIT).success();
    }
}

#[test]
fn fio_with_every_verb() {
    or_skip!(installed("fio"));
    for verb in ["write", "read", "send"] {
        let port = free_port();
        let job = |role: &str| {
            Program::new("fio").line(&format!(
                "--name=job --ioengine=rdma --port={port} --bs=64k --iodepth=8 --size=8m {role}"
            ))
        };
        let mut server = job("--rw=read").spawn();
        server.wait_until_listening(port);
        let client = job(&format!("--rw=write --hostname=127.0.0.1 --verb={verb}")).run_for(LIMIT);
        let printed = client.success();
        assert!(printed.contains("io=8192KiB"), "{verb}: {printed}");
        server.wait_for(LIMIT).success();
    }
}

/// A QEMU with 64 MiB of memory and only the firmware in it, controlled by QMP over its standard
/// input.
fn qemu(options: &str) -> Running {
    let mut qemu = Program::new("qemu-system-x86_64")
        .line("-accel tcg -machine q35 -m 64 -nodefaults -display none -vga none -qmp stdio")
        .line(options)
        .spawn();
    qemu.wait_for_output("its greeting", |text| text.contains("\"QMP\"").then_some(()));
    monitor(&mut qemu, "qmp_capabilities", "");
    qemu
}

/// Sends a QMP command with these arguments and returns the answer, as JSON.
#[track_caller]
fn monitor(qemu: &mut Running, command: &str, arguments: &str) -> String {
    let from = qemu.output().len();
    let arguments = if arguments.is_empty() { "{}" } else { arguments };
    qemu.write_stdin(&format!(
        "{{\"execute\": \"{command}\", \"arguments\": {arguments}}}\n"
    ));
    let answer = |line: &&str| {
        ["{\"return\"", "{\"error\""]
            .iter()
            .any(|head| line.starts_with(head))
    };
    qemu.wait_for_output_from(from, "an answer", |text| {
        text.lines().find(answer).map(str::to_owned)
    })
}

#[test]
fn qemu_migrates_a_guest() {
    or_skip!(installed("qemu-system-x86_64"));
    const PLACE: u32 = 0x0200_0000;
    let content = Random(23).bytes(1 << 20);
    let loaded = Own::new("guest-memory", &content);
    let saved = Own::new("guest-memory-there", &[]);
    for pinned in [false, true] {
        let port = free_port();
        let mut there = qemu("-incoming defer");
        let mut here = qemu(&format!(
            "-device loader,file={},addr={PLACE:#x},force-raw=on",
            loaded.path()
        ));
        for qemu in [&mut here, &mut there] {
            let set =
                format!("{{\"capabilities\": [{{\"capability\": \"rdma-pin-all\", \"state\": {pinned}}}]}}");
            let answer = monitor(qemu, "migrate-set-capabilities", &set);
            if answer.contains("rdma-pin-all") {
                // This QEMU is built without librdmacm.
                return urnic_tests::skip::report(&answer);
            }
        }
        let uri = format!("{{\"uri\": \"rdma:127.0.0.1:{port}\"}}");
        assert_eq!(
            monitor(&mut there, "migrate-incoming", &uri).trim(),
            "{\"return\": {}}"
        );
        assert_eq!(monitor(&mut here, "migrate", &uri).trim(), "{\"return\": {}}");
        let outcome = until(LIMIT, || {
            let answer = monitor(&mut here, "query-migrate", "");
            let over = ["\"completed\"", "\"failed\""]
                .iter()
                .any(|word| answer.contains(word));
            over.then_some(answer)
        });
        let outcome = outcome.unwrap_or_else(|| panic!("no end: {}\n{}", here.output(), there.output()));
        assert!(
            outcome.contains("\"status\": \"completed\""),
            "{outcome}\nsource: {}\ndestination: {}",
            here.output(),
            there.output()
        );
        let runs = until(LIMIT, || {
            monitor(&mut there, "query-status", "")
                .contains("\"running\": true")
                .then_some(())
        });
        assert!(runs.is_some(), "{}", there.output());
        let save = format!(
            "{{\"val\": {PLACE}, \"size\": {}, \"filename\": \"{}\"}}",
            content.len(),
            saved.path()
        );
        assert_eq!(monitor(&mut there, "pmemsave", &save).trim(), "{\"return\": {}}");
        assert!(
            fs::read(&saved.0).expect("a file") == content,
            "the memory at the destination differs"
        );
        for mut qemu in [here, there] {
            monitor(&mut qemu, "quit", "");
            qemu.wait_for(LIMIT).success();
        }
    }
}
