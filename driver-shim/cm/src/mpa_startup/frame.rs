//! Start-up frames: a frame that is being received, and the bytes of a frame to send.

use urnic_wire::mpa::startup::{HEADER_LEN, MAX_PRIVATE_DATA, StartupFrame, StartupHeader};

use super::failure::Failure;

/// A frame that is being received.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    header: Option<StartupHeader>,
}

impl Incoming {
    /// The number of bytes missing to the known end of the frame.
    pub(super) fn bytes_needed(&self) -> usize {
        self.len() - self.bytes.len()
    }

    fn len(&self) -> usize {
        HEADER_LEN + self.header.map_or(0, |header| header.private_data_len)
    }

    /// Takes the bytes that belong to the frame. `check` examines the header as soon as it is
    /// complete, so that the first 20 bytes identify a wrong peer. Returns the number of bytes
    /// taken.
    pub(super) fn take(
        &mut self,
        mut bytes: &[u8],
        check: impl Fn(StartupHeader) -> Result<StartupHeader, Failure>,
    ) -> Result<usize, Failure> {
        let all = bytes.len();
        loop {
            let (now, rest) = bytes.split_at(self.bytes_needed().min(bytes.len()));
            self.bytes.extend_from_slice(now);
            bytes = rest;
            if self.header.is_some() || self.bytes_needed() > 0 {
                return Ok(all - bytes.len());
            }
            if let Some(fixed) = self.bytes.first_chunk() {
                self.header = Some(check(StartupHeader::parse(fixed)?)?);
            }
        }
    }

    /// Header and private data, once the frame is complete.
    pub(super) fn whole(&self) -> Option<(StartupHeader, &[u8])> {
        let header = self.header.filter(|_| self.bytes_needed() == 0)?;
        Some((header, self.bytes.get(HEADER_LEN..)?))
    }
}

/// The ULP's private data is too long for the frame (512 bytes, 508 behind an enhanced word: RFC
/// 6581 §9).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} bytes of private data are too long: with the IRD/ORD word the maximum is {MAX_PRIVATE_DATA}")]
pub struct PrivateDataTooLong(pub usize);

/// The bytes of a frame.
pub(super) fn frame(frame: &StartupFrame<'_>) -> Result<Vec<u8>, PrivateDataTooLong> {
    let mut bytes = vec![0; frame.buffer_len()];
    frame
        .emit(&mut bytes)
        .map_err(|_| PrivateDataTooLong(frame.private_data.len()))?;
    Ok(bytes)
}
