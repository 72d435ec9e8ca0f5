//! Maps the addresses that programs exchange (GID or LID, and QPN) to TCP addresses, and selects
//! the initiator.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV6};
use std::sync::Once;

use rustix::io::Errno;
use urnic_config::Identity;
use urnic_process::addressing::{AddressVector, Gid};
use urnic_process::port_gids::{self, PortGid, gid_of, ip_of};

/// The TCP port in a queue pair number.
pub(super) fn port_of(qpn: u32) -> u16 {
    (qpn >> 8) as u16
}

/// The peer that a program named at RTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// The address at which the peer's process listens.
    pub address: SocketAddr,
    /// The peer's queue pair number.
    pub qpn: u32,
    /// The queue pair is its own peer.
    pub is_self: bool,
    /// This end has the lower (GID, QPN), and is the initiator.
    pub we_initiate: bool,
    /// The address that the peer has for this end, if the family is the same. Connections of this
    /// end come from this address.
    pub source: Option<SocketAddr>,
}

/// The addresses of a stream's two ends, from TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Endpoints {
    /// The address on this host.
    pub local: SocketAddr,
    /// The peer's address.
    pub remote: SocketAddr,
}

/// An address without a port. Link-local addresses are equal only if their networks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostAddress {
    ip: IpAddr,
    scope: u32,
}

impl From<SocketAddr> for HostAddress {
    fn from(address: SocketAddr) -> HostAddress {
        let scope = match address {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => v6.scope_id(),
            _ => 0,
        };
        HostAddress {
            ip: address.ip().to_canonical(),
            scope,
        }
    }
}

/// The log's one line on peers without GIDs.
static WITHOUT_GID: Once = Once::new();

impl Peer {
    /// Whether a stream comes from this peer's address. A peer on this host may use any address of
    /// the host: no TCP connection can be made from outside with such a source, since the answers
    /// would go to this host itself. `is_own` decides whether an address belongs to this host.
    pub fn is_at(&self, ends: &Endpoints, mut is_own: impl FnMut(HostAddress) -> bool) -> bool {
        let (named, remote) = (HostAddress::from(self.address), HostAddress::from(ends.remote));
        let mut is_here = |address| address == HostAddress::from(ends.local) || is_own(address);
        named == remote || (is_here(named) && is_here(remote))
    }
}

/// The addresses of this host at which peers reach this process.
#[derive(Debug, Clone)]
pub struct LocalHost {
    /// The addresses of the device: a peer may connect to them.
    pub gids: Vec<Gid>,
    /// The GID table of the port, which names these addresses.
    pub table: Vec<PortGid>,
    /// The address on which this process listens; `None` = all.
    pub listen: Option<IpAddr>,
    /// The kind of device that programs see.
    pub identity: Identity,
}

impl LocalHost {
    /// The host of a device with these addresses, which shows `identity` to programs.
    pub fn new(gids: Vec<Gid>, listen: Option<IpAddr>, identity: Identity) -> LocalHost {
        let ips = gids.iter().map(|gid| gid.ip);
        let table = match identity {
            Identity::Iwarp => port_gids::of_rnic(ips),
            Identity::Roce => port_gids::of_roce(ips),
        };
        LocalHost {
            gids,
            table,
            listen,
            identity,
        }
    }

    /// Whether an address is one of the device, or of this host's loopback.
    pub fn is_here(&self, ip: IpAddr) -> bool {
        ip.is_loopback() || self.gids.iter().any(|gid| gid.ip == ip)
    }

    /// Whether the address of one end of a stream is on this host. A device with addresses of its
    /// own may have no loopback.
    pub fn is_own(&self, address: HostAddress) -> bool {
        let HostAddress { ip, scope } = address;
        let loopback = || ip.is_loopback() && self.gids.iter().any(|gid| gid.ip.is_loopback());
        self.gids.iter().any(|gid| (gid.ip, gid.scope) == (ip, scope)) || loopback()
    }

