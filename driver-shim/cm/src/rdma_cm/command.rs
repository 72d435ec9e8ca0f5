//! Commands, parsed from the bytes that a program writes to its channel.

use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::abi::{self, CmAddress, ConnParam, Header, address_len, opcode};
use crate::timeouts::RETRIES;

/// Bytes of an id or a count: the response to several commands.
const NUMBER_LEN: usize = size_of::<u32>();
/// Bytes of `struct rdma_ucm_event_resp` without the vendor's extension, which was added later.
const EVENT_LEN: usize = 328;
/// Bytes of `struct rdma_ucm_query_route_resp` without the device's index, which was added later.
const ROUTE_LEN: usize = 200;
/// Bytes of `struct rdma_ucm_query_addr_resp` without the device's index, which was added later.
const ADDRESSES_LEN: usize = 272;
/// Bytes of `struct rdma_ucm_query_path_resp` without path records.
const PATHS_LEN: usize = 8;
/// Bytes of `struct rdma_ucm_connect` without the vendor's extension, which was added later.
const CONNECT_LEN: usize = 276;
/// Bytes of `struct rdma_ucm_accept` without the vendor's extension, which was added later.
const ACCEPT_LEN: usize = 284;

/// `RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER`, the last flag of `JOIN_MCAST`.
const MAX_JOIN_FLAG: u16 = 1;

/// The address of a command's response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The address in the program's memory.
    pub address: u64,
    /// The number of bytes that the program has reserved for the response.
    pub room: usize,
}

/// Parameters of a connection, as a program gives them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Parameters {
    /// The queue pair's number.
    pub qpn: u32,
    /// Maximum number of inbound Reads.
    pub responder_resources: u8,
    /// Maximum number of outbound Reads.
    pub initiator_depth: u8,
    /// Retries of requests that the peer does not acknowledge.
    pub retry_count: u8,
    /// Retries of the peer's requests while no receive is posted.
    pub rnr_retry_count: u8,
    /// The program asks for end-to-end flow control.
    pub flow_control: bool,
    /// The queue pair has a shared receive queue.
    pub srq: bool,
    /// Private data for the peer.
    pub private_data: Vec<u8>,
}

impl From<&ConnParam> for Parameters {
    fn from(param: &ConnParam) -> Parameters {
        let len = usize::from(param.private_data_len);
        Parameters {
            qpn: param.qp_num,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            retry_count: param.retry_count.min(RETRIES),
            rnr_retry_count: param.rnr_retry_count.min(RETRIES),
            flow_control: param.flow_control != 0,
            srq: param.srq != 0,
            private_data: param.private_data.get(..len).unwrap_or_default().to_vec(),
        }
    }
}

