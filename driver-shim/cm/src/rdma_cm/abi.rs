//! The layouts of `<rdma/rdma_user_cm.h>`: the bytes that librdmacm writes to
//! `/dev/infiniband/rdma_cm`, and the answers that it gets.
//!
//! All fields are in native byte order except addresses, ports and GUIDs, which are in network
//! order. No layout has padding; lengths and offsets are asserted.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV6};

use rustix::io::Errno;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

/// Longest private data of a connection (`RDMA_MAX_PRIVATE_DATA`). The maximum of its length byte
/// is one less.
pub const MAX_PRIVATE_DATA: usize = 256;
/// `AF_IB` of `<linux/socket.h>`.
const AF_IB: u16 = 27;
/// `struct sockaddr_in6`.
const IN6_LEN: usize = 28;
/// `struct sockaddr_ib`.
const IB_LEN: usize = 48;
/// `struct __kernel_sockaddr_storage`.
const STORAGE_LEN: usize = 128;
/// No index of the device: the device is identified by its node GUID (`UCMA_INVALID_IB_INDEX`).
const NO_INDEX: u32 = u32::MAX;

/// Numbers of the commands (`RDMA_USER_CM_CMD_*`).
#[expect(missing_docs, reason = "the names are those of <rdma/rdma_user_cm.h>")]
pub mod opcode {
    pub const CREATE_ID: u32 = 0;
    pub const DESTROY_ID: u32 = 1;
    pub const BIND_IP: u32 = 2;
    pub const RESOLVE_IP: u32 = 3;
    pub const RESOLVE_ROUTE: u32 = 4;
    pub const QUERY_ROUTE: u32 = 5;
    pub const CONNECT: u32 = 6;
    pub const LISTEN: u32 = 7;
    pub const ACCEPT: u32 = 8;
    pub const REJECT: u32 = 9;
    pub const DISCONNECT: u32 = 10;
    pub const INIT_QP_ATTR: u32 = 11;
    /// The only command that may wait.
    pub const GET_EVENT: u32 = 12;
    pub const GET_OPTION: u32 = 13;
    pub const SET_OPTION: u32 = 14;
    pub const NOTIFY: u32 = 15;
    pub const JOIN_IP_MCAST: u32 = 16;
    pub const LEAVE_MCAST: u32 = 17;
    pub const MIGRATE_ID: u32 = 18;
    pub const QUERY: u32 = 19;
    pub const BIND: u32 = 20;
    pub const RESOLVE_ADDR: u32 = 21;
    pub const JOIN_MCAST: u32 = 22;
    /// Since Linux 6.17.
    pub const WRITE_CM_EVENT: u32 = 24;

    /// Options of [`QUERY`] (`RDMA_USER_CM_QUERY_*`).
    pub mod query {
        pub const ADDR: u32 = 0;
        pub const PATH: u32 = 1;
        pub const GID: u32 = 2;
    }

    /// Levels and options of [`SET_OPTION`] (`RDMA_OPTION_*` of `<rdma/rdma_cma.h>`).
    pub mod option {
        pub const LEVEL_ID: u32 = 0;
        pub const LEVEL_IB: u32 = 1;
        pub const ID_TOS: u32 = 0;
        pub const ID_REUSEADDR: u32 = 1;
        pub const ID_AFONLY: u32 = 2;
        pub const ID_ACK_TIMEOUT: u32 = 3;
        pub const IB_PATH: u32 = 1;
    }
}

