//! Commands, out of the bytes that a program writes to its channel.

use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::abi::{self, ConnParam, Header, Name};

/// Where a command wants its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Destination {
    /// The program's address.
    pub(crate) address: u64,
    /// Bytes it has room for.
    pub(crate) room: usize,
}

/// Parameters of a connection, as a program gives them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Wishes {
    /// The queue pair's number.
    pub(crate) qpn: u32,
    /// Inbound Reads.
    pub(crate) responder_resources: u8,
    /// Outbound Reads.
    pub(crate) initiator_depth: u8,
    pub(crate) private_data: Vec<u8>,
}

impl From<&ConnParam> for Wishes {
    fn from(param: &ConnParam) -> Wishes {
        let len = usize::from(param.private_data_len);
        Wishes {
            qpn: param.qp_num,
            responder_resources: param.responder_resources,
            initiator_depth: param.initiator_depth,
            private_data: param.private_data.get(..len).unwrap_or_default().to_vec(),
        }
    }
}

/// What a query is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Question {
    Addresses,
    Paths,
    Gids,
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Command {
    CreateId {
        answer: Destination,
        uid: u64,
        port_space: u16,
    },
    DestroyId {
        answer: Destination,
        id: u32,
    },
    /// `BIND_IP` and `BIND`.
    Bind {
        id: u32,
        local: Name,
    },
    /// `RESOLVE_IP` and `RESOLVE_ADDR`.
    ResolveAddress {
        id: u32,
        local: Option<Name>,
        remote: Name,
    },
    ResolveRoute {
        id: u32,
    },
    QueryRoute {
        answer: Destination,
        id: u32,
    },
    Query {
        answer: Destination,
        id: u32,
        question: Question,
    },
    Connect {
        id: u32,
        wishes: Wishes,
    },
    Listen {
        id: u32,
        backlog: u32,
    },
    /// Without wishes: the end of a CONNECT_RESPONSE.
    Accept {
        id: u32,
        uid: u64,
        wishes: Option<Wishes>,
    },
    Reject {
        id: u32,
        private_data: Vec<u8>,
    },
    Disconnect {
        id: u32,
    },
    InitQpAttr {
        answer: Destination,
        id: u32,
        state: u32,
    },
    GetEvent {
        answer: Destination,
    },
    /// The value is at `address` of the program.
    SetOption {
        id: u32,
        level: u32,
        name: u32,
        address: u64,
        len: u32,
    },
    Notify {
        id: u32,
    },
    /// `JOIN_IP_MCAST` and `JOIN_MCAST`.
    JoinMulticast {
        id: u32,
    },
    LeaveMulticast {
        id: u32,
    },
    MigrateId {
        answer: Destination,
        id: u32,
        fd: u32,
    },
}

/// `RDMA_USER_CM_CMD_GET_EVENT`: the one that may wait.
pub(crate) const GET_EVENT: u32 = 12;

/// The number of the command in `bytes`, if there is any.
pub(crate) fn number(bytes: &[u8]) -> Option<u32> {
    Header::read_from_prefix(bytes)
        .ok()
        .map(|(header, _)| header.command)
}

/// A payload of the command's full length.
fn whole<T: FromBytes>(payload: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(payload)
        .map(|(whole, _)| whole)
        .map_err(|_| Errno::INVAL)
}

/// A payload that older programs write without its end; what is missing is zero.
fn extended<T: FromBytes + FromZeros + IntoBytes>(payload: &[u8], least: usize) -> Result<T, Errno> {
    if payload.len() < least {
        return Err(Errno::INVAL);
    }
    let mut extended = T::new_zeroed();
    let known = payload.len().min(size_of::<T>());
    if let (Some(to), Some(from)) = (extended.as_mut_bytes().get_mut(..known), payload.get(..known)) {
        to.copy_from_slice(from);
    }
    Ok(extended)
}

/// An address in a field of its own, with the length that the program gives.
fn name(field: &[u8], len: u16) -> Result<Option<Name>, Errno> {
    Name::parse(field.get(..len.into()).ok_or(Errno::INVAL)?)
}

