//! A capture whose TCP segments begin where MPA's frames begin.
//!
//! tshark (4.0, 4.4) loses a stream where a segment ends an FPDU and has a few bytes of the next:
//! from there on it reads payload as headers. TCP may cut its stream anywhere, and with offloads
//! does. So the captured bytes are cut again, at the lengths in their own headers, one frame in
//! each packet. tshark still checks lengths, checksums and headers: when a length is wrong, every
//! frame after the cut is wrong too.

use std::collections::BTreeMap;

/// One direction of a TCP connection: its number in the capture and its sender's port.
type Direction = (u32, u16);

/// The first bytes of the keys of Request and Reply (RFC 5044 §7.1.1).
const START_UP: &[u8] = b"MPA ID ";

/// The fields that tshark prints for each segment with payload, in the order in which `pcap` reads
/// them.
pub const FIELDS: [&str; 7] = [
    "tcp.stream",
    "ip.src",
    "ip.dst",
    "tcp.srcport",
    "tcp.dstport",
    "tcp.seq",
    "tcp.payload",
];

/// `FIELDS`, tab-separated, as a capture file of MPA frames (libpcap format, raw IPv4), one
/// connection after the other.
///
/// # Errors
/// Data that is missing in the capture, or that is not MPA without markers.
pub fn pcap(lines: &str) -> Result<Vec<u8>, String> {
    let mut file = Vec::new();
    // Magic, version 2.4, time zone, accuracy, longest packet, LINKTYPE_RAW.
    for word in [0xa1b2_c3d4_u32, 4 << 16 | 2, 0, 0, 0x4_0000, 101] {
        file.extend(word.to_le_bytes());
    }
    let flows = flows(lines)?;
    for connection in flows.chunk_by(|a, b| a.direction.0 == b.direction.0) {
        // Programs have connections of their own.
        if !connection.iter().all(|flow| flow.bytes.starts_with(START_UP)) {
            continue;
        }
        let mut cut = Vec::new();
        for flow in connection {
            cut.push((&flow.heads, &flow.bytes, frames(&flow.bytes)?));
        }
        // Request and Reply first: without both, the dissector does not recognise FPDUs.
        for (heads, bytes, ends) in &cut {
            frame(&mut file, heads, 0, &bytes[..ends[0]]);
        }
        for (heads, bytes, ends) in &cut {
            for pair in ends.windows(2) {
                frame(&mut file, heads, pair[0], &bytes[pair[0]..pair[1]]);
            }
        }
    }
    Ok(file)
}

/// The addresses and ports of a direction.
#[derive(Debug)]
struct Heads {
    addresses: [u8; 8],
    ports: [u8; 4],
}

/// All bytes that one side of a connection sent.
#[derive(Debug)]
struct Flow {
    direction: Direction,
    heads: Heads,
    bytes: Vec<u8>,
}

/// Orders the segments of each direction; the side that sends first in a connection comes first.
fn flows(lines: &str) -> Result<Vec<Flow>, String> {
    let mut order: Vec<Direction> = Vec::new();
    let mut found: BTreeMap<Direction, (Heads, BTreeMap<usize, Vec<u8>>)> = BTreeMap::new();
    for line in lines.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [stream, source, target, from, to, sequence, payload] = fields[..] else {
            return Err(format!("not a segment's fields: {line:.80}"));
        };
        let heads = || {
            let mut addresses = [0; 8];
            addresses[..4].copy_from_slice(&source.parse::<std::net::Ipv4Addr>().ok()?.octets());
            addresses[4..].copy_from_slice(&target.parse::<std::net::Ipv4Addr>().ok()?.octets());
            let mut ports = [0; 4];
            ports[..2].copy_from_slice(&from.parse::<u16>().ok()?.to_be_bytes());
            ports[2..].copy_from_slice(&to.parse::<u16>().ok()?.to_be_bytes());
            Some((
                (stream.parse().ok()?, from.parse().ok()?),
                sequence.parse().ok()?,
                Heads { addresses, ports },
            ))
        };
        let (direction, sequence, heads): (Direction, usize, Heads) =
            heads().ok_or_else(|| format!("not a segment's fields: {line:.80}"))?;
        let (_, segments) = found.entry(direction).or_insert_with(|| {
            order.push(direction);
            (heads, BTreeMap::new())
        });
        let longest = segments.entry(sequence).or_default();
        if longest.len() < payload.len() / 2 {
            *longest = crate::peer::hex(payload);
        }
    }
    order.sort_by_key(|&(stream, _)| stream);
    order
        .into_iter()
        .map(|direction| {
            let (heads, segments) = found.remove(&direction).expect("found above");
            let mut bytes = Vec::new();
            for (sequence, payload) in segments {
                // Relative sequence numbers count SYN as 0: data begins at 1. Repeated segments
                // overlap.
                let known = (1 + bytes.len())
                    .checked_sub(sequence)
                    .ok_or_else(|| format!("the capture misses bytes before {sequence} of {direction:?}"))?;
                bytes.extend(payload.get(known..).unwrap_or_default());
            }
            Ok(Flow {
                direction,
                heads,
                bytes,
            })
        })
        .collect()
}

