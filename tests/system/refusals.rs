//! Arguments that verbs refuse: the error number of each, and the line of the log that names the
//! argument. docs/reference/attributes.md has the tables.

use std::fs;

use serde_json::Value;
use urnic_testkit::Folder;
use urnic_tests::program::Program;
use urnic_tests::{compiled, or_skip};

/// What tests/programs/limits.c calls, the error numbers with `--identity iwarp` and `roce`, and
/// what the warning names; nothing: there is none.
const REFUSALS: [(&str, [i32; 2], &str); 39] = [
    (
        "create_qp send_cq",
        [22, 22],
        "ibv_create_qp: send_cq is missing (EINVAL)",
    ),
    (
        "create_qp recv_cq",
        [22, 22],
        "ibv_create_qp: recv_cq is missing (EINVAL)",
    ),
    ("create_qp qp_type 99", [22, 22], "ibv_create_qp: qp_type is 99: "),
    (
        "create_qp UD",
        [95, 0],
        "iWARP has no UD queue pairs: --identity roce (EOPNOTSUPP)",
    ),
    (
        "create_qp UC",
        [95, 0],
        "iWARP has no UC queue pairs: --identity roce (EOPNOTSUPP)",
    ),
    ("create_qp max_send_wr", [22, 22], "ibv_create_qp: max_send_wr "),
    ("create_qp max_recv_wr", [22, 22], "ibv_create_qp: max_recv_wr "),
    ("create_qp max_recv_wr with an SRQ", [0, 0], ""),
    ("create_qp max_send_sge", [22, 22], "ibv_create_qp: max_send_sge "),
    ("create_qp max_recv_sge", [22, 22], "ibv_create_qp: max_recv_sge "),
    ("create_qp max_recv_sge with an SRQ", [0, 0], ""),
    ("create_qp max_inline_data", [22, 22], ""),
    ("create_cq cqe 0", [22, 22], "ibv_create_cq: cqe is 0"),
    ("create_cq cqe", [22, 22], "ibv_create_cq: cqe "),
    (
        "create_cq comp_vector",
        [22, 22],
        "ibv_create_cq: comp_vector is ",
    ),
    ("create_cq channel", [22, 22], "ibv_create_cq: channel is not "),
    ("resize_cq cqe 0", [22, 22], "ibv_resize_cq: cqe is 0"),
    ("resize_cq cqe", [22, 22], "ibv_resize_cq: cqe "),
    ("create_srq max_wr 0", [22, 22], "ibv_create_srq: max_wr is 0"),
    ("create_srq max_wr", [22, 22], "ibv_create_srq: max_wr "),
    ("create_srq max_sge", [22, 22], "ibv_create_srq: max_sge "),
    ("create_srq srq_limit", [0, 0], ""),
    (
        "modify_srq srq_limit",
        [22, 22],
        "ibv_modify_srq: srq_limit 1048576, max_wr is ",
    ),
    ("modify_srq max_wr", [95, 95], ""),
    (
        "modify_srq mask",
        [22, 22],
        "ibv_modify_srq: srq_attr_mask has bits",
    ),
    (
        "modify_qp port_num 2",
        [22, 22],
        "ibv_modify_qp to INIT refused: port_num is 2: ",
    ),
    (
        "modify_qp without the port",
        [22, 22],
        "ibv_modify_qp to INIT refused: IBV_QP_PORT is missing",
    ),
    (
        "modify_qp with a timeout",
        [22, 22],
        "ibv_modify_qp to INIT refused: IBV_QP_TIMEOUT cannot be set from RESET to INIT",
    ),
    (
        "modify_qp rate limit",
        [95, 95],
        "ibv_modify_qp: attr_mask has bits",
    ),
    ("modify_qp to INIT", [0, 0], ""),
    (
        "modify_qp without min_rnr_timer",
        [22, 22],
        "ibv_modify_qp to RTR refused: IBV_QP_MIN_RNR_TIMER is missing (EINVAL)",
    ),
    (
        "modify_qp to the port 2",
        [22, 22],
        "ibv_modify_qp to RTR refused: ah_attr.port_num is 2: ",
    ),
    (
        "post_send in INIT",
        [22, 22],
        "ibv_post_send: nothing can be posted in state INIT",
    ),
    (
        "post_recv num_sge",
        [22, 22],
        "ibv_post_recv: num_sge 1000, max_recv_sge is ",
    ),
    (
        "post_srq_recv num_sge",
        [22, 22],
        "ibv_post_srq_recv: num_sge 1000, max_sge is ",
    ),
    (
        "reg_mr remote write",
        [22, 22],
        "ibv_reg_mr: REMOTE_WRITE needs LOCAL_WRITE (EINVAL)",
    ),
    // Libraries try what memory can be registered, so this is no warning.
    ("reg_mr unmapped", [14, 14], ""),
    (
        "destroy_cq in use",
        [16, 16],
        "ibv_destroy_cq: queue pairs still use it (EBUSY)",
    ),
    ("create_ah port 2", [22, 22], "ibv_create_ah: port_num is 2: "),
];

