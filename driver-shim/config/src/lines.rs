//! The line of each key in a TOML file, for error messages about values.

use std::collections::BTreeMap;

use toml::de::{DeTable, DeValue};

/// The lines of all keys of a file, starting at 1. Keys are whole (`mpa.crc`); the key of an
/// element of an array of tables contains its number (`peer.0.mpa.crc`).
pub(super) fn of_keys(text: &str) -> BTreeMap<String, usize> {
    let mut lines = BTreeMap::new();
    if let Ok(table) = DeTable::parse(text) {
        enter(text, "", table.get_ref(), &mut lines);
    }
    lines
}

fn enter(text: &str, prefix: &str, table: &DeTable<'_>, lines: &mut BTreeMap<String, usize>) {
    for (name, value) in table {
        let key = format!("{prefix}{}", name.get_ref());
        match value.get_ref() {
            DeValue::Table(inner) => enter(text, &format!("{key}."), inner, lines),
            DeValue::Array(elements) => {
                for (number, element) in elements.iter().enumerate() {
                    let key = format!("{key}.{number}");
                    if let DeValue::Table(inner) = element.get_ref() {
                        enter(text, &format!("{key}."), inner, lines);
                    }
                    lines.insert(key, line(text, element.span().start));
                }
            }
            _ => {}
        }
        lines.insert(key, line(text, name.span().start));
    }
}

/// The line that contains the byte at `offset`.
fn line(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_its_line() {
        let text = "log = \"info\"\n\n[mpa]\n# a comment\ncrc = true\n[[peer]]\naddress = \"::1\"\n[[peer]]\nmpa.crc = 1\n";
        let lines = of_keys(text);
        for (key, line) in [
            ("log", 1),
            ("mpa.crc", 5),
            ("peer.0", 6),
            ("peer.0.address", 7),
            ("peer.1", 8),
            ("peer.1.mpa.crc", 9),
        ] {
            assert_eq!(lines.get(key), Some(&line), "{key}: {lines:?}");
        }
    }

    #[test]
    fn a_file_that_is_not_toml_has_no_lines() {
        assert!(of_keys("a = = b").is_empty());
    }
}
