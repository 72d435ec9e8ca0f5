//! Tests of Upper Layer Bindings: the limits that a binding sets for a call and its reply (RFC 8166
//! §6).

#![allow(
    clippy::unwrap_used,
    reason = "clippy.toml allows it in test functions, not in what they share"
)]

use proptest::prelude::*;
use urnic_rpc_rdma::binding::{Binding, Bound, Misplaced, bound, check, may_go_backward};
use urnic_rpc_rdma::engine::{Action, Call, Config, Connection, Event, Item, Role, Terms};
use urnic_rpc_rdma::rpc::{CallHeader, MAX_REPLY_HEADER, SUCCESS_LEN, garbage_args, proc_unavail, success};
use urnic_rpc_rdma::{Body, Header, Limits};

const BINDINGS: [&dyn Binding; 1] = [&Files];
const READ: u32 = 6;
const WRITE: u32 = 7;

/// A binding like that of NFSv3: the data of WRITE and READ may move by chunk.
struct Files;

impl Binding for Files {
    fn program(&self) -> (u32, u32) {
        (100_003, 3)
    }

    fn argument(&self, procedure: u32, arguments: &[u8]) -> Option<usize> {
        let handle = u32::from_be_bytes(*arguments.first_chunk()?);
        let padded = (handle as usize).checked_next_multiple_of(4)?;
        // offset, count, stable, and the count of the data
        let offset = 4 + padded + 8 + 3 * 4;
        (procedure == WRITE && offset <= arguments.len()).then_some(offset)
    }

    fn result(&self, procedure: u32, _arguments: &[u8]) -> Option<u32> {
        (procedure == READ).then_some(5000)
    }

