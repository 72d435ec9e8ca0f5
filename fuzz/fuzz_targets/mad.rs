//! A management datagram of a communication manager from the network.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::net::{Ipv4Addr, Ipv6Addr};
use urnic_wire::mad::*;

fn ids() -> CommIds {
    CommIds { local: 1, remote: 2 }
}

/// The messages about a connection.
fn connection() -> [Message; 7] {
    let mut private_data = [0; CONNECT_PRIVATE_DATA];
    addressings()[0].emit(&mut private_data);
    let path = ConnectionPath {
        local_lid: PERMISSIVE_LID,
        remote_lid: PERMISSIVE_LID,
        hop_limit: 64,
        ack_timeout: 17,
        ..ConnectionPath::default()
    };
    let ids = ids();
    [
        Message::Connect(ConnectRequest {
            local_comm_id: 1,
            service_id: service_id(0x0106, 7000),
            ca_guid: 3,
            qkey: 0,
            qpn: 0x12_3456,
            responder_resources: 4,
            local_eecn: 0,
            initiator_depth: 5,
            remote_eecn: 0,
            remote_response_timeout: 20,
            transport_service: TransportService::RC,
            flow_control: true,
            starting_psn: 0x65_4321,
            local_response_timeout: 20,
            retry_count: 7,
            pkey: 0xffff,
            path_mtu: 3,
            rdc_exists: false,
            rnr_retry_count: 7,
            max_cm_retries: 15,
            srq: true,
            extended_transport: 0,
            primary_path: path,
            alternate_path: ConnectionPath::default(),
            private_data,
        }),
        Message::Receipt(ReceiptAck {
            ids,
            about: About::REPLY,
            service_timeout: 24,
            private_data: [1; RECEIPT_PRIVATE_DATA],
        }),
        Message::Reject(ConnectReject {
            ids,
            about: About::REQUEST,
            reason: RejectReason::CONSUMER,
            information: RejectInformation::new(&[7; 8]).expect("that short"),
            private_data: [2; REJECT_PRIVATE_DATA],
        }),
        Message::ConnectReply(ConnectReply {
            ids,
            qkey: 0,
            qpn: 0x12_3456,
            eecn: 0,
            starting_psn: 0x65_4321,
            responder_resources: 4,
            initiator_depth: 5,
            target_ack_delay: 15,
            failover_accepted: 1,
            flow_control: true,
            rnr_retry_count: 7,
            srq: false,
            ca_guid: 3,
            private_data: [3; CONNECT_REPLY_PRIVATE_DATA],
        }),
        Message::Ready(ReadyToUse {
            ids,
            private_data: [4; READY_PRIVATE_DATA],
        }),
        Message::Disconnect(DisconnectRequest {
            ids,
            remote_qpn: 0x12_3456,
            private_data: [5; DISCONNECT_PRIVATE_DATA],
        }),
        Message::DisconnectReply(DisconnectReply {
            ids,
            private_data: [6; DISCONNECT_REPLY_PRIVATE_DATA],
        }),
    ]
}

fn addressings() -> [IpAddressing; 2] {
    let families = [
        (Ipv4Addr::LOCALHOST.into(), Ipv4Addr::BROADCAST.into()),
        (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::UNSPECIFIED.into()),
    ];
    families.map(|(source, destination)| IpAddressing {
        source_port: 4000,
        source,
        destination,
    })
}

/// A lookup from each family of addresses, a reply of each status, and the messages about a
/// connection.
fn seeds() -> Vec<Vec<u8>> {
    let requests = addressings().map(|addressing| {
        let mut private_data = [0; REQUEST_PRIVATE_DATA];
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
        .emit(&mut bytes);
        bytes
    };
    let lookups = requests.into_iter().chain(replies);
    lookups.chain(connection()).map(emitted).collect()
}

fuzz_target!(init: urnic_fuzz::plant(seeds()), |bytes: &[u8]| {
    match parse(bytes) {
        Ok(mad) => {
            assert!(!mad.to_string().contains('\n'));
            let mut again = [0; MAD_LEN];
            mad.emit(&mut again);
            assert_eq!(parse(&again), Ok(mad));
            let private_data = match &mad.message {
                Message::Request(request) => &request.private_data[..],
                Message::Connect(request) => &request.private_data,
                _ => return,
            };
            if let Some(addressing) = IpAddressing::parse(private_data) {
                let mut again = private_data.to_vec();
                addressing.emit(&mut again);
                assert_eq!(IpAddressing::parse(&again), Some(addressing));
            }
        }
        Err(error) => drop(error.to_string()),
    }
});
