//! MPA's framing (RFC 5044 §4), a second, slow implementation word by word, without the code under
//! test.

use std::io::{self, Read};

/// Bytes from marker to marker (RFC 5044 §4.3).
const SPACING: u64 = 512;
const WORD: usize = 4;

/// CRC32C (RFC 5044 §4.4, RFC 3720 §12.1), bit by bit, in the byte order of the wire.
pub fn crc32c(bytes: &[u8]) -> [u8; 4] {
    const REFLECTED: u32 = 0x82f6_3b78;
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 == 1 { REFLECTED } else { 0 }
        })
    });
    (!crc).to_le_bytes()
}

/// One direction of a stream in full operation.
#[derive(Debug, Clone)]
pub struct Framing {
    /// CRCs are correct and checked; otherwise they are sent wrong, and any value is accepted.
    pub crc: bool,
    /// The stream has markers.
    pub markers: bool,
    /// Bytes since full operation began.
    position: u64,
}

impl Default for Framing {
    fn default() -> Self {
        Self::new(true, false)
    }
}

impl Framing {
    /// The framing of a stream at its first byte.
    pub fn new(crc: bool, markers: bool) -> Self {
        Self {
            crc,
            markers,
            position: 0,
        }
    }

    fn marker_is_due(&self) -> bool {
        self.markers && self.position.is_multiple_of(SPACING)
    }

    /// The FPDU of a ULPDU, with the markers before and in it.
    pub fn frame(&mut self, ulpdu: &[u8]) -> Vec<u8> {
        self.frame_padded(ulpdu, 0)
    }

    /// Frames a ULPDU with this value in the bytes of the pad.
    pub fn frame_padded(&mut self, ulpdu: &[u8], pad: u8) -> Vec<u8> {
        let len = u16::try_from(ulpdu.len()).expect("ULPDU_Length has 16 bits");
        let mut plain = [&len.to_be_bytes(), ulpdu].concat();
        plain.resize(plain.len().next_multiple_of(WORD), pad);

        let mut out = Vec::new();
        let mut start = None;
        for word in plain.chunks(WORD) {
            self.mark(&mut out, start);
            start = start.or(Some(out.len()));
            self.put(&mut out, word);
        }
        self.mark(&mut out, start);
        let crc = match self.crc {
            true => crc32c(&out),
            false => [0xba, 0xdb, 0xad, 0xba],
        };
        self.put(&mut out, &crc);
        out
    }

    fn put(&mut self, out: &mut Vec<u8>, word: &[u8]) {
        out.extend(word);
        self.position += WORD as u64;
    }

    /// The marker that is due here, if any, for an FPDU that starts there.
    fn mark(&mut self, out: &mut Vec<u8>, start: Option<usize>) {
        if self.marker_is_due() {
            let pointer = start.map_or(0, |start| out.len() - start);
            self.put(out, &(pointer as u32).to_be_bytes());
        }
    }

    /// Reads the next FPDU and returns its ULPDU. Panics on a bad CRC, marker or pad.
    ///
    /// # Errors
    /// The error of the read.
    #[track_caller]
    pub fn read(&mut self, from: &mut impl Read) -> io::Result<Vec<u8>> {
        let mut wire = Vec::new();
        let mut plain = Vec::new();
        let mut start = None;
        let mut len = WORD;
        while plain.len() < len {
            self.read_marker(from, &mut wire, start)?;
            start = start.or(Some(wire.len()));
            plain.extend(self.read_word(from, &mut wire)?);
            len = (2 + usize::from(u16::from_be_bytes([plain[0], plain[1]]))).next_multiple_of(WORD);
        }
        self.read_marker(from, &mut wire, start)?;
        let expected = crc32c(&wire);
        let found = self.read_word(from, &mut wire)?;
        assert!(!self.crc || found == expected, "bad CRC: {wire:02x?}");
        let end = 2 + usize::from(u16::from_be_bytes([plain[0], plain[1]]));
        assert!(
            plain[end..].iter().all(|byte| *byte == 0),
            "pad not zero: {wire:02x?}"
        );
        Ok(plain[2..end].to_vec())
    }

    fn read_word(&mut self, from: &mut impl Read, wire: &mut Vec<u8>) -> io::Result<[u8; WORD]> {
        let mut word = [0; WORD];
        from.read_exact(&mut word)?;
        self.put(wire, &word);
        Ok(word)
    }

    fn read_marker(
        &mut self,
        from: &mut impl Read,
        wire: &mut Vec<u8>,
        start: Option<usize>,
    ) -> io::Result<()> {
        if self.marker_is_due() {
            let pointer = start.map_or(0, |start| wire.len() - start) as u32;
            let found = u32::from_be_bytes(self.read_word(from, wire)?);
            assert_eq!(found, pointer, "a marker at {}: {wire:02x?}", self.position - 4);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer::hex;

    /// Vectors of RFC 5044 figures 5 and 6, and of conformance §13.6.
    #[test]
    fn vectors() {
        assert_eq!(crc32c(&[0; 32]), [0xaa, 0x36, 0x91, 0x8a]);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283_u32.to_le_bytes());

        let send = |msn: u32, len: usize| {
            let mut ulpdu = hex("4143 00000000 00000000");
            ulpdu.extend(msn.to_be_bytes());
            ulpdu.extend([0; 4]);
            ulpdu.resize(18 + len, 0);
            ulpdu
        };
        let mut figure_5 = Framing::new(true, true);
        let first = figure_5.frame(&send(1, 24));
        assert_eq!(first[..8], hex("00000000 002a4143"));
        assert_eq!(first[first.len() - 4..], hex("52239983"));

        let mut figure_6 = Framing::new(true, true);
        assert_eq!(figure_6.frame(&send(1, 464)).len(), 492);
        let second = figure_6.frame(&send(2, 24));
        assert_eq!(second[16..28], hex("00000000 00000014 00000000"));
        assert_eq!(second[second.len() - 4..], hex("84925898"));

        let mut multi = Framing::new(true, true).frame(&send(1, 1200));
        assert_eq!((multi.len(), &multi[512..516]), (1236, &hex("000001fc")[..]));
        assert_eq!(multi[1024..1028], hex("000003fc"));
        assert_eq!(multi.split_off(1232), hex("082f573a"));
    }

    #[test]
    fn framed_bytes_are_read_unchanged() {
        for (crc, markers) in [(true, true), (true, false), (false, true), (false, false)] {
            let mut out = Framing::new(crc, markers);
            let mut back = out.clone();
            let ulpdus: Vec<Vec<u8>> = (1..700).map(|len| vec![len as u8; len]).collect();
            let wire: Vec<u8> = ulpdus.iter().flat_map(|ulpdu| out.frame(ulpdu)).collect();
            let mut from = &wire[..];
            for ulpdu in ulpdus {
                assert_eq!(back.read(&mut from).expect("an FPDU"), ulpdu);
            }
            assert!(from.is_empty());
        }
    }
}
