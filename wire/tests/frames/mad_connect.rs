//! Messages about connections of the communication manager. The vectors are written by hand from
//! the tables of the specification's §12.6, except two messages of Linux.

use core::net::IpAddr;
use hex_literal::hex;
use proptest::prelude::*;
use urnic_wire::mad::*;

const TRANSACTION_ID: u64 = 0xa1a2_a3a4_a5a6_a7a8;
const IDS: CommIds = CommIds {
    local: 0x1112_1314,
    remote: 0x2122_2324,
};

/// A message with the attribute, these first bytes, and private data that begins at `private_at`
/// and is filled with `fill`.
fn bytes_of(attribute: u8, bytes: &[u8], private_at: usize, fill: u8) -> Vec<u8> {
    let header = hex!("01 07 02 03 0000 0000 a1a2a3a4a5a6a7a8 0000 0000 00000000");
    let mut all = [&header[..], bytes].concat();
    all[17] = attribute;
    all.resize(24 + private_at, 0);
    all.resize(MAD_LEN, fill);
    all
}

fn emitted(mad: &Mad) -> Vec<u8> {
    let mut bytes = vec![0xaa; MAD_LEN];
    assert_eq!(mad.emit(&mut bytes), mad.buffer_len());
    bytes
}

#[track_caller]
fn is_both_ways(message: Message, bytes: &[u8]) {
    let mad = Mad {
        transaction_id: TRANSACTION_ID,
        message,
    };
    assert_eq!(emitted(&mad), bytes, "{mad}");
    assert_eq!(parse(bytes), Ok(mad));
}

/// The request of rdma_cm over RoCE from 10.1.2.3 to port 7471 of 10.1.2.4, with private data "hi".
fn request() -> ConnectRequest {
    let mut private_data = [0; CONNECT_PRIVATE_DATA];
    let addressing = IpAddressing {
        source_port: 0x8001,
        source: [10, 1, 2, 3].into(),
        destination: [10, 1, 2, 4].into(),
    };
    let at = addressing.emit(&mut private_data);
    private_data[at..at + 2].copy_from_slice(b"hi");
    ConnectRequest {
        local_comm_id: IDS.local,
        service_id: service_id(0x0106, 7471),
        ca_guid: 0x3132_3334_3536_3738,
        qkey: 0x4142_4344,
        qpn: 0x51_5253,
        responder_resources: 0x61,
        local_eecn: 0x62_6364,
        initiator_depth: 0x65,
        remote_eecn: 0x66_6768,
        remote_response_timeout: 20,
        transport_service: TransportService::UC,
        flow_control: true,
        starting_psn: 0x71_7273,
        local_response_timeout: 21,
        retry_count: 7,
        pkey: 0xffff,
        path_mtu: 3,
        rdc_exists: true,
        rnr_retry_count: 6,
        max_cm_retries: 15,
        srq: true,
        extended_transport: 5,
        primary_path: ConnectionPath {
            local_lid: PERMISSIVE_LID,
            remote_lid: PERMISSIVE_LID,
            local_gid: hex!("00000000000000000000ffff 0a010203"),
            remote_gid: hex!("00000000000000000000ffff 0a010204"),
            flow_label: 0x8_1828,
            packet_rate: 3,
            traffic_class: 0x83,
            hop_limit: 64,
            service_level: 9,
            subnet_local: true,
            ack_timeout: 17,
        },
        alternate_path: ConnectionPath {
            local_lid: 0x9192,
            remote_lid: 0x9394,
            local_gid: [0x95; 16],
            remote_gid: [0x96; 16],
            flow_label: 1,
            packet_rate: 0x3f,
            traffic_class: 0x97,
            hop_limit: 1,
            service_level: 1,
            subnet_local: false,
            ack_timeout: 31,
        },
        private_data,
    }
}

#[test]
fn cmc_01_a_request_has_the_bytes_of_the_specification() {
    let bytes = bytes_of(
        0x10,
        &hex!(
            "11121314 00000000 0000000001061d2f 3132333435363738"
            "00000000 41424344"
            "515253 61  626364 65  666768 a3  717273 af"
            "ffff 3e fd"
            "ffff ffff 00000000000000000000ffff0a010203 00000000000000000000ffff0a010204"
            "81828 003  83 40 98 88"
            "9192 9394 95959595959595959595959595959595 96969696969696969696969696969696"
            "00001 03f  97 01 10 f8"
            "00 40 8001 000000000000000000000000 0a010203 000000000000000000000000 0a010204 6869"
        ),
        140 + IP_ADDRESSING_LEN + 2,
        0,
    );
    is_both_ways(Message::Connect(request()), &bytes);
}