/// The subject of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueryKind {
    /// `RDMA_USER_CM_QUERY_ADDR`.
    Addresses,
    /// `RDMA_USER_CM_QUERY_PATH`.
    Paths,
    /// `RDMA_USER_CM_QUERY_GID`.
    Gids,
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// `CREATE_ID`.
    CreateId {
        /// The destination of the answer.
        answer: Destination,
        /// The program's cookie of the id.
        uid: u64,
        /// `enum rdma_port_space`.
        port_space: u16,
    },
    /// `DESTROY_ID`.
    DestroyId {
        /// The destination of the answer.
        answer: Destination,
        /// The id.
        id: u32,
    },
    /// `BIND_IP` and `BIND`.
    Bind {
        /// The id.
        id: u32,
        /// The address to bind to.
        local: CmAddress,
    },
    /// `RESOLVE_IP` and `RESOLVE_ADDR`.
    ResolveAddress {
        /// The id.
        id: u32,
        /// The source address, if the program names one.
        local: Option<CmAddress>,
        /// The destination address.
        remote: CmAddress,
    },
    /// `RESOLVE_ROUTE`.
    ResolveRoute {
        /// The id.
        id: u32,
    },
    /// `QUERY_ROUTE`.
    QueryRoute {
        /// The destination of the answer.
        answer: Destination,
        /// The id.
        id: u32,
    },
    /// `QUERY`.
    Query {
        /// The destination of the answer.
        answer: Destination,
        /// The id.
        id: u32,
        /// The subject of the query.
        kind: QueryKind,
    },
    /// `CONNECT`.
    Connect {
        /// The id.
        id: u32,
        /// Parameters of the connection.
        parameters: Parameters,
    },
    /// `LISTEN`.
    Listen {
        /// The id.
        id: u32,
        /// Maximum number of Requests that may wait to be accepted.
        backlog: u32,
    },
    /// `ACCEPT`; without parameters it is the end of a CONNECT_RESPONSE.
    Accept {
        /// The id.
        id: u32,
        /// The program's cookie of the id.
        uid: u64,
        /// Parameters of the connection.
        parameters: Option<Parameters>,
    },
    /// `REJECT`.
    Reject {
        /// The id.
        id: u32,
        /// Private data for the peer.
        private_data: Vec<u8>,
    },
    /// `DISCONNECT`.
    Disconnect {
        /// The id.
        id: u32,
    },
    /// `INIT_QP_ATTR`.
    InitQpAttr {
        /// The destination of the answer.
        answer: Destination,
        /// The id.
        id: u32,
        /// The requested state of the queue pair.
        state: u32,
    },
    /// `GET_EVENT`.
    GetEvent {
        /// The destination of the answer.
        answer: Destination,
    },
    /// `SET_OPTION`; the value is at `address` of the program.
    SetOption {
        /// The id.
        id: u32,
        /// `RDMA_OPTION_ID`.
        level: u32,
        /// The option.
        name: u32,
        /// The address of the value in the program's memory.
        address: u64,
        /// Bytes of the value.
        len: u32,
    },
    /// `NOTIFY`.
    Notify {
        /// The id.
        id: u32,
        /// `enum ibv_event_type`.
        event: u32,
    },
    /// `WRITE_CM_EVENT`: the program queues an event of its own.
    WriteEvent {
        /// The id.
        id: u32,
        /// `RDMA_CM_EVENT_USER`, or `RDMA_CM_EVENT_INTERNAL` of librdmacm.
        event: u32,
        /// The status of the event.
        status: u32,
        /// What the event says.
        argument: u64,
    },
    /// `JOIN_IP_MCAST` and `JOIN_MCAST`.
    JoinMulticast {
        /// The destination of the answer.
        answer: Destination,
        /// The id.
        id: u32,
        /// The program's cookie of the membership.
        uid: u64,
        /// The group.
        group: CmAddress,
    },
    /// `LEAVE_MCAST`.
    LeaveMulticast {
        /// The destination of the answer.
        answer: Destination,
        /// The number of the membership.
        membership: u32,
    },
    /// `MIGRATE_ID`.
    MigrateId {
        /// The destination of the answer.
        answer: Destination,
        /// The id.
        id: u32,
        /// The file descriptor of the channel that the id leaves.
        fd: u32,
    },
}

/// The number of the command in `bytes`, if `bytes` has one.
pub fn number(bytes: &[u8]) -> Option<u32> {
    Header::read_from_prefix(bytes)
        .ok()
        .map(|(header, _)| header.command)
}

