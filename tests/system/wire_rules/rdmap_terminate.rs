//! The Terminate, ours and the peer's (RFC 5040 §§4.8, 5.4, 7; conformance §5.4).

use urnic_tests::or_skip;
use urnic_tests::peer::{End, hex};
use urnic_tests::startup::CRC;
use urnic_tests::target_process::{QpParams, ROLES, Role, TargetProcess, opcode, status};
use urnic_tests::ulpdu::{complaint, invalidating, read_request, send, tagged, terminate, untagged, write};

use super::rdmap::{READ, reads};
use super::{ALL_FLUSHED, Scene};

// Terminates of the target.

#[test]
fn rdm_t_02_terminates_carry_the_headers_at_fault() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let at = target.buffer();
    for role in ROLES {
        // A Write: M and D, length 0x12, 14 bytes of header (as vector F-TERM-WRITE-111).
        let mut link = target.link(role);
        let stag = target.stag("all");
        link.peer.send_ulpdus(&[write(stag, at + 4093, b"abcd")]);
        let mut expected = hex("4147 00000000 00000002 00000001 00000000 1101c000 0012 c140");
        expected.extend(stag.to_be_bytes());
        expected.extend((at + 4093).to_be_bytes());
        assert_eq!(link.peer.ulpdu(), expected);

        // A Read Request: M, D and R, length 0x2e, 18 bytes and 28 (as vector F-TERM-RREQ-012).
        let mut link = target.link(role);
        let request = read_request(1, target.stag("write"), at, 64);
        link.peer.send_ulpdus(&[&request]);
        let mut expected = hex("4147 00000000 00000002 00000001 00000000 0102e000 002e");
        expected.extend(&request);
        assert_eq!(link.peer.ulpdu(), expected);
    }
    target.quits();
}

#[test]
fn rdm_s_04_the_terminate_of_an_invalidate_has_no_rdmap_header() {
    let mut target = or_skip!(TargetProcess::start(&[]));
    let mut link = target.link(Role::Responder);
    let foreign = target.stag("foreign");
    link.peer
        .send_ulpdus(&[invalidating(0x41, 0x44, foreign, 0, 1, 0, b"hello")]);
    // As vector F-TERM-INV-019.
    let mut expected = hex("4147 00000000 00000002 00000001 00000000 0109c000 0017 4144");
    expected.extend(foreign.to_be_bytes());
    expected.extend(hex("00000000 00000001 00000000"));
    assert_eq!(link.peer.ulpdu(), expected);
    target.quits();
}

#[test]
fn rdm_t_07_a_local_error_is_reported_without_headers() {
    // An lkey that does not exist.
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        let bad = format!("#{:x}", scene.target.no_stag());
        let at = scene.target.buffer();
        scene.target.sends(link.qp, 99, 5);
        scene
            .target
            .posts(link.qp, opcode::SEND, 100, &bad, at, 5, (0, 0));
        assert_eq!(link.peer.ulpdu()[..2], [0x41, 0x43]);
        assert_eq!(link.peer.ulpdu(), terminate(&[0; 4]));
        let completions = [
            &[(99, status::SUCCESS), (100, status::LOC_PROT_ERR)],
            &ALL_FLUSHED[..],
        ];
        scene.is_over(&mut link, End::Closed, &completions.concat());
    }
    scene.ends();
}

// Terminates of the peer.

