//! Commands of arbitrary bytes: which commands fail, and that a parsed command equals its bytes.

use proptest::prelude::*;
use rustix::io::Errno;
use zerocopy::IntoBytes;

use super::super::abi::opcode;
use super::super::abi::{self, CmAddress, ConnParam, Header, address_len};
use super::super::command::{Command, Destination, Parameters, QueryKind, number};

/// The minimum lengths of a command's payload and response, from `rdma_user_cm.h`; `None` for an
/// unknown command.
fn min_lengths(command: u32) -> Option<(usize, usize)> {
    Some(match command {
        opcode::CREATE_ID => (24, 4),
        opcode::DESTROY_ID | opcode::LEAVE_MCAST | opcode::MIGRATE_ID => (16, 4),
        opcode::BIND_IP => (40, 0),
        opcode::RESOLVE_IP => (64, 0),
        opcode::RESOLVE_ROUTE | opcode::LISTEN | opcode::NOTIFY => (8, 0),
        opcode::QUERY_ROUTE => (16, 200),
        opcode::CONNECT => (276, 0),
        opcode::ACCEPT => (284, 0),
        opcode::REJECT => (264, 0),
        opcode::DISCONNECT => (4, 0),
        opcode::INIT_QP_ATTR => (16, 144),
        opcode::GET_EVENT => (8, 328),
        opcode::SET_OPTION | opcode::WRITE_CM_EVENT => (24, 0),
        opcode::JOIN_IP_MCAST => (48, 4),
        opcode::QUERY => (16, 8),
        opcode::BIND => (136, 0),
        opcode::RESOLVE_ADDR => (272, 0),
        opcode::JOIN_MCAST => (152, 4),
        _ => return None,
    })
}

fn written(command: u32, in_len: usize, out_len: u16, payload: &[u8]) -> Vec<u8> {
    let in_len = in_len as u16;
    let header = Header {
        command,
        in_len,
        out_len,
    };
    [header.as_bytes(), payload].concat()
}

#[test]
fn too_short_payloads_are_rejected() {
    let known: Vec<(u32, usize)> = (0..64).filter_map(|n| Some((n, min_lengths(n)?.0))).collect();
    assert_eq!(known.len(), 23);
    for (command, min_len) in known {
        for byte in [0, 0xff] {
            let short = written(command, min_len - 1, u16::MAX, &vec![byte; min_len - 1]);
            assert_eq!(Command::parse(&short), Err(Errno::INVAL), "command {command}");
        }
    }
}

/// A number at an offset of a payload.
fn word(payload: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes(payload[at..at + 4].try_into().unwrap())
}

fn long(payload: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(payload[at..at + 8].try_into().unwrap())
}

/// `struct rdma_ucm_conn_param` at an offset of a payload.
fn parameters(payload: &[u8], at: usize) -> Parameters {
    let param = &payload[at..at + size_of::<ConnParam>()];
    Parameters {
        qpn: word(param, 0),
        responder_resources: param[266],
        initiator_depth: param[267],
        retry_count: param[269].min(7),
        rnr_retry_count: param[270].min(7),
        flow_control: param[268] != 0,
        srq: param[265] != 0,
        private_data: param[8..8 + usize::from(param[264])].to_vec(),
    }
}

fn destination(payload: &[u8], at: usize, room: usize) -> Destination {
    Destination {
        address: long(payload, at),
        room,
    }
}

fn query_kind(option: u32) -> Option<QueryKind> {
    match option {
        opcode::query::ADDR => Some(QueryKind::Addresses),
        opcode::query::PATH => Some(QueryKind::Paths),
        opcode::query::GID => Some(QueryKind::Gids),
        _ => None,
    }
}

/// The group in a command.
fn group(bytes: &[u8]) -> Option<CmAddress> {
    CmAddress::parse(bytes).ok().flatten()
}

