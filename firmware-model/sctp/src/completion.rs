//! The completion of packets that begin an association, between the library and the network.

use std::hash::Hasher;
use std::net::SocketAddr;
use std::time::Duration;

use siphasher::sip128::{Hasher128, SipHasher24};
use urnic_wire::sctp::adaptation::Adaptation;
use urnic_wire::sctp::packet::{
    self, CHUNK_HEADER_LEN, HEADER_LEN, INIT_LEN, Packet, STATE_COOKIE, chunk_type,
};

/// How long a peer may take to echo a cookie (`Valid.Cookie.Life` of RFC 9260 §16).
pub const COOKIE_LIFE: Duration = Duration::from_secs(60);

/// Bytes that are added to a cookie: the time at which it was made, and its authentication.
const SEAL_LEN: usize = TIME_LEN + MAC_LEN;
const TIME_LEN: usize = 8;
const MAC_LEN: usize = 16;

/// The key by which an endpoint authenticates its cookies.
#[derive(Clone)]
pub struct Key([u8; 16]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// A key of random bytes, which nobody else may know.
    pub fn new(random: [u8; 16]) -> Key {
        Key(random)
    }

    /// One of the numbers that only this key determines.
    pub fn number(&self, which: u64) -> u64 {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        hasher.write(b"number");
        hasher.write_u64(which);
        hasher.finish128().h1
    }

    /// The authentication of a cookie that was made at `made` for this peer, and for its and our
    /// SCTP port.
    fn mac(&self, peer: SocketAddr, ports: [u16; 2], cookie: &[u8], made: u64) -> [u8; MAC_LEN] {
        let mut hasher = SipHasher24::new_with_key(&self.0);
        match peer {
            SocketAddr::V4(v4) => {
                hasher.write(b"cookie, IPv4");
                hasher.write(&v4.ip().octets());
            }
            SocketAddr::V6(v6) => {
                hasher.write(b"cookie, IPv6");
                hasher.write(&v6.ip().octets());
            }
        }
        for port in [peer.port(), ports[0], ports[1]] {
            hasher.write_u16(port);
        }
        hasher.write_u64(made);
        hasher.write(cookie);
        hasher.finish128().as_bytes()
    }
}

/// Completes a packet of the library: adds the indication of DDP to an INIT or INIT ACK, and
/// authenticates the cookie of an INIT ACK for `peer`. Other packets stay as they are.
pub fn complete(packet: Vec<u8>, key: &Key, peer: SocketAddr, now: Duration) -> Vec<u8> {
    let Some((ports, parameters)) = Packet::parse(&packet).ok().and_then(|parsed| {
        let (_, parameters) = parsed.init()?;
        Some(([parsed.destination, parsed.source], parameters.to_vec()))
    }) else {
        return packet;
    };
    let mut completed = packet
        .get(..HEADER_LEN + CHUNK_HEADER_LEN + INIT_LEN)
        .unwrap_or_default()
        .to_vec();
    for (kind, value) in packet::parameters(&parameters) {
        if kind == STATE_COOKIE {
            put_parameter(&mut completed, kind, &sealed(value, key, (peer, ports), now));
        } else {
            put_parameter(&mut completed, kind, value);
        }
    }
    completed.extend(Adaptation::Ddp.parameter().into_iter().flatten());
    end_chunk(&mut completed);
    completed
}

/// A cookie with the time and its authentication.
fn sealed(cookie: &[u8], key: &Key, (peer, ports): (SocketAddr, [u16; 2]), now: Duration) -> Vec<u8> {
    let made = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
    let mac = key.mac(peer, ports, cookie, made);
    [cookie, &made.to_be_bytes(), &mac].concat()
}

