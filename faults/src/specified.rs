//! The specification of a fault.

use std::fmt;

use crate::kinds::Kind;
use crate::network::Network;
use crate::occasion::Occasion;
use crate::window::Window;

/// The specification of one fault.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Specified {
    /// The word of its kind in the catalogue.
    pub(crate) word: &'static str,
    /// The values of its kind, as in a specification, with a space before each.
    pub(crate) values: String,
    pub(crate) kind: Kind,
    pub(crate) filter: Filter,
    pub(crate) window: Window,
    pub(crate) when: When,
    /// Most times that it strikes; `None`: no limit.
    pub(crate) count: Option<u64>,
}

/// To which occasions a fault applies.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Filter {
    /// A name, or the number at its end.
    pub(crate) device: Option<String>,
    pub(crate) peer: Option<Network>,
    pub(crate) opcode: Option<String>,
    pub(crate) qp: Option<u32>,
}

impl Filter {
    /// Whether a fault of this kind with this filter can strike without an occasion.
    pub(crate) fn fits_begin(&self, kind: Kind) -> bool {
        kind.of_device().is_some() && self.peer.is_none() && self.opcode.is_none() && self.qp.is_none()
    }

    /// Whether an occasion has the peer, operation and queue pair. Only completions have the last
    /// two, and others pass without.
    pub(crate) fn fits<F>(&self, occasion: &Occasion<'_, F>) -> bool {
        let fits_request = occasion.request().is_none_or(|(opcode, qp)| {
            self.opcode.as_deref().is_none_or(|wanted| wanted == opcode)
                && self.qp.is_none_or(|wanted| wanted == qp)
        });
        let fits_peer = match (self.peer, occasion.peer()) {
            (Some(network), Some(peer)) => network.contains(peer),
            (Some(_), None) => false,
            (None, _) => true,
        };
        fits_request && fits_peer
    }
}

/// The occasions at which a fault strikes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum When {
    /// The first one; nothing else was said.
    First,
    /// The begin of its window, for a fault without an occasion.
    Begin,
    /// The one with this number, from 1 on.
    Nth(u64),
    /// Each one whose number is divisible by this.
    Every(u64),
    /// Each with this probability.
    Probability(f64),
}

impl Specified {
    /// Makes a fault of the device strike at once, if its specification has no time.
    pub(crate) fn begin_at_once(&mut self) {
        if self.when == When::First && self.filter.fits_begin(self.kind) {
            self.when = When::Begin;
            self.window.at.get_or_insert_default();
        }
    }
}

impl fmt::Display for Specified {
    /// Writes the fault in the form of a specification.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.word, self.values)?;
        match self.when {
            When::First => write!(f, " nth=1"),
            When::Begin => Ok(()),
            When::Nth(n) => write!(f, " nth={n}"),
            When::Every(n) => write!(f, " every={n}"),
            When::Probability(p) => write!(f, " p={p}"),
        }?;
        write!(f, "{}", self.window)?;
        if let Some(count) = self.count {
            write!(f, " count={count}")?;
        }
        if let Some(device) = &self.filter.device {
            write!(f, " device={device}")?;
        }
        if let Some(peer) = self.filter.peer {
            write!(f, " peer={peer}")?;
        }
        if let Some(opcode) = &self.filter.opcode {
            write!(f, " opcode={opcode}")?;
        }
        match self.filter.qp {
            Some(qp) => write!(f, " qp={qp:#x}"),
            None => Ok(()),
        }
    }
}
