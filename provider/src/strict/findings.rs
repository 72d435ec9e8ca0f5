//! The findings of a process.

use std::collections::HashMap;
use std::sync::Mutex;

use serde::Serialize;
use urnic_process::lock::lock;

use super::call_site::CallSite;
use super::rule::Rule;
use super::suppressions::Suppressions;

/// More findings than this are not kept.
const MOST: usize = 1000;

/// A rule that was broken at one place of the program.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Finding {
    /// The rule's name.
    pub(crate) rule: &'static str,
    /// What happened, the first time.
    pub(crate) text: String,
    /// The functions of the program that were running, innermost first.
    pub(crate) backtrace: Vec<String>,
    /// How many times.
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
        let mut found = lock(&self.found);
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
        let found = lock(&self.found);
        let mut all: Vec<_> = found
            .iter()
            .filter_map(|((rule, _), finding)| Some((*rule, finding.clone()?)))
            .collect();
        all.sort_by(|(one, a), (other, b)| (one, &a.text).cmp(&(other, &b.text)));
        all.into_iter().map(|(_, finding)| finding).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
