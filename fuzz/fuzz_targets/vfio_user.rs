//! vfio-user: any stream is split into messages or ends, within the limits; a parsed message can be
//! emitted again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_vfio_user::{Decoder, HEADER_LEN, Limits, Reply, Request};

const LIMITS: Limits = Limits {
    message: 4096,
    fds: 1,
};

fuzz_target!(|input: &[u8]| {
    let Some((&cut, stream)) = input.split_first() else {
        return;
    };
    let mut decoder = Decoder::new(LIMITS);
    for read in stream.chunks(usize::from(cut).max(1)) {
        decoder.push(read, []);
        for message in decoder.by_ref() {
            let Ok(message) = message else { return };
            assert!(HEADER_LEN + message.payload.len() <= LIMITS.message);
            let command = message.header.command;
            let mut again = Vec::new();
            if let Ok(request) = message.request() {
                request.emit(message.header.id, false, &mut again);
                assert_eq!(
                    Request::parse(command, &again[HEADER_LEN..]).as_ref(),
                    Ok(&request)
                );
            }
            if let Ok(reply) = message.reply() {
                again.clear();
                reply.emit(message.header.id, &mut again);
                let _ = Reply::parse(command, &again[HEADER_LEN..]);
            }
        }
    }
});
