//! Ids before they connect: making, binding, resolving, asking, moving, destroying.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use urnic_device::vocabulary::{Access, QpState};
use zerocopy::FromZeros;

use super::abi::{IdAddresses, Name, QpAttrResponse};
use super::passive::Listener;
use super::{
    CmEvent, Engine, Event, EventParams, Id, Key, MAX_IDS, Notice, Owner, PS_DATAGRAMS, PS_IB, PS_TCP, State,
    World,
};
use crate::mpa_startup::Close;
use crate::qp_attr::QpMask;

/// What a listener with no backlog of its own gets, and the most that any gets (the kernel's `max_backlog`).
const MAX_BACKLOG: u32 = 1024;

impl Engine {
    /// The id, if the program may name it on this channel.
    pub(super) fn own(&mut self, channel: u64, handle: u32) -> Result<&mut Id, Errno> {
        let id = self.ids.get_mut(&handle).ok_or(Errno::NOENT)?;
        (id.channel == channel).then_some(id).ok_or(Errno::INVAL)
    }

    /// A new id on `channel`.
    ///
    /// # Errors
    /// `EPROTONOSUPPORT` for an unknown port space; `ENOMEM`.
    pub fn create(&mut self, channel: u64, uid: u64, port_space: u16) -> Result<u32, Errno> {
        if ![PS_TCP, PS_IB].contains(&port_space) && !PS_DATAGRAMS.contains(&port_space) {
            return Err(Errno::PROTONOSUPPORT);
        }
        self.enter(Id {
            channel,
            uid,
            port_space,
            reported: 0,
            local: None,
            remote: None,
            picked: false,
            held: None,
            manages_qp: false,
            ack_timeout: None,
            traffic_class: 0,
            one_family: false,
            state: State::Idle,
        })
    }

    pub(super) fn enter(&mut self, id: Id) -> Result<u32, Errno> {
        let handle = match self.free.pop_front() {
            Some(handle) => handle,
            None if self.fresh == MAX_IDS => return Err(Errno::NOMEM),
            None => {
                self.fresh += 1;
                self.fresh - 1
            }
        };
        self.ids.insert(handle, id);
        Ok(handle)
    }

    /// Ends an id; returns how many of its events the program took.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`: no such id here.
    pub fn destroy(&mut self, world: &mut World<'_>, channel: u64, handle: u32) -> Result<u32, Errno> {
        self.own(channel, handle)?;
        Ok(self.remove(world, handle))
    }

    pub(super) fn remove(&mut self, world: &mut World<'_>, handle: u32) -> u32 {
        let Some(id) = self.ids.get_mut(&handle) else {
            return 0;
        };
        let state = std::mem::replace(&mut id.state, State::Over);
        self.let_go(world, handle, state);
        self.release_port(world, handle);
        let Some(id) = self.ids.remove(&handle) else {
            return 0;
        };
        self.timers.set(Key::Id(handle), None);
        self.timers.set(Key::TimeWait(handle), None);
        // What it was not told it shall never be; new ids that only such an event names have no other owner.
        let mut unread = Vec::new();
        if let Some(queue) = self.channels.get_mut(&id.channel) {
            let had = !queue.is_empty();
            queue.retain(|event| {
                let mine = event.id == handle;
                if mine && event.about != handle {
                    unread.push(event.about);
                }
                !mine
            });
            if had && queue.is_empty() {
                world.device.signal(id.channel, false);
            }
        }
        for child in unread {
            self.remove(world, child);
        }
        self.free.push_back(handle);
        id.reported
    }

