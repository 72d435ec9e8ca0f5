//! A limit for lines of the log about connections that fail.

use crate::mpa_startup::Time;

/// Most lines in a second: peers and programs can cause failures without end.
const MAX_LINES: u32 = 100;

/// The number of lines in this second.
#[derive(Debug, Default)]
pub(super) struct Lines {
    second: u64,
    lines: u32,
}

impl Lines {
    /// Whether another line may be written. Logs how many lines of an earlier second were left out.
    pub(super) fn may_say(&mut self, now: Time) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_a_limited_number_of_lines() {
        let mut lines = Lines::default();
        let mut in_second = |second| {
            (0..300)
                .filter(|_| lines.may_say(Time::from_secs(second)))
                .count()
        };
        assert_eq!((in_second(7), in_second(8)), (100, 100));
    }
}