#[test]
fn cmc_01_replies_have_the_bytes_of_the_specification() {
    let reply = ConnectReply {
        ids: IDS,
        qkey: 0x3132_3334,
        qpn: 0x41_4243,
        eecn: 0x51_5253,
        starting_psn: 0x61_6263,
        responder_resources: 0x71,
        initiator_depth: 0x72,
        target_ack_delay: 15,
        failover_accepted: 1,
        flow_control: true,
        rnr_retry_count: 7,
        srq: true,
        ca_guid: 0x8182_8384_8586_8788,
        private_data: [7; CONNECT_REPLY_PRIVATE_DATA],
    };
    let bytes = bytes_of(
        0x13,
        &hex!(
            "11121314 21222324 31323334 414243 00 515253 00 616263 00"
            "71 72 7b f0 8182838485868788"
        ),
        36,
        7,
    );
    is_both_ways(Message::ConnectReply(reply), &bytes);
    let reject = ConnectReject {
        ids: IDS,
        about: About::REPLY,
        reason: RejectReason::TIMEOUT,
        information: RejectInformation::new(&hex!("0102030405060708")).unwrap(),
        private_data: [8; REJECT_PRIVATE_DATA],
    };
    let bytes = bytes_of(
        0x12,
        &hex!("11121314 21222324 40 10 0004 0102030405060708"),
        84,
        8,
    );
    is_both_ways(Message::Reject(reject), &bytes);
    let receipt = ReceiptAck {
        ids: IDS,
        about: About::OTHER,
        service_timeout: 24,
        private_data: [9; RECEIPT_PRIVATE_DATA],
    };
    let bytes = bytes_of(0x11, &hex!("11121314 21222324 80 c0"), 10, 9);
    is_both_ways(Message::Receipt(receipt), &bytes);
}

#[test]
fn cmc_01_short_messages_have_the_bytes_of_the_specification() {
    let ready = ReadyToUse {
        ids: IDS,
        private_data: [1; READY_PRIVATE_DATA],
    };
    let bytes = bytes_of(0x14, &hex!("11121314 21222324"), 8, 1);
    is_both_ways(Message::Ready(ready), &bytes);
    let disconnect = DisconnectRequest {
        ids: IDS,
        remote_qpn: 0x31_3233,
        private_data: [2; DISCONNECT_PRIVATE_DATA],
    };
    let bytes = bytes_of(0x15, &hex!("11121314 21222324 313233 00"), 12, 2);
    is_both_ways(Message::Disconnect(disconnect), &bytes);
    let reply = DisconnectReply {
        ids: IDS,
        private_data: [3; DISCONNECT_REPLY_PRIVATE_DATA],
    };
    let bytes = bytes_of(0x16, &hex!("11121314 21222324"), 8, 3);
    is_both_ways(Message::DisconnectReply(reply), &bytes);
}

#[test]
fn cmc_02_alternate_paths_and_impossible_lengths_are_refused() {
    for attribute in [0x19, 0x1a] {
        let bytes = bytes_of(attribute, &[], 0, 0);
        assert_eq!(parse(&bytes), Err(MadError::AlternatePath(attribute.into())));
    }
    let of_len = |len: u8| bytes_of(0x12, &[0, 0, 0, 0, 0, 0, 0, 0, 0, len << 1], 10, 0);
    assert!(parse(&of_len(72)).is_ok());
    for len in [73, 127] {
        assert_eq!(parse(&of_len(len)), Err(MadError::RejectInformation(len)));
    }
    assert_eq!(RejectInformation::new(&[0; 73]), None);
}