macro_rules! layouts {
    ($($(#[$m:meta])* $name:ident = $len:literal { $($f:ident: $t:ty,)* })*) => { $(
        $(#[$m])*
        #[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
        #[repr(C)]
        #[expect(missing_docs, reason = "the fields are those of <rdma/rdma_user_cm.h>")]
        pub struct $name { $(pub $f: $t,)* }
        const _: () = assert!(size_of::<$name>() == $len);
    )* };
}

layouts! {
    /// The header of every command.
    Header = 8 { command: u32, in_len: u16, out_len: u16, }
    CreateId = 24 { uid: u64, response: u64, port_space: u16, qp_type: u8, reserved: [u8; 5], }
    /// Commands that name an id and require an answer: `DESTROY_ID`, `LEAVE_MCAST`, `QUERY_ROUTE`.
    OnId = 16 { response: u64, id: u32, reserved: u32, }
    BindIp = 40 { response: u64, address: [u8; IN6_LEN], id: u32, }
    Bind = 136 { id: u32, address_len: u16, reserved: u16, address: [u8; STORAGE_LEN], }
    ResolveIp = 64 { source: [u8; IN6_LEN], destination: [u8; IN6_LEN], id: u32, timeout_ms: u32, }
    ResolveAddr = 272 {
        id: u32, timeout_ms: u32, source_len: u16, destination_len: u16, reserved: u32,
        source: [u8; STORAGE_LEN], destination: [u8; STORAGE_LEN],
    }
    ResolveRoute = 8 { id: u32, timeout_ms: u32, }
    Query = 16 { response: u64, id: u32, option: u32, }
    /// `struct rdma_ucm_conn_param`.
    ConnParam = 272 {
        qp_num: u32, qkey: u32, private_data: [u8; MAX_PRIVATE_DATA], private_data_len: u8, srq: u8,
        responder_resources: u8, initiator_depth: u8, flow_control: u8, retry_count: u8, rnr_retry_count: u8, valid: u8,
    }
    Connect = 288 { param: ConnParam, id: u32, reserved: u32, ece: [u32; 2], }
    Listen = 8 { id: u32, backlog: u32, }
    Accept = 296 { uid: u64, param: ConnParam, id: u32, reserved: u32, ece: [u32; 2], }
    Reject = 264 {
        id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; MAX_PRIVATE_DATA],
    }
    Disconnect = 4 { id: u32, }
    InitQpAttr = 16 { response: u64, id: u32, qp_state: u32, }
    GetEvent = 8 { response: u64, }
    SetOption = 24 { value: u64, id: u32, level: u32, name: u32, len: u32, }
    Notify = 8 { id: u32, event: u32, }
    JoinIpMulticast = 48 { response: u64, uid: u64, address: [u8; IN6_LEN], id: u32, }
    JoinMulticast = 152 {
        response: u64, uid: u64, id: u32, address_len: u16, flags: u16, address: [u8; STORAGE_LEN],
    }
    MigrateId = 16 { response: u64, id: u32, fd: u32, }
    /// `struct rdma_ucm_write_cm_event` to the last byte that has a meaning: of its union, events
    /// of programs have the number.
    WriteEvent = 24 { id: u32, reserved: u32, event: u32, status: u32, argument: u64, }

    /// `struct rdma_ucm_ud_param`.
    DatagramParam = 304 {
        qp_num: u32, qkey: u32, address: AhAttr, private_data: [u8; MAX_PRIVATE_DATA], private_data_len: u8,
        reserved: [u8; 7],
    }
    /// The response to `GET_EVENT`. Its union is as long as the longest member, the parameters of
    /// datagrams.
    EventResponse = 336 {
        uid: u64, id: u32, event: u32, status: u32, param: ConnParam, rest: [u8; 32], reserved: u32, ece: [u32; 2],
    }
    /// `struct ib_user_path_rec`.
    PathRecord = 64 {
        dgid: [u8; 16], sgid: [u8; 16], lids: u32, raw_traffic: u32, flow_label: u32, reversible: u32, mtu: u32,
        pkey: [u8; 2], hop_limit: u8, traffic_class: u8, num_paths: u8, sl: u8, mtu_selector: u8, rate_selector: u8,
        rate: u8, packet_life_time_selector: u8, packet_life_time: u8, preference: u8,
    }
    RouteResponse = 208 {
        node_guid: u64, route: [PathRecord; 2], source: [u8; IN6_LEN], destination: [u8; IN6_LEN], num_paths: u32,
        port: u8, reserved: [u8; 3], device_index: u32, reserved1: u32,
    }
    AddressResponse = 280 {
        node_guid: u64, port: u8, reserved: u8, pkey: [u8; 2], source_len: u16, destination_len: u16,
        source: [u8; STORAGE_LEN], destination: [u8; STORAGE_LEN], device_index: u32, reserved1: u32,
    }
    /// The response to `QUERY` for paths: `struct rdma_ucm_query_path_resp` with at most one
    /// `struct ib_path_rec_data`.
    PathResponse = 80 { num_paths: u32, reserved: u32, flags: u32, reserved1: u32, record: SaPathRecord, }
    /// A path record in the form of subnet administration (IBTA vol. 1 §15.2.5.16).
    SaPathRecord = 64 {
        service_id: [u8; 8], dgid: [u8; 16], sgid: [u8; 16], lids: u32, flow_label_hop_limit: [u8; 4], traffic_class: u8,
        reversible_num_paths: u8, pkey: [u8; 2], qos_class_sl: [u8; 2], mtu: u8, rate: u8, packet_life_time: u8,
        preference: u8, reserved: [u8; 6],
    }
    /// `struct ib_uverbs_ah_attr`.
    AhAttr = 32 {
        dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, reserved: u8, dlid: u16,
        sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port: u8, reserved1: u8,
    }
    /// `struct ib_uverbs_qp_attr`.
    QpAttrResponse = 144 {
        mask: u32, state: u32, cur_state: u32, path_mtu: u32, path_mig_state: u32, qkey: u32, rq_psn: u32, sq_psn: u32,
        dest_qp_num: u32, access: u32, address_vectors: [u8; 64], caps: [u32; 5], pkey_index: u16, alt_pkey_index: u16,
        en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8,
        port: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8, alt_port: u8, alt_timeout: u8, reserved: [u8; 5],
    }
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(EventResponse, param) == 20 && offset_of!(EventResponse, ece) == 328);
    assert!(offset_of!(ConnParam, private_data_len) == 264);
    assert!(offset_of!(DatagramParam, private_data) == 40);
    assert!(offset_of!(Connect, id) == 272 && offset_of!(Connect, ece) == 280);
    assert!(offset_of!(Accept, param) == 8 && offset_of!(Accept, id) == 280);
    assert!(offset_of!(RouteResponse, source) == 136 && offset_of!(RouteResponse, num_paths) == 192);
    assert!(offset_of!(RouteResponse, device_index) == 200);
    assert!(offset_of!(QpAttrResponse, pkey_index) == 124 && offset_of!(QpAttrResponse, port) == 133);
};

