//! Whether output has the shape that a page shows: the same words in the same order, where numbers,
//! addresses and the folders of paths may differ, and lines may be broken elsewhere.
//!
//! A line of the log begins with its level: pages leave out the time, the process and the module.
//! `…` in the page stands for any words of one line, or, alone on a line, for any lines.

/// A word of the page, or what stands for some.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Token {
    /// A word, without its numbers.
    Word(String),
    /// The end of a line of the output. A page may break its lines elsewhere, so it has none.
    End,
    /// Any words up to the end of the line.
    RestOfLine,
    /// Any words.
    Any,
}

/// The first word of the page that the output does not have there, with the words before it.
///
/// # Errors
/// What is missing.
pub fn compare(page: &str, output: &str) -> Result<(), String> {
    let expected = of_page(page);
    let actual = of_output(output);
    let mut furthest = 0;
    if matches(&expected, &actual, &mut furthest) {
        return Ok(());
    }
    let at = expected.len() - furthest;
    let near: Vec<String> = expected[at.saturating_sub(4)..(at + 3).min(expected.len())]
        .iter()
        .map(|token| format!("{token:?}"))
        .collect();
    Err(format!("the page and the output differ near {}", near.join(" ")))
}

fn of_page(page: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    for line in page.lines() {
        match line.trim() {
            "…" | "..." => tokens.push(Token::Any),
            line => tokens.extend(line.split_whitespace().map(|word| match word {
                "…" => Token::RestOfLine,
                word => Token::Word(shape(word)),
            })),
        }
    }
    tokens
}

fn of_output(output: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    for line in output.lines() {
        tokens.extend(without_prefix(line).map(|word| Token::Word(shape(word))));
        tokens.push(Token::End);
    }
    tokens
}

/// The words of a line; of a line of the log (`TIME pid N LEVEL MODULE: …`) the level and what
/// follows the module.
fn without_prefix(line: &str) -> impl Iterator<Item = &str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let words = match words.as_slice() {
        [time, "pid", _, level, module, text @ ..] if time.ends_with('Z') && module.ends_with(':') => {
            [&[*level], text].concat()
        }
        _ => words,
    };
    words.into_iter()
}

/// Whether the words match to the end of both. `furthest` becomes the least number of words of the
/// page that were left.
fn matches(page: &[Token], output: &[Token], left: &mut usize) -> bool {
    // Which suffixes of the output may follow the words of the page so far.
    let mut from = vec![false; output.len() + 1];
    from[0] = true;
    for (at, token) in page.iter().enumerate() {
        let mut next = vec![false; output.len() + 1];
        for start in (0..=output.len()).filter(|start| from[*start]) {
            match token {
                Token::Any => next[start..].fill(true),
                Token::RestOfLine => {
                    let rest = output[start..].iter().take_while(|it| **it != Token::End).count();
                    next[start..=start + rest].fill(true);
                }
                word => {
                    let ends = output[start..].iter().take_while(|it| **it == Token::End).count();
                    if output.get(start + ends) == Some(word) {
                        next[start + ends + 1] = true;
                    }
                }
            }
        }
        if !next.contains(&true) {
            *left = page.len() - at;
            return false;
        }
        from = next;
    }
    *left = 0;
    (0..=output.len()).any(|start| from[start] && output[start..].iter().all(|it| *it == Token::End))
}