#[test]
fn values_too_wide_for_their_field_do_not_reach_others() {
    let wide = ConnectRequest {
        qpn: u32::MAX,
        responder_resources: 0,
        retry_count: 0xff,
        local_response_timeout: 0xe0,
        path_mtu: 0xf0,
        max_cm_retries: 0xf0,
        extended_transport: 0xf8,
        ..request()
    };
    let mad = Mad {
        transaction_id: 0,
        message: Message::Connect(wide),
    };
    let mut bytes = [0; MAD_LEN];
    mad.emit(&mut bytes);
    let Ok(Message::Connect(parsed)) = parse(&bytes).map(|mad| mad.message) else {
        panic!("{mad}");
    };
    let expected = ConnectRequest {
        qpn: 0xff_ffff,
        retry_count: 7,
        local_response_timeout: 0,
        path_mtu: 0,
        max_cm_retries: 0,
        extended_transport: 0,
        ..wide
    };
    assert_eq!(parsed, expected);
}

#[test]
fn a_message_about_a_connection_is_one_line() {
    let line = |message| {
        Mad {
            transaction_id: 1,
            message,
        }
        .to_string()
    };
    let of_transaction = ", transaction 0x0000000000000001";
    for (message, expected) in [
        (
            Message::Connect(request()),
            "REQ 0x11121314 for service 0x0000000001061d2f: UC qp 0x515253, psn 0x717273, \
             mtu code 3, depths 97 in 101 out",
        ),
        (
            Message::Reject(ConnectReject {
                ids: IDS,
                about: About::REQUEST,
                reason: RejectReason::CONSUMER,
                information: RejectInformation::NONE,
                private_data: [0; REJECT_PRIVATE_DATA],
            }),
            "REJ 0x11121314 to 0x21222324 of REQ: refused by the program (28)",
        ),
        (
            Message::Receipt(ReceiptAck {
                ids: IDS,
                about: About::REPLY,
                service_timeout: 24,
                private_data: [0; RECEIPT_PRIVATE_DATA],
            }),
            "MRA 0x11121314 to 0x21222324: REP has arrived, timeout code 24",
        ),
        (
            Message::Disconnect(DisconnectRequest {
                ids: IDS,
                remote_qpn: 17,
                private_data: [0; DISCONNECT_PRIVATE_DATA],
            }),
            "DREQ 0x11121314 to 0x21222324: qp 0x000011",
        ),
    ] {
        assert_eq!(line(message), format!("{expected}{of_transaction}"));
    }
    assert_eq!(RejectReason(33).to_string(), "reason 33");
}

/// The REQ of Linux 6.1's rping over rdma_rxe, from 10.0.2.15 to port 7174 of 10.0.2.2.
#[test]
fn cmc_01_a_request_of_linux_is_parsed() {
    let mut bytes = hex!(
        "01070203 0000 0000 0000000297a60323 0010 0000 00000000"
        "2303a697 00000000 0000000001061c06 505400fffe123456 00000000 00000000"
        "00001301 00000001 000000a0 91d3ffa7 ffff 37 f0"
        "ffff ffff 00000000000000000000ffff0a00020f 00000000000000000000ffff0a000202"
        "0174c000 00 40 00 98"
    )
    .to_vec();
    bytes.resize(164, 0);
    bytes.extend(hex!(
        "0040 83fa 000000000000000000000000 0a00020f 000000000000000000000000 0a000202"
    ));
    bytes.resize(MAD_LEN, 0);
    let mad = parse(&bytes).unwrap();
    let Message::Connect(request) = mad.message else {
        panic!("{mad}");
    };
    assert_eq!(request.service_id, service_id(0x0106, 7174));
    assert_eq!((request.qpn, request.starting_psn), (0x13, 0x91_d3ff));
    assert_eq!((request.responder_resources, request.initiator_depth), (1, 1));
    let timeouts = (request.remote_response_timeout, request.local_response_timeout);
    assert_eq!((timeouts, request.max_cm_retries), ((20, 20), 15));
    assert_eq!((request.retry_count, request.rnr_retry_count), (7, 7));
    assert_eq!(
        (request.transport_service, request.path_mtu),
        (TransportService::RC, 3)
    );
    let path = request.primary_path;
    assert_eq!(
        (path.flow_label, path.hop_limit, path.ack_timeout),
        (0x0174c, 64, 19)
    );
    assert_eq!((path.local_lid, path.subnet_local), (PERMISSIVE_LID, false));
    let addressing = IpAddressing::parse(&request.private_data).unwrap();
    assert_eq!(addressing.source, IpAddr::from([10, 0, 2, 15]));
    assert_eq!(addressing.source_port, 0x83fa);
    assert_eq!(emitted(&mad), bytes);
}

