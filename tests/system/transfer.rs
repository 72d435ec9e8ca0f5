//! Data arrives: all of it, once, in order, bit for bit.

use std::time::Duration;

use urnic_tests::program::Program;
use urnic_tests::{Pair, compiled, or_skip};

const LIMIT: Duration = Duration::from_secs(240);

fn pair(name: &str, options: &str) -> Result<Pair, String> {
    Ok(Pair::new(&Program::new(compiled(name)?).line(options)).within(LIMIT))
}

/// Transfers 256 MiB by each operation; the chunk is no power of two, so that FPDUs end anywhere.
fn arrives_bit_exact(crc: bool, markers: bool) {
    for operation in ["send", "write", "read"] {
        let pair = or_skip!(pair(
            "transfer",
            &format!("-o {operation} -b 268435456 -c 1000003")
        ));
        let pair = pair
            .env("URNIC_MPA_CRC", &crc.to_string())
            .env("URNIC_MPA_MARKERS", &markers.to_string());
        // CRCs and markers are TCP's.
        let pair = pair.env("URNIC_SAME_HOST", "off");
        pair.env("URNIC_LOG", "error").succeeds();
    }
}

#[test]
fn a_quarter_gibibyte_through_memory() {
    for operation in ["send", "write", "read"] {
        or_skip!(pair(
            "transfer",
            &format!("-o {operation} -b 268435456 -c 1000003")
        ))
        .succeeds();
    }
}

#[test]
fn one_read_goes_to_a_list_of_places() {
    for identity in ["iwarp", "roce"] {
        let pair = or_skip!(pair("read_list", "")).env("URNIC_IDENTITY", identity);
        let both = pair.succeeds();
        assert!(both.client.output.contains("elements"), "{}", both.client);
    }
}

#[test]
fn a_quarter_gibibyte_with_crc() {
    arrives_bit_exact(true, false);
}

#[test]
fn a_quarter_gibibyte_with_crc_and_markers() {
    arrives_bit_exact(true, true);
}

#[test]
fn a_quarter_gibibyte_with_neither() {
    arrives_bit_exact(false, false);
}

#[test]
fn a_quarter_gibibyte_with_markers() {
    arrives_bit_exact(false, true);
}

#[test]
fn one_message_of_a_quarter_gibibyte() {
    for operation in ["send", "write", "read"] {
        or_skip!(pair(
            "transfer",
            &format!("-o {operation} -b 268435456 -c 268435456")
        ))
        .succeeds();
    }
}

#[test]
fn messages_of_every_small_size() {
    for chunk in [1, 2, 3, 5, 7, 13, 509, 513] {
        for operation in ["send", "write", "read"] {
            or_skip!(pair("transfer", &format!("-o {operation} -b 4099 -c {chunk}"))).succeeds();
        }
    }
}

/// A program that polls the completion of a Write and then notifies its peer by TCP.
fn writes_are_delivered_when_they_complete(rounds: [u32; 3]) {
    for (size, rounds) in [8, 4096, 1 << 20].into_iter().zip(rounds) {
        let ends = or_skip!(pair("delivered", &format!("-s {size} -n {rounds}"))).succeeds();
        let expected = format!("{rounds} rounds, 0 stale");
        assert!(ends.server.output.contains(&expected), "{}", ends.server);
    }
}

#[test]
fn a_completed_write_is_in_the_peers_memory() {
    writes_are_delivered_when_they_complete([5000, 5000, 300]);
}

#[test]
#[ignore = "long: make soak"]
fn a_hundred_thousand_completed_writes_are_in_the_peers_memory() {
    writes_are_delivered_when_they_complete([100_000, 100_000, 100_000]);
}

#[test]
fn a_million_small_messages_come_once_and_in_order() {
    or_skip!(pair("stream", "-n 1000000 -s 16")).succeeds();
}

#[test]
#[ignore = "long: make soak"]
fn ten_million_small_messages_come_once_and_in_order() {
    or_skip!(pair("stream", "-n 10000000 -s 16"))
        .within(Duration::from_secs(1800))
        .succeeds();
}

#[test]
fn three_hundred_queue_pairs_in_one_process() {
    or_skip!(pair("stream", "-q 300 -n 1000 -s 64")).succeeds();
}

#[test]
fn completed_sends_arrive_from_a_destroyed_queue_pair() {
    for size in [64, 65_536, 1_000_000] {
        or_skip!(pair("stream", &format!("-d destroy -n 64 -s {size}"))).succeeds();
    }
}

#[test]
fn completed_sends_arrive_from_a_program_that_ended() {
    for size in [64, 65_536, 1_000_000] {
        or_skip!(pair("stream", &format!("-d exit -n 64 -s {size}"))).succeeds();
    }
}
