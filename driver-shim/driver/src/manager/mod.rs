//! The connection manager of the process, which all its devices share.

pub(crate) mod inventory;

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};
use urnic_sync::{Mutex, MutexGuard};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use urnic_cm::rdma_cm::Engine;
use urnic_config::Config;
use urnic_presence::Presence;
use urnic_presence::token::Token;

use crate::attributes::Attributes;
use crate::dma::DmaMemory;
use inventory::Inventory;

/// Bits of a device's own number of a stream, listener or queue pair. Its number in the process has
/// the device's slot above them.
const NUMBER_BITS: u32 = 24;

/// Most slots.
const SLOTS: usize = 1 << (u32::BITS - NUMBER_BITS);

/// The place of an open device among those that the process has opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot(u8);

impl Slot {
    /// The slot at this index; `None` if there are no more.
    pub(crate) fn at(index: usize) -> Option<Slot> {
        (index < SLOTS).then_some(Slot(u8::try_from(index).ok()?))
    }

    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    /// The process's number of an object with this number of the device.
    ///
    /// # Errors
    /// `EIO` if the device gave a number with more bits than its interface allows.
    pub(crate) fn number(self, of_device: u32) -> Result<u32, Errno> {
        match of_device >> NUMBER_BITS {
            0 => Ok(u32::from(self.0) << NUMBER_BITS | of_device),
            _ => Err(Errno::IO),
        }
    }

    /// The slot and the device's number of an object.
    pub(crate) fn split(number: u32) -> (Slot, u32) {
        (
            Slot((number >> NUMBER_BITS) as u8),
            number & ((1 << NUMBER_BITS) - 1),
        )
    }
}

/// Destinations of receives, by stream.
pub(crate) type Buffers = HashMap<u32, DmaMemory>;

/// The connection manager of the process, whose devices have drivers of type `D`.
pub(crate) struct Manager<D> {
    state: Mutex<RdmaCm<D>>,
    /// The devices that programs see; set by the first channel.
    inventory: OnceLock<Inventory>,
}

/// The state of the connection manager.
pub(crate) struct RdmaCm<D> {
    engine: Engine,
    devices: OpenDevices<D>,
}

impl<D> RdmaCm<D> {
    /// The engine, and the devices that it acts on.
    pub(crate) fn parts(&mut self) -> (&mut Engine, &mut OpenDevices<D>) {
        (&mut self.engine, &mut self.devices)
    }
}

/// The devices that the process opened, by slot, and the objects of the engine's numbers.
pub(crate) struct OpenDevices<D> {
    /// Some may be lost.
    open: Vec<OpenDevice<D>>,
    listeners: Listeners,
    /// Descriptors that show the events of a channel, by channel.
    tokens: HashMap<u64, Shown>,
}

/// The descriptor that shows whether a channel has events.
struct Shown {
    token: Token,
    has_events: bool,
    /// What the descriptor shows.
    shows_events: bool,
}

impl Shown {
    fn update(&mut self) {
        if self.shows_events != self.has_events {
            self.shows_events = self.has_events;
            self.token.show(self.has_events);
        }
    }
}

thread_local!(static AWAITED: Cell<Option<u64>> = const { Cell::new(None) });

/// While it exists, the calling thread takes an event of a channel as soon as it has made one: the
/// channel's descriptor need not show the event in between.
pub(crate) struct AwaitedChannel;

impl AwaitedChannel {
    pub(crate) fn set(channel: u64) -> AwaitedChannel {
        AWAITED.set(Some(channel));
        AwaitedChannel
    }
}

impl Drop for AwaitedChannel {
    fn drop(&mut self) {
        AWAITED.set(None);
    }
}

/// A device that the process opened.
struct OpenDevice<D> {
    /// Index of the device among those that programs see.
    index: usize,
    /// Not set yet while the driver starts.
    driver: Weak<D>,
    /// By the device's numbers of streams.
    buffers: Buffers,
}

impl<D> OpenDevices<D> {
    /// Adds the device with this index, whose driver is not known yet.
    ///
    /// # Errors
    /// `ENOMEM` if the process has opened too many devices.
    fn add(&mut self, index: usize) -> Result<Slot, Errno> {
        let slot = Slot::at(self.open.len()).ok_or(Errno::NOMEM)?;
        self.open.push(OpenDevice {
            index,
            driver: Weak::new(),
            buffers: Buffers::new(),
        });
        Ok(slot)
    }

