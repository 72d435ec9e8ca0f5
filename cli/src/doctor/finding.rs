//! The result of a check of `urnic doctor`.

use std::fmt;

use urnic_console::escaped;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Good,
    /// Useful information about something that breaks nothing.
    Note,
    Wrong,
}

/// One line of the report.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) verdict: Verdict,
    pub(super) subject: &'static str,
    pub(super) text: String,
    /// The command that fixes the fault.
    pub(super) fix: Option<String>,
}

impl Finding {
    pub(super) fn good(subject: &'static str, text: impl ToString) -> Self {
        Self {
            verdict: Verdict::Good,
            subject,
            text: text.to_string(),
            fix: None,
        }
    }

    pub(super) fn note(subject: &'static str, text: impl ToString, fix: Option<&str>) -> Self {
        Self {
            verdict: Verdict::Note,
            subject,
            text: text.to_string(),
            fix: fix.map(str::to_owned),
        }
    }

    pub(super) fn wrong(subject: &'static str, text: impl ToString, fix: impl ToString) -> Self {
        Self {
            verdict: Verdict::Wrong,
            subject,
            text: text.to_string(),
            fix: Some(fix.to_string()),
        }
    }
}

impl Finding {
    /// The finding as an object.
    pub(super) fn json(&self) -> serde_json::Value {
        let verdict = match self.verdict {
            Verdict::Good => "ok",
            Verdict::Note => "note",
            Verdict::Wrong => "wrong",
        };
        serde_json::json!({
            "check": self.subject,
            "verdict": verdict,
            "text": self.text,
            "fix": self.fix,
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Good => "ok",
            Verdict::Note => "note",
            Verdict::Wrong => "WRONG",
        };
        write!(f, "{verdict:<6}{:<17}{}", self.subject, escaped(&self.text))?;
        self.fix
            .as_ref()
            .map_or(Ok(()), |fix| write!(f, "\n{:23}fix: {}", "", escaped(fix)))
    }
}
