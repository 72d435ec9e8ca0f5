//! RPC-over-RDMA headers and the RPC messages that follow them: each message is accepted, gets an
//! error reply or is discarded, within the limits; a parsed header can be emitted again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_nfs::binding::BINDINGS;
use urnic_rpc_rdma::binding::{Binding, bound, check};
use urnic_rpc_rdma::payload::unreduced;
use urnic_rpc_rdma::{Header, Limits, PrivateData, Profile, Refusal, call, reply};

const LIMITS: Limits = Limits {
    segments: 64,
    read_bytes: 1 << 20,
};

fuzz_target!(|input: &[u8]| {
    if let Ok((header, rest)) = Header::parse(input, &LIMITS) {
        let mut again = Vec::new();
        header.emit(&mut again);
        again.extend_from_slice(rest);
        assert_eq!(again, input);
    }
    for profile in [Profile::Rfc8166, Profile::Draft04] {
        match call(input, &LIMITS, profile) {
            Ok(call) => {
                assert!(call.lists.handles().count() <= LIMITS.segments);
                assert!(call.reads.iter().map(|chunk| chunk.bytes()).sum::<u64>() <= LIMITS.read_bytes);
                let places: Vec<_> = call.reads.iter().map(|chunk| chunk.place()).collect();
                if let Some(payload) = call.payload {
                    assert!(unreduced(payload.len(), &places).is_ok());
                }
            }
            Err(Refusal::Answer(header, _)) => {
                let mut answer = Vec::new();
                header.emit(&mut answer);
                assert!(matches!(
                    call(&answer, &LIMITS, profile),
                    Err(Refusal::Discard(_))
                ));
                assert!(reply(&answer, &LIMITS).is_ok());
            }
            Err(Refusal::Discard(_)) => {}
        }
    }
    let _ = reply(input, &LIMITS);
    let bindings = BINDINGS.map(|binding| binding as &dyn Binding);
    if let Some(offset) = bound(&bindings, input).argument {
        assert!(offset <= input.len());
        let _ = check(&bindings, input, &[(offset as u32, 4)]);
    }
    if let Some(private_data) = PrivateData::find(input) {
        assert_eq!(PrivateData::find(&private_data.emit()), Some(private_data));
    }
});
