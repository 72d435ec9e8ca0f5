//! The sixteen bytes before every message.

use crate::error::{Malformed, StreamError};
use crate::fields::{Fields, Put};

/// Length of a header in bytes.
pub const HEADER_LEN: usize = 16;

const TYPE: u32 = 0xf;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

macro_rules! commands {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)+) => {
        /// The command of a message.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Command {
            $($(#[$doc])* $name = $value,)+
        }

        impl Command {
            /// The command of a number.
            pub fn from_raw(raw: u16) -> Option<Command> {
                match raw {
                    $($value => Some(Command::$name),)+
                    _ => None,
                }
            }
        }
    };
}

commands! {
    /// `VFIO_USER_VERSION`: the first message.
    Version = 1,
    /// `VFIO_USER_DMA_MAP`: memory that the server may access.
    DmaMap = 2,
    /// `VFIO_USER_DMA_UNMAP`: memory that it may access no longer.
    DmaUnmap = 3,
    /// `VFIO_USER_DEVICE_GET_INFO`.
    DeviceInfo = 4,
    /// `VFIO_USER_DEVICE_GET_REGION_INFO`.
    RegionInfo = 5,
    /// `VFIO_USER_DEVICE_GET_REGION_IO_FDS`: descriptors that stand for writes to a region.
    RegionIoFds = 6,
    /// `VFIO_USER_DEVICE_GET_IRQ_INFO`.
    IrqInfo = 7,
    /// `VFIO_USER_DEVICE_SET_IRQS`.
    SetIrqs = 8,
    /// `VFIO_USER_REGION_READ`.
    RegionRead = 9,
    /// `VFIO_USER_REGION_WRITE`.
    RegionWrite = 10,
    /// `VFIO_USER_DMA_READ`: the server reads memory of the client.
    DmaRead = 11,
    /// `VFIO_USER_DMA_WRITE`: the server writes memory of the client.
    DmaWrite = 12,
    /// `VFIO_USER_DEVICE_RESET`.
    DeviceReset = 13,
    /// `VFIO_USER_DIRTY_PAGES`, of drafts.
    DirtyPages = 14,
    /// `VFIO_USER_REGION_WRITE_MULTI`: several small writes.
    RegionWriteMulti = 15,
    /// `VFIO_USER_DEVICE_FEATURE`: migration.
    DeviceFeature = 16,
    /// `VFIO_USER_MIG_DATA_READ`.
    MigrationRead = 17,
    /// `VFIO_USER_MIG_DATA_WRITE`.
    MigrationWrite = 18,
}

/// The direction of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The message is a command.
    Command {
        /// The sender expects no reply, not even about an error.
        no_reply: bool,
    },
    /// The message replies to the command of the same id.
    Reply {
        /// The errno if the command failed; 0 if the peer does not name one.
        error: Option<u32>,
    },
}

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Number that the reply repeats.
    pub id: u16,
    /// Number of the command; see [`Command::from_raw`].
    pub command: u16,
    /// Length of the message with its header, in bytes.
    pub size: u32,
    /// Command or reply.
    pub kind: Kind,
}

impl Header {
    pub(crate) fn parse(bytes: &[u8; HEADER_LEN]) -> Result<Header, StreamError> {
        let mut fields = Fields(bytes);
        let parsed: Result<_, Malformed> = (|| {
            Ok((
                fields.u16()?,
                fields.u16()?,
                fields.u32()?,
                fields.u32()?,
                fields.u32()?,
            ))
        })();
        let (id, command, size, flags, error) = parsed.map_err(|_| StreamError::Header)?;
        let kind = match flags & TYPE {
            0 => Kind::Command {
                no_reply: flags & NO_REPLY != 0,
            },
            REPLY => Kind::Reply {
                error: (flags & ERROR != 0).then_some(error),
            },
            _ => return Err(StreamError::Header),
        };
        if (size as usize) < HEADER_LEN {
            return Err(StreamError::Header);
        }
        Ok(Header {
            id,
            command,
            size,
            kind,
        })
    }

    pub(crate) fn flags_and_error(kind: Kind) -> (u32, u32) {
        match kind {
            Kind::Command { no_reply: false } => (0, 0),
            Kind::Command { no_reply: true } => (NO_REPLY, 0),
            Kind::Reply { error: None } => (REPLY, 0),
            Kind::Reply { error: Some(error) } => (REPLY | ERROR, error),
        }
    }

    /// Writes a message: a header, followed by the bytes that `payload` writes.
    pub(crate) fn emit(
        id: u16,
        command: u16,
        kind: Kind,
        out: &mut Vec<u8>,
        payload: impl FnOnce(&mut Vec<u8>),
    ) {
        let start = out.len();
        let (flags, error) = Header::flags_and_error(kind);
        out.put16(id);
        out.put16(command);
        out.put32(0);
        out.put32(flags);
        out.put32(error);
        payload(out);
        let size = (out.len() - start) as u32;
        out[start + 4..start + 8].copy_from_slice(&size.to_ne_bytes());
    }
}
