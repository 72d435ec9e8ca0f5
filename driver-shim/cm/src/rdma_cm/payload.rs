//! The payloads of commands.

use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::abi::CmAddress;

/// The address of a command's response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The address in the program's memory.
    pub address: u64,
    /// The number of bytes that the program has reserved for the response.
    pub room: usize,
}

/// Parses a payload of the command's full length.
fn whole<T: FromBytes>(payload: &[u8]) -> Result<T, Errno> {
    T::read_from_prefix(payload)
        .map(|(whole, _)| whole)
        .map_err(|_| Errno::INVAL)
}

/// Parses a payload of which older programs omit the last fields; missing fields are zero.
pub(super) fn extended<T: FromBytes + FromZeros + IntoBytes>(
    payload: &[u8],
    min_len: usize,
) -> Result<T, Errno> {
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
pub(super) fn parse_address(field: &[u8], len: u16) -> Result<Option<CmAddress>, Errno> {
    CmAddress::parse(field.get(..len.into()).ok_or(Errno::INVAL)?)
}

/// A command's payload, and the room for its answer.
#[derive(Clone, Copy)]
pub(super) struct Payload<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) room: usize,
}

impl Payload<'_> {
    pub(super) fn whole<T: FromBytes>(self) -> Result<T, Errno> {
        whole(self.bytes)
    }

    /// The destination of an answer of at least `min_len` bytes.
    pub(super) fn answer(self, address: u64, min_len: usize) -> Result<Destination, Errno> {
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
