//! `wire=roce` over a link that is long, loses packets, and lets them arrive twice or out of order:
//! a process of ours passes the packets of two hosts on (`far_link.c`).

use std::time::Duration;

use urnic_tests::netns::Netns;
use urnic_tests::program::{Program, Running};
use urnic_tests::{Pair, compiled, or_skip};

use crate::roce::roce;

const LIMIT: Duration = Duration::from_secs(180);

/// The address of the first host.
const SERVER: &str = "10.78.0.1";

/// Two hosts, and the link between them, whose options these are.
fn joined(options: &str) -> Result<([Netns; 2], Running), String> {
    let program = compiled("far_link")?;
    let hosts = Netns::two()?;
    let [a, b] = [&hosts[0], &hosts[1]].map(Netns::holder);
    let program = Program::plain(program).line(&format!("{options} {a} {b}"));
    let mut link = hosts[0].program(program).spawn();
    link.wait_for_output("joined", |output| output.contains("joined").then_some(()));
    for (host, number) in hosts.iter().zip(1..) {
        host.ip(&format!("addr add 10.78.0.{number}/24 dev far0"));
        host.ip("link set far0 up");
    }
    Ok((hosts, link))
}

/// `transfer` between the hosts, which compares every byte.
fn transfers(hosts: &[Netns; 2], options: &str) {
    let program = compiled("transfer").expect("it was compiled");
    let program = roce(program.to_str().expect("a path")).env("URNIC_WIRE", "roce");
    let mut pair = Pair::new(&program.line(&format!("-g 3 {options}")))
        .at(SERVER)
        .within(LIMIT);
    pair.server = hosts[0].program(pair.server);
    pair.client = hosts[1].program(pair.client);
    pair.succeeds();
}

/// One packet of a hundred has each fault, in each direction; a packet takes 20 ms.
#[test]
fn transfers_over_a_far_link_that_loses_packets_are_bit_exact() {
    or_skip!(compiled("transfer"));
    let (hosts, _link) = or_skip!(joined("-d 20000 -l 101 -r 97 -t 103"));
    for operation in ["send", "write", "read"] {
        transfers(&hosts, &format!("-o {operation} -b 1000000 -c 30011 -t 16"));
    }
}

/// The same faults without the distance, so that more packets are under way.
#[test]
fn transfers_over_a_near_link_that_loses_packets_are_bit_exact() {
    or_skip!(compiled("transfer"));
    let (hosts, _link) = or_skip!(joined("-d 200 -l 101 -r 97 -t 103"));
    for operation in ["send", "write", "read"] {
        transfers(&hosts, &format!("-o {operation} -b 4000000 -c 100003 -t 16"));
    }
}
