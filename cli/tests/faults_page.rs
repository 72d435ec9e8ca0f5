//! `docs/guide/faults.md` lists the kinds of faults as the code has them.
//!
//! `URNIC_REGENERATE=1 cargo test -p urnic-cli --test faults_page` writes the part between `<!--
//! kinds -->` and `<!-- end -->`; without the variable a difference is a failure.

mod made_part;

use urnic_faults::{CATALOGUE, Entry};

fn row(kind: &Entry) -> String {
    format!("| `{}` | {} | {} |\n", kind.usage, kind.does, kind.stands_for)
}

#[test]
fn the_faults_page_lists_every_kind() {
    let rows: String = CATALOGUE.iter().map(row).collect();
    let table = format!("| fault | what it does | what it stands for |\n|---|---|---|\n{rows}");
    made_part::check("guide/faults.md", "kinds", &table, "faults_page");
}
