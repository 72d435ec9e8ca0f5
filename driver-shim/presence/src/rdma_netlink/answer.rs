//! The replies to requests, as the kernel's `nldev.c` gives them.
//!
//! A request that names a device of ours by its index is answered here, and one that names another
//! device is passed on to the kernel. A dump of all devices has the kernel's devices and ours.

use std::net::SocketAddr;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::kernel;
use super::message::{Attributes, HEADER, Header, Message, Writer, flag, kind};
use super::uapi::{NLDEV, attr, client, cmd, command, message_type};

/// Most bytes of a datagram with parts of a dump, as the kernel's (`NLMSG_GOODSIZE`): programs
/// receive with buffers of one page.
const DATAGRAM: usize = 3776;
/// Most requests in a buffer that are executed; the others fail with `ENOBUFS`. Programs send one.
const REQUESTS: usize = 16;
/// Most bytes of one entry of a table of objects.
const ENTRY: usize = 512;

/// `NETLINK_RDMA`'s name for the type of a character device, and its number and name.
const UVERBS: &[u8] = b"uverbs";
const RDMA_CM: &[u8] = b"rdma_cm";

/// The state of a port, by `enum ib_port_state` and `enum ib_port_phys_state`.
const PORT_DOWN: (u8, u8) = (1, 3);
const PORT_ACTIVE: (u8, u8) = (4, 5);

/// All processes' devices are visible in all network namespaces (`rdma system`).
const NETNS_SHARED: u8 = 1;

/// A character device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CharDevice {
    /// Major and minor number, as stat(2) has them.
    pub number: u64,
    /// The version of its ABI.
    pub abi: u64,
    /// The name of its node in `/dev/infiniband`.
    pub name: String,
}

/// A device of ours. It has one port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// The number by which requests name it.
    pub index: u32,
    /// The name.
    pub name: String,
    /// `iw` or `roce`.
    pub protocol: &'static str,
    /// The type (`enum ib_node_type`).
    pub node_type: u8,
    /// The version of the firmware.
    pub firmware: String,
    /// The node GUID, in host byte order.
    pub guid: u64,
    /// Whether the port is active.
    pub active: bool,
    /// Index and name of its network interface.
    pub netdev: Option<(u32, String)>,
    /// Its uverbs device.
    pub uverbs: CharDevice,
}

/// An object that a process made on a device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resource {
    /// The process.
    pub pid: u32,
    /// The number of the object among those of its kind.
    pub id: u32,
    /// The object.
    pub object: Object,
}

/// The object of a [`Resource`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Object {
    QueuePair {
        /// `enum ib_qp_type`.
        kind: u8,
        /// `enum ib_qp_state`.
        state: u8,
        /// Number of the peer's queue pair.
        peer: u32,
        rq_psn: u32,
        sq_psn: u32,
        /// Number of the protection domain.
        pd: u32,
    },
    CompletionQueue {
        entries: u32,
        /// Queue pairs that use it.
        users: u64,
    },
    MemoryRegion {
        /// Both keys.
        key: u32,
        length: u64,
        /// Number of the protection domain.
        pd: u32,
    },
    ProtectionDomain {
        /// Objects in the domain.
        users: u64,
    },
    Context,
    SharedReceiveQueue {
        /// Number of the protection domain.
        pd: u32,
        /// Numbers of the queue pairs that use it.
        queue_pairs: Vec<u32>,
    },
    CmId {
        /// Number of the queue pair; 0: none.
        qpn: u32,
        port_space: u32,
        /// `enum rdma_cm_state`.
        state: u8,
        source: Option<SocketAddr>,
        destination: Option<SocketAddr>,
    },
}

/// The kernel's messages; `None` if it has no RDMA netlink, or its devices are hidden.
pub type Replies = Result<Option<Vec<Vec<u8>>>, Errno>;