impl DatagramParam {
    /// The queue pair, its Q_Key and its address.
    pub(super) fn new(qp_num: u32, qkey: u32, address: AhAttr) -> DatagramParam {
        DatagramParam {
            qp_num,
            qkey,
            address,
            ..DatagramParam::new_zeroed()
        }
    }

    /// Adds the peer's private data, at most as much as its length byte can express.
    pub(super) fn set_private_data(&mut self, data: &[u8]) {
        let len = data.len().min(usize::from(u8::MAX));
        if let (Some(to), Some(from)) = (self.private_data.get_mut(..len), data.get(..len)) {
            to.copy_from_slice(from);
            self.private_data_len = len as u8;
        }
    }
}

impl EventResponse {
    /// The offset of the union.
    const PARAM: usize = std::mem::offset_of!(EventResponse, param);

    /// Puts the parameters of datagrams into the union.
    pub(super) fn set_datagrams(&mut self, param: &DatagramParam) {
        let bytes = self.as_mut_bytes();
        if let Some(to) = bytes.get_mut(Self::PARAM..Self::PARAM + size_of::<DatagramParam>()) {
            to.copy_from_slice(param.as_bytes());
        }
    }

    /// Puts the argument of a program's own event into the union.
    pub(super) fn set_argument(&mut self, argument: u64) {
        let bytes = self.as_mut_bytes();
        if let Some(to) = bytes.get_mut(Self::PARAM..Self::PARAM + size_of::<u64>()) {
            to.copy_from_slice(&argument.to_ne_bytes());
        }
    }

    /// The parameters of datagrams in the union.
    #[cfg(test)]
    pub(super) fn datagrams(&self) -> DatagramParam {
        DatagramParam::read_from_prefix(&self.as_bytes()[Self::PARAM..])
            .unwrap()
            .0
    }
}

/// An address that a program gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmAddress {
    /// `AF_INET` or `AF_INET6`.
    Ip(SocketAddr),
    /// `AF_IB`; the value is its GID.
    Ib([u8; 16]),
}

impl CmAddress {
    /// Reads `struct sockaddr_in`, `sockaddr_in6` or `sockaddr_ib` from the front of `bytes`;
    /// `None` for `AF_UNSPEC` or no bytes.
    ///
    /// # Errors
    /// `EAFNOSUPPORT` for another family, `EINVAL` when there are too few bytes.
    pub fn parse(bytes: &[u8]) -> Result<Option<CmAddress>, Errno> {
        let Some((family, _)) = bytes.split_first_chunk() else {
            return Ok(None);
        };
        let family = u16::from_ne_bytes(*family);
        let port = || Some(u16::from_be_bytes(*bytes.get(2..4)?.first_chunk()?));
        let name = match i32::from(family) {
            0 => return Ok(None),
            libc::AF_INET => (|| {
                let ip: [u8; 4] = *bytes.get(4..)?.first_chunk()?;
                Some(CmAddress::Ip(SocketAddr::new(Ipv4Addr::from(ip).into(), port()?)))
            })(),
            libc::AF_INET6 => (|| {
                let ip: [u8; 16] = *bytes.get(8..)?.first_chunk()?;
                let flow = u32::from_be_bytes(*bytes.get(4..)?.first_chunk()?);
                let scope = u32::from_ne_bytes(*bytes.get(24..)?.first_chunk()?);
                Some(CmAddress::Ip(
                    SocketAddrV6::new(ip.into(), port()?, flow, scope).into(),
                ))
            })(),
            _ if family == AF_IB => (|| Some(CmAddress::Ib(*bytes.get(8..)?.first_chunk()?)))(),
            _ => return Err(Errno::AFNOSUPPORT),
        };
        name.map(Some).ok_or(Errno::INVAL)
    }
}

