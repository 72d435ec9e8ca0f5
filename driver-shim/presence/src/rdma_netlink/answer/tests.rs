use proptest::collection::vec;
use proptest::prelude::*;

use super::super::message::{Attributes, Header, Message, Writer, flag, kind};
use super::*;

/// A host with one device of ours, and perhaps one of the kernel's.
struct Machine {
    devices: Vec<Device>,
    resources: Vec<Resource>,
    administrator: bool,
    kernel: Option<Vec<Vec<u8>>>,
    kernels_are_first: bool,
}

const PORT: u32 = 4242;
const OURS: u32 = 1024;

impl Machine {
    fn new() -> Machine {
        Machine {
            devices: vec![Device {
                index: OURS,
                name: "urnic0".to_owned(),
                protocol: "iw",
                node_type: 4,
                firmware: "1.2.3".to_owned(),
                guid: 0x0250_56ff_fe00_0001,
                active: true,
                netdev: Some((2, "eth0".to_owned())),
                uverbs: CharDevice {
                    number: 0x103,
                    abi: 1,
                    name: "uverbs0".to_owned(),
                },
            }],
            resources: Vec::new(),
            administrator: false,
            kernel: None,
            kernels_are_first: false,
        }
    }

    fn with_queue_pairs(count: u32) -> Machine {
        let queue_pair = |id| Resource {
            pid: 77,
            id,
            object: Object::QueuePair {
                kind: 2,
                state: 3,
                peer: 9,
                rq_psn: 1,
                sq_psn: 2,
                pd: 5,
            },
        };
        Machine {
            resources: (1..=count).map(queue_pair).collect(),
            ..Machine::new()
        }
    }

    /// The messages of the answer to one request, and the lengths of its datagrams.
    fn ask(&self, command: u16, flags: u16, fill: impl FnOnce(&mut Writer)) -> Vec<Vec<u8>> {
        let mut request = Writer::new(request_header(command, flags));
        fill(&mut request);
        answer(&request.finish(), PORT, self)
    }
}

fn request_header(command: u16, flags: u16) -> Header {
    Header {
        kind: message_type(NLDEV, command),
        flags: flag::REQUEST | flags,
        sequence: 7,
        port: 0,
    }
}

impl Host for Machine {
    fn devices(&self) -> &[Device] {
        &self.devices
    }

    fn rdma_cm(&self) -> CharDevice {
        CharDevice {
            number: 0xaff,
            abi: 4,
            name: "rdma_cm".to_owned(),
        }
    }

    fn resources(&self, _: &Device) -> Vec<Resource> {
        self.resources.clone()
    }

    fn counters(&self, _: &Device) -> Vec<(String, u64)> {
        vec![("tx_bytes".to_owned(), 1 << 40)]
    }

    fn copies_on_fork(&self) -> bool {
        true
    }

    fn may_administer(&self) -> bool {
        self.administrator
    }

    fn kernel(&self, _: &Message<'_>) -> Replies {
        Ok(self.kernel.clone())
    }

    fn kernels_are_first(&self) -> bool {
        self.kernels_are_first
    }
}

/// The messages in datagrams, which have the receiver's port and the request's sequence number.
fn messages(datagrams: &[Vec<u8>]) -> Vec<Message<'_>> {
    let all: Vec<_> = datagrams
        .iter()
        .flat_map(|datagram| Message::all(datagram))
        .collect();
    for message in &all {
        assert_eq!((message.header.sequence, message.header.port), (7, PORT));
    }
    all
}

/// The code of the only message, which is an error or the end of a dump.
fn code(datagrams: &[Vec<u8>]) -> i32 {
    let all = messages(datagrams);
    let [message] = all[..] else { panic!("{all:?}") };
    assert!(matches!(message.header.kind, kind::ERROR | kind::DONE));
    i32::from_ne_bytes(message.bytes[16..20].try_into().expect("4 bytes"))
}

fn index(writer: &mut Writer) {
    writer.put_u32(attr::DEV_INDEX, OURS);
}

#[test]
fn a_dump_of_devices_has_ours_and_an_end() {
    let datagrams = Machine::new().ask(cmd::GET, flag::DUMP | flag::ACK, |_| {});
    let all = messages(&datagrams);
    let [device, end] = all[..] else { panic!("{all:?}") };
    assert_eq!(device.header.flags, flag::MULTI);
    let attributes = device.attributes();
    assert_eq!(attributes.number(attr::DEV_INDEX), Ok(Some(OURS)));
    assert_eq!(attributes.text(attr::DEV_NAME), Some(&b"urnic0"[..]));
    assert_eq!(attributes.number(attr::PORT_INDEX), Ok(Some(1)));
    assert_eq!(attributes.find(attr::DEV_NODE_TYPE), Some(&[4][..]));
    assert_eq!(end.header.kind, kind::DONE);
}