/// The command that `payload` encodes, with the addresses of `parsed`.
fn expected(parsed: &Command, command: u32, payload: &[u8], room: usize) -> Option<Command> {
    let word = |at| word(payload, at);
    let answer = |at| destination(payload, at, room);
    Some(match (command, parsed.clone()) {
        (opcode::CREATE_ID, _) => Command::CreateId {
            uid: long(payload, 0),
            answer: answer(8),
            port_space: word(16) as u16,
        },
        (opcode::DESTROY_ID, _) => Command::DestroyId {
            answer: answer(0),
            id: word(8),
        },
        (opcode::BIND_IP, Command::Bind { local, .. }) => Command::Bind { id: word(36), local },
        (opcode::BIND, Command::Bind { local, .. }) => Command::Bind { id: word(0), local },
        (opcode::RESOLVE_IP, Command::ResolveAddress { local, remote, .. }) => Command::ResolveAddress {
            id: word(56),
            local,
            remote,
        },
        (opcode::RESOLVE_ADDR, Command::ResolveAddress { local, remote, .. }) => Command::ResolveAddress {
            id: word(0),
            local,
            remote,
        },
        (opcode::RESOLVE_ROUTE, _) => Command::ResolveRoute { id: word(0) },
        (opcode::QUERY_ROUTE, _) => Command::QueryRoute {
            answer: answer(0),
            id: word(8),
        },
        (opcode::CONNECT, _) => Command::Connect {
            id: word(272),
            parameters: parameters(payload, 0),
        },
        (opcode::LISTEN, _) => Command::Listen {
            id: word(0),
            backlog: word(4),
        },
        (opcode::ACCEPT, _) => Command::Accept {
            uid: long(payload, 0),
            id: word(280),
            parameters: (payload[8 + 271] != 0).then(|| parameters(payload, 8)),
        },
        (opcode::REJECT, _) => Command::Reject {
            id: word(0),
            private_data: payload[8..8 + usize::from(payload[4])].to_vec(),
        },
        (opcode::DISCONNECT, _) => Command::Disconnect { id: word(0) },
        (opcode::INIT_QP_ATTR, _) => Command::InitQpAttr {
            answer: answer(0),
            id: word(8),
            state: word(12),
        },
        (opcode::GET_EVENT, _) => Command::GetEvent { answer: answer(0) },
        (opcode::SET_OPTION, _) => Command::SetOption {
            address: long(payload, 0),
            id: word(8),
            level: word(12),
            name: word(16),
            len: word(20),
        },
        (opcode::NOTIFY, _) => Command::Notify {
            id: word(0),
            event: word(4),
        },
        (opcode::WRITE_CM_EVENT, _) => Command::WriteEvent {
            id: word(0),
            event: word(8),
            status: word(12),
            argument: long(payload, 16),
        },
        (opcode::JOIN_IP_MCAST, _) => Command::JoinMulticast {
            answer: answer(0),
            uid: long(payload, 8),
            group: group(&payload[16..44])?,
            id: word(44),
        },
        (opcode::LEAVE_MCAST, _) => Command::LeaveMulticast {
            answer: answer(0),
            membership: word(8),
        },
        (opcode::MIGRATE_ID, _) => Command::MigrateId {
            answer: answer(0),
            id: word(8),
            fd: word(12),
        },
        (opcode::QUERY, _) => Command::Query {
            answer: answer(0),
            id: word(8),
            kind: query_kind(word(12))?,
        },
        (opcode::JOIN_MCAST, _) => {
            let group = group(&payload[24..])?;
            let fields = [word(20) & 0xffff, word(20) >> 16];
            (fields[0] == u32::from(address_len(&group)) && fields[1] < 2).then_some(())?;
            Command::JoinMulticast {
                answer: answer(0),
                uid: long(payload, 8),
                id: word(16),
                group,
            }
        }
        _ => return None,
    })
}

/// A payload of arbitrary bytes, with many small numbers so that options and address families
/// occur.
fn payload() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![3 => any::<u8>(), 2 => Just(0), 1 => 0..30u8];
    prop_oneof![
        proptest::collection::vec(byte.clone(), 0..60),
        proptest::collection::vec(byte, 250..400)
    ]
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_rejected_or_parsed(
        command in 0..30u32,
        missing in prop_oneof![3 => Just(0_usize), 1 => 0..20_usize],
        trailing in 0..20_usize,
        out in any::<u16>(),
        body in payload(),
    ) {
        let claimed = body.len().saturating_sub(trailing);
        let parsed = Command::parse(&written(command, claimed, out, &body));
        prop_assert_eq!(number(&written(command, claimed, out, &body)), Some(command));
        let payload = &body[..claimed];
        prop_assert_eq!(&parsed, &Command::parse(&written(command, claimed, out, payload)), "bytes after the payload change the result");
        if missing > 0 {
            let beyond = written(command, body.len() + missing, out, &body);
            prop_assert_eq!(Command::parse(&beyond), Err(Errno::INVAL));
        }
        let Some((payload_len, answer_len)) = min_lengths(command) else {
            let errno = if command == opcode::GET_OPTION { Errno::NOSYS } else { Errno::INVAL };
            prop_assert_eq!(parsed, Err(errno));
            return Ok(());
        };
        if claimed < payload_len {
            prop_assert_eq!(parsed, Err(Errno::INVAL));
            return Ok(());
        }
        let room = usize::from(out);
        match parsed {
            Ok(parsed) => {
                prop_assert!(room >= answer_len, "no room for the answer to {:?}", parsed);
                prop_assert_eq!(expected(&parsed, command, payload, room), Some(parsed));
            }
            Err(Errno::NOSPC) => prop_assert!(answer_len > 0 && room < 328, "ENOSPC although there is room"),
            Err(Errno::FAULT) => {
                let at = if command == opcode::CREATE_ID { 8 } else { 0 };
                prop_assert!(answer_len > 0 && long(payload, at) == 0, "EFAULT although there is an address");
            }
            Err(Errno::NOSYS) => prop_assert!(command == opcode::QUERY && word(payload, 12) > 2),
            // Addresses: none where one is required, an unknown family, a length out of range.
            Err(errno) => prop_assert!(
                matches!(
                    command,
                    opcode::BIND_IP
                        | opcode::RESOLVE_IP
                        | opcode::BIND
                        | opcode::RESOLVE_ADDR
                        | opcode::JOIN_IP_MCAST
                        | opcode::JOIN_MCAST
                ) && matches!(errno, Errno::INVAL | Errno::AFNOSUPPORT),
                "command {}: {}", command, errno
            ),
        }
    }
}

#[test]
fn response_sizes_match_rdma_user_cm_h() {
    assert_eq!(size_of::<abi::QpAttrResponse>(), 144);
    assert_eq!(size_of::<abi::PathResponse>(), 80);
}
