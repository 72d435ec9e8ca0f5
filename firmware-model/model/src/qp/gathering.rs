//! Whether a queue pair's sends are gathered.
//!
//! A ring is served at once. From the [`BURST`]th ring with no poll between, sends are gathered:
//! the event index moves [`GATHERED`] blocks ahead ([`GATHERED_IN_MEMORY`] for a peer on this
//! host), and what is posted until then leaves with the next poll, arm, or tick of the background
//! thread. [`IDLE_FLUSHES`] flushes in a row that find no
//! more than one entry end that. If none of the burst had found more, gathering only delayed a
//! program that waits for answers by polling memory: the next burst takes [`BACKOFF`] times as many
//! rings to begin, up to [`MAX_BURST`]. Evidence that gathering is useful ends that at once, and
//! each poll for completions halves it.

/// Rings with no poll between that begin a burst, at first.
const BURST: u32 = 4;
/// Flushes that find next to nothing and end a burst: a single one only shows that the program
/// catches up with its completions.
const IDLE_FLUSHES: u32 = 8;
/// The factor for the rings of the next burst after one that gathered nothing, and the maximum of
/// these rings.
const BACKOFF: u32 = 8;
const MAX_BURST: u32 = 1 << 12;
/// Blocks that may be posted in a burst without a ring.
const GATHERED: u32 = 64;
/// The same where sending is no system call: with fewer, the peer works on the first while the next
/// are posted.
pub(crate) const GATHERED_IN_MEMORY: u32 = 16;

/// A change of the present burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Burst {
    /// The burst continues, or there is none.
    Same,
    Began,
    Ended,
}

/// The program's doorbells, and the benefit of gathering so far.
#[derive(Debug)]
pub(crate) struct Gathering {
    /// Sends are gathered.
    burst: bool,
    /// Flushes in a row that found next to nothing.
    idle_flushes: u32,
    /// Rings since the program last polled for completions, and the number of its polls then.
    rings: u32,
    polls: u32,
    /// Rings that begin a burst: from [`BURST`] to [`MAX_BURST`].
    begins_at: u32,
    /// The burst gathered something.
    gathered: bool,
}

impl Default for Gathering {
    fn default() -> Gathering {
        Gathering {
            burst: false,
            idle_flushes: 0,
            rings: 0,
            polls: 0,
            begins_at: BURST,
            gathered: false,
        }
    }
}

impl Gathering {
    /// Whether sends are gathered.
    pub(crate) fn is_on(&self) -> bool {
        self.burst
    }

    /// The number of blocks by which the event index must be ahead; without gathering it is
    /// `ahead`. `in_memory`: the stream passes through memory.
    pub(crate) fn ahead(&self, ahead: u32, in_memory: impl FnOnce() -> bool) -> u32 {
        match self.burst {
            false => ahead,
            true if in_memory() => ahead.max(GATHERED_IN_MEMORY),
            true => ahead.max(GATHERED),
        }
    }

    /// Notes a ring of the driver; `polls` changes whenever the program polls for completions.
    pub(crate) fn note_ring(&mut self, polls: u32) {
        if self.polls != polls {
            (self.polls, self.rings) = (polls, 0);
            // The program's behaviour may have changed meanwhile.
            self.begins_at = (self.begins_at / 2).max(BURST);
        }
        self.rings = self.rings.saturating_add(1);
    }

    /// Everything posted has been taken, `sent` entries of it just now, for a flush or not.
    /// `may_begin`: the queue pair is in a state for bursts.
    pub(crate) fn note_sent(&mut self, sent: u32, flushed: bool, may_begin: bool) -> Burst {
        let begins = !self.burst && self.rings >= self.begins_at && may_begin;
        if sent > 1 {
            self.idle_flushes = 0;
            (self.gathered, self.begins_at) = (true, BURST);
        } else if flushed {
            self.idle_flushes += 1;
        }
        if begins {
            (self.burst, self.idle_flushes, self.gathered) = (true, 0, false);
            return Burst::Began;
        }
        if self.burst && self.idle_flushes >= IDLE_FLUSHES {
            if !self.gathered {
                self.begins_at = (self.begins_at * BACKOFF).min(MAX_BURST);
            }
            self.end();
            return Burst::Ended;
        }
        Burst::Same
    }

    /// Ends the burst; whether there was one.
    pub(crate) fn end(&mut self) -> bool {
        self.rings = 0;
        std::mem::take(&mut self.burst)
    }

    /// The next burst begins as early as the first.
    pub(crate) fn forget(&mut self) {
        self.begins_at = BURST;
    }
}
