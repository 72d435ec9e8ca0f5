//! Files that are no tests have at most 500 lines, functions at most 80.

use crate::sources::crates;

const FILE: usize = 500;
const FUNCTION: usize = 80;

#[test]
fn files_and_functions_are_short() {
    let mut found = Vec::new();
    for file in crates().iter().flat_map(|of| &of.files) {
        let path = file.path.display();
        if file.lines > FILE {
            found.push(format!("{path}: {} lines, more than {FILE}", file.lines));
        }
        for function in &file.functions {
            if function.lines > FUNCTION {
                let (name, lines) = (&function.name, function.lines);
                found.push(format!("{path} {name}: {lines} lines, more than {FUNCTION}"));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
