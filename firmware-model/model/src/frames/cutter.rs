//! The ends of MPA's frames in one direction of a stream.
//!
//! Captures and faults look at a stream from outside, where TCP may cut anywhere, and a reader's
//! socket may, too.

use urnic_wire::mpa::{fpdu, marker, startup};

/// The common beginning of the keys of start-up frames (RFC 5044 §7.1.1).
const KEY: &[u8] = b"MPA ID ";
/// The beginning of the key of the RTR frame proposed in 2007, in either spelling.
const RTR_KEY: &[u8] = b"MPA ID Rt";
/// The M bit of the byte behind the key (RFC 5044 §7.1.1).
const WANTS_MARKERS: u8 = 0x80;

/// The part that comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// A start-up frame.
    StartUp,
    /// The first FPDU, or the RTR frame of 2007.
    Started,
    /// FPDUs.
    FullOperation,
    /// The stream is not MPA.
    Unknown,
}

/// Cuts one direction.
#[derive(Debug)]
pub(crate) struct Cutter {
    phase: Phase,
    /// Bytes of FPDUs and markers before the front.
    offset: u64,
    /// This side requested markers in the data that it receives.
    pub(crate) requests_markers: bool,
}

impl Cutter {
    pub(crate) fn new() -> Cutter {
        Cutter {
            phase: Phase::StartUp,
            offset: 0,
            requests_markers: false,
        }
    }

    /// Length of the frame at the front of `bytes`, which may be longer than `bytes`; `None` if
    /// `bytes` are too few to determine it. `marked`: the other side requested markers.
    pub(crate) fn frame_len(&mut self, bytes: &[u8], marked: bool) -> Option<usize> {
        loop {
            return match self.phase {
                Phase::StartUp => {
                    let known = bytes.len().min(KEY.len());
                    if bytes[..known] != KEY[..known] {
                        self.phase = Phase::Unknown;
                        continue;
                    }
                    startup_len(bytes)
                }
                Phase::Started => {
                    if bytes.get(..RTR_KEY.len())? == RTR_KEY {
                        return startup_len(bytes);
                    }
                    self.phase = Phase::FullOperation;
                    continue;
                }
                Phase::FullOperation if marked => marker::wire_len(self.offset, bytes),
                Phase::FullOperation => fpdu::ulpdu_len(bytes).map(fpdu::fpdu_len),
                Phase::Unknown => (!bytes.is_empty()).then_some(bytes.len()),
            };
        }
    }

    /// The FPDU at the front of `bytes`, whose length is known, without a marker in front of it;
    /// `None`: what comes next is no FPDU.
    pub(crate) fn fpdu<'b>(&self, bytes: &'b [u8], marked: bool) -> Option<&'b [u8]> {
        match self.phase {
            Phase::FullOperation if marked && marker::distance(self.offset) == 0 => bytes.get(marker::LEN..),
            Phase::FullOperation => Some(bytes),
            _ => None,
        }
    }

    /// Position of the front, if it is in FPDUs: bytes of FPDUs and markers before it.
    pub(crate) fn fpdu_offset(&self) -> Option<u64> {
        matches!(self.phase, Phase::Started | Phase::FullOperation).then_some(self.offset)
    }

    /// Passes over the frame at the front, whose length was returned before; `front`: its bytes, or
    /// at least the header of a start-up frame.
    pub(crate) fn pass(&mut self, front: &[u8], len: usize) {
        match self.phase {
            Phase::StartUp => {
                self.requests_markers = front.get(16).is_some_and(|flags| flags & WANTS_MARKERS != 0);
                self.phase = Phase::Started;
            }
            Phase::Started => self.phase = Phase::FullOperation,
            Phase::FullOperation => self.offset += len as u64,
            Phase::Unknown => {}
        }
    }
}

fn startup_len(bytes: &[u8]) -> Option<usize> {
    let len = bytes.get(startup::HEADER_LEN - 2..startup::HEADER_LEN)?;
    Some(startup::HEADER_LEN + usize::from(u16::from_be_bytes([len[0], len[1]])))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use urnic_wire::mpa::fpdu::CrcMode;

    const REQUEST: &[u8] = b"MPA ID Req Frame\x40\x01\x00\x04abcd";

    /// Feeds a stream in pieces; the lengths of the frames found.
    fn cut(stream: &[u8], pieces: &[usize], marked: bool) -> Vec<usize> {
        let mut cutter = Cutter::new();
        let (mut pending, mut found) = (Vec::new(), Vec::new());
        let mut rest = stream;
        let mut sizes = pieces.iter().cycle();
        while !rest.is_empty() {
            let (now, later) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            pending.extend(now);
            rest = later;
            while let Some(len) = cutter
                .frame_len(&pending, marked)
                .filter(|len| *len <= pending.len())
            {
                cutter.pass(&pending[..len], len);
                found.push(len);
                pending.drain(..len);
            }
        }
        assert!(pending.is_empty(), "all of it was frames");
        found
    }

    proptest! {
        #[test]
        fn frames_are_found_however_they_arrive(
            ulpdus in prop::collection::vec(14usize..3000, 1..12),
            pieces in prop::collection::vec(1usize..2000, 1..8),
            marked: bool,
        ) {
            let mut stream = REQUEST.to_vec();
            let mut lengths = vec![REQUEST.len()];
            let mut offset = 0;
            for len in ulpdus {
                let mut buffer = vec![0; 2 * len + 64];
                let ulpdu = vec![0xa5; len];
                let written = match marked {
                    true => marker::emit(offset, &ulpdu, CrcMode::On, &mut buffer),
                    false => fpdu::emit(&ulpdu, CrcMode::On, &mut buffer),
                };
                offset += written as u64;
                stream.extend(&buffer[..written]);
                lengths.push(written);
            }
            prop_assert_eq!(cut(&stream, &pieces, marked), lengths);
        }
    }

    #[test]
    fn the_rtr_frame_of_2007_is_one_of_start_up() {
        for key in [&b"MPA ID RtR Frame"[..], b"MPA ID Rtr Frame"] {
            let fpdu = [
                0, 0x12, 0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 2, 3, 4,
            ];
            let stream = [REQUEST, key, &[0, 1, 0, 0], &fpdu].concat();
            assert_eq!(cut(&stream, &[3], false), [24, 20, 24]);
        }
    }

    #[test]
    fn data_that_is_not_mpa_is_captured_unchanged() {
        assert_eq!(cut(b"GET / HTTP/1.0\r\n", &[5], false), [5, 5, 5, 1]);
        assert_eq!(cut(b"MPA, I say", &[2], false), [4, 2, 2, 2]);
    }
}
