//! The values of the option `log`.
//!
//! tracing's filters accept any word as the name of a module, so a misspelled level would hide all
//! lines. Here a word is a level, or the level of a module of urnic.

/// The names of the levels.
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// The prefix of the names of urnic's modules.
const OURS: &str = "urnic";

fn is_level(text: &str) -> bool {
    LEVELS.iter().any(|level| text.eq_ignore_ascii_case(level))
}

fn is_module(text: &str) -> bool {
    text.starts_with(OURS)
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b':')
}

fn directives(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim)
}

/// Whether `text` is a filter: levels and `MODULE=LEVEL`, with commas between.
pub fn is_log_filter(text: &str) -> bool {
    directives(text).all(|directive| match directive.split_once('=') {
        Some((module, level)) => is_module(module.trim()) && is_level(level.trim()),
        None => is_level(directive),
    })
}

/// The filter in the syntax of tracing's `Targets`. Errors of modules that it does not name are
/// shown, too, unless the filter contains `off`.
pub fn log_filter(text: &str) -> String {
    let errors = (!directives(text).any(is_level)).then_some("error");
    let all: Vec<&str> = errors.into_iter().chain(directives(text)).collect();
    all.join(",").replace(' ', "")
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!(is_log_filter(text), "{text}");
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
            assert!(!is_log_filter(text), "{text}");
        }
    }

    #[test]
    fn errors_are_hidden_only_on_request() {
        assert_eq!(log_filter("urnic_wire=debug"), "error,urnic_wire=debug");
        assert_eq!(log_filter("urnic_wire=debug,off"), "urnic_wire=debug,off");
        assert_eq!(log_filter("info"), "info");
        assert_eq!(log_filter("urnic_wire = info, Warn"), "urnic_wire=info,Warn");
    }
}