    /// Ends what an id is at.
    fn let_go(&mut self, world: &mut World<'_>, handle: u32, state: State) {
        match state {
            State::Idle | State::AddressResolved | State::RouteResolved | State::Over => {}
            State::Bound { lid, early } => {
                self.close_listener(world, lid);
                for sid in early {
                    self.hang_up(world, sid, Close::Abort);
                }
            }
            State::Listening(listener) => {
                let Listener { lid, waiting, .. } = *listener;
                self.close_listener(world, Some(lid));
                let owned = |(sid, owner): (&u32, &Owner)| match owner {
                    Owner::Listener(of, _) if *of == handle => Some(*sid),
                    _ => None,
                };
                let starting: Vec<u32> = self.streams.iter().filter_map(owned).collect();
                for sid in starting.into_iter().chain(waiting) {
                    self.hang_up(world, sid, Close::Abort);
                }
            }
            State::Calling(calling) => self.hang_up(world, calling.sid, Close::Abort),
            State::Answered(answered) => self.hang_up(world, answered.sid, Close::Abort),
            State::Framing(framing) => self.hang_up(world, framing.sid, Close::Abort),
            State::Asked {
                sid, mut responder, ..
            } => {
                if let Ok(reply) = responder.reject(&[], None) {
                    let _ = world.device.send(sid, &reply);
                }
                self.hang_up(world, sid, Close::Orderly);
            }
            State::Opening { qid, .. } | State::Connected { qid } => {
                self.queue_pairs.remove(&qid);
                world.device.abort(qid);
                self.notices.push(Notice::Open(qid));
            }
            // Goes on without the id.
            State::Closing { qid } => {
                self.queue_pairs.remove(&qid);
            }
        }
    }

    fn close_listener(&mut self, world: &mut World<'_>, lid: Option<u32>) {
        if let Some(lid) = lid {
            self.listeners.remove(&lid);
            world.device.unlisten(lid);
        }
    }

    /// The listener of a bound id that is to connect: it holds the port, and takes no connection.
    fn hold(&mut self, world: &mut World<'_>, bound: State) -> Option<u32> {
        let State::Bound { lid, early } = bound else {
            return None;
        };
        for sid in early {
            self.hang_up(world, sid, Close::Abort);
        }
        lid
    }

    /// Lets go of the port that an id holds, so that the id can connect from it.
    pub(super) fn release_port(&mut self, world: &mut World<'_>, handle: u32) {
        let held = self.ids.get_mut(&handle).and_then(|id| id.held.take());
        self.close_listener(world, held);
    }

    /// Gives an id an address, and a port of its own.
    ///
    /// # Errors
    /// `EINVAL` if it has one; `EADDRINUSE`, `EADDRNOTAVAIL`, `EACCES`.
    pub fn bind(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        local: Name,
    ) -> Result<(), Errno> {
        let port_space = self.own(channel, handle)?.port_space;
        if !matches!(self.own(channel, handle)?.state, State::Idle) {
            return Err(Errno::INVAL);
        }
        let (local, lid) = match local {
            // Every address of every port, which is how librdmacm finds out whether AF_IB is understood.
            Name::Ib(gid) if gid == [0; 16] => (None, None),
            Name::Ib(_) => return Err(Errno::ADDRNOTAVAIL),
            Name::Ip(local) if PS_DATAGRAMS.contains(&port_space) => {
                let port = match local.port() {
                    0 => self.pick_port(),
                    port => port,
                };
                (Some(with_port(local, port)), None)
            }
            Name::Ip(local) => {
                let id = self.own(channel, handle)?;
                let ipv6_only = id.one_family && local.is_ipv6();
                let (lid, port) = world.device.listen(local, id.traffic_class, ipv6_only)?;
                self.listeners.insert(lid, handle);
                (Some(with_port(local, port)), Some(lid))
            }
        };
        let id = self.own(channel, handle)?;
        id.local = local;
        id.state = State::Bound {
            lid,
            early: VecDeque::new(),
        };
        Ok(())
    }