/// The length of an address as the program gives it.
pub(super) fn address_len(address: &CmAddress) -> u16 {
    let len = match address {
        CmAddress::Ip(SocketAddr::V4(_)) => 16,
        CmAddress::Ip(SocketAddr::V6(_)) => IN6_LEN,
        CmAddress::Ib(_) => IB_LEN,
    };
    len as u16
}

/// Writes an address as `sockaddr_in` or `sockaddr_in6`, and returns its length: 0 for none.
fn put_address(to: &mut [u8], address: Option<SocketAddr>) -> u16 {
    let mut bytes = [0u8; IN6_LEN];
    let len = match address {
        None => return 0,
        Some(SocketAddr::V4(v4)) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            bytes[2..4].copy_from_slice(&v4.port().to_be_bytes());
            bytes[4..8].copy_from_slice(&v4.ip().octets());
            16
        }
        Some(SocketAddr::V6(v6)) => {
            bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            bytes[2..4].copy_from_slice(&v6.port().to_be_bytes());
            bytes[4..8].copy_from_slice(&v6.flowinfo().to_be_bytes());
            bytes[8..24].copy_from_slice(&v6.ip().octets());
            bytes[24..].copy_from_slice(&v6.scope_id().to_ne_bytes());
            IN6_LEN
        }
    };
    if let Some(to) = to.get_mut(..IN6_LEN) {
        to.copy_from_slice(&bytes);
    }
    len as u16
}

/// The pkey of an Ethernet port.
const PKEY: [u8; 2] = [0xff; 2];
/// The device's only port.
pub(super) const PORT: u8 = 1;

/// The addresses of an id: the answer to queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdAddresses {
    /// The device's node GUID in network order; 0 while the id is bound to no device.
    pub node_guid: u64,
    /// The address that the id is bound to.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub remote: Option<SocketAddr>,
    /// The GIDs of both addresses; 0 for one that the id does not have.
    pub gids: [[u8; 16]; 2],
    /// Port space: part of the service id in an AF_IB name.
    pub port_space: u16,
    /// The device has path records: that of a RoCE NIC.
    pub has_path: bool,
}

/// The hop limit of packets between any hosts.
pub(super) const HOP_LIMIT: u8 = 64;
/// `IBV_MTU_1024`, which any Ethernet carries.
pub(super) const MTU_1024: u8 = 3;
/// `IBV_RATE_100_GBPS`.
const RATE_100_GBPS: u8 = 16;
/// Selector of a path record: the value is exact.
const EXACTLY: u8 = 2;
/// The path is the primary one, in both directions, and for management datagrams (`IB_PATH_GMP`,
/// `IB_PATH_PRIMARY`, `IB_PATH_BIDIRECTIONAL`).
pub(super) const PATH_FLAGS: u32 = 0b10_1011;

impl IdAddresses {
    fn port(&self) -> u8 {
        if self.node_guid == 0 { 0 } else { PORT }
    }

    /// Whether there is a path to describe. The network routes IP: only programs for a RoCE NIC
    /// expect one.
    fn paths(&self) -> u32 {
        u32::from(self.has_path && self.remote.is_some())
    }

    /// The answer to `QUERY` for paths.
    pub fn path(&self) -> PathResponse {
        let mut response = PathResponse::new_zeroed();
        response.num_paths = self.paths();
        if response.num_paths > 0 {
            response.flags = PATH_FLAGS;
            let [sgid, dgid] = self.gids;
            response.record = SaPathRecord {
                dgid,
                sgid,
                flow_label_hop_limit: [0, 0, 0, HOP_LIMIT],
                reversible_num_paths: 0x80 | 1,
                pkey: PKEY,
                mtu: EXACTLY << 6 | MTU_1024,
                rate: EXACTLY << 6 | RATE_100_GBPS,
                packet_life_time: EXACTLY << 6,
                ..SaPathRecord::new_zeroed()
            };
        }
        response
    }