/// The packet of a COOKIE ECHO as the library knows it, without what [`complete`] added. `None`:
/// the cookie is not from here, not for this peer, or too old. Chunks after it are dropped,
/// because the peer repeats them.
pub fn opened(packet: &[u8], key: &Key, peer: SocketAddr, now: Duration) -> Option<Vec<u8>> {
    let parsed = Packet::parse(packet).ok()?;
    if parsed.chunk_type != chunk_type::COOKIE_ECHO {
        return None;
    }
    let at = parsed.value.len().checked_sub(SEAL_LEN)?;
    let (cookie, seal) = parsed.value.split_at_checked(at)?;
    let (made, mac) = seal.split_first_chunk::<TIME_LEN>()?;
    let made = u64::from_be_bytes(*made);
    let ports = [parsed.source, parsed.destination];
    if !is_equal(mac, &key.mac(peer, ports, cookie, made)) {
        return None;
    }
    let age = now.checked_sub(Duration::from_millis(made))?;
    if age > COOKIE_LIFE {
        return None;
    }
    let mut opened = packet.get(..HEADER_LEN + CHUNK_HEADER_LEN)?.to_vec();
    opened.extend_from_slice(cookie);
    end_chunk(&mut opened);
    Some(opened)
}

/// Whether two authentications are equal; takes the same time wherever they differ.
fn is_equal(one: &[u8], other: &[u8; MAC_LEN]) -> bool {
    let differing = one.iter().zip(other).fold(0, |all, (a, b)| all | (a ^ b));
    one.len() == MAC_LEN && differing == 0
}

/// The packet that ends the association which an INIT or INIT ACK with this tag would begin.
pub fn abort(to: &Packet<'_>, initiate_tag: u32) -> Vec<u8> {
    answer(to, initiate_tag, [chunk_type::ABORT, 0])
}

/// The answer to a SHUTDOWN ACK that belongs to no association, with its tag (RFC 9260 §8.4). It
/// is not longer, and ends nothing that the receiver did not end.
pub fn shutdown_complete(to: &Packet<'_>) -> Vec<u8> {
    answer(to, to.tag, [chunk_type::SHUTDOWN_COMPLETE, TAG_REFLECTED])
}

/// The T flag of SHUTDOWN COMPLETE.
const TAG_REFLECTED: u8 = 1;

/// A packet with one chunk of this type and flags, without a value.
fn answer(to: &Packet<'_>, tag: u32, chunk: [u8; 2]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER_LEN + CHUNK_HEADER_LEN);
    bytes.extend_from_slice(&to.destination.to_be_bytes());
    bytes.extend_from_slice(&to.source.to_be_bytes());
    bytes.extend_from_slice(&tag.to_be_bytes());
    bytes.extend_from_slice(&[0; 4]);
    bytes.extend_from_slice(&chunk);
    bytes.extend_from_slice(&[0; 2]);
    end_chunk(&mut bytes);
    bytes
}

/// The packet with the chunks of these types only; `None` if it has none.
pub fn some_chunks(bytes: &[u8], packet: &Packet<'_>, wanted: impl Fn(u8) -> bool) -> Option<Vec<u8>> {
    let mut some = bytes.get(..HEADER_LEN)?.to_vec();
    for chunk in packet.chunks().flatten().filter(|chunk| wanted(chunk.kind)) {
        let len = u16::try_from(CHUNK_HEADER_LEN + chunk.value.len()).ok()?;
        some.extend_from_slice(&[chunk.kind, chunk.flags]);
        some.extend_from_slice(&len.to_be_bytes());
        some.extend_from_slice(chunk.value);
        some.resize(some.len().next_multiple_of(4), 0);
    }
    packet::seal(&mut some);
    (some.len() > HEADER_LEN).then_some(some)
}

fn put_parameter(to: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let len = u16::try_from(CHUNK_HEADER_LEN + value.len()).unwrap_or(u16::MAX);
    to.extend_from_slice(&kind.to_be_bytes());
    to.extend_from_slice(&len.to_be_bytes());
    to.extend_from_slice(value);
    to.resize(to.len().next_multiple_of(4), 0);
}

/// Writes the length of a packet's only chunk, pads it, and writes the checksum.
fn end_chunk(packet: &mut Vec<u8>) {
    let len = u16::try_from(packet.len().saturating_sub(HEADER_LEN)).unwrap_or(u16::MAX);
    if let Some(place) = packet.get_mut(HEADER_LEN + 2..HEADER_LEN + CHUNK_HEADER_LEN) {
        place.copy_from_slice(&len.to_be_bytes());
    }
    packet.resize(packet.len().next_multiple_of(4), 0);
    packet::seal(packet);
}
