//! Options of ids, and attributes of their queue pairs.

use rustix::io::Errno;
use urnic_device::vocabulary::{Access, QpState};
use zerocopy::FromZeros;

use super::abi::QpAttrResponse;
use super::opcode::option;
use super::state::{Engine, State, World};
use crate::qp_attr::QpMask;

impl Engine {
    /// The attributes with which the queue pair of an id reaches `state`. The connection manager
    /// moves the queue pair to RTS, as with every iWARP device.
    ///
    /// # Errors
    /// `EINVAL` for a state other than Init, RTR and RTS, and while there is no device.
    pub fn qp_attributes(&mut self, channel: u64, handle: u32, state: u32) -> Result<QpAttrResponse, Errno> {
        let id = self.own(channel, handle)?;
        if id.local.is_none_or(|local| local.ip().is_unspecified()) {
            return Err(Errno::INVAL);
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
        if !matches!(id.state, State::Connecting(_) | State::Answered(_)) {
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
            // A port in TIME-WAIT can always be used again; a port with a listener cannot.
            (option::LEVEL_ID, option::ID_REUSEADDR) => drop(flag()?),
            (option::LEVEL_ID, option::ID_AFONLY) if matches!(id.state, State::Idle) => {
                id.one_family = flag()?
            }
            (option::LEVEL_ID, option::ID_AFONLY) => return Err(Errno::INVAL),
            (option::LEVEL_ID, option::ID_ACK_TIMEOUT) => {
                let timeout = byte()?;
                if timeout > 31 {
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

/// Whether records of `struct ib_path_rec_data` are complete and include one for both directions
/// (`ucma_set_ib_path`).
fn has_path(value: &[u8]) -> bool {
    const LEN: usize = 72;
    /// `IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL`.
    const FLAGS: u32 = 0b10_1011;
    let flags = |record: &[u8]| record.first_chunk().map(|flags| u32::from_ne_bytes(*flags));
    value.len().is_multiple_of(LEN) && value.chunks(LEN).any(|record| flags(record) == Some(FLAGS))
}
