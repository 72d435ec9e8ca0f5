//! The addresses of both ends at the front of a request's private data (annex A11.4 of the
//! InfiniBand Architecture Specification).

use core::fmt;
use core::net::{IpAddr, Ipv6Addr};
use zerocopy::byteorder::big_endian::U16;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the addresses.
pub const IP_ADDRESSING_LEN: usize = size_of::<Layout>();

const VERSION: u8 = 0;
const IPV4: u8 = 0x40;
const IPV6: u8 = 0x60;
const IPV4_LEN: usize = 4;

/// The addresses of a request: SIDR_REQ or REQ. Both have the same family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpAddressing {
    /// The port of the requester's id.
    pub source_port: u16,
    /// The requester's address.
    pub source: IpAddr,
    /// The address that the request is for.
    pub destination: IpAddr,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    version: u8,
    /// IP version in the upper 4 bits.
    ip_version: u8,
    source_port: U16,
    /// IPv4 addresses are in the last 4 bytes.
    source: [u8; 16],
    destination: [u8; 16],
}

const _: () = assert!(IP_ADDRESSING_LEN == 36);

impl IpAddressing {
    /// Bytes of the addresses.
    #[inline]
    pub fn buffer_len(&self) -> usize {
        IP_ADDRESSING_LEN
    }

    /// Writes the addresses to the front of `buffer`; returns their length. Two families become
    /// IPv6.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`Self::buffer_len`].
    pub fn emit(&self, buffer: &mut [u8]) -> usize {
        let (ip_version, source, destination) = match (self.source, self.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let padded = |octets: [u8; IPV4_LEN]| {
                    let mut bytes = [0; 16];
                    bytes[16 - IPV4_LEN..].copy_from_slice(&octets);
                    bytes
                };
                (IPV4, padded(source.octets()), padded(destination.octets()))
            }
            (source, destination) => {
                let octets = |ip: IpAddr| match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                    IpAddr::V6(ip) => ip.octets(),
                };
                (IPV6, octets(source), octets(destination))
            }
        };
        let layout = Layout {
            version: VERSION,
            ip_version,
            source_port: self.source_port.into(),
            source,
            destination,
        };
        buffer[..IP_ADDRESSING_LEN].copy_from_slice(layout.as_bytes());
        IP_ADDRESSING_LEN
    }

    /// Parses the front of a request's private data; `None` if there are no addresses of IP.
    pub fn parse(private_data: &[u8]) -> Option<IpAddressing> {
        let (layout, _) = Layout::ref_from_prefix(private_data).ok()?;
        let address = |bytes: &[u8; 16]| match (layout.ip_version & 0xf0, bytes) {
            (IPV4, [.., a, b, c, d]) => Some(IpAddr::from([*a, *b, *c, *d])),
            (IPV6, bytes) => Some(Ipv6Addr::from(*bytes).into()),
            _ => None,
        };
        if layout.version != VERSION {
            return None;
        }
        Some(IpAddressing {
            source_port: layout.source_port.get(),
            source: address(&layout.source)?,
            destination: address(&layout.destination)?,
        })
    }
}

impl fmt::Display for IpAddressing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "from {} port {} to {}",
            self.source, self.source_port, self.destination
        )
    }
}