    /// The slot in which the device with this index was opened last.
    ///
    /// # Errors
    /// `ENODEV` if it is not open.
    pub(crate) fn current(&self, index: usize) -> Result<Slot, Errno> {
        let slot = self.open.iter().rposition(|open| open.index == index);
        slot.and_then(Slot::at).ok_or(Errno::NODEV)
    }

    /// The index of the device in a slot.
    pub(crate) fn index(&self, slot: Slot) -> Option<usize> {
        Some(self.open.get(slot.index())?.index)
    }

    /// The driver in a slot.
    pub(crate) fn driver(&self, slot: Slot) -> Option<Arc<D>> {
        self.open.get(slot.index())?.driver.upgrade()
    }

    /// The driver in a slot, and the destinations of its receives.
    pub(crate) fn driver_and_buffers(&mut self, slot: Slot) -> Option<(Arc<D>, &mut Buffers)> {
        let open = self.open.get_mut(slot.index())?;
        Some((open.driver.upgrade()?, &mut open.buffers))
    }

    /// Listeners that consist of several.
    pub(crate) fn listeners(&mut self) -> &mut Listeners {
        &mut self.listeners
    }

    /// Shows whether a channel has events, unless the calling thread is about to take them.
    pub(crate) fn show(&mut self, channel: u64, events: bool) {
        if let Some(shown) = self.tokens.get_mut(&channel) {
            shown.has_events = events;
            if AWAITED.get() != Some(channel) {
                shown.update();
            }
        }
    }

    /// Shows whether a channel has events, after the calling thread waited for one.
    pub(crate) fn show_pending(&mut self, channel: u64) {
        if let Some(shown) = self.tokens.get_mut(&channel) {
            shown.update();
        }
    }
}

/// Listeners at several addresses that are one for the engine, under the number of the first.
#[derive(Default)]
pub(crate) struct Listeners {
    /// The other numbers of each.
    others: HashMap<u32, Vec<u32>>,
    /// The first of each of these.
    first: HashMap<u32, u32>,
}

impl Listeners {
    /// Makes these listeners one; returns its number.
    pub(crate) fn join(&mut self, numbers: &[u32]) -> Option<u32> {
        let (first, others) = numbers.split_first()?;
        if !others.is_empty() {
            self.others.insert(*first, others.to_vec());
            self.first.extend(others.iter().map(|other| (*other, *first)));
        }
        Some(*first)
    }

    /// The number by which the engine knows a listener.
    pub(crate) fn known(&self, number: u32) -> u32 {
        self.first.get(&number).copied().unwrap_or(number)
    }

    /// Forgets a listener; returns all its parts.
    pub(crate) fn part(&mut self, first: u32) -> Vec<u32> {
        let others = self.others.remove(&first).unwrap_or_default();
        for other in &others {
            self.first.remove(other);
        }
        [&[first], others.as_slice()].concat()
    }
}

impl<D> Manager<D> {
    /// The connection manager of a process whose first device has these attributes.
    fn new(config: &Config, attributes: &Attributes) -> Result<Manager<D>, Errno> {
        let mut seed = [0; 8];
        getrandom(&mut seed, GetRandomFlags::empty())?;
        let (max_ird, max_ord) = depths(attributes);
        Ok(Manager {
            state: Mutex::new(RdmaCm {
                engine: Engine::new(config, max_ird, max_ord, u64::from_ne_bytes(seed)),
                devices: OpenDevices {
                    open: Vec::new(),
                    listeners: Listeners::default(),
                    tokens: HashMap::new(),
                },
            }),
            inventory: OnceLock::new(),
        })
    }

    /// The connection manager at `place`, with a slot for a further device.
    ///
    /// # Errors
    /// `ENOMEM` if the process has opened too many devices; those of getrandom(2).
    pub(crate) fn join(
        place: &OnceLock<Arc<Manager<D>>>,
        config: &Config,
        index: usize,
        attributes: &Attributes,
    ) -> Result<(Arc<Manager<D>>, Slot), Errno> {
        let manager = match place.get() {
            Some(manager) => manager.clone(),
            None => {
                let new = Arc::new(Manager::new(config, attributes)?);
                place.get_or_init(|| new).clone()
            }
        };
        let slot = {
            let mut state = manager.lock();
            let slot = state.devices.add(index)?;
            let (max_ird, max_ord) = depths(attributes);
            state.engine.limit_depths(max_ird, max_ord);
            slot
        };
        Ok((manager, slot))
    }

