//! DDP over SCTP (RFC 5043): programs here over urnic, and the SCTP of Linux in the guest
//! (`tests/programs/sctp_peer.c`) as the peer.

use urnic_tests::guest::{Guest, HOST};
use urnic_tests::or_skip;
use urnic_tests::program::{Program, Running};
use urnic_tests::shell::LIMIT;
use urnic_tests::skip::installed;
use urnic_tests::wait::{free_port, until};

use crate::sctp_kernel::{count, fragments, is_ddp_over_sctp};

/// A program over urnic's device, with SCTP as its lower layer.
fn program(name: &str, line: &str) -> Program {
    Program::new(name).line(line).env("URNIC_LLP", "sctp")
}

/// A program that listens at a port, which is that of UDP and of SCTP.
#[track_caller]
fn listener(name: &str, line: &str) -> (Running, u16) {
    let port = free_port();
    let mut running = program(name, &line.replace("PORT", &port.to_string())).spawn();
    running.wait_until_listening(port);
    (running, port)
}

/// The kernel connects to a program here. Returns the output of the kernel's end, and of ours.
#[track_caller]
fn kernel_connects(guest: &Guest, peer: &str, options: &str, (name, line): (&str, &str)) -> (String, String) {
    let (ours, port) = listener(name, line);
    let theirs = guest.start(&format!("{peer} active {HOST} {port} encap {port} {options}"));
    let (ok, printed) = theirs.ends();
    assert!(ok, "--- the kernel:\n{printed}\n--- urnic:\n{}", ours.output());
    (printed, ours.wait_for(LIMIT).to_string())
}

/// A program here connects to the kernel, which listens at the guest's port.
#[track_caller]
fn urnic_connects(guest: &Guest, peer: &str, options: &str, (name, line): (&str, &str)) -> (String, String) {
    let theirs = guest.sctp_listener(&format!("{peer} passive {} {options}", guest.port));
    let line = line.replace("PORT", &guest.port.to_string());
    let ours = program(name, &line).run_for(LIMIT);
    if !ours.ok() {
        guest.stop();
    }
    let (ok, printed) = theirs.ends();
    assert!(ok && ours.ok(), "--- the kernel:\n{printed}\n--- urnic:\n{ours}");
    (printed, ours.to_string())
}

#[test]
fn rping_both_ways() {
    or_skip!(installed("rping"));
    or_skip!(installed("tshark"));
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let server = ("rping", "-s -p PORT -v -V -C 20 -S 4000");
    for form in ["", "enhanced"] {
        let options = format!("rping 20 size 4000 {form}");
        let (theirs, _) = kernel_connects(&guest, peer, &options, server);
        assert_eq!(count(&theirs, "is well"), 20, "{theirs}");
    }
    let client = ("rping", "-c -a 127.0.0.1 -p PORT -v -V -C 20 -S 4000");
    let (theirs, ours) = urnic_connects(&guest, peer, "rping 1", client);
    assert_eq!(count(&theirs, "received Enhanced Initiate"), 1, "{theirs}");
    assert_eq!(count(&ours, "rdma-ping-"), 20, "{ours}");
    is_ddp_over_sctp(&guest.wire(), guest.port);
}

#[test]
fn sessions_share_an_association() {
    or_skip!(installed("ucmatose"));
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let before = fragments(&guest);
    let server = ("ucmatose", "-p PORT -c 4 -C 8 -S 3000");
    let (theirs, _) = kernel_connects(&guest, peer, "enhanced sessions 4 sends 8 size 3000", server);
    assert_eq!(count(&theirs, "of 3000 bytes"), 32, "{theirs}");
    assert_eq!(count(&theirs, "received Enhanced Accept"), 4, "{theirs}");

    assert_eq!(fragments(&guest), before);
}

#[test]
fn the_kernel_echoes_what_a_program_sends() {
    or_skip!(installed("rdma_client"));
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let client = ("rdma_client", "-s 127.0.0.1 -p PORT");
    let (theirs, _) = urnic_connects(&guest, peer, "", client);
    assert_eq!(count(&theirs, "received Send 1 of 16 bytes"), 1, "{theirs}");
}

#[test]
fn the_kernel_rejects_a_program() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let theirs = guest.sctp_listener(&format!("{peer} passive {} reject", guest.port));
    let line = format!("-c -a 127.0.0.1 -p {} -C 1", guest.port);
    let ours = program("rping", &line).run_for(LIMIT);
    assert!(!ours.ok() && ours.to_string().contains("REJECTED"), "{ours}");
    theirs.success();
}

#[test]
fn a_kernel_without_ddp_is_refused() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let (ours, port) = listener("rping", "-s -p PORT -C 1 -S 100");
    for adaptation in [0, 2] {
        let line = format!("{peer} active {HOST} {port} encap {port} adaptation {adaptation}");
        let (ok, printed) = guest.start(&line).ends();
        assert!(!ok && printed.contains("Connection refused"), "{printed}");
    }
    // The listener goes on.
    let line = format!("{peer} active {HOST} {port} encap {port} rping 1 size 100");
    let printed = guest.start(&line).success();
    assert_eq!(count(&printed, "is well"), 1, "{printed}");
    ours.wait_for(LIMIT);
}

#[test]
fn a_program_sees_that_the_kernel_has_ended() {
    or_skip!(installed("rping"));
    let guest = or_skip!(Guest::borrowed());
    let peer = or_skip!(guest.with_sctp());
    let (ours, port) = listener("rping", "-s -p PORT -v -S 1000");
    let line = format!("{peer} active {HOST} {port} encap {port} rping 1000000 size 1000");
    let theirs = guest.start(&line);
    let begun = until(LIMIT, || {
        (count(&ours.output(), "server ping data") > 3).then_some(())
    });
    assert!(begun.is_some(), "{}", ours.output());
    // The kernel ends the association of a killed program.
    guest.stop();
    let _ = theirs.ends();
    let ours = ours.wait_for(LIMIT).to_string();
    assert!(ours.contains("DISCONNECT"), "{ours}");
}