    /// Finds the way to `remote`; an event says how it went.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state or for two families; `ENODEV` for an InfiniBand address; those of binding, for an id that has no address yet.
    pub fn resolve_address(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        local: Option<Name>,
        remote: Name,
    ) -> Result<(), Errno> {
        let id = self.own(channel, handle)?;
        if !matches!(id.state, State::Idle | State::Bound { .. }) {
            return Err(Errno::INVAL);
        }
        let datagrams = PS_DATAGRAMS.contains(&id.port_space);
        let idle = matches!(id.state, State::Idle);
        let Name::Ip(remote) = remote else {
            return Err(Errno::NODEV);
        };
        let wanted = match local {
            None => None,
            Some(Name::Ip(local)) => Some(local),
            Some(Name::Ib(_)) => return Err(Errno::NODEV),
        };
        // An id that is bound stays bound: the source address of this command is for one that is not (`resolve_prepare_src` of the kernel).
        let local = if idle { wanted } else { id.local };
        if local.is_some_and(|local| local.is_ipv4() != remote.is_ipv4()) {
            return Err(Errno::INVAL);
        }
        if let Some(wanted) = local.filter(|local| idle && *local != anywhere(*local)) {
            self.bind(world, channel, handle, Name::Ip(wanted))?;
        }
        let local = self.own(channel, handle)?.local;
        let remote = to_somewhere(remote);
        let source = if remote.ip().is_multicast() && !datagrams {
            Err(Errno::NETUNREACH)
        } else {
            match local {
                Some(local) if !local.ip().is_unspecified() => Ok(local),
                _ => world.device.source(remote),
            }
        };
        match source {
            Ok(source) => {
                // From here on the id is an initiator's. Its port is held until it connects.
                let before = std::mem::replace(&mut self.own(channel, handle)?.state, State::AddressResolved);
                let held = self.hold(world, before);
                let given = local.map_or(0, |local| local.port());
                let port = if given == 0 { self.pick_port() } else { given };
                let id = self.own(channel, handle)?;
                id.held = held;
                id.local = Some(with_port(source, port));
                id.remote = Some(remote);
                id.picked = given == 0;
                self.report(world, handle, CmEvent::AddressResolved, 0, EventParams::default());
            }
            Err(errno) => {
                let status = -errno.raw_os_error();
                self.report(
                    world,
                    handle,
                    CmEvent::AddressError,
                    status,
                    EventParams::default(),
                );
            }
        }
        Ok(())
    }

    /// There is nothing to resolve: the network routes. An event says so.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state.
    pub fn resolve_route(&mut self, world: &mut World<'_>, channel: u64, handle: u32) -> Result<(), Errno> {
        let id = self.own(channel, handle)?;
        if !matches!(id.state, State::AddressResolved) {
            return Err(Errno::INVAL);
        }
        id.state = State::RouteResolved;
        self.report(world, handle, CmEvent::RouteResolved, 0, EventParams::default());
        Ok(())
    }

    /// Where an id is, on the device with that node GUID.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`.
    pub fn addresses(&mut self, channel: u64, handle: u32, node_guid: u64) -> Result<IdAddresses, Errno> {
        let id = self.own(channel, handle)?;
        let on_device = id.local.is_some_and(|local| !local.ip().is_unspecified());
        Ok(IdAddresses {
            node_guid: if on_device { node_guid } else { 0 },
            local: id.local,
            remote: id.remote,
            port_space: id.port_space,
        })
    }

    /// Takes calls from now on.
    ///
    /// # Errors
    /// `EINVAL` in the wrong state, `EOPNOTSUPP` for datagrams, those of binding.
    pub fn listen(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        backlog: u32,
    ) -> Result<(), Errno> {
        let id = self.own(channel, handle)?;
        if PS_DATAGRAMS.contains(&id.port_space) {
            return Err(Errno::OPNOTSUPP);
        }
        if matches!(id.state, State::Idle) {
            let anywhere = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
            self.bind(world, channel, handle, Name::Ip(anywhere))?;
        }
        let id = self.own(channel, handle)?;
        let State::Bound {
            lid: Some(lid),
            early,
        } = &mut id.state
        else {
            return Err(Errno::INVAL);
        };
        let (lid, early) = (*lid, std::mem::take(early));
        let backlog = match backlog.cast_signed() {
            1.. if backlog < MAX_BACKLOG => backlog,
            _ => MAX_BACKLOG,
        };
        tracing::debug!("id {handle}: listens at {:?}", id.local);
        for sid in &early {
            self.streams.remove(sid);
            self.timers.set(Key::Stream(*sid), None);
        }
        let listener = Box::new(Listener::new(lid, backlog, early));
        self.own(channel, handle)?.state = State::Listening(listener);
        self.admit(world, handle);
        Ok(())
    }

