//! Parsing of commands that older and newer programs write.

use rustix::io::Errno;
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::super::abi::opcode;
use super::super::abi::{self, Header};
use super::super::command::{Command, Destination, Parameters};

fn written<T: IntoBytes + Immutable>(command: u32, out_len: u16, payload: &T) -> Vec<u8> {
    let header = Header {
        command,
        in_len: size_of::<T>() as u16,
        out_len,
    };
    [header.as_bytes(), payload.as_bytes()].concat()
}

#[test]
fn a_command_has_the_address_and_room_of_its_response() {
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
    assert_eq!(
        Command::parse(&written(opcode::CREATE_ID, 4, &create)),
        Ok(expected)
    );
    assert_eq!(
        Command::parse(&written(opcode::CREATE_ID, 3, &create)),
        Err(Errno::NOSPC)
    );
    create.response = 0;
    assert_eq!(
        Command::parse(&written(opcode::CREATE_ID, 4, &create)),
        Err(Errno::FAULT)
    );
}

#[test]
fn programs_may_omit_the_vendor_extension() {
    let mut connect = abi::Connect::new_zeroed();
    (connect.id, connect.param.qp_num) = (3, 9);
    (connect.param.private_data[0], connect.param.private_data_len) = (5, 1);
    let all = written(opcode::CONNECT, 0, &connect);
    let short = [
        &opcode::CONNECT.to_ne_bytes()[..],
        &280u16.to_ne_bytes(),
        &[0; 2],
        &all[8..288],
    ]
    .concat();
    let expected = Command::Connect {
        id: 3,
        parameters: Parameters {
            qpn: 9,
            private_data: vec![5],
            ..Parameters::default()
        },
    };
    assert_eq!(Command::parse(&all).as_ref(), Ok(&expected));
    assert_eq!(Command::parse(&short), Ok(expected));
}

#[test]
fn get_option_is_not_implemented() {
    assert_eq!(
        Command::parse(&written(opcode::GET_OPTION, 0, &0u64)),
        Err(Errno::NOSYS)
    );
    assert_eq!(Command::parse(&written(99, 0, &0u64)), Err(Errno::INVAL));
}
