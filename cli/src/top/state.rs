//! The user's choices in the view, and the samples that it shows.

use std::collections::HashMap;
use std::time::Instant;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use urnic_driver::watch::Snapshot;

use super::sample::{Device, Sample};
use crate::stat::errors;

/// The rates that a curve has.
const HISTORY: usize = 200;

/// The order of the list.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Sort {
    /// By process number.
    #[default]
    Pid,
    /// The largest rate of bytes first.
    Rate,
    /// Most errors first.
    Errors,
}

/// A device of a larger rate comes before another if its rate is larger by this factor: two of
/// about the same rate would change places at each sample.
const CLEARLY_MORE: f64 = 1.5;
/// The samples over which the rates that are compared are averaged.
const AVERAGED: usize = 5;

impl Sort {
    fn next(self) -> Sort {
        match self {
            Sort::Pid => Sort::Rate,
            Sort::Rate => Sort::Errors,
            Sort::Errors => Sort::Pid,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Sort::Rate => "rate",
            Sort::Errors => "errors",
            Sort::Pid => "process",
        }
    }

    /// Whether a device of weight `one` has to stand before one of weight `other`.
    fn is_before(self, one: f64, other: f64) -> bool {
        match self {
            Sort::Pid => false,
            Sort::Rate => one > other * CLEARLY_MORE,
            Sort::Errors => one > other,
        }
    }
}

/// The state of the view.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) before: Sample,
    pub(super) now: Sample,
    /// Bytes per second of each device in both directions, oldest first.
    pub(super) rates: HashMap<Device, Vec<u64>>,
    pub(super) sort: Sort,
    /// The devices in the order of the list.
    pub(super) order: Vec<Device>,
    /// The row of the list that is selected. It stays with its device.
    pub(super) selected: usize,
    /// The queue pairs of this device are shown, and this row is selected.
    pub(super) detail: Option<(Device, usize)>,
    pub(super) paused: bool,
    pub(super) help: bool,
}

/// The effect of a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    Continue,
    Quit,
}

impl State {
    /// Takes the next sample, unless the view is paused.
    pub(super) fn take(&mut self, snapshots: Vec<Snapshot>, at: Instant) {
        if self.paused {
            return;
        }
        let qpn = self.selected_qpn();
        self.before = std::mem::replace(&mut self.now, Sample::new(snapshots, at));
        self.select_pair(qpn);
        let names: Vec<Device> = self.now.devices().collect();
        self.rates.retain(|device, _| names.contains(device));
        for device in names {
            let sum = |counter| self.now.rate(&self.before, &device, counter).unwrap_or(0.0);
            let rate = sum("tx_bytes") + sum("rx_bytes");
            let rates = self.rates.entry(device).or_default();
            if rates.len() == HISTORY {
                rates.remove(0);
            }
            rates.push(rate as u64);
        }
        self.arrange();
    }

    /// The number of the queue pair that is selected.
    fn selected_qpn(&self) -> Option<u32> {
        let (device, row) = self.detail.as_ref()?;
        let pairs = &self.now.of(device)?.queue_pairs;
        pairs
            .get((*row).min(pairs.len().saturating_sub(1)))
            .map(|pair| pair.qpn)
    }

    /// Selects the row of this queue pair, if it is still there.
    fn select_pair(&mut self, qpn: Option<u32>) {
        if let Some((device, row)) = &mut self.detail
            && let Some(one) = self.now.of(device)
            && let Some(at) = one.queue_pairs.iter().position(|pair| Some(pair.qpn) == qpn)
        {
            *row = at;
        }
    }

    /// Brings the list up to date: rows change places only where they have to, and the selection
    /// stays with its device.
    fn arrange(&mut self) {
        let selected = self.selected_device();
        let mut all: Vec<Device> = self.now.devices().collect();
        let place = |device: &Device| self.order.iter().position(|one| one == device);
        all.sort_by_cached_key(|device| match self.sort {
            Sort::Pid => (None, device.clone()),
            // New ones come last.
            _ => (Some(place(device).unwrap_or(usize::MAX)), device.clone()),
        });
        let mut weighed: Vec<(f64, Device)> = all.into_iter().map(|one| (self.weight(&one), one)).collect();
        for end in (1..weighed.len()).rev() {
            for at in 0..end {
                if self.sort.is_before(weighed[at + 1].0, weighed[at].0) {
                    weighed.swap(at, at + 1);
                }
            }
        }
        self.order = weighed.into_iter().map(|(_, device)| device).collect();
        if let Some(at) = selected.and_then(|device| self.order.iter().position(|one| *one == device)) {
            self.selected = at;
        }
    }

    /// The value by which devices are ordered.
    fn weight(&self, device: &Device) -> f64 {
        let rates = self.rates.get(device).map_or(&[][..], Vec::as_slice);
        let last = &rates[rates.len().saturating_sub(AVERAGED)..];
        match self.sort {
            Sort::Pid => 0.0,
            Sort::Rate => last.iter().fold(0.0, |sum, rate| sum + *rate as f64) / last.len().max(1) as f64,
            Sort::Errors => self
                .now
                .of(device)
                .map_or(0.0, |one| errors(&one.counters) as f64),
        }
    }

    /// The device that is selected in the list.
    pub(super) fn selected_device(&self) -> Option<Device> {
        let last = self.order.len().checked_sub(1)?;
        self.order.get(self.selected.min(last)).cloned()
    }

    pub(super) fn key(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::Continue;
        }
        let help = std::mem::take(&mut self.help);
        let rows = self.rows();
        let at = match &mut self.detail {
            Some((_, at)) => at,
            None => &mut self.selected,
        };
        *at = (*at).min(rows.saturating_sub(1));
        match key.code {
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Next::Quit,
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Esc if help => {}
            KeyCode::Esc | KeyCode::Left | KeyCode::Backspace => self.detail = None,
            KeyCode::Enter | KeyCode::Right => {
                let device = self.selected_device();
                self.detail = self.detail.take().or(device.map(|device| (device, 0)));
            }
            KeyCode::Up | KeyCode::Char('k') => *at = at.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => *at = (*at + 1).min(rows.saturating_sub(1)),
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.arrange();
            }
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('h' | '?') => self.help = !help,
            _ => {}
        }
        Next::Continue
    }

    /// The number of rows of the table that is shown.
    fn rows(&self) -> usize {
        match &self.detail {
            Some((device, _)) => self.now.of(device).map_or(0, |one| one.queue_pairs.len()),
            None => self.now.devices().count(),
        }
    }
}
