//! The payload of a Terminate, which the parser reads tolerantly.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_wire::rdmap::Terminate;

fuzz_target!(|payload: &[u8]| {
    let Ok(terminate) = Terminate::parse(payload) else {
        return assert!(payload.len() < 4, "only a missing control field is an error");
    };
    let _ = terminate.to_string();
    let mut again = [0; Terminate::MAX_LEN];
    let len = terminate.emit(&mut again);
    assert_eq!(len, terminate.buffer_len());
    assert_eq!(Terminate::parse(&again[..len]), Ok(terminate));
    assert!(len <= payload.len());
    let at_startup = Terminate::parse_at_startup(payload).expect("as long as before");
    assert!(at_startup == terminate || (at_startup.layer, at_startup.etype) == (2, 0));
});