    /// The state, locked.
    pub(crate) fn lock(&self) -> MutexGuard<'_, RdmaCm<D>> {
        self.state.lock()
    }

    /// The devices that programs see; `None` before the first channel.
    pub(crate) fn inventory(&self) -> Option<&Inventory> {
        self.inventory.get()
    }

    /// Opens a channel, whose events `token` shows; returns its number.
    pub(crate) fn open_channel(&self, config: &Config, presence: &Presence, token: Token) -> u64 {
        self.inventory.get_or_init(|| Inventory::new(config, presence));
        let mut state = self.lock();
        let channel = state.engine.open_channel();
        let shown = Shown {
            token,
            has_events: false,
            shows_events: false,
        };
        state.devices.tokens.insert(channel, shown);
        channel
    }

    /// Removes what shows the events of a channel, and returns it: closing it needs no lock.
    pub(crate) fn remove_token(&self, channel: u64) -> Option<Token> {
        let shown = self.lock().devices.tokens.remove(&channel);
        shown.map(|shown| shown.token)
    }

    /// Sets the driver of a slot, once it has started.
    pub(crate) fn started(&self, slot: Slot, driver: &Arc<D>) {
        if let Some(open) = self.lock().devices.open.get_mut(slot.index()) {
            open.driver = Arc::downgrade(driver);
        }
    }

    /// Calls `work` with the engine, the buffers of the device in this slot, and the function that
    /// returns the engine's number of a listener.
    pub(crate) fn take<T>(
        &self,
        slot: Slot,
        work: impl FnOnce(&Engine, &mut Buffers, &dyn Fn(u32) -> u32) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.lock();
        let (engine, OpenDevices { open, listeners, .. }) = state.parts();
        let open = open.get_mut(slot.index())?;
        work(engine, &mut open.buffers, &|number| listeners.known(number))
    }

    /// The driver that opened the device with this index last.
    pub(crate) fn current(&self, index: usize) -> Option<Arc<D>> {
        let state = self.lock();
        state.devices.driver(state.devices.current(index).ok()?)
    }

    /// The index of the device in a slot.
    pub(crate) fn index(&self, slot: Slot) -> Option<usize> {
        self.lock().devices.index(slot)
    }

    /// The driver in a slot.
    pub(crate) fn driver(&self, slot: Slot) -> Option<Arc<D>> {
        self.lock().devices.driver(slot)
    }

    /// The drivers of all devices that the process has opened.
    pub(crate) fn drivers(&self) -> Vec<Arc<D>> {
        let state = self.lock();
        state
            .devices
            .open
            .iter()
            .filter_map(|open| open.driver.upgrade())
            .collect()
    }
}

fn depths(attributes: &Attributes) -> (u8, u8) {
    let depth = |limit: u32| u8::try_from(limit).unwrap_or(u8::MAX);
    (depth(attributes.max_ird), depth(attributes.max_ord))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_names_slot_and_object() {
        for index in [0, 1, 255] {
            let slot = Slot::at(index).unwrap();
            for of_device in [0, 1, 0xff_ffff] {
                let number = slot.number(of_device).unwrap();
                assert_eq!(Slot::split(number), (slot, of_device));
            }
            assert_eq!(slot.number(1 << 24), Err(Errno::IO));
        }
        assert_eq!(Slot::at(256), None);
    }

    #[test]
    fn joined_listeners_are_one_for_the_engine() {
        let mut listeners = Listeners::default();
        assert_eq!(listeners.join(&[]), None);
        assert_eq!(listeners.join(&[9]), Some(9));
        assert_eq!(listeners.join(&[1, 2, 3]), Some(1));
        assert_eq!(
            [9, 1, 2, 3, 4].map(|number| listeners.known(number)),
            [9, 1, 1, 1, 4]
        );
        assert_eq!(listeners.part(1), [1, 2, 3]);
        assert_eq!(listeners.known(2), 2);
        assert_eq!(listeners.part(9), [9]);
    }
}