    /// The answer to `QUERY_ROUTE`.
    pub fn route(&self) -> RouteResponse {
        let mut response = RouteResponse::new_zeroed();
        response.node_guid = self.node_guid;
        let [path, _] = &mut response.route;
        ([path.sgid, path.dgid], path.pkey) = (self.gids, PKEY);
        response.num_paths = self.paths();
        if response.num_paths > 0 {
            (path.reversible, path.num_paths, path.hop_limit) = (1, 1, HOP_LIMIT);
            (path.mtu_selector, path.mtu) = (EXACTLY, MTU_1024.into());
            (path.rate_selector, path.rate) = (EXACTLY, RATE_100_GBPS);
            path.packet_life_time_selector = EXACTLY;
        }
        put_address(&mut response.source, self.local);
        put_address(&mut response.destination, self.remote);
        response.port = self.port();
        response.device_index = NO_INDEX;
        response
    }

    /// The answer to `QUERY` for addresses.
    pub fn addresses(&self) -> AddressResponse {
        let mut response = self.bare();
        response.source_len = put_address(&mut response.source, self.local);
        response.destination_len = put_address(&mut response.destination, self.remote);
        response
    }

    /// The answer to `QUERY` for GIDs: both addresses as `struct sockaddr_ib`.
    pub fn gids(&self) -> AddressResponse {
        const LEN: u16 = IB_LEN as u16;
        let mut response = self.bare();
        let space = u64::from(self.port_space) << 16;
        let [sgid, dgid] = self.gids;
        for (to, address, gid) in [
            (&mut response.source, self.local, sgid),
            (&mut response.destination, self.remote, dgid),
        ] {
            let service = space | u64::from(address.map_or(0, |address| address.port()));
            to[..2].copy_from_slice(&AF_IB.to_ne_bytes());
            to[2..4].copy_from_slice(&PKEY);
            to[8..24].copy_from_slice(&gid);
            to[24..32].copy_from_slice(&service.to_be_bytes());
        }
        (response.source_len, response.destination_len) = (LEN, LEN);
        response
    }

    fn bare(&self) -> AddressResponse {
        let mut response = AddressResponse::new_zeroed();
        response.node_guid = self.node_guid;
        response.port = self.port();
        response.pkey = PKEY;
        response.device_index = NO_INDEX;
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["10.1.2.3:7471", "[fe80::1%3]:20049", "[::]:0", "0.0.0.0:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let mut bytes = [0; STORAGE_LEN];
            let len = put_address(&mut bytes, Some(address));
            assert_eq!(len, if address.is_ipv4() { 16 } else { 28 });
            assert_eq!(
                CmAddress::parse(&bytes[..len.into()]),
                Ok(Some(CmAddress::Ip(address)))
            );
            assert_eq!(
                CmAddress::parse(&bytes[..usize::from(len) - 8]).is_err(),
                address.is_ipv6(),
                "{text}"
            );
        }
    }

    #[test]
    fn other_families_and_missing_addresses_are_detected() {
        assert_eq!(CmAddress::parse(&[]), Ok(None));
        assert_eq!(CmAddress::parse(&[0; 28]), Ok(None));
        let family = |family: u16| {
            let mut bytes = [0; STORAGE_LEN];
            bytes[..2].copy_from_slice(&family.to_ne_bytes());
            bytes
        };
        assert_eq!(CmAddress::parse(&family(1)), Err(Errno::AFNOSUPPORT));
        assert_eq!(CmAddress::parse(&family(AF_IB)), Ok(Some(CmAddress::Ib([0; 16]))));
        assert_eq!(CmAddress::parse(&family(AF_IB)[..20]), Err(Errno::INVAL));
    }

    #[test]
    fn an_id_without_device_has_no_port() {
        let unbound = IdAddresses {
            node_guid: 0,
            local: Some("0.0.0.0:7471".parse().unwrap()),
            remote: None,
            gids: [[0; 16]; 2],
            port_space: 0x106,
            has_path: false,
        };
        assert_eq!((unbound.addresses().port, unbound.route().port), (0, 0));
        assert_eq!(unbound.addresses().destination_len, 0);
        let bound = IdAddresses {
            node_guid: 5,
            ..unbound
        };
        assert_eq!((bound.addresses().port, bound.route().port), (1, 1));
        assert_eq!(bound.gids().source[24..32], 0x0106_1d2fu64.to_be_bytes());
    }
}