/// Where each frame of a stream ends: the start-up frame (RFC 5044 §7.1.1), then FPDUs (§4.1).
fn frames(bytes: &[u8]) -> Result<Vec<usize>, String> {
    let mut ends = Vec::new();
    let mut at = 0;
    let word = |at: usize| {
        bytes
            .get(at..at + 2)
            .map(|two| usize::from(u16::from_be_bytes([two[0], two[1]])))
            .ok_or_else(|| format!("a stream of {} bytes ends within the frame at {at}", bytes.len()))
    };
    while at < bytes.len() {
        at = if bytes[at..].starts_with(START_UP) {
            at + 20 + word(at + 18)?
        } else {
            at + (2 + word(at)?).next_multiple_of(4) + 4
        };
        ends.push(at.min(bytes.len()));
    }
    Ok(ends)
}

/// Adds a frame: an IPv4 packet holds 65,535 bytes, an FPDU may have more.
fn frame(file: &mut Vec<u8>, heads: &Heads, at: usize, bytes: &[u8]) {
    for (number, piece) in bytes.chunks(40_000).enumerate() {
        packet(file, heads, at + 40_000 * number, piece);
    }
}

/// Adds a packet: record header, IPv4, TCP without options, and the payload at this offset of its
/// direction.
fn packet(file: &mut Vec<u8>, heads: &Heads, at: usize, payload: &[u8]) {
    let length = 40 + u32::try_from(payload.len()).expect("a piece of a frame");
    let number = u32::try_from(at + 1).expect("a short capture");
    for word in [0, 0, length, length] {
        file.extend(word.to_le_bytes());
    }
    file.extend([0x45, 0]);
    file.extend(&length.to_be_bytes()[2..]);
    // No fragment; 64 hops; TCP; no checksum, as if the interface had made it.
    file.extend([0, 0, 0x40, 0, 64, 6, 0, 0]);
    file.extend(heads.addresses);
    file.extend(heads.ports);
    file.extend(number.to_be_bytes());
    // Acknowledges nothing in particular; five words of header, ACK and PSH; a window; no checksum,
    // no urgent data.
    file.extend([0, 0, 0, 1, 0x50, 0x18, 0xff, 0xff, 0, 0, 0, 0]);
    file.extend(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: &str = "4d504120494420526571204672616d654001000461626364";
    const FPDU: &str = "00174143000000000000000000000001000000006865\
                        6c6c6f000000b990b10c";

    fn line(sequence: usize, payload: &str) -> String {
        format!("0\t10.0.0.1\t10.0.0.2\t1000\t2000\t{sequence}\t{payload}\n")
    }

    #[test]
    fn segments_in_any_order_twice_and_cut_anywhere_become_frames() {
        let stream = format!("{REQUEST}{FPDU}{FPDU}");
        let cut = |from: usize, to: usize| line(from + 1, &stream[2 * from..2 * to]);
        let end = stream.len() / 2;
        let whole = pcap(&cut(0, end)).unwrap();
        assert_eq!(
            pcap(&[cut(27, 60), cut(0, 27), cut(20, 40), cut(60, end)].concat()).unwrap(),
            whole
        );
        assert_eq!(whole.len(), 24 + 3 * (16 + 40) + end);
    }

    #[test]
    fn a_gap_is_reported() {
        assert!(
            pcap(&[line(1, REQUEST), line(30, FPDU)].concat())
                .unwrap_err()
                .contains("misses")
        );
    }

    #[test]
    fn frames_end_by_their_lengths() {
        let bytes = crate::peer::hex(&format!("{REQUEST}{FPDU}{}", &FPDU[..20]));
        assert_eq!(frames(&bytes).unwrap(), [24, 56, 66]);
    }
}