/// A word without what differs from run to run: `#` for each number, only the last name of a path.
fn shape(word: &str) -> String {
    if let Some(path) = word
        .find('/')
        .filter(|at| word[..*at].chars().all(|c| !c.is_alphanumeric()))
        && word.len() > path + 1
    {
        let name = word.rsplit('/').next().unwrap_or_default();
        return format!("{}/{}", &word[..path], shape(name));
    }
    let mut shaped = String::new();
    let mut rest = word;
    while let Some(first) = rest.chars().next() {
        let number = number_at(rest);
        if number > 0 {
            shaped.push('#');
            rest = &rest[number..];
            continue;
        }
        // A whole word of letters, so that no number is seen in its middle.
        let letters = rest.find(|c: char| !c.is_alphabetic()).unwrap_or(rest.len());
        let len = letters.max(first.len_utf8());
        shaped.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    shaped
}

/// The length of the number at the beginning of a text, or 0: decimal with fraction and unit of
/// 1000, hexadecimal with digits in it, groups of these with colons (addresses).
fn number_at(text: &str) -> usize {
    let hex = text.strip_prefix("0x").unwrap_or(text);
    let prefix = text.len() - hex.len();
    let is_part = |c: char| c.is_ascii_hexdigit() || (prefix == 0 && ":.".contains(c));
    let len = hex.find(|c: char| !is_part(c)).unwrap_or(hex.len());
    let trimmed = hex[..len].trim_end_matches([':', '.']);
    let number = match trimmed.contains(|c: char| c.is_ascii_digit()) {
        true => trimmed,
        // The address `::`. `dead` may be a word, and so may `beef:`.
        false if hex[..len].contains("::") => &hex[..len],
        false => return 0,
    };
    let rest = &hex[number.len()..];
    let unit = rest
        .chars()
        .next()
        .filter(|c| "kMGT".contains(*c))
        .map_or(0, char::len_utf8);
    let is_word = rest[unit..].starts_with(|c: char| c.is_alphabetic());
    // `4e` of `4everything` is no number.
    if rest.starts_with(|c: char| c.is_alphabetic()) && unit == 0 {
        let decimal = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        return decimal;
    }
    prefix + number.len() + if is_word { 0 } else { unit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_addresses_and_folders_may_differ() {
        for (page, output) in [
            ("1000 iters in 0.05 seconds", "20 iters in 1 seconds"),
            ("8192000 bytes, 1.5M of them", "7 bytes, 830k of them"),
            ("QPN 0xb42b00, GID ::", "QPN 0xa0b300, GID ::ffff:192.0.2.2"),
            ("guid: ee4b:cca8:0943:5b25", "guid: 0001:2:3:abcd"),
            ("GUID ee4bcca809435b25", "GUID 12cca809435b25ee"),
            ("(192.0.2.2:33529 to 10.0.0.1:7)", "(127.0.0.1:1 to [::1]:2)"),
            (
                "ok  /usr/lib/liburnic.so, of it",
                "ok  /opt/x/y/liburnic.so, of it",
            ),
            ("hca_id: urnic0", "hca_id: urnic1"),
        ] {
            let result = compare(page, output);
            let is_v6_in_brackets = output.contains('[');
            assert_eq!(
                result.is_ok(),
                !is_v6_in_brackets,
                "{page:?} {output:?}: {result:?}"
            );
        }
    }

    #[test]
    fn lines_of_the_log_begin_with_their_level() {
        let line = "2026-11-29T12:45:03.875521Z pid 69  WARN urnic_model::x: qp 0x7: ended\n";
        assert_eq!(compare("WARN qp 0x8: ended", line), Ok(()));
        assert!(compare("ERROR qp 0x8: ended", line).is_err());
    }

    #[test]
    fn words_may_not_differ() {
        for (page, output) in [
            ("1000 iters in 0.05 seconds", "1000 iters in 0.05 minutes"),
            ("ok  plug-in", "WRONG plug-in"),
            ("/usr/lib/liburnic.so", "/usr/lib/other.so"),
            ("a b", "a b c"),
            ("a b c", "a b"),
            ("a", ""),
            ("", "a"),
        ] {
            assert!(compare(page, output).is_err(), "{page:?} {output:?}");
        }
    }

    #[test]
    fn an_ellipsis_stands_for_words_or_lines() {
        assert_eq!(compare("a …\nb", "a x y z\nb\n"), Ok(()));
        assert!(compare("a …\nb", "a x\ny\nb\n").is_err());
        assert_eq!(compare("a\n…\nb", "a\nx\ny\nb\n"), Ok(()));
        assert_eq!(compare("a\n…", "a\n"), Ok(()));
        assert_eq!(
            compare("a b\n   c", "a b c\n"),
            Ok(()),
            "a line broken by the page"
        );
    }
}
