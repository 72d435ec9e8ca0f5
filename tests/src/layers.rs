//! Crates depend downwards only.

use std::collections::BTreeMap;

use toml::Table;

use crate::build::tree;

/// The crates of the product, bottom first. A crate depends on crates above it in this list only.
const LAYERS: [&str; 19] = [
    "wire",
    "vfio-user",
    "console",
    "rpc-rdma/protocol",
    "rpc-rdma/verbs",
    "nfs",
    "verbs-api/device",
    "faults",
    "verbs-api/rdma-core",
    "tests/testkit",
    "device-checks",
    "firmware-model/model",
    "firmware-model/serve",
    "driver-shim/process",
    "driver-shim/config",
    "driver-shim/presence",
    "driver-shim/cm",
    "driver-shim/bus",
    "driver-shim/driver",
];
/// The crates above all layers, which may use any of them.
const TOP: [&str; 5] = ["provider", "cli", "tests", "bench", "fuzz"];

fn manifest(folder: &str) -> Table {
    let path = tree().join(folder).join("Cargo.toml");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.parse()
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn name(manifest: &Table) -> String {
    manifest["package"]["name"].as_str().expect("a name").to_owned()
}

#[test]
fn crates_depend_downwards_only() {
    let mut below: BTreeMap<String, &str> = BTreeMap::new();
    for folder in LAYERS {
        let manifest = manifest(folder);
        let dependencies = manifest["dependencies"].as_table().expect("a table");
        let ours = dependencies.keys().filter(|name| name.starts_with("urnic-"));
        for dependency in ours {
            assert!(
                below.contains_key(dependency),
                "{folder} depends on {dependency}, which is not below it"
            );
        }
        below.insert(name(&manifest), folder);
    }
}

#[test]
fn every_crate_has_its_layer() {
    let workspace = manifest(".");
    let members = workspace["workspace"]["members"].as_array().expect("an array");
    for member in members {
        let member = member.as_str().expect("a folder");
        let known = LAYERS.contains(&member) || TOP.contains(&member);
        assert!(known, "{member} is in no layer");
    }
}

#[test]
fn drivers_and_models_share_only_the_contract() {
    // The model must not depend on its driver, VFIO not on the presence, and a test suite for
    // devices not on a driver.
    for (folder, never) in [
        (
            "firmware-model/model",
            "urnic-driver urnic-bus urnic-cm urnic-presence urnic-process urnic-config",
        ),
        ("driver-shim/bus", "urnic-presence urnic-cm urnic-driver"),
        ("driver-shim/cm", "urnic-model urnic-bus urnic-presence"),
        (
            "device-checks",
            "urnic-driver urnic-bus urnic-model urnic-rdma-core",
        ),
    ] {
        let manifest = manifest(folder);
        let dependencies = manifest["dependencies"].as_table().expect("a table");
        for never in never.split(' ') {
            assert!(!dependencies.contains_key(never), "{folder} depends on {never}");
        }
    }
}

#[test]
fn only_tests_depend_on_the_testkit() {
    for folder in LAYERS.into_iter().chain(TOP) {
        let manifest = manifest(folder);
        let dependencies = manifest["dependencies"].as_table().expect("a table");
        // The suite of device checks is tests, too.
        let is_test = ["device-checks", "tests", "fuzz"].contains(&folder);
        let uses = dependencies.contains_key("urnic-testkit");
        assert!(is_test || !uses, "{folder} depends on the testkit");
    }
}
