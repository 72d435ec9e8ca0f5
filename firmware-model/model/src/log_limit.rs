//! A limit for lines of the log that peers or programs can cause without end.

use urnic_sync::Mutex;

use crate::time::Nanos;

/// Most lines in a second.
const LINES: u32 = 100;
const SECOND: u64 = 1_000_000_000;

/// The lines of one kind that were written in this second.
#[derive(Debug)]
pub struct LogLimit {
    /// The subject of the lines, in the plural.
    about: &'static str,
    written: Mutex<Written>,
}

#[derive(Debug)]
struct Written {
    second: u64,
    lines: u32,
}

impl LogLimit {
    /// A limit for lines about `about`, a plural.
    pub const fn new(about: &'static str) -> LogLimit {
        LogLimit {
            about,
            written: Mutex::new(Written { second: 0, lines: 0 }),
        }
    }

    /// Whether another line may be written. Call this before making the line. Logs how many lines
    /// of an earlier second were left out.
    pub fn may_say(&self, now: Nanos) -> bool {
        let mut written = self.written.lock();
        let left_out = written.begin(now.0 / SECOND);
        written.lines = written.lines.saturating_add(1);
        let may = written.lines <= LINES;
        drop(written);
        if left_out > 0 {
            tracing::warn!("{left_out} lines on {} were left out", self.about);
        }
        may
    }
}

impl Written {
    /// Begins a second, if it is a new one; returns how many lines of the last were left out.
    fn begin(&mut self, second: u64) -> u32 {
        if self.second == second {
            return 0;
        }
        let last = std::mem::replace(self, Written { second, lines: 0 });
        last.lines.saturating_sub(LINES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_are_left_out_are_counted_in_the_next_second() {
        let mut written = Written { second: 0, lines: 0 };
        assert_eq!(written.begin(7), 0);
        written.lines = LINES + 5;
        assert_eq!(written.begin(7), 0, "the second goes on");
        assert_eq!(written.begin(8), 5);
        assert_eq!(written.begin(9), 0);
    }

    #[test]
    fn a_second_has_a_limited_number_of_lines() {
        let limit = LogLimit::new("tests");
        let in_second = |second: u64| {
            (0..3 * LINES)
                .filter(|_| limit.may_say(Nanos(second * SECOND)))
                .count()
        };
        assert_eq!((in_second(1), in_second(2)), (LINES as usize, LINES as usize));
    }
}
