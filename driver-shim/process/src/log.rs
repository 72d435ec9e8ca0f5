//! The log: which events the option `log` shows, and the line of each.

use std::fmt::{Debug, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const LEVELS: [(&str, LevelFilter); 6] = [
    ("off", LevelFilter::OFF),
    ("error", LevelFilter::ERROR),
    ("warn", LevelFilter::WARN),
    ("info", LevelFilter::INFO),
    ("debug", LevelFilter::DEBUG),
    ("trace", LevelFilter::TRACE),
];

/// The prefix of the names of urnic's modules.
const OURS: &str = "urnic";

/// The value of the option `log`: levels and `MODULE=LEVEL`, with commas between.
///
/// Each element is the prefix of modules' names, and the level up to which their events are shown.
/// The last level without a module is for all modules, which is the empty prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogFilter(Vec<(String, LevelFilter)>);

impl LogFilter {
    /// The filter in `text`. A misspelled level is not a filter: it does not count as the name of a
    /// module.
    pub fn parse(text: &str) -> Option<LogFilter> {
        // Errors of modules that the text does not name are shown, too.
        let mut levels = vec![(String::new(), LevelFilter::ERROR)];
        for directive in text.split(',') {
            let (module, level) = match directive.split_once('=') {
                Some((module, level)) => (module_name(module.trim())?, level),
                None => ("", directive),
            };
            levels.push((module.to_owned(), level_of(level.trim())?));
        }
        Some(LogFilter(levels))
    }

    /// The level up to which the events of a module are shown: that of the longest prefix.
    fn level(&self, module: &str) -> LevelFilter {
        let matching = self.0.iter().filter(|(prefix, _)| module.starts_with(prefix));
        let longest = matching.max_by_key(|(prefix, _)| prefix.len());
        longest.map_or(LevelFilter::OFF, |(_, level)| *level)
    }
}

fn module_name(text: &str) -> Option<&str> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':';
    (text.starts_with(OURS) && text.bytes().all(is_name)).then_some(text)
}

fn level_of(text: &str) -> Option<LevelFilter> {
    let found = LEVELS.iter().find(|(name, _)| text.eq_ignore_ascii_case(name));
    found.map(|(_, level)| *level)
}

/// Writes the events that a filter shows, each as one line.
///
/// A line has the time, what `stamp` says, the level, the module, the message and the fields.
#[derive(Debug)]
pub struct Log<S, W> {
    /// The events to write.
    pub filter: LogFilter,
    /// What is added to the time of each line.
    pub stamp: S,
    /// Writes a line, which ends in a line feed.
    pub write: W,
}

impl<S, W> Subscriber for Log<S, W>
where
    S: Fn() -> String + Send + Sync + 'static,
    W: Fn(Level, &str) + Send + Sync + 'static,
{
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.filter.level(metadata.target())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        self.filter.0.iter().map(|(_, level)| *level).max()
    }

    fn event(&self, event: &Event<'_>) {
        let (level, module) = (*event.metadata().level(), event.metadata().target());
        let mut line = Line(utc(SystemTime::now()));
        line.add(format_args!("{} {level:>5} {module}:", (self.stamp)()));
        event.record(&mut line);
        line.0.push('\n');
        (self.write)(level, &line.0);
    }

    // urnic has no spans.

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// A line, to which fields are added.
struct Line(String);

impl Line {
    fn add(&mut self, text: std::fmt::Arguments<'_>) {
        // Writing to a string fails only if the value's own formatting does.
        let _ = self.0.write_fmt(text);
    }
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        match field.name() {
            "message" => {
                let text = format!(" {value:?}");
                text.chars().for_each(|c| push_escaped(&mut self.0, c));
            }
            name => self.add(format_args!(" {name}={value:?}")),
        }
    }
}

/// A message may contain what a peer sent, and a terminal acts on control characters.
fn push_escaped(line: &mut String, c: char) {
    match c {
        '\n' | '\t' => line.push(c),
        c if c.is_control() => line.extend(c.escape_default()),
        c => line.push(c),
    }
}

/// The time as in RFC 3339, with microseconds.
fn utc(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let micros = since.subsec_micros();
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Year, month and day of the day that is `days` after 1970-01-01.
fn civil(days: u64) -> (u64, u64, u64) {
    // Counted from 0000-03-01, so that a leap day is the last day of its year, and of its era of
    // 400 years.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Five months, from March or August, have 153 days.
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;
    use urnic_sync::Mutex;

    #[test]
    fn levels_and_modules_are_filters() {
        for text in [
            "warn",
            "OFF",
            "Debug",
            "urnic=trace",
            "warn,urnic_cm::native=debug",
            "urnic_wire=info, error",
        ] {
            assert!(LogFilter::parse(text).is_some(), "{text}");
        }
    }

    #[test]
    fn filters_that_would_hide_everything_are_invalid() {
        for text in [
            "",
            "verbose",
            "warning",
            "urnic",
            "debug,",
            "urnic=loud",
            "=debug",
            "unric=debug",
            "3",
            "debug;trace",
            "urnic[span]=debug",
        ] {
            assert_eq!(LogFilter::parse(text), None, "{text}");
        }
    }

    #[test]
    fn the_longest_prefix_decides_and_errors_are_hidden_only_on_request() {
        for (text, module, level) in [
            ("info", "urnic_wire", LevelFilter::INFO),
            ("urnic_wire=debug", "urnic_wire::mpa", LevelFilter::DEBUG),
            ("urnic_wire=debug", "urnic_cm", LevelFilter::ERROR),
            ("urnic_wire=debug,off", "urnic_cm", LevelFilter::OFF),
            ("urnic_wire = info, Warn", "urnic_wire", LevelFilter::INFO),
            ("urnic_wire = info, Warn", "urnic_cm", LevelFilter::WARN),
            (
                "urnic_cm::native=off,urnic_cm=trace",
                "urnic_cm::native",
                LevelFilter::OFF,
            ),
        ] {
            let filter = LogFilter::parse(text).unwrap();
            assert_eq!(filter.level(module), level, "{text}: {module}");
        }
    }

    #[test]
    fn a_line_has_time_stamp_level_module_message_and_fields() {
        let lines: Arc<Mutex<Vec<(Level, String)>>> = Arc::default();
        let written = lines.clone();
        let log = Log {
            filter: LogFilter::parse("info").unwrap(),
            stamp: || " pid 7".to_owned(),
            write: move |level, line: &str| written.lock().push((level, line.to_owned())),
        };
        tracing::subscriber::with_default(log, || {
            tracing::warn!(qpn = 5, name = "a b", "lost\x1b[2J");
            tracing::debug!("hidden");
        });
        let lines = lines.lock();
        let [(Level::WARN, line)] = lines.as_slice() else {
            panic!("{lines:?}");
        };
        let (time, line) = line.split_at("2026-01-02T03:04:05.000006Z".len());
        assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
        let module = module_path!();
        assert_eq!(
            line,
            format!(" pid 7  WARN {module}: lost\\u{{1b}}[2J qpn=5 name=\"a b\"\n")
        );
    }

    #[test]
    fn dates_are_those_of_the_gregorian_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_399, "2000-02-28T23:59:59.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_709_251_200, "2024-03-01T00:00:00.000000Z"),
            (4_107_542_399, "2100-02-28T23:59:59.000000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000000Z"),
        ] {
            assert_eq!(utc(UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
    }
}