/// What the answers need to know of the host and its processes.
pub trait Host {
    /// The devices of ours that the program sees.
    fn devices(&self) -> &[Device];
    /// The character device of the connection manager.
    fn rdma_cm(&self) -> CharDevice;
    /// The objects that this user's processes have made on a device.
    fn resources(&self, device: &Device) -> Vec<Resource>;
    /// The counters of the port of a device, with their names.
    fn counters(&self, device: &Device) -> Vec<(String, u64)>;
    /// Whether forked children may have registered memory.
    fn copies_on_fork(&self) -> bool;
    /// Whether the process has `CAP_NET_ADMIN`.
    fn may_administer(&self) -> bool;
    /// The messages with which the kernel replies to a request.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    fn kernel(&self, request: &Message<'_>) -> Replies;
    /// Whether a dump of all devices has the kernel's before ours.
    fn kernels_are_first(&self) -> bool;
}

/// A kind of object in a device's tables.
struct Table {
    name: &'static str,
    command: u16,
    /// The attribute with the entries.
    table: u16,
    entry: u16,
    /// The attribute with the number of an object.
    id: u16,
    contains: fn(&Object) -> bool,
}

/// All kinds, in the order of the kernel's summary.
const TABLES: [Table; 7] = [
    Table {
        name: "pd",
        command: cmd::RES_PD_GET,
        table: attr::RES_PD,
        entry: attr::RES_PD_ENTRY,
        id: attr::RES_PDN,
        contains: |object| matches!(object, Object::ProtectionDomain { .. }),
    },
    Table {
        name: "cq",
        command: cmd::RES_CQ_GET,
        table: attr::RES_CQ,
        entry: attr::RES_CQ_ENTRY,
        id: attr::RES_CQN,
        contains: |object| matches!(object, Object::CompletionQueue { .. }),
    },
    Table {
        name: "qp",
        command: cmd::RES_QP_GET,
        table: attr::RES_QP,
        entry: attr::RES_QP_ENTRY,
        id: attr::RES_LQPN,
        contains: |object| matches!(object, Object::QueuePair { .. }),
    },
    Table {
        name: "cm_id",
        command: cmd::RES_CM_ID_GET,
        table: attr::RES_CM_ID,
        entry: attr::RES_CM_ID_ENTRY,
        id: attr::RES_CM_IDN,
        contains: |object| matches!(object, Object::CmId { .. }),
    },
    Table {
        name: "mr",
        command: cmd::RES_MR_GET,
        table: attr::RES_MR,
        entry: attr::RES_MR_ENTRY,
        id: attr::RES_MRN,
        contains: |object| matches!(object, Object::MemoryRegion { .. }),
    },
    Table {
        name: "ctx",
        command: cmd::RES_CTX_GET,
        table: attr::RES_CTX,
        entry: attr::RES_CTX_ENTRY,
        id: attr::RES_CTXN,
        contains: |object| matches!(object, Object::Context),
    },
    Table {
        name: "srq",
        command: cmd::RES_SRQ_GET,
        table: attr::RES_SRQ,
        entry: attr::RES_SRQ_ENTRY,
        id: attr::RES_SRQN,
        contains: |object| matches!(object, Object::SharedReceiveQueue { .. }),
    },
];

/// The commands that only an administrator may give (`RDMA_NL_ADMIN_PERM`).
const ADMINISTRATIVE: [u16; 12] = [
    cmd::SET,
    cmd::NEWLINK,
    cmd::DELLINK,
    cmd::SYS_SET,
    cmd::STAT_SET,
    cmd::STAT_DEL,
    cmd::RES_QP_GET_RAW,
    cmd::RES_CQ_GET_RAW,
    cmd::RES_MR_GET_RAW,
    cmd::RES_SRQ_GET_RAW,
    cmd::NEWDEV,
    cmd::DELDEV,
];

/// The outcome of a request.
enum Outcome {
    /// All messages, with the acknowledgement or the end of the dump.
    Complete(Vec<Vec<u8>>),
    /// One reply, or none.
    Reply(Option<Writer>),
    /// The parts of a dump.
    Dump(Vec<Vec<u8>>),
}

