//! Limits for lines of the log about connections that fail.

use std::time::Duration;

use crate::mpa_startup::Time;

/// Most lines in a second about what the program does: it can cause failures without end.
const MAX_LINES: u32 = 100;
/// Most lines at once about what peers do.
const PEER_LINES: u32 = 10;
/// The time after which peers may cause one more line.
const PEER_INTERVAL: Duration = Duration::from_secs(60);

/// The lines of the program's own calls in this second.
#[derive(Debug, Default)]
pub(super) struct Lines {
    second: u64,
    lines: u32,
}

impl Lines {
    /// Whether another line may be written. Logs how many lines of an earlier second were left out.
    pub(super) fn may_log(&mut self, now: Time) -> bool {
        if self.second != now.as_secs() {
            let left_out = self.lines.saturating_sub(MAX_LINES);
            (self.second, self.lines) = (now.as_secs(), 0);
            if left_out > 0 {
                tracing::warn!("{left_out} lines on connections that failed were left out");
            }
        }
        self.lines = self.lines.saturating_add(1);
        self.lines <= MAX_LINES
    }
}

/// The lines that peers caused. Their number is limited apart from that of the program's lines, and
/// far lower: a peer neither fills the log nor suppresses them.
#[derive(Debug, Default)]
pub(super) struct PeerLines {
    /// The lines that count; one of them expires in each interval.
    counted: u32,
    /// The last time at which a line expired.
    since: Time,
    left_out: u64,
}

impl PeerLines {
    /// Whether another line may be written. Logs how many lines were left out before it.
    pub(super) fn may_log(&mut self, now: Time) -> bool {
        let expired = now.saturating_sub(self.since).as_secs() / PEER_INTERVAL.as_secs();
        let expired = u32::try_from(expired).unwrap_or(u32::MAX);
        self.counted = self.counted.saturating_sub(expired);
        self.since = match self.counted {
            0 => now,
            _ => self.since + PEER_INTERVAL * expired,
        };
        if self.counted >= PEER_LINES {
            self.left_out = self.left_out.saturating_add(1);
            return false;
        }
        self.counted += 1;
        let left_out = std::mem::take(&mut self.left_out);
        if left_out > 0 {
            tracing::warn!("{left_out} lines on connections from peers were left out");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_a_limited_number_of_lines() {
        let mut lines = Lines::default();
        let mut in_second = |second| {
            (0..300)
                .filter(|_| lines.may_log(Time::from_secs(second)))
                .count()
        };
        assert_eq!((in_second(7), in_second(8)), (100, 100));
    }

    #[test]
    fn peers_cause_ten_lines_then_one_in_a_minute() {
        let mut lines = PeerLines::default();
        let mut at = |second| {
            (0..300)
                .filter(|_| lines.may_log(Time::from_secs(second)))
                .count()
        };
        let written = [1000, 1030, 1059, 1060, 1119, 1120, 1240].map(&mut at);
        assert_eq!(written, [10, 0, 0, 1, 0, 1, 2]);
        assert_eq!(at(1_000_000), 10);
        assert_eq!(lines.left_out, 290);
    }
}
