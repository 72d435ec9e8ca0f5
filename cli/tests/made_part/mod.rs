//! A part of a page that a test makes.

use std::path::Path;

/// Compares the part of a page of docs/ between `<!-- NAME -->` and `<!-- end -->` with `part`, or
/// writes it if the variable `URNIC_REGENERATE` is set. `test` is the test that does so.
#[track_caller]
pub(crate) fn check(page: &str, name: &str, part: &str, test: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(page);
    let text = std::fs::read_to_string(&path).expect("the page");
    let (begin, end) = (format!("<!-- {name} -->\n"), "<!-- end -->\n");
    let (head, rest) = text.split_once(&begin).expect("the beginning of the part");
    let (_, tail) = rest.split_once(end).expect("the end of the part");
    let made = [head, &begin, part, end, tail].concat();
    if std::env::var_os("URNIC_REGENERATE").is_some() {
        std::fs::write(&path, &made).expect("the page is written");
        return;
    }
    let differs = text.lines().zip(made.lines()).find(|(text, made)| text != made);
    assert!(
        text == made,
        "docs/{page} is not what the code says ({differs:?}): URNIC_REGENERATE=1 cargo test -p urnic-cli --test {test}"
    );
}
