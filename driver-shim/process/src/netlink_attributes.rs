//! The attributes in messages of netlink(7), of the kernel and of the program: length, type, value,
//! padding to four bytes. Lengths include the header, and not the padding.

use rustix::io::Errno;

/// Length of an attribute's header (`struct nlattr`).
const HEADER: usize = 4;
/// The bits of an attribute's type without `NLA_F_NESTED` and `NLA_F_NET_BYTEORDER`.
const TYPE_MASK: u16 = 0x3fff;

/// A list of attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes<'a>(pub &'a [u8]);

impl<'a> Attributes<'a> {
    /// The attributes with their types, up to the first malformed one.
    pub fn all(self) -> impl Iterator<Item = (u16, &'a [u8])> {
        let mut rest = self.0;
        std::iter::from_fn(move || {
            let length = usize::from(u16_at(rest, 0)?);
            let kind = u16_at(rest, 2)? & TYPE_MASK;
            let value = rest.get(HEADER..length)?;
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
            Some((kind, value))
        })
    }

    /// The value of the last attribute of this type, which is the one that counts in the kernel.
    pub fn find(self, wanted: u16) -> Option<&'a [u8]> {
        self.all()
            .filter_map(|(kind, value)| (kind == wanted).then_some(value))
            .last()
    }

    /// The number in the attribute of this type.
    ///
    /// # Errors
    /// `ERANGE` if the value is too short, as in the kernel.
    pub fn number(self, wanted: u16) -> Result<Option<u32>, Errno> {
        self.find(wanted)
            .map(|value| u32_at(value, 0).ok_or(Errno::RANGE))
            .transpose()
    }

    /// The text in the attribute of this type, without the zero at its end.
    pub fn text(self, wanted: u16) -> Option<&'a [u8]> {
        self.find(wanted)?.split(|&byte| byte == 0).next()
    }
}

/// The number of 16 bits at this offset, in host byte order.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The number of 32 bits at this offset, in host byte order.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}