/// The REP of Linux 6.1's rping over rdma_rxe.
#[test]
fn cmc_01_a_reply_of_linux_is_parsed() {
    let mut bytes = hex!(
        "01070203 0000 0000 02c04d60c0709a70 0013 0000 00000000"
        "2403a697 c4525351 00000000 00001500 00000000 59f0cf00 01 01 78 e0 505400fffe123456"
    )
    .to_vec();
    bytes.resize(MAD_LEN, 0);
    let mad = parse(&bytes).unwrap();
    let Message::ConnectReply(reply) = mad.message else {
        panic!("{mad}");
    };
    assert_eq!((reply.ids.local, reply.ids.remote), (0x2403_a697, 0xc452_5351));
    assert_eq!((reply.qpn, reply.starting_psn), (0x15, 0x59_f0cf));
    assert_eq!((reply.target_ack_delay, reply.rnr_retry_count), (15, 7));
    assert_eq!(emitted(&mad), bytes);
}

proptest! {
    /// A message is what its bytes say: bytes that are parsed are emitted as they were, except for
    /// reserved ones, and parsed again.
    #[test]
    fn any_body_of_any_attribute_is_parsed(attribute in 0x10..0x1bu8, body: [[u8; 29]; 8]) {
        let bytes = bytes_of(attribute, body.as_flattened(), 232, 0);
        match parse(&bytes) {
            Ok(mad) => {
                prop_assert!(!mad.to_string().contains('\n'));
                let mut again = [0; MAD_LEN];
                mad.emit(&mut again);
                prop_assert_eq!(parse(&again), Ok(mad));
                let private_at = MAD_LEN - 92;
                prop_assert!(attribute != 0x10 || again[private_at..] == bytes[private_at..]);
            }
            Err(error) => prop_assert!([0x12, 0x19, 0x1a].contains(&attribute), "{error}"),
        }
    }

    /// Each field of a request is sent, and no field changes another.
    #[test]
    fn what_a_request_says_is_parsed(
        ids: (u32, u64, u64, u32), qpn in 0..1u32 << 24, psn in 0..1u32 << 24,
        bytes: [u8; 4], small in (0..32u8, 0..4u8, 0..32u8, 0..8u8, 0..16u8, 0..8u8, 0..16u8),
        flags: [bool; 4], gids: [[u8; 16]; 2], flow in 0..1u32 << 20,
    ) {
        let path = ConnectionPath {
            local_lid: ids.0 as u16,
            remote_lid: ids.3 as u16,
            local_gid: gids[0],
            remote_gid: gids[1],
            flow_label: flow,
            packet_rate: small.0 << 1 | u8::from(flags[0]),
            traffic_class: bytes[2],
            hop_limit: bytes[3],
            service_level: small.4,
            subnet_local: flags[1],
            ack_timeout: small.2,
        };
        let request = ConnectRequest {
            local_comm_id: ids.0,
            service_id: ids.1,
            ca_guid: ids.2,
            qkey: ids.3,
            qpn,
            responder_resources: bytes[0],
            local_eecn: psn ^ 0xff,
            initiator_depth: bytes[1],
            remote_eecn: qpn ^ 0xff,
            remote_response_timeout: small.0,
            transport_service: TransportService(small.1),
            flow_control: flags[0],
            starting_psn: psn,
            local_response_timeout: small.2,
            retry_count: small.3,
            pkey: ids.0 as u16,
            path_mtu: small.4,
            rdc_exists: flags[2],
            rnr_retry_count: small.5,
            max_cm_retries: small.6,
            srq: flags[3],
            extended_transport: small.5,
            primary_path: path,
            alternate_path: ConnectionPath { flow_label: flow ^ 0xfff, ..path },
            ..request()
        };
        let mad = Mad { transaction_id: ids.1, message: Message::Connect(request) };
        let mut bytes = [0; MAD_LEN];
        mad.emit(&mut bytes);
        prop_assert_eq!(parse(&bytes), Ok(mad));
    }
}