#[test]
fn the_kernels_devices_are_in_the_same_dump() {
    let mut theirs = Writer::new(Header {
        port: PORT,
        ..request_header(cmd::GET, flag::MULTI)
    });
    theirs
        .put_u32(attr::DEV_INDEX, 0)
        .put_text(attr::DEV_NAME, "mlx5_0");
    let end = Writer::new(Header {
        kind: kind::DONE,
        port: PORT,
        ..request_header(0, flag::MULTI)
    });
    let mut machine = Machine {
        kernel: Some(vec![theirs.finish(), end.finish()]),
        ..Machine::new()
    };
    let names = |datagrams: &[Vec<u8>]| -> Vec<String> {
        let named = |message: &Message<'_>| {
            let name = message.attributes().text(attr::DEV_NAME)?;
            Some(String::from_utf8_lossy(name).into_owned())
        };
        messages(datagrams).iter().filter_map(named).collect()
    };
    let datagrams = machine.ask(cmd::GET, flag::DUMP, |_| {});
    assert_eq!(names(&datagrams), ["urnic0", "mlx5_0"]);
    let ends = messages(&datagrams)
        .into_iter()
        .filter(|message| message.header.kind == kind::DONE);
    assert_eq!(ends.count(), 1);
    machine.kernels_are_first = true;
    assert_eq!(
        names(&machine.ask(cmd::GET, flag::DUMP, |_| {})),
        ["mlx5_0", "urnic0"]
    );
    // A request that names the kernel's device is the kernel's.
    machine.kernel = Some(vec![vec![0; 16]]);
    let passed_on = machine.ask(cmd::PORT_GET, 0, |request| {
        request.put_u32(attr::DEV_INDEX, 0);
    });
    assert_eq!(passed_on, [vec![0; 16]]);
}

#[test]
fn a_port_has_its_state_and_interface() {
    let datagrams = Machine::new().ask(cmd::PORT_GET, flag::ACK, |request| {
        request
            .put_u32(attr::DEV_INDEX, OURS)
            .put_u32(attr::PORT_INDEX, 1);
    });
    let all = messages(&datagrams);
    let [port, acknowledgement] = all[..] else {
        panic!("{all:?}")
    };
    assert_eq!(port.attributes().find(attr::PORT_STATE), Some(&[4][..]));
    assert_eq!(port.attributes().text(attr::NDEV_NAME), Some(&b"eth0"[..]));
    assert_eq!(acknowledgement.header.kind, kind::ERROR);
    assert_eq!(acknowledgement.bytes[16..20], [0; 4]);
    let other = Machine::new().ask(cmd::PORT_GET, 0, |request| {
        request
            .put_u32(attr::DEV_INDEX, OURS)
            .put_u32(attr::PORT_INDEX, 2);
    });
    assert_eq!(code(&other), -Errno::INVAL.raw_os_error());
}

#[test]
fn many_queue_pairs_fit_into_datagrams_of_a_page() {
    let machine = Machine::with_queue_pairs(1000);
    let datagrams = machine.ask(cmd::RES_QP_GET, flag::DUMP, index);
    assert!(datagrams.iter().all(|datagram| datagram.len() <= 4096));
    let entries = messages(&datagrams)
        .into_iter()
        .filter_map(|message| message.attributes().find(attr::RES_QP));
    let numbers: Vec<u32> = entries
        .flat_map(|table| Attributes(table).all().collect::<Vec<_>>())
        .map(|(kind, entry)| {
            assert_eq!(kind, attr::RES_QP_ENTRY);
            let entry = Attributes(entry);
            assert_eq!(entry.number(attr::RES_PID), Ok(Some(77)));
            assert_eq!(entry.number(attr::RES_RQPN), Ok(Some(9)));
            entry
                .number(attr::RES_LQPN)
                .expect("long enough")
                .expect("a number")
        })
        .collect();
    assert_eq!(numbers, (1..=1000).collect::<Vec<_>>());
}

#[test]
fn one_queue_pair_is_found_by_its_number() {
    let machine = Machine::with_queue_pairs(3);
    let of = |number| {
        machine.ask(cmd::RES_QP_GET, 0, |request| {
            request
                .put_u32(attr::DEV_INDEX, OURS)
                .put_u32(attr::RES_LQPN, number);
        })
    };
    let datagrams = of(2);
    let found = messages(&datagrams)[0].attributes();
    assert_eq!(found.number(attr::RES_LQPN), Ok(Some(2)));
    assert_eq!(code(&of(4)), -Errno::NOENT.raw_os_error());
}

