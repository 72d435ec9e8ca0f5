//! `docs/reference/options.md` lists the options as the code has them.
//!
//! `URNIC_REGENERATE=1 cargo test -p urnic-cli --test options_page` writes the part between `<!--
//! options -->` and `<!-- end -->`; without the variable a difference is a failure.

use std::fmt::Write as _;
use std::path::Path;

use urnic_config::{Config, OPTIONS};

const BEGIN: &str = "<!-- options -->\n";
const END: &str = "<!-- end -->\n";

/// The entries of all options, with a heading for each group of keys.
fn entries() -> String {
    let defaults = Config::default();
    let (mut text, mut group) = (String::new(), "");
    for opt in OPTIONS {
        let of = opt.key.split_once('.').map_or("general", |(group, _)| group);
        if of != group {
            group = of;
            let _ = writeln!(text, "\n## Keys: {group}");
        }
        let default = match opt.value(&defaults) {
            value if value.is_empty() => "nothing".to_owned(),
            value => format!("`{value}`"),
        };
        let _ = write!(
            text,
            "\n### `{}`\n\n{}\n\n* Takes {}\n* Default: {default}\n* Variable: `{}`\n",
            opt.key,
            opt.help,
            opt.takes,
            opt.variable(),
        );
        if opt.is_per_peer() {
            text.push_str("* A `[[peer]]` section may set it.\n");
        }
    }
    text.push('\n');
    text
}

#[test]
fn the_options_page_lists_every_option() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/options.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let (head, rest) = page.split_once(BEGIN).expect("the beginning of the list");
    let (_, tail) = rest.split_once(END).expect("the end of the list");
    let made = [head, BEGIN, &entries(), END, tail].concat();
    if std::env::var_os("URNIC_REGENERATE").is_some() {
        std::fs::write(&path, &made).expect("the page is written");
        return;
    }
    let differs = page.lines().zip(made.lines()).find(|(page, made)| page != made);
    assert!(
        page == made,
        "docs/reference/options.md is not what the options say ({differs:?}): \
         URNIC_REGENERATE=1 cargo test -p urnic-cli --test options_page"
    );
}
