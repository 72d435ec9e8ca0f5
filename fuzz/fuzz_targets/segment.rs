//! A ULPDU through DDP and RDMAP, with every header they have.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_wire::rdmap::{Segment, TerminateError};

fuzz_target!(|ulpdu: &[u8]| match Segment::parse(ulpdu) {
    Ok(segment) => {
        let shown = segment.to_string();
        assert!(!shown.contains('\n'));
        let mut again = vec![0; segment.buffer_len()];
        assert_eq!(segment.emit(&mut again), again.len());
        assert!(again.len() <= ulpdu.len());
        let same = Segment::parse(&again).expect("what was accepted is accepted again");
        assert_eq!(
            (same.opcode, same.body, same.header.last()),
            (segment.opcode, segment.body, segment.header.last())
        );
        assert_eq!(same.to_string(), shown);
    }
    Err(error) => {
        let _ = (error.to_string(), TerminateError::from(error));
    }
});