/// The datagrams that answer the requests in `buffer`, which a socket with this netlink port has
/// sent.
pub fn answer(buffer: &[u8], port: u32, host: &dyn Host) -> Vec<Vec<u8>> {
    let mut datagrams = Vec::new();
    for (index, message) in Message::all(buffer).enumerate() {
        let header = message.header;
        let is_request = header.flags & flag::REQUEST != 0 && header.kind >= kind::FIRST;
        let request = Request { message, port, host };
        let outcome = match is_request {
            true if index >= REQUESTS => Err(Errno::NOBUFS),
            true => request.outcome(),
            false => Ok(Outcome::Reply(None)),
        };
        let acknowledge = header.flags & flag::ACK != 0;
        match outcome {
            Ok(Outcome::Complete(messages)) => datagrams.extend(packed(messages)),
            Ok(Outcome::Dump(mut messages)) => {
                messages.push(request.done(0));
                datagrams.extend(packed(messages));
            }
            Ok(Outcome::Reply(reply)) => {
                datagrams.extend(reply.map(Writer::finish));
                datagrams.extend(acknowledge.then(|| request.error(0)));
            }
            Err(errno) if request.is_dump() => datagrams.push(request.done(-errno.raw_os_error())),
            Err(errno) => datagrams.push(request.error(-errno.raw_os_error())),
        }
    }
    datagrams
}

/// Puts messages into datagrams.
fn packed(messages: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let mut datagrams: Vec<Vec<u8>> = Vec::new();
    for message in messages {
        match datagrams.last_mut() {
            Some(last) if last.len() + message.len() <= DATAGRAM => {
                last.resize(last.len().next_multiple_of(4), 0);
                last.extend(message);
            }
            _ => datagrams.push(message),
        }
    }
    datagrams
}

/// A request, and what its answer depends on.
struct Request<'a> {
    message: Message<'a>,
    port: u32,
    host: &'a dyn Host,
}

