//! The engines of RPC-over-RDMA with outstanding calls, against a peer that sends any bytes and a
//! device that executes all requests.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_rpc_rdma::engine::{Action, Call, Config, Connection, Event, Exposed, Item, Reply, Role, Terms};
use urnic_rpc_rdma::{Limits, Segment};

const LIMITS: Limits = Limits {
    segments: 64,
    read_bytes: 1 << 16,
};

fn call(xid: u32) -> Call<()> {
    let mut message = [0; 40];
    message[..4].copy_from_slice(&xid.to_be_bytes());
    let item = |len| Item {
        offset: 40,
        memory: (),
        len,
    };
    Call {
        message: message.into(),
        arguments: vec![item(5000)],
        results: vec![item(3000)],
        max_reply: 2000,
    }
}

/// Executes the actions of the end and replies to its events; returns the bytes of memory that the
/// end holds for calls of the peer.
fn run(end: &mut Connection<()>, receives: &mut usize) -> u64 {
    let mut held = 0;
    loop {
        let (actions, events) = (end.actions(), end.events());
        if actions.is_empty() && events.is_empty() {
            return held;
        }
        for action in actions {
            match action {
                Action::Receive(count) => *receives += count,
                Action::Register { region, what, .. } => {
                    let length = match what {
                        Exposed::Memory((), len) | Exposed::Fresh(len) => len,
                        Exposed::Bytes(bytes) => bytes.len() as u32,
                    };
                    let handle = region.0 as u32;
                    let segment = Segment {
                        handle,
                        length,
                        offset: 0,
                    };
                    end.registered(region, vec![segment]);
                }
                Action::Release { region, .. } => end.released(region),
                Action::Send { work, pieces, .. } => {
                    assert!(pieces.iter().map(|piece| piece.len).sum::<usize>() <= 1024);
                    end.completed(work);
                }
                Action::Read { work, remote, .. } => {
                    held += u64::from(remote.length);
                    end.completed(work);
                }
                Action::Write { pieces, remote } => {
                    assert_eq!(
                        pieces.iter().map(|piece| piece.len).sum::<usize>(),
                        remote.length as usize
                    );
                }
                Action::Close(_) => {
                    end.disconnected();
                    *receives = 0;
                    end.connected(Terms::default());
                }
            }
        }
        for event in events {
            if let Event::CallReceived(incoming) = event {
                assert!(incoming.items.iter().map(|(_, len)| len).sum::<u64>() <= LIMITS.read_bytes);
                let mut message = vec![0; 1200];
                message[..4].copy_from_slice(&incoming.xid.to_be_bytes());
                message[7] = 1;
                let results = vec![Item {
                    offset: 1200,
                    memory: (),
                    len: 77,
                }];
                let reply = Reply {
                    message: message.into(),
                    results,
                };
                let _ = end.reply(incoming.call, &reply);
            }
        }
    }
}

fuzz_target!(|input: &[u8]| {
    for role in [Role::Client, Role::Server] {
        let mut end = Connection::new(&Config {
            limits: LIMITS,
            grant: 3,
            request: 3,
            ..Config::new(role)
        });
        let mut receives = 0;
        end.connected(Terms::default());
        end.peer_takes_calls();
        for xid in 0..4 {
            assert!(end.call(call(xid)).is_ok());
        }
        let mut left = input;
        while let [len, flags, rest @ ..] = left {
            run(&mut end, &mut receives);
            // A device delivers no message for which no receive is posted.
            if receives == 0 {
                break;
            }
            receives -= 1;
            let (message, next) = rest.split_at(usize::from(*len).min(rest.len()));
            end.received(message, (flags & 1 != 0).then_some(u32::from(flags >> 1)));
            assert!(run(&mut end, &mut receives) <= LIMITS.read_bytes);
            assert!(receives <= 3 + 4);
            left = next;
        }
    }
});
