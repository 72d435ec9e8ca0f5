//! The findings of a process: the rules, the violations, and the findings that the program's
//! developers leave out by a file.

use std::collections::HashMap;
use std::path::Path;
use urnic_sync::Mutex;

use serde::Serialize;
use urnic_config::read_file;

use crate::call_site::CallSite;

macro_rules! rules {
    ($($(#[doc = $doc:literal])+ $name:ident = $text:literal,)*) => {
        /// A rule that a program breaks.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub(crate) enum Rule { $($(#[doc = $doc])+ $name,)* }

        impl Rule {
            /// All rules, in the order of the guide.
            pub(crate) const ALL: &'static [Rule] = &[$(Rule::$name,)*];

            /// The name in the log, the report and suppressions.
            pub(crate) const fn name(self) -> &'static str {
                match self { $(Rule::$name => $text,)* }
            }
        }
    };
}

rules! {
    /// The memory of a request changed before its completion was polled.
    BufferChanged = "buffer-changed",
    /// The memory of a receive was read or written before its completion was polled.
    ReceiveTouched = "receive-touched",
    /// An element of a request names memory that its key does not cover.
    BadLkey = "bad-lkey",
    /// A request completed in error.
    RequestFailed = "request-failed",
    /// A verb that posts returned an error.
    PostRefused = "post-refused",
    /// The send queue is full of requests of which none is signalled.
    NoneSignalled = "none-signalled",
    /// More requests are outstanding than the completion queue has entries.
    CqTooSmall = "cq-too-small",
    /// An event was requested while completions waited, and nothing was polled before the program
    /// waited for it.
    MissedRearm = "missed-rearm",
    /// An object is destroyed before its events are acknowledged.
    EventNotAcknowledged = "event-not-acknowledged",
    /// A message found no receive.
    ReceiveMissing = "receive-missing",
    /// An object is destroyed while others need it.
    DestroyedTooEarly = "destroyed-too-early",
    /// Memory was unmapped while it was registered.
    UnmappedWhileRegistered = "unmapped-while-registered",
    /// The process forked with registered memory, and without `ibv_fork_init`.
    ForkWithoutInit = "fork-without-init",
    /// An object was not destroyed.
    Leak = "leak",
}

impl Rule {
    /// The rule of this name.
    pub(crate) fn named(name: &str) -> Option<Rule> {
        Rule::ALL.iter().copied().find(|rule| rule.name() == name)
    }
}

/// Most findings that are stored.
const MOST: usize = 1000;

/// A rule that was broken at one place of the program.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    /// The rule's name.
    pub(crate) rule: &'static str,
    /// The text of the first violation.
    pub(crate) text: String,
    /// The functions of the program that were running, innermost first.
    pub(crate) backtrace: Vec<String>,
    /// The number of violations.
    pub(crate) count: u64,
}

/// All findings.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    suppressions: Suppressions,
    /// `None`: suppressed.
    found: Mutex<HashMap<(Rule, CallSite), Option<Finding>>>,
}

impl Findings {
    pub(super) fn new(suppressions: Suppressions) -> Findings {
        Findings {
            suppressions,
            found: Mutex::default(),
        }
    }

    pub(super) fn suppressions(&self) -> Suppressions {
        self.suppressions.clone()
    }

    /// Reports that the program broke `rule` at `site`; `text` is made for the first time only.
    pub(crate) fn report(&self, rule: Rule, site: &CallSite, text: impl FnOnce() -> String) {
        let mut found = self.found.lock();
        if let Some(known) = found.get_mut(&(rule, site.clone())) {
            if let Some(known) = known {
                known.count += 1;
            }
            return;
        }
        if found.len() >= MOST {
            return;
        }
        let (text, frames) = (text(), site.frames());
        let suppressed = self.suppressions.cover(rule, &text, frames.all());
        let line = match frames.of_program() {
            [] => format!("strict: {}: {text}", rule.name()),
            _ => format!("strict: {}: {text}; at {frames}", rule.name()),
        };
        let finding = (!suppressed).then(|| Finding {
            rule: rule.name(),
            text,
            backtrace: frames.of_program().to_vec(),
            count: 1,
        });
        found.insert((rule, site.clone()), finding);
        drop(found);
        if !suppressed {
            tracing::warn!("{line}");
        }
    }

