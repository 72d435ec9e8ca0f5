//! A management datagram of a communication manager from the network.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_wire::mad::{IpAddressing, MAD_LEN, Message, parse};

fuzz_target!(|bytes: &[u8]| {
    match parse(bytes) {
        Ok(mad) => {
            assert!(!mad.to_string().contains('\n'));
            let mut again = [0; MAD_LEN];
            mad.emit(&mut again);
            assert_eq!(parse(&again), Ok(mad));
            if let Message::Request(request) = mad.message
                && let Some(addressing) = IpAddressing::parse(&request.private_data)
            {
                let mut again = request.private_data;
                addressing.emit(&mut again);
                assert_eq!(IpAddressing::parse(&again), Some(addressing));
            }
        }
        Err(error) => drop(error.to_string()),
    }
});