impl<'a> Request<'a> {
    fn attributes(&self) -> Attributes<'a> {
        self.message.attributes()
    }

    fn command(&self) -> u16 {
        command(self.message.header.kind)
    }

    /// Whether the kernel would answer by a dump.
    fn is_dump(&self) -> bool {
        let header = self.message.header;
        header.flags & flag::DUMP != 0
            && client(header.kind) == NLDEV
            && (matches!(
                self.command(),
                cmd::GET | cmd::PORT_GET | cmd::RES_GET | cmd::STAT_GET
            ) || self.table().is_some())
    }

    /// The table that the command queries.
    fn table(&self) -> Option<&'static Table> {
        TABLES.iter().find(|table| table.command == self.command())
    }

    /// The device of ours that the request names.
    fn device(&self) -> Result<Option<&'a Device>, Errno> {
        let index = self.attributes().number(attr::DEV_INDEX)?;
        Ok(self
            .host
            .devices()
            .iter()
            .find(|device| Some(device.index) == index))
    }

    fn outcome(&self) -> Result<Outcome, Errno> {
        if client(self.message.header.kind) == NLDEV {
            if let Some(device) = self.device()? {
                return self.of_device(device);
            }
            let names_none = self.attributes().find(attr::DEV_INDEX).is_none();
            match self.command() {
                cmd::GET | cmd::RES_GET if names_none && self.is_dump() => return Ok(self.of_all()),
                cmd::GET_CHARDEV if names_none && self.chardev_type() == Some(RDMA_CM) => {
                    return Ok(self.chardev(&self.host.rdma_cm()));
                }
                _ => {}
            }
        }
        if let Some(messages) = self.host.kernel(&self.message)? {
            return Ok(Outcome::Complete(messages));
        }
        match self.command() {
            _ if client(self.message.header.kind) != NLDEV => Err(Errno::INVAL),
            cmd::SYS_GET => Ok(self.system()),
            administrative if ADMINISTRATIVE.contains(&administrative) => Err(self.refusal()),
            _ => Err(Errno::INVAL),
        }
    }

    /// Why a change is refused.
    fn refusal(&self) -> Errno {
        match self.host.may_administer() {
            true => Errno::OPNOTSUPP,
            false => Errno::PERM,
        }
    }

    /// The answer to a request that names a device of ours.
    fn of_device(&self, device: &Device) -> Result<Outcome, Errno> {
        let given_port = self.attributes().number(attr::PORT_INDEX)?;
        if given_port.is_some_and(|port| port != 1) {
            return Err(Errno::INVAL);
        }
        let is_dump = self.is_dump();
        match self.command() {
            cmd::GET if is_dump => Ok(self.of_all()),
            cmd::GET => Ok(self.one(|reply| about(reply, device))),
            cmd::PORT_GET if !is_dump && given_port.is_none() => Err(Errno::INVAL),
            cmd::PORT_GET => Ok(self.one_or_dump(|reply| about_port(reply, device))),
            cmd::RES_GET if is_dump => Ok(self.of_all()),
            cmd::RES_GET => {
                let resources = self.host.resources(device);
                Ok(self.one(|reply| summary(reply, device, &resources)))
            }
            cmd::GET_CHARDEV if self.chardev_type() == Some(UVERBS) => Ok(self.chardev(&device.uverbs)),
            cmd::GET_CHARDEV if self.chardev_type().is_none() => Err(Errno::INVAL),
            cmd::GET_CHARDEV => Err(Errno::OPNOTSUPP),
            cmd::STAT_GET if is_dump => Ok(Outcome::Dump(Vec::new())),
            cmd::STAT_GET | cmd::STAT_GET_STATUS if given_port.is_none() => Err(Errno::INVAL),
            cmd::STAT_GET => self.statistics(device),
            cmd::STAT_GET_STATUS => Ok(self.counters(device, |entry, index, _| {
                entry.put_u32(attr::STAT_HWCOUNTER_INDEX, index);
            })),
            administrative if ADMINISTRATIVE.contains(&administrative) => Err(self.refusal()),
            cmd::SYS_GET => Ok(self.system()),
            _ => match self.table() {
                Some(table) if is_dump => Ok(Outcome::Dump(self.entries(device, table))),
                Some(table) => self.entry(device, table),
                None => Err(Errno::INVAL),
            },
        }
    }

    /// The answer to a dump of all devices: the kernel's devices, and ours. Ours are there also if
    /// the kernel cannot be asked.
    fn of_all(&self) -> Outcome {
        let asked = self.host.kernel(&self.message);
        let replied = asked.unwrap_or_default().unwrap_or_default();
        let last = replied.last().and_then(|message| Message::first(message));
        let is_cut = last.is_some_and(|(last, _)| last.header.flags & flag::DUMP_INTERRUPTED != 0);
        let of_a_device = |message: &Vec<u8>| {
            Message::first(message).is_some_and(|(message, _)| message.header.kind >= kind::FIRST)
        };
        let kernels: Vec<Vec<u8>> = replied.into_iter().filter(of_a_device).collect();
        let ours = self.host.devices().iter().map(|device| {
            let mut part = Writer::new(self.header(flag::MULTI));
            match self.command() {
                cmd::RES_GET => summary(&mut part, device, &self.host.resources(device)),
                _ => about(&mut part, device),
            }
            part.finish()
        });
        let mut all: Vec<Vec<u8>> = match self.host.kernels_are_first() {
            true => kernels.into_iter().chain(ours).collect(),
            false => ours.chain(kernels).collect(),
        };
        if is_cut {
            all.push(kernel::cut_off(self.header(0)));
            return Outcome::Complete(all);
        }
        Outcome::Dump(all)
    }

    fn system(&self) -> Outcome {
        self.one(|reply| {
            reply.put_u8(attr::SYS_NETNS_MODE, NETNS_SHARED);
            if self.host.copies_on_fork() {
                reply.put_u8(attr::SYS_COPY_ON_FORK, 1);
            }
        })
    }

    fn chardev_type(&self) -> Option<&'a [u8]> {
        self.attributes().text(attr::CHARDEV_TYPE)
    }

    fn chardev(&self, device: &CharDevice) -> Outcome {
        self.one(|reply| {
            reply
                .put_u64(attr::CHARDEV, device.number)
                .put_u64(attr::CHARDEV_ABI, device.abi)
                .put_text(attr::CHARDEV_NAME, &device.name);
        })
    }

    /// The counters of the port, or their mode, which is that no counter is bound to queue pairs.
    fn statistics(&self, device: &Device) -> Result<Outcome, Errno> {
        match self.attributes().number(attr::STAT_RES)? {
            None => Ok(self.counters(device, |entry, _, value| {
                entry.put_u64(attr::STAT_HWCOUNTER_ENTRY_VALUE, value);
            })),
            Some(of) if of != attr::RES_QP.into() => Err(Errno::INVAL),
            Some(_) if self.attributes().find(attr::STAT_MODE).is_none() => Err(Errno::INVAL),
            Some(_) => Ok(self.one(|reply| {
                handle(reply, device);
                reply.put_u32(attr::PORT_INDEX, 1).put_u32(attr::STAT_MODE, 0);
            })),
        }
    }

    /// The counters of the port with their names; `value` adds what is asked of each.
    fn counters(&self, device: &Device, value: impl Fn(&mut Writer, u32, u64)) -> Outcome {
        let counters = self.host.counters(device);
        self.one(|reply| {
            handle(reply, device);
            reply.put_u32(attr::PORT_INDEX, 1);
            reply.nest(attr::STAT_HWCOUNTERS, |table| {
                for (index, (name, count)) in (0..).zip(&counters) {
                    table.nest(attr::STAT_HWCOUNTER_ENTRY, |entry| {
                        entry.put_text(attr::STAT_HWCOUNTER_ENTRY_NAME, name);
                        value(entry, index, *count);
                    });
                }
            });
        })
    }

    /// The table of a device's objects of one kind, in messages that fit into datagrams. Without
    /// objects there is no message.
    fn entries(&self, device: &Device, table: &Table) -> Vec<Vec<u8>> {
        let resources = self.host.resources(device);
        let mut rest = resources
            .iter()
            .filter(|resource| (table.contains)(&resource.object))
            .peekable();
        let mut messages = Vec::new();
        while rest.peek().is_some() {
            let mut part = Writer::new(self.header(flag::MULTI));
            handle(&mut part, device);
            part.nest(table.table, |entries| {
                while entries.len() + ENTRY <= DATAGRAM {
                    let Some(resource) = rest.next() else { return };
                    entries.nest(table.entry, |entry| self.fill(entry, resource));
                }
            });
            messages.push(part.finish());
        }
        messages
    }

    /// One object, by its number.
    fn entry(&self, device: &Device, table: &Table) -> Result<Outcome, Errno> {
        let id = self.attributes().number(table.id)?.ok_or(Errno::INVAL)?;
        let resources = self.host.resources(device);
        let found = resources
            .iter()
            .find(|resource| (table.contains)(&resource.object) && resource.id == id)
            .ok_or(Errno::NOENT)?;
        Ok(self.one(|reply| {
            handle(reply, device);
            self.fill(reply, found);
        }))
    }

    /// The attributes of an object. Keys of memory are for administrators only, as in the kernel.
    fn fill(&self, entry: &mut Writer, resource: &Resource) {
        let id = resource.id;
        match &resource.object {
            Object::QueuePair { .. } => fill_queue_pair(entry, resource),
            Object::CmId { .. } => fill_cm_id(entry, resource),
            Object::CompletionQueue { entries, users } => {
                entry
                    .put_u32(attr::RES_CQE, *entries)
                    .put_u64(attr::RES_USECNT, *users)
                    .put_u32(attr::RES_CQN, id);
            }
            Object::MemoryRegion { key, length, pd } => {
                if self.host.may_administer() {
                    entry.put_u32(attr::RES_RKEY, *key).put_u32(attr::RES_LKEY, *key);
                }
                entry
                    .put_u64(attr::RES_MRLEN, *length)
                    .put_u32(attr::RES_MRN, id)
                    .put_u32(attr::RES_PDN, *pd);
            }
            Object::ProtectionDomain { users } => {
                entry.put_u64(attr::RES_USECNT, *users).put_u32(attr::RES_PDN, id);
            }
            Object::Context => {
                entry.put_u32(attr::RES_CTXN, id);
            }
            Object::SharedReceiveQueue { pd, queue_pairs } => {
                entry
                    .put_u32(attr::RES_SRQN, id)
                    .put_u8(attr::RES_TYPE, 0)
                    .put_u32(attr::RES_PDN, *pd);
                // The kernel joins neighbours to ranges; numbers that do not fit are left out.
                entry.nest(attr::RES_QP, |table| {
                    for qpn in queue_pairs.iter().take(ENTRY / 32) {
                        table.nest(attr::RES_QP_ENTRY, |entry| {
                            entry.put_u32(attr::RES_LQPN, *qpn);
                        });
                    }
                });
            }
        }
        entry.put_u32(attr::RES_PID, resource.pid);
    }

    /// The header of a reply.
    fn header(&self, flags: u16) -> Header {
        Header {
            kind: message_type(NLDEV, self.command()),
            flags,
            sequence: self.message.header.sequence,
            port: self.port,
        }
    }

    fn one(&self, fill: impl FnOnce(&mut Writer)) -> Outcome {
        let mut reply = Writer::new(self.header(0));
        fill(&mut reply);
        Outcome::Reply(Some(reply))
    }

    fn one_or_dump(&self, fill: impl FnOnce(&mut Writer)) -> Outcome {
        if !self.is_dump() {
            return self.one(fill);
        }
        let mut part = Writer::new(self.header(flag::MULTI));
        fill(&mut part);
        Outcome::Dump(vec![part.finish()])
    }

    /// The acknowledgement of the request, with its header; or its error as a negative number, with
    /// the whole request.
    fn error(&self, code: i32) -> Vec<u8> {
        let (flags, about) = match code {
            0 => (flag::CAPPED, self.message.bytes.get(..HEADER).unwrap_or_default()),
            _ => (0, self.message.bytes),
        };
        let mut error = Writer::new(Header {
            kind: kind::ERROR,
            ..self.header(flags)
        });
        error.raw(&code.to_ne_bytes()).raw(about);
        error.finish()
    }

    /// The end of a dump.
    fn done(&self, code: i32) -> Vec<u8> {
        let mut done = Writer::new(Header {
            kind: kind::DONE,
            ..self.header(flag::MULTI)
        });
        done.raw(&code.to_ne_bytes());
        done.finish()
    }
}