    /// All findings, by rule.
    pub(crate) fn all(&self) -> Vec<Finding> {
        let found = self.found.lock();
        let mut all: Vec<_> = found
            .iter()
            .filter_map(|((rule, _), finding)| Some((*rule, finding.clone()?)))
            .collect();
        all.sort_by(|(one, a), (other, b)| (one, &a.text).cmp(&(other, &b.text)));
        all.into_iter().map(|(_, finding)| finding).collect()
    }
}

/// The list.
#[derive(Debug, Clone, Default)]
pub(crate) struct Suppressions(Vec<(Rule, String)>);

impl Suppressions {
    /// Reads the file.
    ///
    /// # Errors
    /// A message: the file cannot be read, or has a line that names no rule.
    pub(super) fn read(path: &Path) -> Result<Suppressions, String> {
        let text = read_file(path).map_err(|errno| format!("cannot read it: {errno}"))?;
        Suppressions::parse(&String::from_utf8_lossy(&text))
    }

    fn parse(text: &str) -> Result<Suppressions, String> {
        let lines = text
            .lines()
            .map(|line| line.split('#').next().unwrap_or("").trim());
        let mut all = Vec::new();
        for (number, line) in lines.enumerate().filter(|(_, line)| !line.is_empty()) {
            let (name, part) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
            let rule = Rule::named(name).ok_or_else(|| {
                let names: Vec<&str> = Rule::ALL.iter().map(|rule| rule.name()).collect();
                format!(
                    "line {}: {name} is no rule; the rules are {}",
                    number + 1,
                    names.join(", ")
                )
            })?;
            all.push((rule, part.trim().to_owned()));
        }
        Ok(Suppressions(all))
    }

    /// Whether a finding with this text, and these frames, is left out.
    pub(super) fn cover(&self, rule: Rule, text: &str, frames: &[String]) -> bool {
        self.0.iter().any(|(suppressed, part)| {
            *suppressed == rule && (text.contains(part) || frames.iter().any(|frame| frame.contains(part)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guide_has_every_rule_in_order() {
        let guide = include_str!("../../../docs/guide/strict.md");
        let section = guide
            .split("\n## ")
            .find(|section| section.starts_with("Rules\n"));
        let rows = section
            .expect("Rules")
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
        let names: Vec<&str> = rows.map(|(name, _)| name).collect();
        let rules: Vec<&str> = Rule::ALL.iter().map(|rule| rule.name()).collect();
        assert_eq!(names, rules);
    }

    #[test]
    fn rules_are_found_by_their_names() {
        for rule in Rule::ALL {
            assert_eq!(Rule::named(rule.name()), Some(*rule));
        }
        assert_eq!(Rule::named("leaks"), None);
    }

    #[test]
    fn a_place_is_reported_once_and_counted() {
        let findings = Findings::default();
        let sites = [CallSite::here(), CallSite::here()];
        for round in 0..3 {
            findings.report(Rule::CqTooSmall, &sites[0], || format!("round {round}"));
        }
        findings.report(Rule::BadLkey, &sites[0], || "other rule".to_owned());
        findings.report(Rule::CqTooSmall, &sites[1], || "other place".to_owned());
        let all: Vec<_> = findings
            .all()
            .into_iter()
            .map(|f| (f.rule, f.text, f.count))
            .collect();
        assert_eq!(
            all,
            [
                ("bad-lkey", "other rule".to_owned(), 1),
                ("cq-too-small", "other place".to_owned(), 1),
                ("cq-too-small", "round 0".to_owned(), 3),
            ]
        );
    }

    #[test]
    fn a_line_is_a_rule_with_or_without_a_part() {
        let all = Suppressions::parse("# ours\nleak\n\nbad-lkey  ucma_init # known\n").unwrap();
        assert!(all.cover(Rule::Leak, "anything", &[]));
        assert!(all.cover(
            Rule::BadLkey,
            "text",
            &["main".into(), "ucma_init (librdmacm.so.1)".into()]
        ));
        assert!(!all.cover(Rule::BadLkey, "text", &["main".into()]));
        assert!(!all.cover(Rule::CqTooSmall, "text", &[]));
    }

    #[test]
    fn a_line_without_a_rule_is_an_error_that_names_it() {
        let error = Suppressions::parse("leak\nleeks main\n").unwrap_err();
        assert!(
            error.starts_with("line 2: leeks is no rule; the rules are buffer-changed, "),
            "{error}"
        );
    }
}
