//! Frames by hand.

use urnic_wire::mpa::fpdu::{self, CrcMode};
use zerocopy::FromBytes;

/// The FPDU that carries a ULPDU, with CRC and without markers.
pub(crate) fn fpdu_of(ulpdu: &[u8]) -> Vec<u8> {
    let mut buffer = vec![0; fpdu::fpdu_len(ulpdu.len())];
    fpdu::emit(ulpdu, CrcMode::On, &mut buffer);
    buffer
}

/// Bytes in hexadecimal, spaces ignored.
pub(crate) fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// A segment of a Send (RFC 5041 §4.3): control bytes, MSN, MO, payload.
pub(crate) fn send_segment(last: bool, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    untagged(if last { 0x41 } else { 0x01 }, 0x43, 0, 0, msn, mo, payload)
}

pub(crate) fn untagged(ddp: u8, rdmap: u8, word: u32, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![ddp, rdmap];
    for field in [word, qn, msn, mo] {
        ulpdu.extend_from_slice(&field.to_be_bytes());
    }
    ulpdu.extend_from_slice(payload);
    ulpdu
}

pub(crate) fn tagged(ddp: u8, rdmap: u8, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut ulpdu = vec![ddp, rdmap];
    ulpdu.extend_from_slice(&stag.to_be_bytes());
    ulpdu.extend_from_slice(&to.to_be_bytes());
    ulpdu.extend_from_slice(payload);
    ulpdu
}

/// A segment of a Write that is its last.
pub(crate) fn write_segment(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    tagged(0xc1, 0x40, stag, to, payload)
}

/// The header of a Read Request, after its DDP header.
pub(crate) fn read_request(msn: u32, sink: (u32, u64), size: u32, source: (u32, u64)) -> Vec<u8> {
    let mut header = sink.0.to_be_bytes().to_vec();
    header.extend_from_slice(&sink.1.to_be_bytes());
    header.extend_from_slice(&size.to_be_bytes());
    header.extend_from_slice(&source.0.to_be_bytes());
    header.extend_from_slice(&source.1.to_be_bytes());
    untagged(0x41, 0x41, 0, 1, msn, 0, &header)
}

/// Bytes that differ from their neighbours.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8)) as u8).collect()
}

/// Reads a value at the front of bytes.
pub(crate) fn be32(bytes: &[u8]) -> u32 {
    zerocopy::byteorder::big_endian::U32::read_from_prefix(bytes)
        .unwrap()
        .0
        .get()
}
