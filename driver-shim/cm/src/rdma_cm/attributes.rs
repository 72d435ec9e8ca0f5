//! Options of ids, and attributes of their queue pairs.

use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use urnic_device::vocabulary::{Access, QpState};
use zerocopy::{FromZeros, IntoBytes};

use super::abi::opcode::option;
use super::abi::{AhAttr, HOP_LIMIT, MTU_1024, PATH_FLAGS, PORT, QpAttrResponse};
use super::command::Parameters;
use super::{Engine, Id, PS_IPOIB, State, UDP_QKEY, World};
use crate::qp_attr::{MANAGER_QPN, QpMask};
use crate::timeouts::RETRIES;
use urnic_process::port_gids::gid_of;

/// Retries while the peer has no receive posted: no limit.
const RNR_RETRIES: u8 = 7;

impl Engine {
    /// The attributes with which the queue pair of an id reaches `state`. With an RNIC, the
    /// connection manager moves the queue pair to RTS; with a RoCE NIC, the program does.
    ///
    /// # Errors
    /// `EINVAL` for a state other than Init, RTR and RTS, and while there is no device or, with a
    /// RoCE NIC, no peer.
    pub fn qp_attributes(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        state: u32,
    ) -> Result<QpAttrResponse, Errno> {
        let identity = self.identity;
        let id = self.own(channel, handle)?;
        if id.local.is_none_or(|local| local.ip().is_unspecified()) {
            return Err(Errno::INVAL);
        }
        if identity.is_roce() && id.is_for_datagrams() {
            return datagram_attributes(id, state);
        }
        if identity.is_roce() {
            let by_messages = match id.state {
                State::ByMessages(_) => true,
                // A peer may connect by a stream, whatever its wire is here.
                State::Requested { .. } => false,
                _ => id.remote.is_some_and(|remote| self.speaks_roce_to(remote)),
            };
            let of_peer = [QpState::Rtr, QpState::Rts].into_iter();
            let of_peer = of_peer.into_iter().find(|of_peer| *of_peer as u32 == state);
            if let Some(state) = of_peer.filter(|_| by_messages) {
                return self.attributes_by_messages(world, handle, state);
            }
            let id = self.own(channel, handle)?;
            let remote = id.remote.map(|remote| remote.ip());
            let default = remote.map(|remote| self.policy(remote).ack_timeout);
            let id = self.own(channel, handle)?;
            let ack_timeout = id.ack_timeout.or(default).unwrap_or_default();
            return roce_attributes(world, id, state, ack_timeout);
        }
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let mut response = QpAttrResponse::new_zeroed();
        let mask = match QpState::from_raw(state) {
            Some(QpState::Init) => QpMask::STATE | QpMask::PKEY_INDEX | QpMask::PORT | QpMask::ACCESS_FLAGS,
            Some(QpState::Rtr) => QpMask::RTR_BY_MANAGER,
            Some(QpState::Rts) => QpMask::PORT,
            _ => return Err(Errno::INVAL),
        };
        // Before CONNECT: librdmacm created the queue pair. After CONNECT: the program has an
        // external queue pair.
        if !matches!(
            id.state,
            State::LookingUp(_) | State::Connecting(_) | State::Answered(_)
        ) {
            id.manages_qp = true;
        }
        response.mask = mask.bits();
        response.state = state;
        response.cur_state = state;
        response.access = access.bits();
        response.port = 1;
        response.timeout = id.ack_timeout.unwrap_or(0);
        Ok(response)
    }