/// Kinds of queue pairs (`enum ib_qp_type`).
mod ib {
    pub(super) const QPT_RC: u8 = 2;
    pub(super) const QPT_UC: u8 = 3;
}

/// Index and name of a device.
fn handle(reply: &mut Writer, device: &Device) {
    reply
        .put_u32(attr::DEV_INDEX, device.index)
        .put_text(attr::DEV_NAME, &device.name);
}

fn about(reply: &mut Writer, device: &Device) {
    handle(reply, device);
    reply
        .put_u32(attr::PORT_INDEX, 1)
        .put_u64(attr::CAP_FLAGS, 0)
        .put_text(attr::FW_VERSION, &device.firmware)
        .put_u64(attr::NODE_GUID, device.guid)
        .put_u64(attr::SYS_IMAGE_GUID, device.guid)
        .put_u8(attr::DEV_NODE_TYPE, device.node_type)
        .put_text(attr::DEV_PROTOCOL, device.protocol);
}

fn about_port(reply: &mut Writer, device: &Device) {
    let (state, physical) = match device.active {
        true => PORT_ACTIVE,
        false => PORT_DOWN,
    };
    handle(reply, device);
    reply
        .put_u32(attr::PORT_INDEX, 1)
        .put_u8(attr::PORT_STATE, state)
        .put_u8(attr::PORT_PHYS_STATE, physical);
    if let Some((index, name)) = &device.netdev {
        reply
            .put_u32(attr::NDEV_INDEX, *index)
            .put_text(attr::NDEV_NAME, name);
    }
}