/// In both roles: requests on the wire, then this Terminate. The target does not answer it, and its
/// requests complete with these statuses.
#[track_caller]
fn terminated_by(scene: &mut Scene, ulpdu: impl Fn(&[u8], &[u8]) -> Vec<u8>, read: u64, sent: u64) {
    for role in ROLES {
        let mut link = scene.target.link(role);
        reads(&mut scene.target, &mut link, 100, 1);
        let request = {
            let (stag, at) = (scene.target.stag("in"), scene.target.address("inbox"));
            let mut header = stag.to_be_bytes().to_vec();
            header.extend(at.to_be_bytes());
            header.extend((READ as u32).to_be_bytes());
            header.extend(hex("00000200 00007f00 00002000"));
            untagged(0x41, 0x41, 1, 1, 0, &header)
        };
        scene.target.sends(link.qp, 101, 5);
        let message = link.peer.ulpdu();
        let bad = ulpdu(&request, &message);
        link.peer.send_ulpdus(&[&bad]);
        // RDM-T-05: an orderly end, at once; RDM-T-06: all that is outstanding fails.
        let completions = [&[(100, read), (101, sent)], &ALL_FLUSHED[..]].concat();
        scene.is_over(&mut link, End::Closed, &completions);
    }
    scene.continues();
}

#[test]
fn rdm_t_06_a_terminate_fails_outstanding_requests() {
    use status::*;
    let mut scene = or_skip!(Scene::start(&[]));
    // About the stream: a bad CRC (vector F-TERM-202), a local catastrophe.
    terminated_by(
        &mut scene,
        |_, _| terminate(&hex("20020000")),
        RETRY_EXC_ERR,
        FLUSHED,
    );
    terminated_by(
        &mut scene,
        |_, _| terminate(&hex("00000000")),
        REM_OP_ERR,
        FLUSHED,
    );
    // About the Read, with all headers.
    let about_read = |request: &[u8], _: &[u8]| terminate(&[&hex("0102e000 002e")[..], request].concat());
    terminated_by(&mut scene, about_read, REM_ACCESS_ERR, FLUSHED);
    // About the Send: no buffer, too long.
    let about_send = |control: &str, message: &[u8]| {
        let len = (message.len() as u16).to_be_bytes();
        terminate(&[&hex(control)[..], &len, &message[..18]].concat())
    };
    terminated_by(
        &mut scene,
        |_, message| about_send("1202c000", message),
        FLUSHED,
        RNR_RETRY_EXC_ERR,
    );
    terminated_by(
        &mut scene,
        |_, message| about_send("1205c000", message),
        FLUSHED,
        REM_INV_REQ_ERR,
    );
    scene.ends();
}

#[test]
fn rdm_t_09_terminates_in_odd_forms_are_understood() {
    use status::*;
    let mut scene = or_skip!(Scene::start(&[]));
    let plain = |payload: &'static str| move |_: &[u8], _: &[u8]| terminate(&hex(payload));
    // cxgb4 and irdma: LLP errors under error type 3 (vector for 2/0/07).
    terminated_by(&mut scene, plain("23070000"), RETRY_EXC_ERR, FLUSHED);
    // siw on little-endian machines: nibbles swapped, M, D, R in the low bits. 0/1/02, with all
    // headers.
    terminated_by(
        &mut scene,
        |request, _| terminate(&[&hex("10020700 002e")[..], request].concat()),
        REM_ACCESS_ERR,
        FLUSHED,
    );
    // siw: the R flag without an RDMA header.
    terminated_by(
        &mut scene,
        |request, _| terminate(&[&hex("0102e000 0012")[..], &request[..18]].concat()),
        REM_ACCESS_ERR,
        FLUSHED,
    );
    // Headers that are cut off, at several places.
    for len in [4, 5, 6, 16] {
        terminated_by(
            &mut scene,
            |request, _| terminate(&[&hex("0102e000 002e")[..], request].concat()[..len]),
            REM_ACCESS_ERR,
            FLUSHED,
        );
    }
    // M alone; D without M; reserved bits.
    terminated_by(&mut scene, plain("01018000 002e"), REM_ACCESS_ERR, FLUSHED);
    terminated_by(
        &mut scene,
        |request, _| terminate(&[&hex("01024000 002e")[..], &request[..18]].concat()),
        REM_ACCESS_ERR,
        FLUSHED,
    );
    terminated_by(&mut scene, plain("20021fff"), RETRY_EXC_ERR, FLUSHED);
    // Numbers without a meaning.
    for payload in ["70000000", "f0ff0000", "20990000"] {
        terminated_by(&mut scene, plain(payload), RETRY_EXC_ERR, FLUSHED);
    }
    // About messages that the target never sent: another MSN, a Write elsewhere.
    for header in [
        "1202c000 0017 4143 00000000 00000000 0000004d 00000000",
        "1100c000 0012 c140 deadbeef 00000000 00000000",
    ] {
        let status = if header.starts_with("12") {
            RNR_RETRY_EXC_ERR
        } else {
            REM_ACCESS_ERR
        };
        terminated_by(&mut scene, plain(header), status, FLUSHED);
    }
    // More after it than belongs there.
    terminated_by(
        &mut scene,
        |_, _| terminate(&[&hex("20020000")[..], &[0x47; 1000]].concat()),
        RETRY_EXC_ERR,
        FLUSHED,
    );
    scene.ends();
}