impl Command {
    /// Parses a command.
    ///
    /// # Errors
    /// `EINVAL` for an unknown or malformed command, `ENOSYS` for `GET_OPTION`, which the
    /// kernel does not implement, `ENOSPC` without room for the answer, `EFAULT` without an address
    /// for the answer, `EAFNOSUPPORT` for an unsupported address family.
    pub fn parse(bytes: &[u8]) -> Result<Command, Errno> {
        let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| Errno::INVAL)?;
        let payload = Payload {
            bytes: rest.get(..header.in_len.into()).ok_or(Errno::INVAL)?,
            room: header.out_len.into(),
        };
        // Each function below parses some commands, and leaves the others to the next.
        Command::parse_id_command(header.command, payload)
    }

    /// Parses a command on ids or on the events of their channel.
    fn parse_id_command(command: u32, payload: Payload<'_>) -> Result<Command, Errno> {
        Ok(match command {
            opcode::CREATE_ID => {
                let c: abi::CreateId = payload.whole()?;
                Command::CreateId {
                    answer: payload.answer(c.response, NUMBER_LEN)?,
                    uid: c.uid,
                    port_space: c.port_space,
                }
            }
            opcode::DESTROY_ID => {
                let c: abi::OnId = payload.whole()?;
                Command::DestroyId {
                    answer: payload.answer(c.response, NUMBER_LEN)?,
                    id: c.id,
                }
            }
            opcode::MIGRATE_ID => {
                let c: abi::MigrateId = payload.whole()?;
                Command::MigrateId {
                    answer: payload.answer(c.response, NUMBER_LEN)?,
                    id: c.id,
                    fd: c.fd,
                }
            }
            opcode::WRITE_CM_EVENT => {
                let c: abi::WriteEvent = payload.whole()?;
                Command::WriteEvent {
                    id: c.id,
                    event: c.event,
                    status: c.status,
                    argument: c.argument,
                }
            }
            opcode::GET_EVENT => {
                let c: abi::GetEvent = payload.whole()?;
                Command::GetEvent {
                    answer: payload.answer(c.response, EVENT_LEN)?,
                }
            }
            _ => return Command::parse_address_command(command, payload),
        })
    }

    /// Parses a command on addresses, routes or multicast groups.
    fn parse_address_command(command: u32, payload: Payload<'_>) -> Result<Command, Errno> {
        Ok(match command {
            opcode::BIND_IP => {
                let c: abi::BindIp = payload.whole()?;
                Command::Bind {
                    id: c.id,
                    local: CmAddress::parse(&c.address)?.ok_or(Errno::INVAL)?,
                }
            }
            opcode::BIND => {
                let c: abi::Bind = payload.whole()?;
                Command::Bind {
                    id: c.id,
                    local: parse_address(&c.address, c.address_len)?.ok_or(Errno::INVAL)?,
                }
            }
            opcode::RESOLVE_IP => {
                let c: abi::ResolveIp = payload.whole()?;
                Command::ResolveAddress {
                    id: c.id,
                    local: CmAddress::parse(&c.source)?,
                    remote: CmAddress::parse(&c.destination)?.ok_or(Errno::INVAL)?,
                }
            }
            opcode::RESOLVE_ADDR => {
                let c: abi::ResolveAddr = payload.whole()?;
                Command::ResolveAddress {
                    id: c.id,
                    local: parse_address(&c.source, c.source_len)?,
                    remote: parse_address(&c.destination, c.destination_len)?.ok_or(Errno::INVAL)?,
                }
            }
            opcode::RESOLVE_ROUTE => Command::ResolveRoute {
                id: payload.whole::<abi::ResolveRoute>()?.id,
            },
            _ => return Command::parse_group_command(command, payload),
        })
    }

    /// Parses a command on a multicast group.
    fn parse_group_command(command: u32, payload: Payload<'_>) -> Result<Command, Errno> {
        let address = |bytes: &[u8]| CmAddress::parse(bytes).ok().flatten().ok_or(Errno::INVAL);
        Ok(match command {
            opcode::JOIN_IP_MCAST => {
                let c: abi::JoinIpMulticast = payload.whole()?;
                Command::JoinMulticast {
                    answer: payload.answer(c.response, NUMBER_LEN)?,
                    id: c.id,
                    uid: c.uid,
                    group: address(&c.address)?,
                }
            }
            opcode::JOIN_MCAST => {
                let c: abi::JoinMulticast = payload.whole()?;
                let answer = payload.answer(c.response, NUMBER_LEN)?;
                let group = address(&c.address)?;
                // A program that only sends to the group becomes a member, too: it gets the group's
                // parameters, and its queue pair decides whether it receives.
                if address_len(&group) != c.address_len || c.flags > MAX_JOIN_FLAG {
                    return Err(Errno::INVAL);
                }
                Command::JoinMulticast {
                    answer,
                    id: c.id,
                    uid: c.uid,
                    group,
                }
            }
            opcode::LEAVE_MCAST => {
                let c: abi::OnId = payload.whole()?;
                Command::LeaveMulticast {
                    answer: payload.answer(c.response, NUMBER_LEN)?,
                    membership: c.id,
                }
            }
            _ => return Command::parse_connection_command(command, payload),
        })
    }

    /// Parses a command on a connection.
    fn parse_connection_command(command: u32, payload: Payload<'_>) -> Result<Command, Errno> {
        Ok(match command {
            opcode::CONNECT => {
                let c: abi::Connect = extended(payload.bytes, CONNECT_LEN)?;
                Command::Connect {
                    id: c.id,
                    parameters: Parameters::from(&c.param),
                }
            }
            opcode::LISTEN => {
                let c: abi::Listen = payload.whole()?;
                Command::Listen {
                    id: c.id,
                    backlog: c.backlog,
                }
            }
            opcode::ACCEPT => {
                let c: abi::Accept = extended(payload.bytes, ACCEPT_LEN)?;
                Command::Accept {
                    id: c.id,
                    uid: c.uid,
                    parameters: (c.param.valid != 0).then(|| Parameters::from(&c.param)),
                }
            }
            opcode::REJECT => {
                let c: abi::Reject = payload.whole()?;
                let len = usize::from(c.private_data_len);
                Command::Reject {
                    id: c.id,
                    private_data: c.private_data.get(..len).unwrap_or_default().to_vec(),
                }
            }
            opcode::DISCONNECT => Command::Disconnect {
                id: payload.whole::<abi::Disconnect>()?.id,
            },
            opcode::NOTIFY => {
                let c: abi::Notify = payload.whole()?;
                Command::Notify {
                    id: c.id,
                    event: c.event,
                }
            }
            _ => return Command::parse_attribute_command(command, payload),
        })
    }

    /// Parses a query, a query of queue pair attributes, or an option.
    fn parse_attribute_command(command: u32, payload: Payload<'_>) -> Result<Command, Errno> {
        Ok(match command {
            opcode::QUERY_ROUTE => {
                let c: abi::OnId = payload.whole()?;
                Command::QueryRoute {
                    answer: payload.answer(c.response, ROUTE_LEN)?,
                    id: c.id,
                }
            }
            opcode::QUERY => {
                let c: abi::Query = payload.whole()?;
                let (kind, min_len) = match c.option {
                    opcode::query::ADDR => (QueryKind::Addresses, ADDRESSES_LEN),
                    opcode::query::PATH => (QueryKind::Paths, PATHS_LEN),
                    opcode::query::GID => (QueryKind::Gids, ADDRESSES_LEN),
                    _ => return Err(Errno::NOSYS),
                };
                Command::Query {
                    answer: payload.answer(c.response, min_len)?,
                    id: c.id,
                    kind,
                }
            }
            opcode::INIT_QP_ATTR => {
                let c: abi::InitQpAttr = payload.whole()?;
                Command::InitQpAttr {
                    answer: payload.answer(c.response, size_of::<abi::QpAttrResponse>())?,
                    id: c.id,
                    state: c.qp_state,
                }
            }
            opcode::SET_OPTION => {
                let c: abi::SetOption = payload.whole()?;
                Command::SetOption {
                    id: c.id,
                    level: c.level,
                    name: c.name,
                    address: c.value,
                    len: c.len,
                }
            }
            opcode::GET_OPTION => return Err(Errno::NOSYS),
            _ => return Err(Errno::INVAL),
        })
    }
}

