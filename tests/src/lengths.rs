//! Files that are no tests have at most 500 lines, functions at most 80. Those of the tests' own
//! library and programs count, too.

use crate::sources::{crates, crates_of_tests};

const FILE: usize = 500;
const FUNCTION: usize = 80;

#[test]
fn files_and_functions_are_short() {
    let mut found = Vec::new();
    let of_tests = crates_of_tests();
    for file in crates().iter().chain(&of_tests).flat_map(|of| &of.files) {
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