#[test]
fn rdm_t_09_a_swapped_start_up_error_is_understood() {
    // siw's 2/0/06; 0/2/06 would be about a message, and there was none (vector, conformance
    // §13.5).
    let mut scene = or_skip!(Scene::start(&[]));
    let mut link = scene.target.link(Role::Responder);
    link.peer.send(&hex(
        "00164147 00000000 00000002 00000001 00000000 02060000 6f77b973",
    ));
    scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
    scene.target.sends(link.qp, 100, 5);
    scene.target.completes(link.qp, &[(100, status::RETRY_EXC_ERR)]);
    scene.ends();
}

#[test]
fn rdm_t_04_a_terminate_needs_no_receive() {
    let mut scene = or_skip!(Scene::start(&[]));
    let params = QpParams {
        receives: 0,
        ..QpParams::default()
    };
    for role in ROLES {
        let mut link = scene.target.link_as(role, &params, CRC);
        link.peer.send_ulpdus(&[terminate(&hex("20020000"))]);
        scene.is_over(&mut link, End::Closed, &[]);
    }
    scene.ends();
}

#[test]
fn rdm_t_08_a_bad_terminate_makes_no_loop() {
    let mut scene = or_skip!(Scene::start(&[]));
    let good = hex("20020000");
    for bad in [
        // MSN, MO, L, queues, T (the place of the Invalidate STag has no meaning); too short for a
        // control field.
        untagged(0x41, 0x47, 2, 0, 0, &good),
        untagged(0x41, 0x47, 2, 5, 0, &good),
        untagged(0x41, 0x47, 2, 1, 4, &good),
        untagged(0x01, 0x47, 2, 1, 0, &good),
        untagged(0x41, 0x47, 0, 1, 0, &good),
        untagged(0x41, 0x47, 1, 1, 0, &good),
        untagged(0x41, 0x47, 9, 1, 0, &good),
        tagged(0xc1, 0x47, 1, 0, &good),
        terminate(b""),
        terminate(&good[..3]),
    ] {
        for role in ROLES {
            let mut link = scene.target.link(role);
            link.peer.send_ulpdus(&[&bad]);
            // No answer, and the end: after an invalid Terminate, by a reset.
            scene.is_over(&mut link, End::Reset, &ALL_FLUSHED);
        }
    }
    scene.ends();
}

#[test]
fn rdm_t_04_two_terminates_that_cross_make_no_third() {
    let mut scene = or_skip!(Scene::start(&[]));
    for role in ROLES {
        let mut link = scene.target.link(role);
        let bad = send(9, b"hello");
        link.peer.send_ulpdus(&[bad.clone(), terminate(&hex("20020000"))]);
        assert_eq!(link.peer.ulpdu(), complaint(0x1203, &bad));
        scene.is_over(&mut link, End::Closed, &ALL_FLUSHED);
        assert_eq!(scene.target.event().1, link.qp.index);
    }
    scene.ends();
}
