//! The checks of each attribute, in the kernel and here: the source of
//! docs/reference/attributes.md, and tests of each row.
//!
//! `URNIC_REGENERATE=1 cargo test -p urnic-driver --lib rows` writes the page's generated parts.

use std::fmt::Write as _;
use std::path::Path;

use super::{Rules, attributes, check};
use crate::refusal::Reason;
use rustix::io::Errno;
use urnic_cm::qp_attr::{QpAttr, QpMask as M};
use urnic_config::Identity;
use urnic_device::vocabulary::QpKind;
use urnic_device::vocabulary::QpState::{self, Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
use urnic_process::addressing::AddressVector;

/// An attribute of `ibv_modify_qp(3)`: the checks of its value, and values that show them.
struct Row {
    /// The attribute's names in verbs.
    name: &'static str,
    mask: M,
    /// What Linux's uverbs layer checks.
    core: &'static str,
    /// What the driver rxe checks.
    rxe: &'static str,
    /// What the driver mlx5 checks.
    mlx5: &'static str,
    /// What urnic checks.
    urnic: &'static str,
    /// A change in which the attribute may be set.
    change: (QpState, QpState),
    set: fn(&mut QpAttr, u32),
    taken: &'static [u32],
    refused: &'static [u32],
}

const NOTHING: &str = "–";
const ORD: u32 = 16;

const ROWS: [Row; 19] = [
    Row {
        name: "`qp_state`",
        mask: M::STATE,
        core: "≤ ERR",
        rxe: NOTHING,
        mlx5: NOTHING,
        urnic: "≤ ERR",
        change: (Reset, Init),
        set: |attr, value| attr.state = value,
        taken: &[Init as u32],
        refused: &[7, u32::MAX],
    },
    Row {
        name: "`cur_qp_state`",
        mask: M::CUR_STATE,
        core: "≤ ERR; RTR, RTS, SQD or SQE",
        rxe: "taken for the state, whatever it is",
        mlx5: "the firmware compares it",
        urnic: "the state of the queue pair, as mlx5",
        change: (Rts, Rts),
        set: |attr, value| attr.cur_state = value,
        taken: &[Rts as u32],
        refused: &[Rtr as u32, 7],
    },
    Row {
        name: "`qp_access_flags`",
        mask: M::ACCESS_FLAGS,
        core: NOTHING,
        rxe: NOTHING,
        mlx5: "atomics, if the device has none",
        urnic: "nothing: unknown rights are ignored, as rxe does",
        change: (Reset, Init),
        set: |attr, value| attr.access = value,
        taken: &[0, 0xf, 1 << 8, 1 << 30, u32::MAX],
        refused: &[],
    },
    Row {
        name: "`pkey_index`",
        mask: M::PKEY_INDEX,
        core: NOTHING,
        rxe: NOTHING,
        mlx5: "within the table",
        urnic: "nothing, as rxe",
        change: (Reset, Init),
        set: |attr, value| attr.pkey_index = value as u16,
        taken: &[0, 1, 0xffff],
        refused: &[],
    },
    Row {
        name: "`port_num`",
        mask: M::PORT,
        core: "a port of the device",
        rxe: "a port of the device",
        mlx5: "a port of the device",
        urnic: "1",
        change: (Reset, Init),
        set: |attr, value| attr.port = value as u8,
        taken: &[1],
        refused: &[0, 2, 255],
    },
    Row {
        name: "`qkey`",
        mask: M::QKEY,
        core: NOTHING,
        rxe: NOTHING,
        mlx5: NOTHING,
        urnic: NOTHING,
        change: (Rts, Rts),
        set: |attr, value| attr.qkey = value,
        taken: &[0, u32::MAX],
        refused: &[],
    },
    Row {
        name: "`ah_attr` (`IBV_QP_AV`)",
        mask: M::AV,
        core: "`port_num` is that of the queue pair; RoCE: `is_global`, `sgid_index` within the table, `dgid` resolves",
        rxe: "`sgid_index` within the table",
        mlx5: "as uverbs",
        urnic: "`port_num` is 1; `sgid_index` within the table; `dgid` is an address, and with `roce` the host reaches it (else `ENETUNREACH`, `EHOSTUNREACH`, `ETIMEDOUT`). Without `is_global`, a LID \
                names an address (`--identity iwarp`) or this host (`roce`)",
        change: (Init, Rtr),
        set: |attr, value| attr.av.port = value as u8,
        taken: &[1],
        refused: &[0, 2],
    },
    Row {
        name: "`path_mtu`",
        mask: M::PATH_MTU,
        core: NOTHING,
        rxe: "≤ `IBV_MTU_4096`",
        mlx5: "`IBV_MTU_256` to `IBV_MTU_4096`",
        urnic: "`IBV_MTU_256` to `IBV_MTU_4096`, as mlx5: rxe takes 0 for an MTU of -1",
        change: (Init, Rtr),
        set: |attr, value| attr.path_mtu = value,
        taken: &[1, 3, 5],
        refused: &[0, 6, 4096],
    },
    Row {
        name: "`timeout`",
        mask: M::TIMEOUT,
        core: NOTHING,
        rxe: "≤ 31",
        mlx5: "uses five bits",
        urnic: "≤ 31, as rxe",
        change: (Rtr, Rts),
        set: |attr, value| attr.timeout = value as u8,
        taken: &[0, 14, 31],
        refused: &[32, 255],
    },
    Row {
        name: "`retry_cnt`",
        mask: M::RETRY_CNT,
        core: NOTHING,
        rxe: NOTHING,
        mlx5: "uses three bits",
        urnic: "nothing, as rxe",
        change: (Rtr, Rts),
        set: |attr, value| attr.retry_cnt = value as u8,
        taken: &[0, 7, 8, 255],
        refused: &[],
    },
    Row {
        name: "`rnr_retry`",
        mask: M::RNR_RETRY,
        core: NOTHING,
        rxe: "nothing: 7 has no limit, larger numbers are counts",
        mlx5: "uses three bits",
        urnic: "as rxe",
        change: (Rtr, Rts),
        set: |attr, value| attr.rnr_retry = value as u8,
        taken: &[0, 7, 8, 255],
        refused: &[],
    },
    Row {
        name: "`rq_psn`",
        mask: M::RQ_PSN,
        core: "RoCE: uses 24 bits",
        rxe: NOTHING,
        mlx5: NOTHING,
        urnic: "uses 24 bits",
        change: (Init, Rtr),
        set: |attr, value| attr.rq_psn = value,
        taken: &[0, 0xff_ffff, u32::MAX],
        refused: &[],
    },
    Row {
        name: "`max_rd_atomic` (`IBV_QP_MAX_QP_RD_ATOMIC`)",
        mask: M::MAX_QP_RD_ATOMIC,
        core: NOTHING,
        rxe: "≤ `max_qp_init_rd_atom`",
        mlx5: "≤ `max_qp_init_rd_atom`",
        urnic: "≤ `max_qp_init_rd_atom`",
        change: (Rtr, Rts),
        set: |attr, value| attr.max_rd_atomic = value as u8,
        taken: &[0, 1, ORD],
        refused: &[ORD + 1, 255],
    },
    Row {
        name: "`alt_ah_attr`, `alt_port_num`, `alt_timeout`, `alt_pkey_index` (`IBV_QP_ALT_PATH`)",
        mask: M::ALT_PATH,
        core: "the ports; on Ethernet always refused",
        rxe: "not reached",
        mlx5: "not reached",
        urnic: "always refused, as uverbs",
        change: (Rts, Rts),
        set: |_, _| (),
        taken: &[],
        refused: &[0],
    },
    Row {
        name: "`min_rnr_timer`",
        mask: M::MIN_RNR_TIMER,
        core: NOTHING,
        rxe: "nothing: uses five bits",
        mlx5: "nothing: uses five bits",
        urnic: "nothing: uses five bits; a query shows these, as with mlx5",
        change: (Init, Rtr),
        set: |attr, value| attr.min_rnr_timer = value as u8,
        taken: &[0, 31, 32, 255],
        refused: &[],
    },
    Row {
        name: "`sq_psn`",
        mask: M::SQ_PSN,
        core: "RoCE: uses 24 bits",
        rxe: NOTHING,
        mlx5: NOTHING,
        urnic: "uses 24 bits",
        change: (Rtr, Rts),
        set: |attr, value| attr.sq_psn = value,
        taken: &[0, 0xff_ffff, u32::MAX],
        refused: &[],
    },
    Row {
        name: "`max_dest_rd_atomic`",
        mask: M::MAX_DEST_RD_ATOMIC,
        core: NOTHING,
        rxe: NOTHING,
        mlx5: "≤ `max_qp_rd_atom`",
        urnic: "nothing, as rxe: more than `max_qp_rd_atom` becomes that, also in a query",
        change: (Init, Rtr),
        set: |attr, value| attr.max_dest_rd_atomic = value as u8,
        taken: &[0, 16, 17, 255],
        refused: &[],
    },
    Row {
        name: "`path_mig_state`",
        mask: M::PATH_MIG_STATE,
        core: NOTHING,
        rxe: NOTHING,
        mlx5: NOTHING,
        urnic: "nothing, and a query shows `IBV_MIG_MIGRATED`",
        change: (Rts, Rts),
        set: |_, _| (),
        taken: &[0],
        refused: &[],
    },
    Row {
        name: "`dest_qp_num`",
        mask: M::DEST_QPN,
        core: NOTHING,
        rxe: NOTHING,
        mlx5: "uses 24 bits",
        urnic: "uses 24 bits; a number less than 256 contains no port and is refused, except 1 with rdma_cm (`roce`)",
        change: (Init, Rtr),
        set: |attr, value| attr.dest_qpn = value,
        taken: &[0, 0xff_ffff, u32::MAX],
        refused: &[],
    },
];

/// An argument of a verb that creates or changes an object: the checks of its value.
struct Limit {
    verb: &'static str,
    argument: &'static str,
    rxe: &'static str,
    mlx5: &'static str,
    urnic: &'static str,
}

const fn limit(verb: &'static str, argument: &'static str, [rxe, mlx5, urnic]: [&'static str; 3]) -> Limit {
    Limit {
        verb,
        argument,
        rxe,
        mlx5,
        urnic,
    }
}

const ROUNDED: &str = "≤ `max_qp_wr`; the granted number is larger or equal";

/// The program tests/programs/limits.c shows these rows.
const LIMITS: [Limit; 17] = [
    limit(
        "`ibv_create_qp`",
        "`send_cq`, `recv_cq`",
        ["not null", "not null", "not null"],
    ),
    limit(
        "`ibv_create_qp`",
        "`qp_type`",
        [
            "EOPNOTSUPP but for RC, UC, UD",
            "EOPNOTSUPP but for RC, UC, UD and more",
            "EOPNOTSUPP but for RC; `--identity roce` also UC, UD; EINVAL for an unknown number",
        ],
    ),
    limit(
        "`ibv_create_qp`",
        "`max_send_wr`",
        ["≤ `max_qp_wr`", "ENOMEM or EINVAL beyond `max_qp_wr`", ROUNDED],
    ),
    limit(
        "`ibv_create_qp`",
        "`max_recv_wr`",
        [
            "≤ `max_qp_wr`; with an SRQ ignored",
            "≤ `max_qp_wr`; with an SRQ ignored",
            "≤ `max_qp_wr`; with an SRQ ignored",
        ],
    ),
    limit(
        "`ibv_create_qp`",
        "`max_send_sge`",
        ["≤ `max_sge`", "≤ `max_sge`", "≤ `max_sge`"],
    ),
    limit(
        "`ibv_create_qp`",
        "`max_recv_sge`",
        [
            "≤ `max_sge`; with an SRQ ignored",
            "≤ `max_sge`; with an SRQ ignored",
            "≤ `max_sge`; with an SRQ ignored",
        ],
    ),
    limit(
        "`ibv_create_qp`",
        "`max_inline_data`",
        [
            "≤ a limit that no attribute shows",
            "≤ a limit that no attribute shows",
            "≤ a limit that no attribute shows; no warning, since programs find it by trying",
        ],
    ),
    limit(
        "`ibv_create_cq`",
        "`cqe`",
        ["1 to `max_cqe`", "1 to `max_cqe`", "1 to `max_cqe`"],
    ),
    limit(
        "`ibv_create_cq`",
        "`comp_vector`",
        [
            "< `num_comp_vectors` (uverbs)",
            "< `num_comp_vectors` (uverbs)",
            "< `num_comp_vectors`",
        ],
    ),
    limit(
        "`ibv_create_cq`",
        "`channel`",
        [
            "an open channel (uverbs)",
            "an open channel (uverbs)",
            "an open channel",
        ],
    ),
    limit(
        "`ibv_resize_cq`",
        "`cqe`",
        [
            "1 to `max_cqe`, and at least the completions that wait",
            "as rxe",
            "as rxe",
        ],
    ),
    limit(
        "`ibv_modify_cq`",
        "`attr_mask`",
        ["EOPNOTSUPP", "moderation", "moderation; EOPNOTSUPP for more"],
    ),
    limit(
        "`ibv_create_srq`",
        "`max_wr`",
        ["1 to `max_srq_wr`", "≤ `max_srq_wr`", "1 to `max_srq_wr`, as rxe"],
    ),
    limit(
        "`ibv_create_srq`",
        "`max_sge`",
        ["≤ `max_srq_sge`", "≤ `max_srq_sge`", "≤ `max_srq_sge`"],
    ),
    limit(
        "`ibv_create_srq`",
        "`srq_limit`",
        ["≤ `max_wr`", "ignored", "ignored, as the manual page says"],
    ),
    limit(
        "`ibv_modify_srq`",
        "`srq_limit`",
        [
            "≤ `max_wr` of the queue",
            "≤ `max_wr` of the queue",
            "≤ `max_wr` of the queue",
        ],
    ),
    limit(
        "`ibv_modify_srq`",
        "`max_wr`",
        [
            "changes the size",
            "EINVAL",
            "EOPNOTSUPP: `IBV_DEVICE_SRQ_RESIZE` is not set",
        ],
    ),
];

fn rules(identity: Identity, kind: QpKind) -> Rules {
    Rules {
        identity,
        kind,
        ord: ORD,
    }
}

/// Values that all checks take, for a change to this state.
pub(super) fn plain(from: QpState, to: QpState) -> QpAttr {
    QpAttr {
        state: to as u32,
        cur_state: from as u32,
        port: 1,
        path_mtu: 3,
        av: AddressVector {
            port: 1,
            ..AddressVector::default()
        },
        ..QpAttr::default()
    }
}

#[test]
fn each_attribute_is_checked_as_its_row_says() {
    for identity in [Identity::Iwarp, Identity::Roce] {
        for row in &ROWS {
            let kind = match row.mask == M::QKEY {
                true => QpKind::UnreliableDatagram,
                false => QpKind::ReliableConnected,
            };
            let (from, to) = row.change;
            let rules = rules(identity, kind);
            let (needed, allowed) = attributes(&rules, from, to).unwrap();
            assert!((needed | allowed | M::STATE).contains(row.mask), "{}", row.name);
            let outcome = |value| {
                let mut attr = plain(from, to);
                (row.set)(&mut attr, value);
                check(&rules, from, &attr, needed | row.mask | M::STATE)
            };
            for &value in row.taken {
                assert_eq!(outcome(value), Ok(to), "{} {value}", row.name);
            }
            for &value in row.refused {
                let refusal = outcome(value).unwrap_err();
                assert_eq!(refusal.errno, Errno::INVAL, "{} {value}", row.name);
                assert!(refusal.reason.is_some(), "{} {value}", row.name);
            }
        }
    }
}

const STATES: [QpState; 7] = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
const KINDS: [(QpKind, &str); 3] = [
    (QpKind::ReliableConnected, "RC"),
    (QpKind::UnreliableConnected, "UC"),
    (QpKind::UnreliableDatagram, "UD"),
];

#[test]
fn missing_and_superfluous_attributes_are_named() {
    for (kind, _) in KINDS {
        let rules = rules(Identity::Roce, kind);
        for (from, to) in STATES.iter().flat_map(|from| STATES.map(|to| (*from, to))) {
            let attr = plain(from, to);
            let reason = |mask| check(&rules, from, &attr, mask | M::STATE).map_err(|r| r.reason);
            let Some((needed, allowed)) = attributes(&rules, from, to) else {
                let none = Reason::NoTransition { from, to };
                assert_eq!(reason(M::empty()), Result::Err(Some(none)));
                continue;
            };
            let refused = allowed.contains(M::ALT_PATH).then_some(M::ALT_PATH);
            let taken = allowed - refused.unwrap_or_default();
            assert_eq!(reason(needed | taken), Ok(to), "{kind:?} {from:?} {to:?}");
            for missing in needed.iter() {
                let missed = Reason::Missing(missing);
                assert_eq!(reason(needed - missing), Result::Err(Some(missed)));
            }
            for attributes in (M::all() - needed - allowed - M::STATE).iter() {
                let superfluous = Reason::Superfluous { from, to, attributes };
                assert_eq!(reason(needed | attributes), Result::Err(Some(superfluous)));
            }
        }
    }
}

/// The attributes, by their names in verbs without `IBV_QP_`.
fn named(attributes: M) -> String {
    let names: Vec<String> = attributes
        .iter_names()
        .map(|(name, _)| format!("`{name}`"))
        .collect();
    match names.is_empty() {
        true => NOTHING.to_owned(),
        false => names.join(", "),
    }
}

fn values() -> String {
    let mut page = "| attribute | uverbs | rxe | mlx5 | urnic |\n|---|---|---|---|---|\n".to_owned();
    for row in &ROWS {
        let Row {
            name,
            core,
            rxe,
            mlx5,
            urnic,
            ..
        } = row;
        let _ = writeln!(page, "| {name} | {core} | {rxe} | {mlx5} | {urnic} |");
    }
    page
}

fn transitions() -> String {
    let mut page = "| type | from | to | needed | also allowed |\n|---|---|---|---|---|\n".to_owned();
    for (kind, name) in KINDS {
        let rules = rules(Identity::Roce, kind);
        for (from, to) in STATES.iter().flat_map(|from| STATES.map(|to| (*from, to))) {
            // These need no attribute.
            if matches!(to, Reset | Err) {
                continue;
            }
            if let Some((needed, allowed)) = attributes(&rules, from, to) {
                let (from, to) = (from.verbs_name(), to.verbs_name());
                let (needed, allowed) = (named(needed), named(allowed));
                let _ = writeln!(page, "| {name} | {from} | {to} | {needed} | {allowed} |");
            }
        }
    }
    page
}

fn limits() -> String {
    let mut page = "| verb | argument | rxe | mlx5 | urnic |\n|---|---|---|---|---|\n".to_owned();
    for Limit {
        verb,
        argument,
        rxe,
        mlx5,
        urnic,
    } in &LIMITS
    {
        let _ = writeln!(page, "| {verb} | {argument} | {rxe} | {mlx5} | {urnic} |");
    }
    page
}

#[test]
fn the_page_has_these_rows() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/attributes.md");
    let mut page = std::fs::read_to_string(&path).unwrap();
    for (part, rows) in [
        ("values", values()),
        ("transitions", transitions()),
        ("limits", limits()),
    ] {
        let (start, end) = (format!("<!-- {part} -->\n"), format!("<!-- end of {part} -->\n"));
        let from = page.find(&start).unwrap() + start.len();
        let to = page.find(&end).unwrap();
        page.replace_range(from..to, &format!("\n{rows}\n"));
    }
    if std::env::var_os("URNIC_REGENERATE").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap() == page,
        "docs/reference/attributes.md differs from the rows: URNIC_REGENERATE=1 cargo test -p urnic-driver --lib rows"
    );
}