fn fill_queue_pair(entry: &mut Writer, resource: &Resource) {
    let Object::QueuePair {
        kind,
        state,
        peer,
        rq_psn,
        sq_psn,
        pd,
    } = resource.object
    else {
        return;
    };
    entry
        .put_u32(attr::PORT_INDEX, 1)
        .put_u32(attr::RES_LQPN, resource.id);
    let is_connected = matches!(kind, ib::QPT_RC | ib::QPT_UC);
    if is_connected {
        entry
            .put_u32(attr::RES_RQPN, peer)
            .put_u32(attr::RES_RQ_PSN, rq_psn);
    }
    entry.put_u32(attr::RES_SQ_PSN, sq_psn);
    if is_connected {
        entry.put_u8(attr::RES_PATH_MIG_STATE, 0);
    }
    entry
        .put_u8(attr::RES_TYPE, kind)
        .put_u8(attr::RES_STATE, state)
        .put_u32(attr::RES_PDN, pd);
}

fn fill_cm_id(entry: &mut Writer, resource: &Resource) {
    let Object::CmId {
        qpn,
        port_space,
        state,
        source,
        destination,
    } = resource.object
    else {
        return;
    };
    if qpn != 0 {
        entry
            .put_u32(attr::RES_LQPN, qpn)
            .put_u8(attr::RES_TYPE, ib::QPT_RC);
    }
    entry
        .put_u32(attr::PORT_INDEX, 1)
        .put_u32(attr::RES_PS, port_space)
        .put_u8(attr::RES_STATE, state);
    for (kind, address) in [(attr::RES_SRC_ADDR, source), (attr::RES_DST_ADDR, destination)] {
        if let Some(address) = address {
            entry.put(kind, &storage(address));
        }
    }
    entry.put_u32(attr::RES_CM_IDN, resource.id);
}

