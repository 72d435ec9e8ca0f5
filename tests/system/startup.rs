//! Start-up at a live listener: what is refused, how, and that nothing of it costs anybody else anything.

use std::time::Duration;

use urnic_tests::or_skip;
use urnic_tests::peer::{Peer, hex, sealed};
use urnic_tests::victim::{SUCCESS, Victim, send};

const REQUEST_KEY: &str = "4d504120 49442052 65712046 72616d65";
const RTR: &str = "000ec140 00000001 00000000 00000000 ebd34c5f";

/// Sends these bytes to the listener and expects the end with nothing before it; then a genuine peer gets through.
#[track_caller]
fn refused_without_a_word(bytes: &[u8]) {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut stranger = Peer::call(victim.listener());
    stranger.send(bytes);
    stranger.end();
    gets_through(&mut victim);
    victim.leaves();
}

#[track_caller]
fn gets_through(victim: &mut Victim) {
    let mut peer = victim.connect();
    peer.send(&send(1, b"hello"));
    assert_eq!(victim.completion().status, SUCCESS);
    victim.is_healthy();
}

#[test]
fn mpa_s_04_a_wrong_key_is_closed_without_a_word() {
    refused_without_a_word(&hex("4d504120 49442052 65702046 72616d65 40010000"));
    refused_without_a_word(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    refused_without_a_word(&[0; 64]);
}

#[test]
fn mpa_s_09_an_unknown_revision_is_closed() {
    for revision in ["03", "81", "ff"] {
        refused_without_a_word(&hex(&format!("{REQUEST_KEY} 40 {revision} 0000")));
    }
}

#[test]
fn mpa_s_10_private_data_beyond_the_limit_is_closed() {
    let mut frame = hex(&format!("{REQUEST_KEY} 40 01 0201"));
    frame.extend([0; 513]);
    refused_without_a_word(&frame);
}

#[test]
fn mpa_s_06_silence_and_half_frames_are_closed_in_time() {
    let variables = [("URNIC_MPA_STARTUP_TIMEOUT_RESPONDER_S", "1")];
    let mut victim = or_skip!(Victim::start(4, &variables));
    let mut silent = Peer::call(victim.listener());
    let mut half = Peer::call(victim.listener());
    half.send(&victim.request()[..19]);
    let mut almost = Peer::call(victim.listener());
    let request = victim.request();
    almost.send(&request[..request.len() - 1]);
    silent.end();
    half.end();
    almost.end();
    gets_through(&mut victim);
    victim.leaves();
}

#[test]
fn mpa_s_13_nothing_is_sent_before_the_first_fpdu() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.call();
    victim.sends();
    peer.stays_silent(Duration::from_millis(400));
    peer.send(&hex(RTR));
    let ulpdu = peer.ulpdu();
    assert_eq!(ulpdu[..18], hex("4143 00000000 00000000 00000001 00000000"));
    let completion = victim.completion();
    assert_eq!((completion.status, completion.wr_id), (SUCCESS, 1000));
    victim.leaves();
}

#[test]
fn mpa_s_21_an_rtr_that_never_comes_is_not_waited_for_for_ever() {
    let victim = or_skip!(Victim::start(4, &[("URNIC_MPA_RTR_TIMEOUT_S", "1")]));
    let mut peer = victim.call();
    // EMPA-23: no Terminate from a responder whose fence is closed.
    peer.end();
    victim.leaves();
}

#[test]
fn empa_18_the_rtr_takes_no_receive_and_makes_no_completion() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.connect();
    victim.is_healthy();
    assert_eq!(victim.poll().status, -1);
    peer.send(&send(1, b"hello"));
    let completion = victim.completion();
    assert_eq!((completion.status, completion.wr_id), (SUCCESS, 0));
    victim.leaves();
}

#[test]
fn mpa_s_14_fpdus_right_behind_the_request_s_answer_are_taken() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = victim.call();
    peer.send(&[hex(RTR), send(1, b"hello"), send(2, b"again")].concat());
    assert_eq!(victim.completion().wr_id, 0);
    assert_eq!(victim.completion().wr_id, 1);
    victim.leaves();
}

#[test]
fn mpa_s_15_bytes_behind_the_request_before_the_reply_are_malformed() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let mut peer = Peer::call(victim.listener());
    // In one segment, so that the Reply cannot come between.
    peer.send(
        &[
            victim.request(),
            sealed(&hex("c140 00000001 0000000000000000")),
            vec![1, 2, 3, 4],
        ]
        .concat(),
    );
    // Whether the Reply went out already is chance; that these octets are not taken for an FPDU stream of ours is not.
    peer.finish();
    peer.rest();
    assert_ne!(victim.completion().status, SUCCESS);
    victim.is_healthy();
    victim.leaves();
}

/// Flags of the Reply to a call with these numbers.
fn reply_to(victim: &Victim, request: &[u8]) -> u8 {
    let mut peer = Peer::call(victim.listener());
    peer.send(request);
    peer.take(20)[16]
}

#[test]
fn a_call_for_no_queue_pair_and_one_with_a_wrong_psn_are_rejected() {
    const REJECT: u8 = 0x20;
    let mut victim = or_skip!(Victim::start(4, &[]));
    let good = victim.request();
    // The introduction ends with from, to, sq_psn, rq_psn (4 octets each) and the nonce (8).
    let at = |field: usize| good.len() - 24 + 4 * field + 3;
    for field in 0..4 {
        let mut bad = good.clone();
        bad[at(field)] ^= 0xff;
        assert_eq!(reply_to(&victim, &bad) & REJECT, REJECT, "field {field}");
    }
    gets_through(&mut victim);
    // And a second one, for a queue pair that is connected.
    assert_eq!(reply_to(&victim, &good) & REJECT, REJECT);
    victim.is_healthy();
    victim.leaves();
}

#[test]
fn a_stranger_who_speaks_mpa_is_rejected_in_good_form() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    assert_eq!(
        reply_to(&victim, &hex(&format!("{REQUEST_KEY} 40 01 0000"))) & 0x20,
        0x20
    );
    gets_through(&mut victim);
    victim.leaves();
}

/// Memory of a process, in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .expect("a size");
    line.split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("a number")
}

#[test]
fn thousands_of_idle_and_babbling_strangers_cost_little_and_stall_nobody() {
    let mut victim = or_skip!(Victim::start(4, &[]));
    let before = resident(victim.pid());
    let mut strangers = Vec::new();
    for number in 0..3000_u32 {
        let mut stranger = Peer::call(victim.listener());
        match number % 4 {
            0 => {}
            1 => stranger.send(&hex(REQUEST_KEY)),
            2 => stranger.send(&number.to_le_bytes().repeat(50)),
            _ => stranger.finish(),
        }
        // Held open by us, as an attacker would; a thousand at a time, for our own limit's sake.
        strangers.push(stranger);
        if strangers.len() > 1000 {
            strangers.remove(0);
        }
    }
    gets_through(&mut victim);
    let grown = resident(victim.pid()).saturating_sub(before);
    assert!(grown < 64 * 1024, "{grown} KiB for strangers");
    victim.leaves();
}