#[test]
fn keys_of_memory_are_for_administrators() {
    let mut machine = Machine::new();
    machine.resources = vec![Resource {
        pid: 1,
        id: 3,
        object: Object::MemoryRegion {
            key: 0x345,
            length: 4096,
            pd: 1,
        },
    }];
    for administrator in [false, true] {
        machine.administrator = administrator;
        let datagrams = machine.ask(cmd::RES_MR_GET, 0, |request| {
            request.put_u32(attr::DEV_INDEX, OURS).put_u32(attr::RES_MRN, 3);
        });
        let region = messages(&datagrams)[0].attributes();
        assert_eq!(region.find(attr::RES_RKEY).is_some(), administrator);
        assert_eq!(region.find(attr::RES_MRLEN), Some(&4096u64.to_ne_bytes()[..]));
    }
}

#[test]
fn changes_are_refused_as_the_kernel_refuses_them() {
    for command in ADMINISTRATIVE {
        let mut machine = Machine::new();
        let refused = machine.ask(command, flag::ACK, index);
        assert_eq!(code(&refused), -Errno::PERM.raw_os_error(), "{command}");
        machine.administrator = true;
        let refused = machine.ask(command, flag::ACK, index);
        assert_eq!(code(&refused), -Errno::OPNOTSUPP.raw_os_error(), "{command}");
    }
}

#[test]
fn unknown_devices_and_clients_are_invalid() {
    let machine = Machine::new();
    let other = |request: &mut Writer| {
        request.put_u32(attr::DEV_INDEX, 5);
    };
    let invalid = -Errno::INVAL.raw_os_error();
    assert_eq!(code(&machine.ask(cmd::GET, 0, other)), invalid);
    assert_eq!(code(&machine.ask(cmd::RES_QP_GET, flag::DUMP, other)), invalid);
    let of_another_client = Writer::new(Header {
        kind: message_type(2, 0),
        ..request_header(0, 0)
    });
    assert_eq!(
        code(&answer(&of_another_client.finish(), PORT, &machine)),
        invalid
    );
}

#[test]
fn the_character_devices_are_found_by_their_types() {
    let machine = Machine::new();
    let of = |kind: &str, device: bool| {
        machine.ask(cmd::GET_CHARDEV, 0, |request| {
            if device {
                request.put_u32(attr::DEV_INDEX, OURS);
            }
            request.put_text(attr::CHARDEV_TYPE, kind);
        })
    };
    for (kind, device, name) in [("uverbs", true, "uverbs0"), ("rdma_cm", false, "rdma_cm")] {
        let datagrams = of(kind, device);
        let found = messages(&datagrams)[0].attributes();
        assert_eq!(found.text(attr::CHARDEV_NAME), Some(name.as_bytes()));
    }
    assert_eq!(code(&of("umad", true)), -Errno::OPNOTSUPP.raw_os_error());
}

#[test]
fn the_system_copies_on_fork() {
    let datagrams = Machine::new().ask(cmd::SYS_GET, 0, |_| {});
    let found = messages(&datagrams)[0].attributes();
    assert_eq!(found.find(attr::SYS_COPY_ON_FORK), Some(&[1][..]));
    assert_eq!(found.find(attr::SYS_NETNS_MODE), Some(&[1][..]));
}

#[test]
fn messages_that_are_no_requests_are_only_acknowledged() {
    let header = Header {
        flags: flag::ACK,
        ..request_header(cmd::GET, 0)
    };
    let acknowledged = answer(&Writer::new(header).finish(), PORT, &Machine::new());
    assert_eq!(code(&acknowledged), 0);
}

proptest! {
    #[test]
    fn any_request_gets_datagrams_that_a_program_can_receive(
        command in 0u16..32,
        flags: u16,
        attributes in vec((0u16..100, vec(any::<u8>(), 0..8)), 0..6),
        ours: bool,
    ) {
        let datagrams = Machine::with_queue_pairs(100).ask(command, flags, |request| {
            if ours {
                index(request);
            }
            for (kind, value) in &attributes {
                request.put(*kind, value);
            }
        });
        for datagram in &datagrams {
            prop_assert!(datagram.len() <= 4096);
            let whole: usize = Message::all(datagram).map(|message| message.bytes.len().next_multiple_of(4)).sum();
            prop_assert_eq!(whole, datagram.len().next_multiple_of(4));
        }
    }

    #[test]
    fn no_buffer_makes_the_answer_panic(bytes in vec(any::<u8>(), 0..200)) {
        let _ = answer(&bytes, PORT, &Machine::new());
    }
}