    fn max_results(&self, _procedure: u32, _arguments: &[u8]) -> Option<usize> {
        Some(136)
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn opaque(len: u32) -> Vec<u8> {
    let padded = len.next_multiple_of(4) as usize;
    [words(&[len]), vec![b'o'; padded]].concat()
}

/// A call of NFSv3 with AUTH_SYS of 20 bytes.
fn nfs(procedure: u32, arguments: &[u8]) -> Vec<u8> {
    let header = words(&[7, 0, 2, 100_003, 3, procedure, 1]);
    [&header[..], &opaque(20), &words(&[0, 0]), arguments].concat()
}

/// Bytes before the arguments.
const HEADER: usize = 28 + 24 + 8;

fn read_arguments(count: u32) -> Vec<u8> {
    [opaque(30), words(&[0, 4096, count])].concat()
}

/// Arguments of a WRITE up to the count of the data, inclusive.
fn write_arguments(count: u32) -> Vec<u8> {
    [opaque(30), words(&[0, 4096, count, 2, count])].concat()
}

#[test]
fn rpc_b_02_programs_without_a_binding_keep_everything_inline() {
    for (program, version) in [(100_003, 4), (100_004, 3), (0x4000_0000, 1)] {
        let mut call = nfs(WRITE, &write_arguments(5000));
        call[12..20].copy_from_slice(&words(&[program, version]));
        assert_eq!(bound(&BINDINGS, &call), Bound::default());
    }
}

#[test]
fn rpc_b_02_calls_protected_by_rpcsec_gss_are_not_reduced() {
    let call = |procedure, service| {
        let header = words(&[7, 0, 2, 100_003, 3, WRITE, 6, 24, 1, procedure, 9, service, 4, 0]);
        [&header[..], &words(&[6, 0]), &write_arguments(5000)].concat()
    };
    let eligible = |procedure, service| bound(&BINDINGS, &call(procedure, service)).argument.is_some();
    assert!(eligible(0, 1), "authentication alone");
    assert!(!eligible(0, 2) && !eligible(0, 3), "integrity, privacy");
    assert!(!eligible(1, 1) && !eligible(3, 1), "set-up and end of a context");
}

/// A header of a reply may have a verifier of 400 bytes (RFC 5531 §8.2), as with RPCSEC_GSS, and it
/// ends with accept_stat and two words at most.
#[test]
fn rpc_g_02_the_longest_reply_includes_the_longest_verifier() {
    let longest = words(&[7, 1, 0, 6, 400]).len() + 400 + words(&[2, 3, 3]).len();
    assert_eq!(MAX_REPLY_HEADER, longest);
    for flavor in [1, 6] {
        let mut call = nfs(READ, &read_arguments(5000));
        call[24..28].copy_from_slice(&words(&[flavor]));
        // RPCSEC_GSS version 1, data, sequence number 9, service none.
        call[32..48].copy_from_slice(&words(&[1, 0, 9, 1]));
        assert_eq!(bound(&BINDINGS, &call).max_reply, Some(longest + 136), "{flavor}");
    }
}

/// A binding with a call that a server may make to its client.
struct Callbacks;

impl Binding for Callbacks {
    fn program(&self) -> (u32, u32) {
        (0x4000_0000, 1)
    }

    fn max_results(&self, _procedure: u32, _arguments: &[u8]) -> Option<usize> {
        Some(0)
    }

    fn backward(&self, procedure: u32) -> bool {
        procedure == 2
    }
}

#[test]
fn a_binding_names_the_permitted_backward_calls() {
    let bindings: [&dyn Binding; 2] = [&Files, &Callbacks];
    let may = |program, version, procedure| {
        let call = urnic_rpc_rdma::rpc::call(7, program, version, procedure);
        may_go_backward(&bindings, &CallHeader::parse(&call).unwrap())
    };
    for (program, version) in [(100_003, 3), (0x4000_0000, 1), (0x4000_0009, 1)] {
        assert!(may(program, version, 0), "NULL is always permitted");
    }
    assert!(!may(100_003, 3, 2), "a binding permits no other call by default");
    assert!(may(0x4000_0000, 1, 2) && !may(0x4000_0000, 1, 3));
    assert!(may(0x4000_0000, 2, 3), "another version has no binding");
}

#[test]
fn headers_of_replies_have_their_status() {
    for (reply, status) in [(success(7), 0), (proc_unavail(7), 3), (garbage_args(7), 4)] {
        assert_eq!(reply, words(&[7, 1, 0, 0, 0, status]));
        assert_eq!(reply.len(), SUCCESS_LEN);
    }
}

#[test]
fn rpc_k_01_the_count_of_an_item_stays_inline() {
    let call = nfs(WRITE, &write_arguments(5000));
    let offset = bound(&BINDINGS, &call).argument.unwrap();
    assert_eq!(call[offset - 4..offset], 5000_u32.to_be_bytes());
    assert_eq!(offset, call.len());
}

#[test]
fn rpc_e_05_chunks_that_do_not_fit_the_arguments_are_garbage() {
    let offset = (HEADER + write_arguments(5).len()) as u32;
    let write = nfs(WRITE, &write_arguments(5));
    let checked = |items: &[(u32, u64)]| check(&BINDINGS, &write, items);
    for len in [5, 8] {
        assert_eq!(checked(&[(offset, len)]), Ok(()), "with its padding or without");
    }
    for len in [0, 4, 6, 7, 9, u64::MAX] {
        assert_eq!(checked(&[(offset, len)]), Err(Misplaced(offset)));
    }
    assert_eq!(checked(&[(offset - 4, 5)]), Err(Misplaced(offset - 4)));
    assert_eq!(
        checked(&[(offset, 5), (offset + 8, 4)]),
        Err(Misplaced(offset + 8))
    );
    assert_eq!(checked(&[]), Ok(()));
    let read = nfs(READ, &read_arguments(5));
    assert_eq!(check(&BINDINGS, &read, &[(offset, 5)]), Err(Misplaced(offset)));
    assert_eq!(garbage_args(7), words(&[7, 1, 0, 0, 0, 4]));
}

/// A WRITE of 8 KiB and a READ, checked down to the header.
#[test]
fn rpc_k_01_only_data_named_by_the_binding_moves_by_chunk() {
    let mut engine = Connection::<&str>::new(&Config::new(Role::Client));
    engine.connected(Terms::default());
    let message = nfs(WRITE, &write_arguments(8192));
    let bound_data = bound(&BINDINGS, &message);
    let argument = Item {
        offset: bound_data.argument.unwrap(),
        memory: "data",
        len: 8192,
    };
    let call = Call {
        message: message.into(),
        arguments: vec![argument],
        results: vec![],
        max_reply: bound_data.max_reply.unwrap(),
    };
    engine.call(call).unwrap();
    let mut sent = None;
    while sent.is_none() {
        for action in engine.actions() {
            match action {
                Action::Register { region, .. } => engine.registered(
                    region,
                    vec![urnic_rpc_rdma::Segment {
                        handle: 1,
                        length: 8192,
                        offset: 0,
                    }],
                ),
                Action::Send { pieces, .. } => sent = Some(pieces),
                _ => {}
            }
        }
    }
    assert!(
        engine
            .events()
            .iter()
            .all(|event| !matches!(event, Event::Answered { .. }))
    );
    let bytes: Vec<u8> = (sent.unwrap().iter())
        .flat_map(|span| match &span.source {
            urnic_rpc_rdma::engine::Source::Bytes(bytes) => bytes[span.at..][..span.len].to_vec(),
            urnic_rpc_rdma::engine::Source::Memory(_) => panic!("it is not inline"),
        })
        .collect();
    let (header, payload) = Header::parse(&bytes, &Limits::default()).unwrap();
    let Body::Msg(lists) = header.body else { panic!() };
    assert_eq!(
        lists.reads[0].position as usize,
        HEADER + write_arguments(0).len()
    );
    assert!(lists.reply.is_none(), "the reply of a WRITE fits into 1024 bytes");
    let places: Vec<_> = lists.read_chunks().iter().map(|chunk| chunk.place()).collect();
    assert_eq!(check(&BINDINGS, payload, &places), Ok(()));
}

proptest! {
    #[test]
    fn any_message_is_accepted_or_refused(message: Vec<u8>, items: Vec<(u32, u64)>) {
        let bound_data = bound(&BINDINGS, &message);
        prop_assert!(bound_data.argument.is_none_or(|offset| offset <= message.len()));
        let _ = check(&BINDINGS, &message, &items);
    }

    #[test]
    fn any_arguments_are_accepted_or_refused(procedure in 0..23_u32, arguments in prop::collection::vec(0..9_u32, 0..40), items: Vec<(u32, u64)>) {
        let message = nfs(procedure, &words(&arguments));
        let header = CallHeader::parse(&message).unwrap();
        prop_assert_eq!((header.len, header.procedure, header.protected), (HEADER, procedure, false));
        let bound_data = bound(&BINDINGS, &message);
        prop_assert!(bound_data.argument.is_none_or(|offset| offset <= message.len() && offset % 4 == 0));
        let _ = check(&BINDINGS, &message, &items);
    }
}
