//! tshark, with independently written dissectors, checks the data that a part of the system tests
//! sent: `scripts/test interop` runs that part with `URNIC_TEST_PCAP`, so that every program
//! captures its wire, and then this.

use std::collections::BTreeMap;
use std::path::PathBuf;

use urnic_tests::capture::Wire;
use urnic_tests::or_skip;
use urnic_tests::skip::installed;
use urnic_tests::spawn::CAPTURES;

use super::table::Table;

/// RDMAP's opcodes from 0 on (RFC 5040 §4.2, RFC 7306 §5).
const OPCODES: [&str; 12] = [
    "Write",
    "Read Request",
    "Read Response",
    "Send",
    "Send with Invalidate",
    "Send with Solicited Event",
    "Send with both",
    "Terminate",
    "Immediate Data",
    "Immediate Data with Solicited Event",
    "Atomic Request",
    "Atomic Response",
];

#[test]
#[ignore = "make interop"]
fn tshark_decodes_the_traffic_of_all_system_tests() {
    or_skip!(installed("tshark"));
    let Some(folder) = std::env::var_os(CAPTURES).map(PathBuf::from) else {
        return urnic_tests::skip::report(&format!("{CAPTURES} names no folder of captures"));
    };
    let entries = std::fs::read_dir(&folder).expect("the folder of captures");
    let files: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    let (mut fpdus, mut startups, mut opcodes) = (0, 0, BTreeMap::<u8, u64>::new());
    let mut wrong = Vec::new();
    for file in &files {
        let dissection = Wire::of(file.clone()).dissect_as_captured();
        fpdus += dissection.good_crcs;
        startups += dissection.startups;
        for (&opcode, &count) in &dissection.opcodes {
            *opcodes.entry(opcode).or_default() += count;
        }
        if dissection.bad_crcs > 0 || !dissection.malformed.is_empty() {
            wrong.push(format!(
                "{}: {} wrong CRCs, {:?}",
                file.display(),
                dissection.bad_crcs,
                dissection.malformed
            ));
        }
    }
    let title = format!(
        "{} captures of the system tests, dissected by tshark: {} wrong",
        files.len(),
        wrong.len()
    );
    let mut table = Table::new("captures", &title, &["frame", "count"]);
    table.row(&["Request or Reply", &startups.to_string()]);
    table.row(&["FPDU with a good CRC", &fpdus.to_string()]);
    for (opcode, count) in &opcodes {
        let name = OPCODES.get(usize::from(*opcode)).copied().unwrap_or("unknown");
        table.row(&[name, &count.to_string()]);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // Without these opcodes the captures prove nothing.
    for opcode in [0, 1, 2, 3, 10, 11] {
        assert!(
            opcodes.contains_key(&opcode),
            "no program sent opcode {opcode}: {opcodes:?}"
        );
    }
    assert!(fpdus > 0 && startups > 0);
}
