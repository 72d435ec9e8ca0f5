//! The blocks of a pcapng file that we write: sections, interfaces, packets
//! (draft-ietf-opsawg-pcapng §4).

/// Packets begin with an IP header (`LINKTYPE_RAW`).
const RAW_IP: u16 = 101;

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;

const END_OF_OPTIONS: u16 = 0;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_DESCRIPTION: u16 = 3;
const IF_TSRESOL: u16 = 9;
const EPB_FLAGS: u16 = 2;

/// Which way a packet passed its interface, as the low bits of `epb_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    In = 1,
    Out = 2,
}

/// The interface, time and direction of a packet; the time in nanoseconds since 1970 began.
#[derive(Debug, Clone, Copy)]
pub(super) struct PacketMeta {
    pub(super) interface: u32,
    pub(super) at: u64,
    /// `None` = both.
    pub(super) way: Option<Way>,
}

/// Adds a block with the body that `body` writes.
fn block(out: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend(kind.to_le_bytes());
    out.extend([0; 4]);
    body(out);
    // The total length, which includes padding and both length fields, is at either end.
    pad(out, start);
    let total = ((out.len() - start + 4) as u32).to_le_bytes();
    out.extend(total);
    out[start + 4..start + 8].copy_from_slice(&total);
}

/// Zeroes up to a multiple of 4 from `start` on.
fn pad(out: &mut Vec<u8>, start: usize) {
    let len = (out.len() - start).next_multiple_of(4);
    out.resize(start + len, 0);
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    let value = &value[..value.len().min(usize::from(u16::MAX))];
    out.extend(code.to_le_bytes());
    out.extend((value.len() as u16).to_le_bytes());
    let start = out.len();
    out.extend(value);
    pad(out, start);
}

/// Begins a section, written by this application.
pub(super) fn section(out: &mut Vec<u8>, application: &str) {
    block(out, SECTION_HEADER, |out| {
        // The byte order, version 1.0, and an unspecified length.
        out.extend(0x1a2b_3c4d_u32.to_le_bytes());
        out.extend([1, 0, 0, 0]);
        out.extend([0xff; 8]);
        option(out, SHB_USERAPPL, application.as_bytes());
        option(out, END_OF_OPTIONS, &[]);
    });
}

/// Describes the section's next interface, of IP packets with times in nanoseconds.
pub(super) fn interface(out: &mut Vec<u8>, name: &str, description: &str) {
    block(out, INTERFACE_DESCRIPTION, |out| {
        out.extend(RAW_IP.to_le_bytes());
        // Reserved, and no limit to a packet's length.
        out.extend([0; 6]);
        option(out, IF_NAME, name.as_bytes());
        option(out, IF_DESCRIPTION, description.as_bytes());
        option(out, IF_TSRESOL, &[9]);
        option(out, END_OF_OPTIONS, &[]);
    });
}

/// Adds a packet in two parts.
pub(super) fn packet(out: &mut Vec<u8>, meta: PacketMeta, headers: &[u8], payload: &[u8]) {
    block(out, ENHANCED_PACKET, |out| {
        let len = (headers.len() + payload.len()) as u32;
        out.extend(meta.interface.to_le_bytes());
        out.extend(((meta.at >> 32) as u32).to_le_bytes());
        out.extend((meta.at as u32).to_le_bytes());
        // All bytes were captured.
        out.extend(len.to_le_bytes());
        out.extend(len.to_le_bytes());
        let start = out.len();
        out.extend(headers);
        out.extend(payload);
        pad(out, start);
        if let Some(way) = meta.way {
            option(out, EPB_FLAGS, &(way as u32).to_le_bytes());
            option(out, END_OF_OPTIONS, &[]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The blocks of a file: kind and body.
    fn blocks(mut file: &[u8]) -> Vec<(u32, &[u8])> {
        let word = |at: &[u8]| u32::from_le_bytes(*at.first_chunk().unwrap());
        let mut found = Vec::new();
        while !file.is_empty() {
            let total = word(&file[4..]) as usize;
            assert_eq!(total % 4, 0);
            assert_eq!(word(&file[total - 4..]) as usize, total);
            found.push((word(file), &file[8..total - 4]));
            file = &file[total..];
        }
        found
    }

    #[test]
    fn a_section_has_its_byte_order_and_its_writer() {
        let mut file = Vec::new();
        section(&mut file, "urnic");
        let [(kind, body)] = blocks(&file)[..] else {
            panic!("one block")
        };
        assert_eq!(kind, SECTION_HEADER);
        assert_eq!(body[..8], [0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0]);
        assert_eq!(body[16..], *b"\x04\0\x05\0urnic\0\0\0\0\0\0\0");
    }

    #[test]
    fn an_interface_declares_times_in_nanoseconds() {
        let mut file = Vec::new();
        interface(&mut file, "abcd", "e");
        let [(kind, body)] = blocks(&file)[..] else {
            panic!("one block")
        };
        assert_eq!(kind, INTERFACE_DESCRIPTION);
        assert_eq!(body[..8], [101, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(
            body[8..],
            *b"\x02\0\x04\0abcd\x03\0\x01\0e\0\0\0\x09\0\x01\0\x09\0\0\0\0\0\0\0"
        );
    }

    proptest! {
        #[test]
        fn packets_of_any_length_are_found_again(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 1..20), at: u64, way in prop::sample::select(vec![None, Some(Way::In), Some(Way::Out)])) {
            let mut file = Vec::new();
            for payload in &payloads {
                packet(&mut file, PacketMeta { interface: 3, at, way }, b"head", payload);
            }
            let found = blocks(&file);
            prop_assert_eq!(found.len(), payloads.len());
            for ((kind, body), payload) in found.into_iter().zip(payloads) {
                let word = |n: usize| u32::from_le_bytes(*body[4 * n..].first_chunk().unwrap());
                prop_assert_eq!((kind, word(0)), (ENHANCED_PACKET, 3));
                prop_assert_eq!(u64::from(word(1)) << 32 | u64::from(word(2)), at);
                let len = 4 + payload.len();
                prop_assert_eq!((word(3) as usize, word(4) as usize), (len, len));
                prop_assert_eq!(&body[20..24], b"head");
                prop_assert_eq!(&body[24..20 + len], &payload[..]);
                let (padding, options) = body[20 + len..].split_at(len.next_multiple_of(4) - len);
                prop_assert!(padding.iter().all(|byte| *byte == 0));
                let expected = match way {
                    None => vec![],
                    Some(way) => vec![2, 0, 4, 0, way as u8, 0, 0, 0, 0, 0, 0, 0],
                };
                prop_assert_eq!(options, &expected[..]);
            }
        }
    }
}
