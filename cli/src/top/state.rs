//! What the user of the view has chosen, and the samples that it shows.

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
    /// The largest rate of bytes first.
    #[default]
    Rate,
    /// Most errors first.
    Errors,
    /// By process number.
    Pid,
}

impl Sort {
    fn next(self) -> Sort {
        match self {
            Sort::Rate => Sort::Errors,
            Sort::Errors => Sort::Pid,
            Sort::Pid => Sort::Rate,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Sort::Rate => "rate",
            Sort::Errors => "errors",
            Sort::Pid => "process",
        }
    }

    fn sorted(self, now: &Sample, before: &Sample) -> Vec<Device> {
        let weight = |device: &Device| match self {
            Sort::Rate => ["tx_bytes", "rx_bytes"]
                .iter()
                .filter_map(|counter| now.rate(before, device, counter))
                .fold(0.0, |sum, rate| sum + rate),
            Sort::Errors => now.of(device).map_or(0.0, |one| errors(&one.counters) as f64),
            Sort::Pid => 0.0,
        };
        let mut all: Vec<(f64, Device)> = now.devices().map(|device| (weight(&device), device)).collect();
        all.sort_by(|(one, first), (other, second)| other.total_cmp(one).then_with(|| first.cmp(second)));
        all.into_iter().map(|(_, device)| device).collect()
    }
}

/// What the user sees and has chosen.
#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) before: Sample,
    pub(super) now: Sample,
    /// Bytes per second of each device in both directions, oldest first.
    pub(super) rates: HashMap<Device, Vec<u64>>,
    pub(super) sort: Sort,
    pub(super) selected: usize,
    /// The queue pairs of this device are shown, from this row on.
    pub(super) detail: Option<(Device, usize)>,
    pub(super) paused: bool,
    pub(super) help: bool,
}

/// What follows from a key.
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
        self.before = std::mem::replace(&mut self.now, Sample::new(snapshots, at));
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
                let device = self.sorted().get(self.selected).cloned();
                self.detail = self.detail.take().or(device.map(|device| (device, 0)));
            }
            KeyCode::Up | KeyCode::Char('k') => *at = at.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => *at = (*at + 1).min(rows.saturating_sub(1)),
            KeyCode::Char('s') => self.sort = self.sort.next(),
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

    /// The devices in the order of the list.
    pub(super) fn sorted(&self) -> Vec<Device> {
        self.sort.sorted(&self.now, &self.before)
    }
}
