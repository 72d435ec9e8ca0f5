//! Crates depend downwards only.

use std::collections::BTreeMap;

use std::path::Path;

use toml::{Table, Value};

use crate::build::tree;
use crate::sources::{WORKSPACES, manifest, members};

/// The crates of the product, bottom first. A crate depends on crates above it in this list only.
const LAYERS: [&str; 23] = [
    "sync",
    "sys",
    "wire",
    "vfio-user",
    "console",
    "rpc-rdma/protocol",
    "rpc-rdma/verbs",
    "rpc-rdma/nfs",
    "verbs-api/device",
    "faults",
    "verbs-api/rdma-core",
    "verbs-api/testkit",
    "verbs-api/device-checks",
    "firmware-model/sctp",
    "firmware-model/roce",
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
    let mut layers = LAYERS.into_iter().chain(TOP).map(Path::new);
    for member in members() {
        let known = layers.clone().any(|layer| layer == member);
        assert!(known, "{} is in no layer", member.display());
    }
    // The fuzz targets are a workspace of their own.
    let gone = layers.find(|layer| *layer != Path::new("fuzz") && !members().iter().any(|it| it == layer));
    assert_eq!(gone, None, "no workspace has this layer");
}

/// What both workspaces set is the same. Otherwise cargo compiles a dependency of both twice, and a
/// lint, an edition or a version holds for a part of the crates only.
#[test]
fn workspaces_agree() {
    let [rnic, rpc_rdma] = WORKSPACES.map(|folder| Value::Table(manifest(folder)));
    for part in ["resolver", "package", "lints"] {
        let part = |of: &Value| of["workspace"][part].clone();
        assert_eq!(part(&rnic), part(&rpc_rdma));
    }
    let mut complaints = Vec::new();
    let parts = |of: &Value| [of["workspace"]["dependencies"].clone(), of["profile"].clone()];
    for (rnic, rpc_rdma) in parts(&rnic).iter().zip(&parts(&rpc_rdma)) {
        differences("", rnic, rpc_rdma, &mut complaints);
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// Adds the keys that both tables have with another value, but for paths.
fn differences(key: &str, one: &Value, other: &Value, found: &mut Vec<String>) {
    let (Value::Table(one), Value::Table(other)) = (one, other) else {
        if one != other {
            found.push(format!("{key}: {one:?}, and {other:?}"));
        }
        return;
    };
    for (name, one) in one.iter().filter(|(name, _)| *name != "path") {
        if let Some(other) = other.get(name) {
            differences(&format!("{key}.{name}"), one, other, found);
        }
    }
}

/// A dependency of both workspaces has one version in their lock files, unless its releases are
/// incompatible.
#[test]
fn lock_files_agree() {
    let [rnic, rpc_rdma] = WORKSPACES.map(|workspace| locked(&tree().join(workspace)));
    let both = rnic
        .iter()
        .filter_map(|(name, version)| Some((name, version, rpc_rdma.get(name)?)));
    let complaints: Vec<_> = both.filter(|(_, one, other)| one != other).collect();
    assert!(complaints.is_empty(), "{complaints:?}");
}

/// The versions in the lock file of this workspace, by name and compatible releases.
fn locked(workspace: &Path) -> BTreeMap<(String, String), String> {
    let text = std::fs::read_to_string(workspace.join("Cargo.lock")).expect("a lock file");
    let lock: Table = text.parse().expect("TOML");
    let packages = lock["package"].as_array().expect("an array");
    let text = |package: &Value, key: &str| package[key].as_str().expect("a string").to_owned();
    let key = |package: &Value| {
        let version = text(package, "version");
        let end = version.find(|c| !matches!(c, '0' | '.')).unwrap_or(0) + 1;
        let compatible = version[..end].to_owned() + version[end..].split('.').next().unwrap_or("");
        ((text(package, "name"), compatible), version)
    };
    packages.iter().map(key).collect()
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
            "verbs-api/device-checks",
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
        let is_test = ["verbs-api/device-checks", "tests", "fuzz"].contains(&folder);
        let uses = dependencies.contains_key("urnic-testkit");
        assert!(is_test || !uses, "{folder} depends on the testkit");
    }
}
