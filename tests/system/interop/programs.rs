//! libfabric's own tests (fabtests) over its verbs provider; and the checks of rdma_cm ports, run
//! on soft-iWARP.

use std::time::Duration;

use urnic_tests::build::{compiled, scratch};
use urnic_tests::debian::script;
use urnic_tests::guest::{Guest, Packets};
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::program::Program;

use super::table::Table;

const LIMIT: Duration = Duration::from_secs(3600);

/// Fabtests that fail on every iWARP device under Linux, and the reason. docs/reference/programs.md
/// has them, too.
const KNOWN: [(&str, &str); 3] = [
    (
        "fi_msg_sockets",
        "libfabric resolves the address of an id twice, which Linux refuses with EINVAL",
    ),
    (
        "fi_shared_ctx -e msg --no-tx-shared-ctx",
        "the server of fi_msg_sockets still listens, at the same port",
    ),
    ("fi_cq_data -e rdm", "libfabric gives iWARP no immediate data"),
];

#[test]
#[ignore = "make interop"]
fn soft_iwarp_has_the_same_ports() {
    let guest = or_skip!(Guest::boot(1, 512, Packets::Passing));
    guest.bring(&or_skip!(compiled("cm_ports")), "/bin/cm_ports");
    guest.start("cm_ports 10.0.2.15").success();
}

/// Names and results of the tests, from the output of `runfabtests.sh -vv`.
fn results(printed: &str) -> Vec<(String, String)> {
    let mut name = None;
    let mut results = Vec::new();
    for line in printed.lines() {
        // A name may follow the last words of the test before.
        if let Some((_, named)) = line.split_once("- name:") {
            name = Some(named.trim().to_owned());
        } else if let (Some(result), Some(_)) = (line.trim().strip_prefix("result:"), &name) {
            results.extend(name.take().map(|name| (name, result.trim().to_owned())));
        }
    }
    results
}

#[test]
#[ignore = "make interop"]
fn quick_fabtests_pass_but_for_those_that_cannot() {
    let folder = or_skip!(script("fabtests", &[]));
    // libfabric's verbs provider takes no address of the loopback interface.
    let [host, _peer] = or_skip!(Netns::pair());
    let path = std::env::var("PATH").unwrap_or_default();
    let mut table = Table::new(
        "fabtests",
        "libfabric's own quick tests, between two programs of this machine, without those that libfabric excludes for its providers",
        &["provider", "test", "result", ""],
    );
    let mut wrong = Vec::new();
    for (provider, excluded) in [
        ("verbs", "verbs/verbs.exclude"),
        ("verbs;ofi_rxm", "ofi_rxm/ofi_rxm.exclude"),
    ] {
        let program = Program::new(format!("{folder}/bin/runfabtests.sh"))
            .env("PATH", format!("{folder}/bin:{path}"))
            .env("LD_LIBRARY_PATH", format!("{folder}/lib"))
            .line("-t quick -T 300 -vv -s 10.77.0.1 -c 10.77.0.1 -f")
            .arg(format!("{folder}/share/fabtests/test_configs/{excluded}"))
            .arg(provider);
        // It makes temporary files where it runs.
        let program = program.through(["env".into(), "--chdir".into(), scratch().into_os_string()]);
        let printed = host.program(program).run_for(LIMIT).output;
        let results = results(&printed);
        let passed = results.iter().filter(|(_, result)| result == "Pass").count();
        assert!(passed >= 20, "{provider}: {passed} passed\n{printed}");
        for (name, result) in &results {
            let known = KNOWN.iter().find(|(test, _)| name.starts_with(test));
            let reason = match (result.as_str(), known) {
                ("Pass" | "Excluded" | "Notrun", _) => "",
                (_, Some((_, reason))) => reason,
                _ => {
                    wrong.push(format!("{provider}: {name}: {result}"));
                    ""
                }
            };
            if result != "Excluded" {
                table.row(&[provider, name, result, reason]);
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
