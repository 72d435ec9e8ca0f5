//! The part of XDR (RFC 4506) that headers need: big-endian units of four bytes.

use crate::malformed::Malformed;

/// Bytes of one XDR unit.
pub(crate) const UNIT: usize = 4;

/// Bytes from `len` to the next multiple of four (RFC 4506 §3).
pub(crate) const fn pad(len: u64) -> u64 {
    len.wrapping_neg() % UNIT as u64
}

/// The unread rest of an XDR stream.
#[derive(Clone, Copy)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    pub(crate) fn word(&mut self) -> Result<u32, Malformed> {
        let (word, rest) = self.0.split_first_chunk().ok_or(Malformed::Truncated)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*word))
    }

    pub(crate) fn hyper(&mut self) -> Result<u64, Malformed> {
        let (hyper, rest) = self.0.split_first_chunk().ok_or(Malformed::Truncated)?;
        self.0 = rest;
        Ok(u64::from_be_bytes(*hyper))
    }

    /// The discriminator of optional-data: whether an item follows (RFC 4506 §4.19).
    pub(crate) fn follows(&mut self) -> Result<bool, Malformed> {
        match self.word()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(Malformed::Flag(other)),
        }
    }
}

pub(crate) fn put_word(word: u32, out: &mut Vec<u8>) {
    out.extend_from_slice(&word.to_be_bytes());
}

pub(crate) fn put_hyper(hyper: u64, out: &mut Vec<u8>) {
    out.extend_from_slice(&hyper.to_be_bytes());
}
