//! Management datagrams of the communication manager. The vectors are written by hand from the
//! tables of the specification; tshark dissects them as the test of captures shows.

use core::net::IpAddr;
use hex_literal::hex;
use proptest::prelude::*;
use urnic_wire::mad::*;

const REQUEST_ID: u32 = 0x0102_0304;
const TRANSACTION_ID: u64 = 0xa1a2_a3a4_a5a6_a7a8;

/// A management datagram with these bytes, and zeroes after them.
fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut padded = bytes.to_vec();
    padded.resize(MAD_LEN, 0);
    padded
}

fn emitted(mad: &Mad) -> Vec<u8> {
    let mut bytes = vec![0xaa; MAD_LEN];
    assert_eq!(mad.emit(&mut bytes), mad.buffer_len());
    bytes
}

fn request() -> Mad {
    let mut private_data = [0; REQUEST_PRIVATE_DATA];
    let addressing = IpAddressing {
        source_port: 0x8001,
        source: [10, 1, 2, 3].into(),
        destination: [10, 1, 2, 4].into(),
    };
    let at = addressing.emit(&mut private_data);
    private_data[at..at + 2].copy_from_slice(b"hi");
    Mad {
        transaction_id: TRANSACTION_ID,
        message: Message::Request(ServiceRequest {
            request_id: REQUEST_ID,
            pkey: 0xffff,
            service_id: service_id(0x0111, 7471),
            private_data,
        }),
    }
}

fn reply() -> Mad {
    let mut private_data = [0; REPLY_PRIVATE_DATA];
    private_data[..2].copy_from_slice(b"ho");
    Mad {
        transaction_id: TRANSACTION_ID,
        message: Message::Reply(ServiceReply {
            request_id: REQUEST_ID,
            status: ServiceStatus::VALID,
            qpn: 0x9c_4000,
            service_id: service_id(0x0111, 7471),
            qkey: 0x0123_4567,
            private_data,
        }),
    }
}

#[test]
fn cmu_01_requests_and_replies_have_the_bytes_of_the_specification() {
    let of_request = padded(&hex!(
        "01 07 02 03 0000 0000 a1a2a3a4a5a6a7a8 0017 0000 00000000"
        "01020304 ffff 0000 0000000001111d2f"
        "00 40 8001 000000000000000000000000 0a010203 000000000000000000000000 0a010204 6869"
    ));
    assert_eq!(emitted(&request()), of_request);
    assert_eq!(parse(&of_request), Ok(request()));
    let mut of_reply = padded(&hex!(
        "01 07 02 03 0000 0000 a1a2a3a4a5a6a7a8 0018 0000 00000000"
        "01020304 00 00 0000 9c4000 00 0000000001111d2f 01234567"
    ));
    of_reply[MAD_LEN - REPLY_PRIVATE_DATA..][..2].copy_from_slice(b"ho");
    assert_eq!(emitted(&reply()), of_reply);
    assert_eq!(parse(&of_reply), Ok(reply()));
}

#[test]
fn cmu_02_other_management_datagrams_are_refused() {
    let good = emitted(&request());
    let changed = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        parse(&bytes).map(|_| ())
    };
    assert_eq!(changed(0, 2), Err(MadError::Version(2, 2)));
    assert_eq!(changed(2, 1), Err(MadError::Version(1, 1)));
    assert_eq!(changed(1, 3), Err(MadError::Class(3)));
    assert_eq!(changed(3, 0x81), Err(MadError::Method(0x81)));
    for attribute in [0x0f, 0x1b] {
        assert_eq!(changed(17, attribute), Err(MadError::Attribute(attribute.into())));
    }
    for len in [0, 1, 24, MAD_LEN - 1] {
        assert_eq!(parse(&good[..len]), Err(MadError::Length(len)));
    }
    assert_eq!(
        parse(&[good.as_slice(), &[0]].concat()),
        Err(MadError::Length(257))
    );
}

#[test]
fn addresses_of_other_versions_are_none() {
    let mut bytes = [0; IP_ADDRESSING_LEN];
    let v6 = IpAddressing {
        source_port: 7,
        source: "2001:db8::1".parse().unwrap(),
        destination: "2001:db8::2".parse().unwrap(),
    };
    v6.emit(&mut bytes);
    assert_eq!(IpAddressing::parse(&bytes), Some(v6));
    assert_eq!(IpAddressing::parse(&bytes[..35]), None);
    bytes[1] = 0x50;
    assert_eq!(IpAddressing::parse(&bytes), None);
    (bytes[0], bytes[1]) = (1, 0x60);
    assert_eq!(IpAddressing::parse(&bytes), None);
}

#[test]
fn a_message_is_one_line() {
    assert_eq!(
        request().to_string(),
        "SIDR_REQ 0x01020304 for service 0x0000000001111d2f, transaction 0xa1a2a3a4a5a6a7a8"
    );
    assert_eq!(
        reply().to_string(),
        "SIDR_REP 0x01020304, valid: service 0x0000000001111d2f is qp 0x9c4000, qkey 0x01234567, \
         transaction 0xa1a2a3a4a5a6a7a8"
    );
}

fn any_ip(v4: bool) -> impl Strategy<Value = IpAddr> {
    any::<[u8; 16]>().prop_map(move |bytes| match v4 {
        true => IpAddr::from([bytes[0], bytes[1], bytes[2], bytes[3]]),
        false => IpAddr::from(bytes),
    })
}

fn any_addressing() -> impl Strategy<Value = IpAddressing> {
    any::<(bool, u16)>().prop_flat_map(|(v4, source_port)| {
        (any_ip(v4), any_ip(v4)).prop_map(move |(source, destination)| IpAddressing {
            source_port,
            source,
            destination,
        })
    })
}

proptest! {
    #[test]
    fn what_is_emitted_is_parsed(
        transaction_id: u64, ids: (u32, u16, u64), status: u8, qpn in 0..1u32 << 24, qkey: u32,
        data: [[u8; 8]; 27], addressing in any_addressing(),
    ) {
        let (request_id, pkey, service_id) = ids;
        let mut private_data = [0; REQUEST_PRIVATE_DATA];
        private_data.copy_from_slice(data.as_flattened());
        addressing.emit(&mut private_data);
        prop_assert_eq!(IpAddressing::parse(&private_data), Some(addressing));
        let request = ServiceRequest { request_id, pkey, service_id, private_data };
        let mut private_data = [0; REPLY_PRIVATE_DATA];
        private_data.copy_from_slice(&data.as_flattened()[..REPLY_PRIVATE_DATA]);
        let status = ServiceStatus(status);
        let reply = ServiceReply { request_id, status, qpn, service_id, qkey, private_data };
        for message in [Message::Request(request), Message::Reply(reply)] {
            let mad = Mad { transaction_id, message };
            prop_assert_eq!(parse(&emitted(&mad)), Ok(mad));
            prop_assert!(!mad.to_string().contains('\n'));
        }
    }

    #[test]
    fn any_bytes_are_parsed_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse(&bytes).map(|mad| mad.to_string());
        let _ = IpAddressing::parse(&bytes).map(|addressing| addressing.to_string());
    }
}
