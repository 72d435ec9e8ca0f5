//! Programs of sockets, made to use rsockets: the distribution's examples, and any program under
//! librspreload.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use urnic_testkit::Folder;
use urnic_tests::build::{plugin, scratch, urnic};
use urnic_tests::debian::Debian;
use urnic_tests::program::{Program, Running};
use urnic_tests::served::in_process;
use urnic_tests::skip::installed;
use urnic_tests::wait::free_port;
use urnic_tests::{compiled, or_skip};

const LIMIT: Duration = Duration::from_secs(120);

/// Server and client of `rsocket_overrun`, which let a Send wait `patience` milliseconds for a
/// receive. Returns when the client has sent all that its credits allow.
fn overrun(patience: &str) -> Result<(Running, Running), String> {
    let port = free_port();
    let program = Program::new(compiled("rsocket_overrun")?)
        .line(&format!("-p {port}"))
        .env("URNIC_CM_RNR_GRACE_MS", patience);
    let mut server = program.clone().env("URNIC_LOG", "debug").spawn();
    server.wait_until_listening(port);
    let mut client = program.arg("127.0.0.1").spawn();
    server.wait_for_output("how many receives it posted", |text| {
        text.contains("posted 384 receives").then_some(())
    });
    client.wait_for_output("that it sent a message for each, and one more", |text| {
        text.contains("sent 384 messages and its own credits")
            .then_some(())
    });
    Ok((server, client))
}

#[test]
fn an_rsockets_send_without_a_receive_needs_an_rnr_grace() {
    or_skip!(in_process("the server's log has the device's words"));
    let (mut server, _client) = or_skip!(overrun("0"));
    // DDP, untagged buffer, no buffer available (RFC 5041 §8).
    server.wait_for_output("Terminate", |text| {
        (text.contains("a Send finds no receive posted taken=384")
            && text.contains("TerminateSent, 0x1202c000"))
        .then_some(())
    });
}

#[test]
fn with_an_rnr_grace_rsockets_loses_no_data() {
    let (server, client) = or_skip!(overrun("60000"));
    // The end of its standard input lets the server continue.
    server.wait_for(LIMIT).success();
    client.wait_for(LIMIT).success();
}

/// `librspreload.so`, in the folder of this architecture.
fn rspreload() -> Option<PathBuf> {
    let folders = std::fs::read_dir("/usr/lib").ok()?.flatten();
    let mut places = folders.map(|folder| folder.path().join("rsocket/librspreload.so.1"));
    places.find(|path| path.exists())
}

/// Bytes that the process received through the device.
fn received(process: u32, watched: &Folder) -> u64 {
    let stat = Program::plain(urnic()).line(&format!("stat --json {process}"));
    let json = stat.env("URNIC_PRESENT_DIR", watched.path()).run().success();
    let counts = json.split("\"rx_bytes\":").skip(1).filter_map(|rest| {
        let rest = rest.trim_start();
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    });
    counts.max().unwrap_or_default()
}

#[test]
fn iperf3_under_librspreload_uses_the_device() {
    or_skip!(installed("iperf3"));
    let Some(rspreload) = rspreload() else {
        return urnic_tests::skip::report("librspreload.so is not installed");
    };
    let watched = Folder::inside(&scratch(), "iperf3");
    let port = free_port();
    let iperf3 = Program::plain("iperf3")
        .line(&format!("-p {port}"))
        .env(
            "LD_PRELOAD",
            format!("{}:{}", rspreload.display(), plugin().display()),
        )
        .env("URNIC_PRESENT_DIR", watched.path());
    let mut server = iperf3.clone().line("-s").spawn();
    server.wait_until_listening(port);
    // rsockets itself may sleep 5 s over each connection (`wake_up_interval` of rsocket.c): its
    // poll() watches a listener's channel, but the connecting side gets its event elsewhere.
    for options in ["-n 64M", "-n 64M -R"] {
        let client = iperf3.clone().line(&format!("-c 127.0.0.1 {options}"));
        let printed = client.run_for(LIMIT).success();
        assert!(printed.contains("iperf Done"), "{printed}\n{}", server.output());
        if options == "-n 64M" {
            let bytes = received(server.pid(), &watched);
            assert!(bytes >= 64 << 20, "{bytes} bytes:\n{printed}");
        }
    }
}

/// A file of one GiB that no part of is like another; and its checksum.
fn gibibyte(path: &Path) {
    let mut state = 1u64;
    let mut file = std::fs::File::create(path).expect("a file in our folder");
    let mut block = vec![0u8; 1 << 20];
    for _ in 0..1 << 10 {
        for word in block.as_chunks_mut::<8>().0 {
            // Weyl's sequence, mixed.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            word.copy_from_slice(&(state ^ state >> 29).to_le_bytes());
        }
        file.write_all(&block).expect("room for two GiB");
    }
}

fn checksum(path: &Path) -> String {
    let out = Command::new("sha256sum").arg(path).output().expect("coreutils");
    String::from_utf8_lossy(&out.stdout)
        .split_whitespace()
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// rcopy moves such a file within `ours`, a folder that is called `theirs` where the programs run.
fn rcopy_moves_a_gibibyte(ours: &Folder, theirs: &str, program: impl Fn(Program) -> Program) {
    let port = free_port();
    let (from, to) = (ours.file("from"), ours.file("to"));
    gibibyte(&from);
    let rcopy = program(Program::new("rcopy"));
    let mut server = rcopy.clone().line(&format!("-p {port}")).spawn();
    server.wait_until_listening(port);
    let files = format!("{theirs}/from 127.0.0.1:{theirs}/to");
    let printed = rcopy.line(&format!("{files} -p {port}")).run_for(LIMIT).success();
    assert_eq!(checksum(&from), checksum(&to), "{printed}\n{}", server.output());
}

#[test]
fn rcopy_of_a_gibibyte_is_bit_exact() {
    or_skip!(installed("rcopy"));
    let folder = Folder::inside(&scratch(), "rcopy");
    let path = folder.path().display().to_string();
    rcopy_moves_a_gibibyte(&folder, &path, |program| program);
}

#[test]
fn rcopy_of_a_gibibyte_is_exact_with_the_other_debians() {
    let debian = or_skip!(Debian::other());
    let folder = Folder::inside(&debian.outside("/var/tmp"), "urnic-rcopy");
    let name = folder.path().file_name().expect("a name").display();
    let there = format!("/var/tmp/{name}");
    rcopy_moves_a_gibibyte(&folder, &there, |program| debian.program(program));
}
