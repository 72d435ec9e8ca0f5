//! Listeners: connections are accepted as fast as the driver takes them.

use super::{Listening, Streams};
use crate::events::Effects;
use crate::schedule::{Interest, Schedule, Token};
use crate::stream::Listener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use urnic_device::command::Status;
use urnic_device::event::{Event, EventKind};
use urnic_sync::Mutex;

impl Streams {
    /// Adds a listener, possibly on several addresses, on which at most `limit` connections may
    /// wait for the driver; returns its number.
    pub(crate) fn listen(
        &self,
        listeners: Vec<Box<dyn Listener>>,
        limit: u32,
        effects: &mut Effects,
    ) -> Result<u32, Status> {
        let entry = self.listeners.insert_with(Status::NoResources, |lid| {
            Ok(Listening {
                lid,
                limit,
                pending: AtomicU32::new(0),
                paused: AtomicBool::new(false),
                starved: AtomicBool::new(false),
                listeners: Mutex::new(listeners),
            })
        })?;
        effects.open_listener(entry.lid);
        Ok(entry.lid)
    }

    /// Opens a listener when the command that made it is complete: connections are taken from now
    /// on.
    pub(crate) fn open_listener(&self, schedule: &Schedule, lid: u32, effects: &mut Effects) {
        let Some(entry) = self.listeners.find(lid) else {
            return;
        };
        for listener in entry.listeners.lock().iter() {
            if let Some(fd) = listener.descriptor()
                && let Err(errno) = schedule.watch(fd, Token::Listener(lid), Interest::Input)
            {
                tracing::error!(lid, %errno, "a listener cannot be watched");
            }
        }
        self.accept(schedule, lid, effects);
    }

    /// Stops listening: on return, the port is free. Streams that were accepted stay.
    pub(crate) fn unlisten(&self, schedule: &Schedule, lid: u32) -> Result<(), Status> {
        let entry = self.listeners.remove(lid).ok_or(Status::InvalidHandle)?;
        for listener in entry.listeners.lock().drain(..) {
            // A thread in epoll_wait may have the file in use; the last user closes the socket, and
            // here that has to be this thread.
            if let Some(fd) = listener.descriptor() {
                schedule.unwatch(fd);
            }
        }
        Ok(())
    }

    /// Takes the connections that wait at a listener, up to the driver's limit.
    pub(crate) fn accept(&self, schedule: &Schedule, lid: u32, effects: &mut Effects) {
        let Some(entry) = self.listeners.find(lid) else {
            return;
        };
        let mut listeners = entry.listeners.lock();
        entry.paused.store(false, Ordering::SeqCst);
        let mut refused = None;
        for listener in listeners.iter_mut() {
            loop {
                if entry.pending.load(Ordering::SeqCst) >= entry.limit {
                    entry.paused.store(true, Ordering::SeqCst);
                    // The driver may have taken a connection between the two lines.
                    if entry.pending.load(Ordering::SeqCst) >= entry.limit {
                        entry.starved.store(false, Ordering::SeqCst);
                        return;
                    }
                }
                if schedule.is_backed_up() {
                    // The driver takes no events. The background thread tries again while some
                    // connections wait.
                    entry.paused.store(true, Ordering::SeqCst);
                    return;
                }
                let accepted = match listener.accept() {
                    Ok(Some(stream)) => self.insert(schedule, Some(stream), Some(entry.clone()), None),
                    Ok(None) => break,
                    Err(errno) => {
                        // Out of descriptors or memory: the background thread tries again.
                        entry.paused.store(true, Ordering::SeqCst);
                        refused = Some(errno);
                        break;
                    }
                };
                match accepted {
                    Ok(stream) => {
                        entry.pending.fetch_add(1, Ordering::SeqCst);
                        let event = Event::new(EventKind::StreamAccepted, lid);
                        effects.event(event.with_data(stream.sid.into()));
                    }
                    Err(_) => tracing::warn!(lid, "a connection was dropped: too many streams"),
                }
            }
        }
        let starved = entry.starved.swap(refused.is_some(), Ordering::SeqCst);
        // The background thread polls at intervals, and must not wake itself each time.
        if let Some(errno) = refused
            && !starved
        {
            tracing::warn!(lid, %errno, "connections cannot be accepted");
            schedule.note_left_over();
        }
    }

    /// Takes connections from listeners that were paused. Returns whether one is still paused.
    pub(crate) fn accept_paused(&self, schedule: &Schedule, effects: &mut Effects) -> bool {
        let paused = |l: &Arc<Listening>| l.paused.load(Ordering::SeqCst);
        let full = |l: &Arc<Listening>| l.pending.load(Ordering::SeqCst) >= l.limit;
        for entry in self.listeners.all().iter().filter(|l| paused(l) && !full(l)) {
            self.accept(schedule, entry.lid, effects);
        }
        self.listeners.all().iter().any(|l| paused(l) && !full(l))
    }
}
