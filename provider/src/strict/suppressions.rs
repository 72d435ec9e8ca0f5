//! Findings to leave out, as the program's developers list them in a file.

use std::path::Path;

use urnic_config::read_file;

use super::rule::Rule;

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

    /// Whether a finding with this text, and these frames, is to be left out.
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