    /// Sets an option.
    ///
    /// # Errors
    /// `ENOSYS` for an unsupported option, `EINVAL` for a value of the wrong length, or for an
    /// option that the state of the id does not allow.
    pub fn set_option(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        (level, name): (u32, u32),
        value: &[u8],
    ) -> Result<(), Errno> {
        let id = self.own(channel, handle)?;
        let flag = || Ok::<_, Errno>(i32::from_ne_bytes(value.try_into().map_err(|_| Errno::INVAL)?) != 0);
        let byte = || match value {
            [byte] => Ok(*byte),
            _ => Err(Errno::INVAL),
        };
        match (level, name) {
            // The traffic class of the connection's packets, or, before the address is bound, of a
            // listener's.
            (option::LEVEL_ID, option::ID_TOS) => id.traffic_class = byte()?,
            // A port in TIME-WAIT can always be used again; a port with a listener never can. Ids
            // that do not listen share a port with this option.
            (option::LEVEL_ID, option::ID_REUSEADDR) => match (&id.state, flag()?) {
                (State::Listening(_) | State::Serving(_), _) => return Err(Errno::INVAL),
                (State::Idle, reuse) => id.reuse = reuse,
                (_, true) => id.reuse = true,
                (_, false) => return Err(Errno::INVAL),
            },
            (option::LEVEL_ID, option::ID_AFONLY) => match (&id.state, flag()?) {
                (State::Idle | State::Bound { .. }, one_family) => id.one_family = one_family,
                _ => return Err(Errno::INVAL),
            },
            (option::LEVEL_ID, option::ID_ACK_TIMEOUT) => {
                let timeout = byte()?;
                if timeout > 31 || id.is_for_datagrams() {
                    return Err(Errno::INVAL);
                }
                id.ack_timeout = Some(timeout);
            }
            // A path that the program found resolves the route: the network routes anyway.
            (option::LEVEL_IB, option::IB_PATH) if has_path(value) => {
                return self.resolve_route(world, channel, handle);
            }
            (option::LEVEL_IB, option::IB_PATH) => return Err(Errno::INVAL),
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }
}

/// The attributes for the queue pair of a RoCE NIC's program, as `ib_cm` in a kernel gives them.
/// The destination of RTR is [`MANAGER_QPN`].
fn roce_attributes(
    world: &mut World<'_>,
    id: &Id,
    state: u32,
    ack_timeout: u8,
) -> Result<QpAttrResponse, Errno> {
    let mut response = QpAttrResponse::new_zeroed();
    let depths = match &id.state {
        State::Connecting(connecting) => depths_of(&connecting.parameters),
        State::LookingUp(lookup) => match &lookup.connecting {
            Some(connecting) => depths_of(&connecting.parameters),
            None => (0, 0),
        },
        State::Answered(answered) => depths_of(&answered.parameters),
        State::Requested { params, .. } => (params.responder_resources, params.initiator_depth),
        _ => (0, 0),
    };
    let mask = match QpState::from_raw(state) {
        Some(QpState::Init) => {
            let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            response.access = access.bits();
            QpMask::STATE | QpMask::PKEY_INDEX | QpMask::PORT | QpMask::ACCESS_FLAGS
        }
        Some(QpState::Rtr) => {
            let (local, remote) = (id.local.ok_or(Errno::INVAL)?, id.remote.ok_or(Errno::INVAL)?);
            let vector = address_vector(world, local, remote.ip(), id.traffic_class);
            let bytes = vector.as_bytes();
            response.address_vectors[..bytes.len()].copy_from_slice(bytes);
            response.path_mtu = MTU_1024.into();
            response.dest_qp_num = MANAGER_QPN;
            response.max_dest_rd_atomic = depths.0;
            QpMask::RTR_OF_CHANNEL_ADAPTER
        }
        Some(QpState::Rts) => {
            (response.timeout, response.retry_cnt) = (ack_timeout, retries(&id.state));
            response.rnr_retry = RNR_RETRIES;
            response.max_rd_atomic = depths.1;
            QpMask::RTS_OF_CHANNEL_ADAPTER
        }
        _ => return Err(Errno::INVAL),
    };
    (response.mask, response.state, response.cur_state) = (mask.bits(), state, state);
    response.port = PORT;
    Ok(response)
}

/// The retries of requests that the peer does not acknowledge. A responder would have those of its
/// peer, but the MPA Request does not carry them.
fn retries(state: &State) -> u8 {
    match state {
        State::Connecting(connecting) => connecting.parameters.retry_count,
        State::LookingUp(lookup) => {
            let connecting = lookup.connecting.as_ref();
            connecting.map_or(RETRIES, |connecting| connecting.parameters.retry_count)
        }
        State::Answered(answered) => answered.parameters.retry_count,
        _ => RETRIES,
    }
}

/// The attributes of a queue pair for datagrams, which the connection manager of a kernel gives in
/// any state.
fn datagram_attributes(id: &mut Id, state: u32) -> Result<QpAttrResponse, Errno> {
    QpState::from_raw(state).ok_or(Errno::INVAL)?;
    if id.port_space == PS_IPOIB {
        return Err(Errno::NODEV);
    }
    id.qkey = UDP_QKEY;
    let mut response = QpAttrResponse::new_zeroed();
    let mask = QpMask::STATE | QpMask::PKEY_INDEX | QpMask::PORT | QpMask::QKEY;
    (response.mask, response.state, response.cur_state) = (mask.bits(), state, state);
    (response.port, response.qkey) = (PORT, id.qkey);
    Ok(response)
}

/// The attributes of an address handle for `remote`, in packets of this traffic class.
pub(super) fn address_vector(
    world: &mut World<'_>,
    local: SocketAddr,
    remote: IpAddr,
    traffic_class: u8,
) -> AhAttr {
    let (sgid_index, own) = world.device.own_gid(local);
    AhAttr {
        dgid: peer_gid(remote, own),
        sgid_index,
        hop_limit: HOP_LIMIT,
        traffic_class,
        is_global: 1,
        port: PORT,
        ..AhAttr::new_zeroed()
    }
}

/// The GID of a peer of an id whose GID is `own`. A loopback address is this host, and has the same
/// GID, as in a kernel (`cma_resolve_loopback`).
pub(super) fn peer_gid(remote: IpAddr, own: [u8; 16]) -> [u8; 16] {
    match remote.to_canonical() {
        ip if ip.is_loopback() => own,
        ip => gid_of(ip),
    }
}

/// Inbound and outbound Reads that the program requests.
fn depths_of(parameters: &Parameters) -> (u8, u8) {
    (parameters.responder_resources, parameters.initiator_depth)
}

/// Whether records of `struct ib_path_rec_data` are complete and include one for both directions
/// (`ucma_set_ib_path`).
fn has_path(value: &[u8]) -> bool {
    const LEN: usize = 72;
    let flags = |record: &[u8]| record.first_chunk().map(|flags| u32::from_ne_bytes(*flags));
    value.len().is_multiple_of(LEN) && value.chunks(LEN).any(|record| flags(record) == Some(PATH_FLAGS))
}
