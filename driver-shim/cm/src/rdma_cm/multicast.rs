//! Multicast groups. Joining takes no messages: the program's queue pair joins the group of IP when
//! it is attached, which librdmacm does at the event.

use std::net::SocketAddr;

use rustix::io::Errno;

use super::abi::{CmAddress, DatagramParam};
use super::datagram_state::{Membership, UDP_QKEY};
use super::options::address_vector;
use super::state::{CmEvent, Engine, Event, EventParams, PS_DATAGRAMS, State, World};

/// The number of the queue pair in datagrams to a group.
const MULTICAST_QPN: u32 = 0xff_ffff;

impl Engine {
    /// Joins a multicast group; an event has the parameters of datagrams to the group. Returns the
    /// number of the membership.
    ///
    /// # Errors
    /// `EINVAL` for an id of another port space, without a device or in the wrong state, and for an
    /// address that is zero or no address of IP; `EOPNOTSUPP` with an RNIC.
    pub fn join(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        uid: u64,
        group: CmAddress,
    ) -> Result<u32, Errno> {
        let is_roce = self.identity.is_roce();
        let id = self.own(channel, handle)?;
        let local = id.local.filter(|local| !local.ip().is_unspecified());
        if !is_roce {
            return Err(Errno::OPNOTSUPP);
        }
        let local = local.ok_or(Errno::INVAL)?;
        let group = match group {
            CmAddress::Ip(group) if !group.ip().is_unspecified() => group,
            _ => return Err(Errno::INVAL),
        };
        let is_bound = matches!(id.state, State::Bound { .. } | State::AddressResolved);
        if !is_bound || !PS_DATAGRAMS.contains(&id.port_space) {
            return Err(Errno::INVAL);
        }
        id.qkey = UDP_QKEY;
        let number = self.free_membership();
        let membership = Membership {
            id: handle,
            uid,
            reported: 0,
        };
        self.datagrams.memberships.insert(number, membership);
        tracing::debug!("id {handle}: joins {}", group.ip());
        let event = joined(world, (handle, number), local, group);
        self.queue(world, event);
        Ok(number)
    }

    fn free_membership(&mut self) -> u32 {
        loop {
            let number = self.datagrams.next_membership;
            self.datagrams.next_membership = number.wrapping_add(1);
            if !self.datagrams.memberships.contains_key(&number) {
                return number;
            }
        }
    }

    /// Leaves a group. Events of the membership that the program has not taken are discarded.
    /// Returns the number of those that it took.
    ///
    /// # Errors
    /// `ENOENT` for a membership that does not exist, `EINVAL` for one of another channel.
    pub fn leave(&mut self, world: &mut World<'_>, channel: u64, number: u32) -> Result<u32, Errno> {
        let membership = self.datagrams.memberships.get(&number).ok_or(Errno::NOENT)?;
        let (handle, reported) = (membership.id, membership.reported);
        self.own(channel, handle)?;
        self.datagrams.memberships.remove(&number);
        if let Some(queue) = self.channels.get_mut(&channel) {
            let had = !queue.is_empty();
            queue.retain(|event| event.membership != Some(number));
            if had && queue.is_empty() {
                world.device.signal(channel, false);
            }
        }
        Ok(reported)
    }
}

/// The event that an id has joined a group.
fn joined(
    world: &mut World<'_>,
    (handle, number): (u32, u32),
    local: SocketAddr,
    group: SocketAddr,
) -> Event {
    let vector = address_vector(world, local, group.ip(), 0);
    Event {
        id: handle,
        about: number,
        kind: CmEvent::MulticastJoin,
        status: 0,
        params: EventParams {
            datagrams: Some(DatagramParam::new(MULTICAST_QPN, UDP_QKEY, vector)),
            ..EventParams::default()
        },
        membership: Some(number),
    }
}