fn limits(identity: &str) -> Result<Program, String> {
    Ok(Program::new(compiled("limits")?).env("URNIC_IDENTITY", identity))
}

fn warnings(output: &str) -> Vec<&str> {
    let lines = output
        .lines()
        .filter(|line| line.contains(" WARN ") || line.contains("ERROR "));
    lines.collect()
}

#[test]
fn each_refused_argument_is_named_once() {
    for (at, identity) in ["iwarp", "roce"].into_iter().enumerate() {
        let output = or_skip!(limits(identity)).run().success();
        let mut expected = 0;
        for (call, errors, warning) in &REFUSALS {
            let line = format!("{call}: {}", errors[at]);
            assert_eq!(
                output.lines().filter(|said| *said == line).count(),
                2,
                "{line}\n{output}"
            );
            if !warning.is_empty() && errors[at] != 0 {
                expected += 1;
                assert!(
                    warnings(&output)
                        .iter()
                        .any(|line| line.contains(warning) && line.contains("(limits.c:")),
                    "{warning}\n{output}"
                );
            }
        }
        assert_eq!(warnings(&output).len(), expected, "{output}");
    }
}

#[test]
fn probes_and_an_option_are_silent() {
    let probe = or_skip!(limits("iwarp")).arg("probe").run().success();
    assert_eq!(warnings(&probe), Vec::<&str>::new());
    let silenced = or_skip!(limits("iwarp"))
        .env("URNIC_REFUSALS", "false")
        .run()
        .success();
    assert_eq!(warnings(&silenced), Vec::<&str>::new());
    let informed = or_skip!(limits("iwarp")).env("URNIC_LOG", "info").run().success();
    let unmapped = "ibv_reg_mr: a page between addr and addr + length is not mapped";
    let mut lines = informed.lines();
    assert!(
        lines.any(|line| line.contains(" INFO ") && line.contains(unmapped)),
        "{informed}"
    );
}

#[test]
fn warnings_cost_the_program_no_memory() {
    let output = or_skip!(limits("roce")).run().success();
    let peak = output.lines().find_map(|line| line.strip_prefix("KiB: "));
    let peak: u64 = peak.expect("a peak").parse().expect("a number");
    // The plug-in's own debug information alone takes more.
    assert!(peak < 16 << 10, "{output}");
}

#[test]
fn the_report_has_each_refusal_with_its_place() {
    let folder = Folder::new("refusals");
    let path = folder.path().join("report.json");
    or_skip!(limits("iwarp"))
        .env("URNIC_REPORT", &path)
        .run()
        .success();
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let of_verb = |verb: &str| {
        let all = report["refusals"].as_array().unwrap();
        all.iter()
            .find(|refusal| refusal["verb"] == verb)
            .cloned()
            .unwrap()
    };
    let region = of_verb("ibv_reg_mr");
    assert_eq!(
        region["text"],
        "ibv_reg_mr: REMOTE_WRITE needs LOCAL_WRITE (EINVAL)"
    );
    assert_eq!(
        (&region["errno"], &region["count"]),
        (&"EINVAL".into(), &2.into())
    );
    assert!(
        region["backtrace"][0]
            .as_str()
            .unwrap()
            .starts_with("queue_pair (limits.c:"),
        "{region}"
    );
    let last = &report["devices"][0]["last_refusal"];
    assert_eq!(last["verb"], "ibv_create_ah", "{report}");
}
