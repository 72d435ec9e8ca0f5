//! Requests to RDMA netlink: the program may pass on bytes of others.

#![no_main]

use libfuzzer_sys::fuzz_target;
use urnic_presence::rdma_netlink::answer::{CharDevice, Device, Host, Object, Resource, answer};
use urnic_presence::rdma_netlink::message::{Header, Message, Writer, flag};
use urnic_presence::rdma_netlink::uapi::{NLDEV, attr, cmd, message_type};

/// A machine with one device, which has objects, and no devices of the kernel.
struct Machine([Device; 1]);

fn char_device(name: &str) -> CharDevice {
    CharDevice {
        number: 0x103,
        abi: 1,
        name: name.to_owned(),
    }
}

impl Machine {
    fn new() -> Machine {
        Machine([Device {
            index: 0,
            name: "urnic0".to_owned(),
            protocol: "iw",
            node_type: 4,
            firmware: "1".to_owned(),
            guid: 1,
            active: true,
            netdev: Some((1, "lo".to_owned())),
            uverbs: char_device("uverbs0"),
        }])
    }
}

impl Host for Machine {
    fn devices(&self) -> &[Device] {
        &self.0
    }

    fn rdma_cm(&self) -> CharDevice {
        char_device("rdma_cm")
    }

    fn resources(&self, _: &Device) -> Vec<Resource> {
        let object = |id| match id % 3 {
            0 => Object::Context,
            1 => Object::CompletionQueue {
                entries: 16,
                users: 1,
            },
            _ => Object::SharedReceiveQueue {
                pd: 1,
                queue_pairs: (0..id).collect(),
            },
        };
        (0..40)
            .map(|id| Resource {
                pid: 1,
                id,
                object: object(id),
            })
            .collect()
    }

    fn counters(&self, _: &Device) -> Vec<(String, u64)> {
        vec![("tx_bytes".to_owned(), 1)]
    }

    fn copies_on_fork(&self) -> bool {
        true
    }

    fn may_administer(&self) -> bool {
        false
    }

    fn kernel(&self, _: &Message<'_>) -> urnic_presence::rdma_netlink::answer::Replies {
        Ok(None)
    }

    fn kernels_are_first(&self) -> bool {
        false
    }
}

/// A request of each command, for one object and as a dump.
fn seeds() -> Vec<Vec<u8>> {
    let request = |command: u16, flags: u16| {
        let mut request = Writer::new(Header {
            kind: message_type(NLDEV, command),
            flags: flag::REQUEST | flags,
            sequence: 1,
            port: 0,
        });
        request.put_u32(attr::DEV_INDEX, 0).put_u32(attr::PORT_INDEX, 1);
        request
            .put_u32(attr::RES_CQN, 1)
            .put_text(attr::CHARDEV_TYPE, "uverbs");
        request.finish()
    };
    (cmd::GET..=cmd::DELDEV)
        .flat_map(|command| [request(command, flag::ACK), request(command, flag::DUMP)])
        .collect()
}

fuzz_target!(init: urnic_fuzz::plant(seeds()), |bytes: &[u8]| {
    for datagram in answer(bytes, 7, &Machine::new()) {
        // An error contains the request.
        assert!(datagram.len() <= 4096 + bytes.len());
        for message in Message::all(&datagram) {
            assert_eq!(message.header.port, 7);
        }
    }
});
