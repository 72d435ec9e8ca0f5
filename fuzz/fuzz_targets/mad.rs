//! A management datagram of a communication manager from the network.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::net::{Ipv4Addr, Ipv6Addr};
use urnic_wire::mad::{
    IpAddressing, MAD_LEN, Mad, Message, REPLY_PRIVATE_DATA, REQUEST_PRIVATE_DATA, ServiceReply,
    ServiceRequest, ServiceStatus, parse, service_id,
};

/// A request from each family of addresses, and a reply of each status.
fn seeds() -> Vec<Vec<u8>> {
    let families = [
        (Ipv4Addr::LOCALHOST.into(), Ipv4Addr::BROADCAST.into()),
        (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into()),
    ];
    let requests = families.map(|(source, destination)| {
        let mut private_data = [0; REQUEST_PRIVATE_DATA];
        let addressing = IpAddressing {
            source_port: 4000,
            source,
            destination,
        };
        addressing.emit(&mut private_data);
        Message::Request(ServiceRequest {
            request_id: 1,
            pkey: 0xffff,
            service_id: service_id(0x0111, 7000),
            private_data,
        })
    });
    let statuses = [
        ServiceStatus::VALID,
        ServiceStatus::UNSUPPORTED,
        ServiceStatus::REJECTED,
        ServiceStatus(9),
    ];
    let replies = statuses.map(|status| {
        Message::Reply(ServiceReply {
            request_id: 1,
            status,
            qpn: 0x12_3456,
            service_id: service_id(0x0111, 7000),
            qkey: 0x8001_0000,
            private_data: [7; REPLY_PRIVATE_DATA],
        })
    });
    let emitted = |message| {
        let mut bytes = vec![0; MAD_LEN];
        Mad {
            transaction_id: 0x0102_0304_0506_0708,
            message,
        }
        .emit((&mut bytes[..]).try_into().expect("that long"));
        bytes
    };
    requests.into_iter().chain(replies).map(emitted).collect()
}

fuzz_target!(init: urnic_fuzz::plant(seeds()), |bytes: &[u8]| {
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
