//! Calls of a server to its client (RFC 8167) with an outside peer: its calls and replies are bytes
//! that are written here, as client and as server.

use std::net::TcpListener;

use urnic_tests::build::example;
use urnic_tests::peer::Peer;
use urnic_tests::program::{Program, Running};
use urnic_tests::startup::{CRC, Frame};

use super::{ABSENT, DONE_NOTHING, ERROR, GRANT, MSG, Requester, X, err_chunk, msg, of, reply, words};

/// The program of the example: NULL, `count_down` forward, and `step` backward.
const PROGRAM: u32 = 0x2000_0002;
const COUNT_DOWN: u32 = 1;
const STEP: u32 = 2;
/// Credits of backward calls.
const BACKWARD: u32 = 8;

/// An RPC call with one word of arguments.
fn call(procedure: u32, argument: u32) -> [u32; 11] {
    [X, 0, 2, PROGRAM, 1, procedure, 0, 0, 0, 0, argument]
}

/// A message in an RDMA_MSG without lists, with these credits.
fn with_credits(credits: u32, payload: &[u32]) -> Vec<u8> {
    words(&[&[X, 1, credits, MSG], &ABSENT, payload])
}

fn callback(line: &str) -> Running {
    let callback = Program::new(example("rpc-rdma/verbs", "callback")).line(line);
    // The peer's start-up is of revision 1.
    callback.env("URNIC_MPA_REVISION", "1").spawn()
}

/// A server of the example, and the hand-made client.
fn server() -> (Running, Requester) {
    let mut server = callback("serve 127.0.0.1:0");
    let port = server.wait_for_output("where it listens", |printed| {
        printed.strip_suffix('\n')?.rsplit(':').next()?.parse().ok()
    });
    let requester = Requester::at(port);
    (server, requester)
}

/// Receives the server's call to this procedure, which must have exactly these bytes, and returns
/// its xid.
#[track_caller]
fn is_called(client: &mut Requester, procedure: u32, argument: u32) -> u32 {
    let received = client.receives().expect("a backward call");
    let xid = u32::from_be_bytes(*received.first_chunk().expect("an xid"));
    assert_eq!(
        received,
        of(xid, with_credits(BACKWARD, &call(procedure, argument)))
    );
    xid
}

/// The server calls a client that is not ours: with one credit for its calls before the first
/// reply, a request for its own credits, and no chunks.
#[test]
fn rpc_bd_02_and_04_our_server_calls_an_outside_client() {
    let (_server, mut client) = server();
    client.sends(&with_credits(32, &call(COUNT_DOWN, 2)));
    for (procedure, argument) in [(0, 0), (STEP, 1), (STEP, 0)] {
        let xid = is_called(&mut client, procedure, argument);
        // An answer to another call, and an RDMA_ERROR to it, are not taken for the answer.
        client.sends(&of(xid ^ 1, with_credits(4, &DONE_NOTHING)));
        client.sends(&err_chunk(xid ^ 1));
        client.sends(&of(xid, with_credits(4, &DONE_NOTHING)));
    }
    let counted = [DONE_NOTHING.as_slice(), &[2]].concat();
    assert_eq!(client.receives(), Some(reply(&ABSENT, &counted)));
}

/// RDMA_ERROR ends the server's call. Its service then gives no answer, so the connection ends.
#[test]
fn rpc_bd_04_an_outside_clients_error_ends_our_servers_call() {
    let (mut server, mut client) = server();
    client.sends(&with_credits(32, &call(COUNT_DOWN, 1)));
    let xid = is_called(&mut client, 0, 0);
    client.sends(&words(&[&[xid, 1, 4, ERROR, 2]]));
    assert_eq!(client.receives(), None);
    server.wait_for_output("why its call failed", |printed| {
        printed
            .contains("could not use the header or its chunks")
            .then_some(())
    });
}

/// A server that is not ours calls our client while this waits for the answer to a call with the
/// same xid.
#[test]
fn rpc_bd_01_and_02_our_client_answers_an_outside_server() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("it is bound");
    let client = callback(&format!("call {address} 7"));
    let mut peer = Peer::accept(&listener);
    let request = Frame::read(&mut peer);
    assert!(request.request && request.revision == 1, "{request:?}");
    let accepted = Frame {
        request: false,
        flags: CRC,
        revision: 1,
        private_data: Vec::new(),
    };
    peer.send(&accepted.to_bytes());
    let mut server = Requester {
        peer,
        sent: 0,
        last: 0,
    };
    let received = server.receives().expect("a call");
    let xid = u32::from_be_bytes(*received.first_chunk().expect("an xid"));
    assert_eq!(received, of(xid, with_credits(GRANT, &call(COUNT_DOWN, 7))));
    // A call with a Write list is answered ERR_CHUNK; another xid is another call.
    server.sends(&of(xid ^ 1, msg(&[0, 1, 1, 7, 8, 0, 0, 0, 0], &call(STEP, 9))));
    let refused = words(&[&[xid ^ 1, 1, BACKWARD, ERROR, 2]]);
    assert_eq!(server.receives(), Some(refused));
    // A procedure that the binding does not name: PROC_UNAVAIL.
    server.sends(&of(xid, with_credits(2, &call(COUNT_DOWN, 9))));
    let unavailable = with_credits(BACKWARD, &[X, 1, 0, 0, 0, 3]);
    assert_eq!(server.receives(), Some(of(xid, unavailable)));
    for step in [6, 5] {
        server.sends(&of(xid, with_credits(2, &call(STEP, step))));
        let answer = of(xid, with_credits(BACKWARD, &DONE_NOTHING));
        assert_eq!(server.receives(), Some(answer));
    }
    server.sends(&of(
        xid,
        with_credits(GRANT, &[DONE_NOTHING.as_slice(), &[7]].concat()),
    ));
    let printed = client.wait().success();
    assert_eq!(printed, "step 6\nstep 5\ncounted down 28 bytes\n");
}