/// Parses a payload of the command's full length.
fn whole<T: FromBytes>(payload: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(payload)
        .map(|(whole, _)| whole)
        .map_err(|_| Errno::INVAL)
}

/// Parses a payload of which older programs omit the last fields; missing fields are zero.
fn extended<T: FromBytes + FromZeros + IntoBytes>(payload: &[u8], min_len: usize) -> Result<T, Errno> {
    if payload.len() < min_len {
        return Err(Errno::INVAL);
    }
    let mut extended = T::new_zeroed();
    let known = payload.len().min(size_of::<T>());
    if let (Some(to), Some(from)) = (extended.as_mut_bytes().get_mut(..known), payload.get(..known)) {
        to.copy_from_slice(from);
    }
    Ok(extended)
}

/// Parses an address in `field`, of which `len` bytes are used.
fn parse_address(field: &[u8], len: u16) -> Result<Option<CmAddress>, Errno> {
    CmAddress::parse(field.get(..len.into()).ok_or(Errno::INVAL)?)
}

/// A command's payload, and the room for its answer.
#[derive(Clone, Copy)]
struct Payload<'a> {
    bytes: &'a [u8],
    room: usize,
}

impl Payload<'_> {
    fn whole<T: FromBytes>(self) -> Result<T, Errno> {
        whole(self.bytes)
    }

    /// The destination of an answer of at least `min_len` bytes.
    fn answer(self, address: u64, min_len: usize) -> Result<Destination, Errno> {
        match (address, self.room >= min_len) {
            (_, false) => Err(Errno::NOSPC),
            (0, true) => Err(Errno::FAULT),
            (_, true) => Ok(Destination {
                address,
                room: self.room,
            }),
        }
    }
}