    /// How the queue pair of an id goes to `state`. RTS is the connection manager's to reach, as with every iWARP device.
    ///
    /// # Errors
    /// `EINVAL` for another state than Init, RTR and RTS, and while there is no device.
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
        // Before CONNECT: librdmacm made the queue pair. Behind it: the program has one of its own.
        if !matches!(id.state, State::Calling(_) | State::Answered(_)) {
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
    /// `ENOSYS` for one that is unknown here, `EINVAL` for a value of the wrong length, or when it is too early or too late.
    pub fn set_option(
        &mut self,
        world: &mut World<'_>,
        channel: u64,
        handle: u32,
        (level, name): (u32, u32),
        value: &[u8],
    ) -> Result<(), Errno> {
        /// `RDMA_OPTION_ID` and `RDMA_OPTION_IB`.
        const LEVEL_ID: u32 = 0;
        const LEVEL_IB: u32 = 1;
        let id = self.own(channel, handle)?;
        let flag = || Ok::<_, Errno>(i32::from_ne_bytes(value.try_into().map_err(|_| Errno::INVAL)?) != 0);
        let octet = || match value {
            [octet] => Ok(*octet),
            _ => Err(Errno::INVAL),
        };
        match (level, name) {
            // TOS: of the packets of a connection to be made, or, before its address is bound, of a listener's.
            (LEVEL_ID, 0) => id.traffic_class = octet()?,
            // REUSEADDR: a port in TIME-WAIT can always be used again, one with a listener never.
            (LEVEL_ID, 1) => drop(flag()?),
            (LEVEL_ID, 2) if matches!(id.state, State::Idle) => id.one_family = flag()?,
            (LEVEL_ID, 2) => return Err(Errno::INVAL),
            (LEVEL_ID, 3) => {
                let timeout = octet()?;
                if timeout > 31 {
                    return Err(Errno::INVAL);
                }
                id.ack_timeout = Some(timeout);
            }
            // IB_PATH: what the program found out by itself does for the route, which the network knows anyway.
            (LEVEL_IB, 1) if has_path(value) => return self.resolve_route(world, channel, handle),
            (LEVEL_IB, 1) => return Err(Errno::INVAL),
            _ => return Err(Errno::NOSYS),
        }
        Ok(())
    }

    /// The program saw data before the connection manager saw the connection: nothing that iWARP has to be told.
    ///
    /// # Errors
    /// `EINVAL` for an id without a connection, even one in the making.
    pub fn notify(&mut self, channel: u64, handle: u32) -> Result<(), Errno> {
        match self.own(channel, handle)?.state {
            State::Idle | State::Bound { .. } | State::AddressResolved | State::RouteResolved => {
                Err(Errno::INVAL)
            }
            _ => Ok(()),
        }
    }

    /// Moves an id, with its events, from channel `old` to `new`; returns how many events the program took on the old one.
    ///
    /// # Errors
    /// `ENOENT`, `EINVAL`.
    pub fn migrate(&mut self, world: &mut World<'_>, old: u64, new: u64, handle: u32) -> Result<u32, Errno> {
        let id = self.own(old, handle)?;
        id.channel = new;
        let reported = id.reported;
        let Some(queue) = self.channels.get_mut(&old) else {
            return Ok(reported);
        };
        let (moving, staying): (Vec<Event>, Vec<Event>) =
            queue.drain(..).partition(|event| event.id == handle);
        queue.extend(staying);
        if !moving.is_empty() && queue.is_empty() {
            world.device.signal(old, false);
        }
        for event in moving {
            if let Some(child) = self.ids.get_mut(&event.about) {
                child.channel = new;
            }
            self.queue(world, event);
        }
        Ok(reported)
    }
}

/// Whether records of `struct ib_path_rec_data` are whole and have one for both directions (`ucma_set_ib_path`).
fn has_path(value: &[u8]) -> bool {
    const LEN: usize = 72;
    /// `IB_PATH_GMP | IB_PATH_PRIMARY | IB_PATH_BIDIRECTIONAL`.
    const FLAGS: u32 = 0b10_1011;
    let flags = |record: &[u8]| record.first_chunk().map(|flags| u32::from_ne_bytes(*flags));
    value.len().is_multiple_of(LEN) && value.chunks(LEN).any(|record| flags(record) == Some(FLAGS))
}

pub(super) fn with_port(mut address: SocketAddr, port: u16) -> SocketAddr {
    address.set_port(port);
    address
}

/// No address and no port of this one's family.
fn anywhere(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        SocketAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
    }
}

/// "Any" as a destination is this host, as with TCP.
fn to_somewhere(remote: SocketAddr) -> SocketAddr {
    match remote.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => SocketAddr::new(Ipv4Addr::LOCALHOST.into(), remote.port()),
        IpAddr::V6(ip) if ip.is_unspecified() => SocketAddr::new(Ipv6Addr::LOCALHOST.into(), remote.port()),
        _ => remote,
    }
}
