//! The commands.

pub(crate) mod acl;
pub(crate) mod bench;
mod ending;
pub(crate) mod list;
pub(crate) mod remote;
pub(crate) mod serve;
pub(crate) mod transfer;

use urnic_console::{READER_GONE, Unwritten};

/// The result of a command, or the message of its failure.
pub(crate) type Done<T> = Result<T, String>;

/// Writes to standard output. If its reader has closed the pipe, the process ends.
pub(crate) fn print(text: &str) -> Done<()> {
    match urnic_console::print(text) {
        Err(Unwritten::ReaderGone) => std::process::exit(READER_GONE.into()),
        written => written.map_err(|unwritten| unwritten.to_string()),
    }
}

/// Parses a number of bytes: 4096, 64K, 256M, 2G.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match &text[digits.len()..] {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "m" | "MiB" => 20,
        "G" | "g" | "GiB" => 30,
        "T" | "t" | "TiB" => 40,
        other => return Err(format!("{other} is no unit of bytes: K, M, G, T")),
    };
    let number: u64 = digits
        .parse()
        .map_err(|_| format!("{text} is no number of bytes"))?;
    number
        .checked_mul(1 << unit)
        .ok_or_else(|| format!("{text} is too much"))
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_with_suffixes_are_parsed() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("64K"), Ok(65536));
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert!(bytes("99999999999T").is_err());
        assert!(bytes("M").is_err());
        assert!(bytes("5 apples").is_err());
    }
}