impl Command {
    /// Reads a command.
    ///
    /// # Errors
    /// `EINVAL` for an unknown or malformed one, `ENOSYS` for `GET_OPTION`, which the kernel has a number for and nothing else, `ENOSPC` without room
    /// for the answer, `EFAULT` without an address for it, `EAFNOSUPPORT`.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Command, Errno> {
        let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| Errno::INVAL)?;
        let payload = rest.get(..header.in_len.into()).ok_or(Errno::INVAL)?;
        let answer = |address: u64, least: usize| {
            let room = usize::from(header.out_len);
            match (address, room >= least) {
                (_, false) => Err(Errno::NOSPC),
                (0, true) => Err(Errno::FAULT),
                (_, true) => Ok(Destination { address, room }),
            }
        };
        Ok(match header.command {
            0 => {
                let c: abi::CreateId = whole(payload)?;
                Command::CreateId {
                    answer: answer(c.response, 4)?,
                    uid: c.uid,
                    port_space: c.port_space,
                }
            }
            1 => {
                let c: abi::OnId = whole(payload)?;
                Command::DestroyId {
                    answer: answer(c.response, 4)?,
                    id: c.id,
                }
            }
            2 => {
                let c: abi::BindIp = whole(payload)?;
                Command::Bind {
                    id: c.id,
                    local: Name::parse(&c.address)?.ok_or(Errno::INVAL)?,
                }
            }
            3 => {
                let c: abi::ResolveIp = whole(payload)?;
                Command::ResolveAddress {
                    id: c.id,
                    local: Name::parse(&c.source)?,
                    remote: Name::parse(&c.destination)?.ok_or(Errno::INVAL)?,
                }
            }
            4 => Command::ResolveRoute {
                id: whole::<abi::ResolveRoute>(payload)?.id,
            },
            5 => {
                let c: abi::OnId = whole(payload)?;
                Command::QueryRoute {
                    // All but the device's index, which is younger.
                    answer: answer(c.response, 200)?,
                    id: c.id,
                }
            }
            6 => {
                let c: abi::Connect = extended(payload, 276)?;
                Command::Connect {
                    id: c.id,
                    wishes: Wishes::from(&c.param),
                }
            }
            7 => {
                let c: abi::Listen = whole(payload)?;
                Command::Listen {
                    id: c.id,
                    backlog: c.backlog,
                }
            }
            8 => {
                let c: abi::Accept = extended(payload, 284)?;
                Command::Accept {
                    id: c.id,
                    uid: c.uid,
                    wishes: (c.param.valid != 0).then(|| Wishes::from(&c.param)),
                }
            }
            9 => {
                let c: abi::Reject = whole(payload)?;
                let len = usize::from(c.private_data_len);
                Command::Reject {
                    id: c.id,
                    private_data: c.private_data.get(..len).unwrap_or_default().to_vec(),
                }
            }
            10 => Command::Disconnect {
                id: whole::<abi::Disconnect>(payload)?.id,
            },
            11 => {
                let c: abi::InitQpAttr = whole(payload)?;
                Command::InitQpAttr {
                    answer: answer(c.response, size_of::<abi::QpAttrResponse>())?,
                    id: c.id,
                    state: c.qp_state,
                }
            }
            GET_EVENT => {
                let c: abi::GetEvent = whole(payload)?;
                Command::GetEvent {
                    // All but the vendor's extension, which is younger.
                    answer: answer(c.response, 328)?,
                }
            }
            13 => return Err(Errno::NOSYS),
            14 => {
                let c: abi::SetOption = whole(payload)?;
                Command::SetOption {
                    id: c.id,
                    level: c.level,
                    name: c.name,
                    address: c.value,
                    len: c.len,
                }
            }
            15 => Command::Notify {
                id: whole::<abi::Notify>(payload)?.id,
            },
            16 => Command::JoinMulticast {
                id: whole::<abi::JoinIpMulticast>(payload)?.id,
            },
            17 => Command::LeaveMulticast {
                id: whole::<abi::OnId>(payload)?.id,
            },
            18 => {
                let c: abi::MigrateId = whole(payload)?;
                Command::MigrateId {
                    answer: answer(c.response, 4)?,
                    id: c.id,
                    fd: c.fd,
                }
            }
            19 => {
                let c: abi::Query = whole(payload)?;
                let (question, least) = match c.option {
                    0 => (Question::Addresses, 272),
                    1 => (Question::Paths, size_of::<abi::PathResponse>()),
                    2 => (Question::Gids, 272),
                    _ => return Err(Errno::NOSYS),
                };
                Command::Query {
                    answer: answer(c.response, least)?,
                    id: c.id,
                    question,
                }
            }
            20 => {
                let c: abi::Bind = whole(payload)?;
                Command::Bind {
                    id: c.id,
                    local: name(&c.address, c.address_len)?.ok_or(Errno::INVAL)?,
                }
            }
            21 => {
                let c: abi::ResolveAddr = whole(payload)?;
                Command::ResolveAddress {
                    id: c.id,
                    local: name(&c.source, c.source_len)?,
                    remote: name(&c.destination, c.destination_len)?.ok_or(Errno::INVAL)?,
                }
            }
            22 => Command::JoinMulticast {
                id: whole::<abi::JoinMulticast>(payload)?.id,
            },
            _ => return Err(Errno::INVAL),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zerocopy::Immutable;

    fn written<T: IntoBytes + Immutable>(command: u32, out_len: u16, payload: &T) -> Vec<u8> {
        let header = Header {
            command,
            in_len: size_of::<T>() as u16,
            out_len,
        };
        [header.as_bytes(), payload.as_bytes()].concat()
    }

    #[test]
    fn a_command_says_where_its_answer_goes() {
        let mut create = abi::CreateId::new_zeroed();
        (create.uid, create.response, create.port_space) = (7, 0x1000, 0x106);
        let expected = Command::CreateId {
            answer: Destination {
                address: 0x1000,
                room: 4,
            },
            uid: 7,
            port_space: 0x106,
        };
        assert_eq!(Command::parse(&written(0, 4, &create)), Ok(expected));
        assert_eq!(Command::parse(&written(0, 3, &create)), Err(Errno::NOSPC));
        create.response = 0;
        assert_eq!(Command::parse(&written(0, 4, &create)), Err(Errno::FAULT));
    }

    #[test]
    fn programs_older_than_vendor_extensions_write_less() {
        let mut connect = abi::Connect::new_zeroed();
        (connect.id, connect.param.qp_num) = (3, 9);
        (connect.param.private_data[0], connect.param.private_data_len) = (5, 1);
        let all = written(6, 0, &connect);
        let short = [
            &6u32.to_ne_bytes()[..],
            &280u16.to_ne_bytes(),
            &[0; 2],
            &all[8..288],
        ]
        .concat();
        let expected = Command::Connect {
            id: 3,
            wishes: Wishes {
                qpn: 9,
                private_data: vec![5],
                ..Wishes::default()
            },
        };
        assert_eq!(Command::parse(&all).as_ref(), Ok(&expected));
        assert_eq!(Command::parse(&short), Ok(expected));
    }

    #[test]
    fn get_option_is_a_number_and_nothing_else() {
        assert_eq!(Command::parse(&written(13, 0, &0u64)), Err(Errno::NOSYS));
        assert_eq!(Command::parse(&written(99, 0, &0u64)), Err(Errno::INVAL));
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_understood(command in 0..30u32, in_len in 0..400u16, out in any::<u16>(), body in proptest::collection::vec(any::<u8>(), 0..400)) {
            let header = Header { command, in_len, out_len: out };
            let bytes = [header.as_bytes(), &body].concat();
            if usize::from(in_len) > body.len() {
                prop_assert_eq!(Command::parse(&bytes), Err(Errno::INVAL));
            } else {
                let _ = Command::parse(&bytes);
            }
        }
    }
}