/// The number of objects of each kind.
fn summary(reply: &mut Writer, device: &Device, resources: &[Resource]) {
    handle(reply, device);
    reply.nest(attr::RES_SUMMARY, |summary| {
        for table in &TABLES {
            let count = resources
                .iter()
                .filter(|resource| (table.contains)(&resource.object))
                .count();
            summary.nest(attr::RES_SUMMARY_ENTRY, |entry| {
                entry
                    .put_text(attr::RES_SUMMARY_ENTRY_NAME, table.name)
                    .put_u64(attr::RES_SUMMARY_ENTRY_CURR, count as u64);
            });
        }
    });
}

/// `struct __kernel_sockaddr_storage`.
fn storage(address: SocketAddr) -> [u8; 128] {
    const AF_INET: u16 = 2;
    const AF_INET6: u16 = 10;
    let mut storage = [0; 128];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = storage.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    put(2, &address.port().to_be_bytes());
    match address {
        SocketAddr::V4(address) => {
            put(0, &AF_INET.to_ne_bytes());
            put(4, &address.ip().octets());
        }
        SocketAddr::V6(address) => {
            put(0, &AF_INET6.to_ne_bytes());
            put(8, &address.ip().octets());
            put(24, &address.scope_id().to_ne_bytes());
        }
    }
    storage
}

#[cfg(test)]
mod tests;
