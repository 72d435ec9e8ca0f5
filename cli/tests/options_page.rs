//! `docs/reference/options.md` lists the options as the code has them.
//!
//! `URNIC_REGENERATE=1 cargo test -p urnic-cli --test options_page` writes the part between `<!--
//! options -->` and `<!-- end -->`; without the variable a difference is a failure.

mod made_part;

use std::fmt::Write as _;

use urnic_config::{Config, OPTIONS};

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
    made_part::check("reference/options.md", "options", &entries(), "options_page");
}
