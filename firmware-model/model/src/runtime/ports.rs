//! UDP ports that are bound for queue pairs which do not exist yet.

use crate::stream::datagram::DatagramSocket;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The sockets of one port.
type Sockets = Vec<Box<dyn DatagramSocket>>;

/// Bound ports, by number.
#[derive(Debug)]
pub(crate) struct Ports {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: u32,
    bound: HashMap<u32, Sockets>,
}

impl Ports {
    pub(crate) fn new(limit: u32) -> Ports {
        Ports {
            limit: limit as usize,
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a port; `None` if there are too many.
    pub(crate) fn insert(&self, sockets: Sockets) -> Option<u32> {
        let mut state = self.state();
        if state.bound.len() >= self.limit {
            return None;
        }
        loop {
            state.last = state.last.wrapping_add(1).max(1);
            let id = state.last;
            if let Entry::Vacant(vacant) = state.bound.entry(id) {
                vacant.insert(sockets);
                return Some(id);
            }
        }
    }

    /// Removes a port: its sockets belong to the caller.
    pub(crate) fn take(&self, id: u32) -> Option<Sockets> {
        self.state().bound.remove(&id)
    }

    /// Closes all ports.
    pub(crate) fn clear(&self) {
        let closed = std::mem::take(&mut self.state().bound);
        drop(closed);
    }
}