    /// The source address of connections to `remote`: the address that the program gave to the
    /// peer.
    fn source(&self, own: &Gid, remote: IpAddr) -> Option<SocketAddr> {
        let same_family = own.ip.is_ipv4() == remote.is_ipv4();
        // No packet leaves this host with a loopback source.
        let reaches_remote = !own.ip.is_loopback() || self.is_here(remote);
        (same_family && reaches_remote).then(|| match own.ip {
            IpAddr::V4(ip) => SocketAddr::new(ip.into(), 0),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, 0, 0, own.scope).into(),
        })
    }

    /// The GID of an address of this host, the one of RoCE v2 if there is one, and its index. Where
    /// no loopback address has a GID, that of the first address of the family stands for it.
    pub fn own_gid(&self, ip: IpAddr) -> Option<(u8, [u8; 16])> {
        let ip = ip.to_canonical();
        let of = |raw| self.table.iter().rposition(|gid| gid.raw == raw);
        let is_like = |gid: &&Gid| gid.ip.is_ipv4() == ip.is_ipv4();
        let of_family = || self.gids.iter().filter(is_like).find_map(|gid| of(gid.raw()));
        let index = match of(gid_of(ip)) {
            None if ip.is_loopback() => of_family()?,
            found => found?,
        };
        Some((u8::try_from(index).ok()?, self.table.get(index)?.raw))
    }

    /// The port's LID: the low 16 bits of the first address. A RoCE NIC has none.
    pub fn lid(&self) -> u16 {
        if self.identity.is_roce() {
            return 0;
        }
        self.gids
            .first()
            .map_or(0, |gid| u128::from_be_bytes(gid.raw()) as u16)
    }

    /// The peer that an address vector and a number name, for the local queue pair `qpn`.
    ///
    /// # Errors
    /// `EINVAL`: no such own GID, neither GID nor LID given (a RoCE NIC requires a GID for other
    /// hosts), or a number without a port. `ENETUNREACH`: a link-local GID, and a RoCE NIC without
    /// one.
    pub fn peer(&self, av: &AddressVector, dest_qpn: u32, qpn: u32) -> Result<Peer, Errno> {
        let port = port_of(dest_qpn);
        if port == 0 {
            return Err(Errno::INVAL);
        }
        if av.is_global {
            let entry = self.table.get(usize::from(av.sgid_index)).ok_or(Errno::INVAL)?;
            let own = self.gids.get(entry.address).ok_or(Errno::INVAL)?;
            let ip = ip_of(&av.dgid);
            if ip.is_unspecified() || ip.is_multicast() {
                return Err(Errno::INVAL);
            }
            let address = match ip {
                // A GID does not contain the scope: the peer is on the network of this end's GID,
                // else of any link-local GID.
                IpAddr::V6(v6) if v6.is_unicast_link_local() => {
                    let scopes = || self.gids.iter().map(|gid| gid.scope).filter(|scope| *scope != 0);
                    let same = self
                        .gids
                        .iter()
                        .filter(|gid| gid.ip == ip)
                        .map(|gid| gid.scope)
                        .next();
                    let scope = Some(own.scope)
                        .filter(|s| *s != 0)
                        .or(same)
                        .or_else(|| scopes().next());
                    let without = match self.identity {
                        Identity::Iwarp => Errno::INVAL,
                        Identity::Roce => Errno::NETUNREACH,
                    };
                    SocketAddrV6::new(v6, port, 0, scope.ok_or(without)?).into()
                }
                ip => SocketAddr::new(ip, port),
            };
            return Ok(Peer {
                address,
                qpn: dest_qpn,
                is_self: dest_qpn == qpn && self.is_here(ip),
                // A host may have several GIDs for one address.
                we_initiate: (own.raw(), qpn) < (gid_of(ip), dest_qpn),
                source: self.source(own, ip),
            });
        }
        let lid = self.lid();
        let ip = self.ip_without_gid(av).ok_or(Errno::INVAL)?;
        Ok(Peer {
            address: SocketAddr::new(ip, port),
            qpn: dest_qpn,
            is_self: dest_qpn == qpn && av.dlid == lid,
            we_initiate: (lid, qpn) < (av.dlid, dest_qpn),
            // A LID belongs to the address of GID 0.
            source: self.gids.first().and_then(|own| self.source(own, ip)),
        })
    }

    /// The address that a vector without a GID names. All RoCE NICs have the LID 0, which therefore
    /// names this host: programs that exchange LIDs only (qperf) run on one host.
    fn ip_without_gid(&self, av: &AddressVector) -> Option<IpAddr> {
        if self.identity.is_roce() {
            if av.dlid != self.lid() {
                return None;
            }
            WITHOUT_GID.call_once(|| {
                tracing::warn!(
                    "a program names its peer without a GID: a RoCE NIC takes it to be on this host; \
                     for another host give the program a GID index (an option such as -g 3)"
                );
            });
        }
        self.ip_of_lid(av.dlid)
    }

    /// The address of a LID: the own LID is this host, and another LID is the host with these low
    /// 16 bits in the /16 of GID 0.
    fn ip_of_lid(&self, dlid: u16) -> Option<IpAddr> {
        let own = self.gids.first()?.ip;
        if dlid == self.lid() {
            return Some(self.listen.unwrap_or(own));
        }
        match own {
            IpAddr::V4(own) if dlid != 0 => {
                Some(Ipv4Addr::from(u32::from(own) & 0xffff_0000 | u32::from(dlid)).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(ip: &str, scope: u32) -> Gid {
        Gid {
            ip: ip.parse().unwrap(),
            scope,
            prefix_len: 24,
        }
    }

    fn local_host() -> LocalHost {
        let gids = vec![
            gid("10.1.2.3", 0),
            gid("2001:db8::3", 0),
            gid("fe80::3", 5),
            gid("fe80::33", 6),
            gid("127.0.0.1", 0),
            gid("::1", 0),
        ];
        LocalHost::new(gids, None, Identity::Iwarp)
    }

    fn by_gid(ip: &str, sgid_index: u8) -> AddressVector {
        AddressVector {
            is_global: true,
            dgid: gid(ip, 0).raw(),
            sgid_index,
            ..AddressVector::default()
        }
    }

    const QPN: u32 = 5000 << 8 | 1;
    const PEER: u32 = 6000 << 8 | 2;

    #[test]
    fn the_gid_names_the_host_and_the_qpn_names_the_port() {
        let peer = |ip, index| local_host().peer(&by_gid(ip, index), PEER, QPN).unwrap().address;
        assert_eq!(peer("10.1.9.9", 0), "10.1.9.9:6000".parse().unwrap());
        assert_eq!(peer("2001:db8::9", 1), "[2001:db8::9]:6000".parse().unwrap());
    }

    #[test]
    fn a_link_local_gid_takes_the_scope_of_the_own_gid() {
        let scope = |index| match local_host()
            .peer(&by_gid("fe80::9", index), PEER, QPN)
            .unwrap()
            .address
        {
            SocketAddr::V6(address) => address.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        assert_eq!((scope(2), scope(3)), (5, 6));
        assert_eq!(scope(0), 5);
    }

    #[test]
    fn a_lid_names_this_host_or_one_in_its_16_bit_prefix() {
        let peer = |dlid| {
            local_host().peer(
                &AddressVector {
                    dlid,
                    ..AddressVector::default()
                },
                PEER,
                QPN,
            )
        };
        assert_eq!(peer(0x0203).unwrap().address, "10.1.2.3:6000".parse().unwrap());
        assert_eq!(peer(0x0a0b).unwrap().address, "10.1.10.11:6000".parse().unwrap());
        assert_eq!(peer(0), Err(Errno::INVAL));
    }

    #[test]
    fn the_same_number_on_the_same_host_is_the_same_queue_pair() {
        let is_self = |av: AddressVector, dest| local_host().peer(&av, dest, QPN).unwrap().is_self;
        assert!(is_self(by_gid("10.1.2.3", 0), QPN));
        assert!(is_self(by_gid("127.0.0.1", 0), QPN));
        assert!(is_self(
            AddressVector {
                dlid: 0x0203,
                ..AddressVector::default()
            },
            QPN
        ));
        assert!(!is_self(by_gid("10.1.2.3", 0), QPN + 1));
        assert!(!is_self(by_gid("10.1.2.4", 0), QPN));
    }

    #[test]
    fn both_ends_agree_on_the_initiator() {
        let other = LocalHost::new(vec![gid("10.1.2.4", 0)], None, Identity::Iwarp);
        for (a, b) in [(QPN, PEER), (PEER, QPN), (QPN, QPN)] {
            let here = local_host().peer(&by_gid("10.1.2.4", 0), b, a).unwrap();
            let there = other.peer(&by_gid("10.1.2.3", 0), a, b).unwrap();
            assert!(here.we_initiate != there.we_initiate);
            let by_lid = |dlid| AddressVector {
                dlid,
                ..AddressVector::default()
            };
            let here = local_host().peer(&by_lid(0x0204), b, a).unwrap();
            let there = other.peer(&by_lid(0x0203), a, b).unwrap();
            assert!(here.we_initiate != there.we_initiate);
        }
    }

    #[test]
    fn the_gids_of_a_roce_nic_lead_to_the_same_peer() {
        let host = |ip: &str| LocalHost::new(vec![gid(ip, 0), gid("127.0.0.1", 0)], None, Identity::Roce);
        let (here, there) = (host("10.1.2.3"), host("10.1.2.4"));
        for (a, b) in [(QPN, PEER), (PEER, QPN)] {
            for sgid_index in 0..4 {
                for dgid_index in 0..4 {
                    let av = |to: &LocalHost| AddressVector {
                        is_global: true,
                        dgid: to.table[dgid_index].raw,
                        sgid_index,
                        ..AddressVector::default()
                    };
                    let peer = here.peer(&av(&there), b, a).unwrap();
                    assert_eq!(
                        peer.address,
                        SocketAddr::new("10.1.2.4".parse().unwrap(), port_of(b))
                    );
                    let back = there.peer(&av(&here), a, b).unwrap();
                    assert!(peer.we_initiate != back.we_initiate);
                    assert!(here.peer(&av(&here), QPN, QPN).unwrap().is_self);
                    let by_lid = AddressVector {
                        dlid: 0x0203,
                        ..AddressVector::default()
                    };
                    assert_eq!(here.peer(&by_lid, b, a), Err(Errno::INVAL));
                    let without = here.peer(&AddressVector::default(), b, a).unwrap();
                    assert_eq!(without.address, SocketAddr::new(here.gids[0].ip, port_of(b)));
                    assert!(!without.is_self);
                }
            }
        }
    }

    #[test]
    fn the_first_address_of_the_family_stands_for_loopback() {
        let host = |ips: &[&str], identity| {
            LocalHost::new(ips.iter().map(|ip| gid(ip, 0)).collect(), None, identity)
        };
        let own = |host: &LocalHost, ip: &str| {
            let (index, raw) = host.own_gid(ip.parse().unwrap())?;
            Some((index, ip_of(&raw).to_string()))
        };
        let of = |index, ip: &str| Some((index, ip.to_owned()));
        let all = ["2001:db8::7", "10.1.2.3", "127.0.0.1", "::1"];
        let roce = host(&all, Identity::Roce);
        for loopback in ["127.0.0.1", "127.0.0.2", "::ffff:127.0.0.1", "10.1.2.3"] {
            assert_eq!(own(&roce, loopback), of(3, "10.1.2.3"), "{loopback}");
        }
        assert_eq!(own(&roce, "::1"), of(5, "2001:db8::7"));
        assert_eq!(own(&roce, "10.1.2.4"), None);
        let last = host(&["127.0.0.1", "10.1.2.3"], Identity::Roce);
        assert_eq!(own(&last, "127.0.0.1"), of(3, "10.1.2.3"));
        let rnic = host(&all, Identity::Iwarp);
        assert_eq!(own(&rnic, "127.0.0.1"), of(2, "127.0.0.1"));
        let alone = host(&["127.0.0.1"], Identity::Roce);
        assert_eq!(own(&alone, "127.0.0.2"), of(3, "127.0.0.1"));
        assert_eq!(own(&alone, "::1"), None);
    }

    #[test]
    fn an_address_without_a_peer_is_invalid() {
        for (av, dest) in [
            (by_gid("10.1.2.4", 9), PEER),
            (by_gid("::", 0), PEER),
            (by_gid("224.0.0.1", 0), PEER),
            (by_gid("10.1.2.4", 0), 17),
        ] {
            assert_eq!(
                local_host().peer(&av, dest, QPN),
                Err(Errno::INVAL),
                "{av:?} {dest}"
            );
        }
    }
}
