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

/// The providers that use connections, and libfabric's files of tests that it excludes for them.
const CONNECTED: [(&str, &str); 2] = [
    ("verbs", "verbs/verbs.exclude"),
    ("verbs;ofi_rxm", "ofi_rxm/ofi_rxm.exclude"),
];

/// A fabtest that fails, and the reason.
struct Known {
    test: &'static str,
    identities: &'static [&'static str],
    reason: &'static str,
}

impl Known {
    fn is(&self, identity: &str, name: &str) -> bool {
        name.starts_with(self.test) && self.identities.contains(&identity)
    }
}

/// Fabtests that fail on every device of these identities under Linux. docs/reference/programs.md
/// has them, too.
const KNOWN: [Known; 3] = [
    Known {
        test: "fi_msg_sockets",
        identities: &["iwarp", "roce"],
        reason: "libfabric resolves the address of an id twice, which Linux refuses with EINVAL",
    },
    Known {
        test: "fi_shared_ctx -e msg --no-tx-shared-ctx",
        identities: &["iwarp", "roce"],
        reason: "the server of fi_msg_sockets still listens, at the same port",
    },
    Known {
        test: "fi_cq_data -e rdm",
        identities: &["iwarp"],
        reason: "libfabric gives iWARP no immediate data",
    },
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

/// Runs libfabric's quick tests with devices of this identity over these providers, each with the
/// file of its exclusions; their results become the table of this name.
fn quick_fabtests(name: &str, identity: &str, providers: &[(&str, &str)]) {
    let folder = or_skip!(script("fabtests", &[]));
    // libfabric's verbs provider takes no address of the loopback interface.
    let [host, _peer] = or_skip!(Netns::pair());
    let path = std::env::var("PATH").unwrap_or_default();
    let mut table = Table::new(
        name,
        &format!(
            "libfabric's own quick tests, between two programs of this machine with the identity {identity}, without those that libfabric excludes for its providers"
        ),
        &["provider", "test", "result", ""],
    );
    let mut wrong = Vec::new();
    for (provider, excluded) in providers {
        let program = Program::new(format!("{folder}/bin/runfabtests.sh"))
            .env("URNIC_IDENTITY", identity)
            .env("PATH", format!("{folder}/bin:{path}"))
            .env("LD_LIBRARY_PATH", format!("{folder}/lib"))
            .line("-t quick -T 300 -vv -s 10.77.0.1 -c 10.77.0.1 -f")
            .arg(format!("{folder}/share/fabtests/test_configs/{excluded}"))
            .arg(provider);
        // It makes temporary files where it runs.
        let program = program.through(["env".into(), "--chdir".into(), scratch().into_os_string()]);
        // It kills each program of the machine whose name begins with `fi_`.
        let program = program.through(["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]);
        let printed = host.program(program).run_for(LIMIT).output;
        let results = results(&printed);
        let passed = results.iter().filter(|(_, result)| result == "Pass").count();
        assert!(passed >= 20, "{provider}: {passed} passed\n{printed}");
        for (name, result) in &results {
            let known = KNOWN.iter().find(|known| known.is(identity, name));
            let reason = match (result.as_str(), known) {
                ("Pass" | "Excluded" | "Notrun", _) => "",
                (_, Some(known)) => known.reason,
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

#[test]
#[ignore = "make interop"]
fn quick_fabtests_pass_but_for_those_that_cannot() {
    quick_fabtests("fabtests", "iwarp", &CONNECTED);
}

#[test]
#[ignore = "make interop"]
fn quick_fabtests_of_a_roce_nic_pass_but_for_those_that_cannot() {
    quick_fabtests("fabtests-roce", "roce", &CONNECTED);
}

#[test]
#[ignore = "make interop"]
fn quick_fabtests_over_datagrams_pass() {
    let over_datagrams = [("verbs;ofi_rxd", "ofi_rxd/ofi_rxd.exclude")];
    quick_fabtests("fabtests-datagrams", "roce", &over_datagrams);
}
