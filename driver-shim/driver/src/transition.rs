//! The state transitions of a queue pair and their attributes: the table of `ibv_modify_qp(3)`
//! (InfiniBand Architecture Specification vol. 1, table "QP state transition properties").
//!
//! A queue pair of an RNIC closes its stream in SQD (RDMAC Verbs; conformance VRB-Q-03), and a
//! connection manager moves it to RTS. A queue pair of a RoCE NIC drains its send queue in SQD, and
//! may return to RTS.

use urnic_device::vocabulary::{QpKind, QpState};

use urnic_cm::qp_attr::{QpAttr, QpMask};
use urnic_config::Identity;

use crate::refusal::{Reason, Refusal, at_most};

/// The attributes that only reliable connections have.
const OF_RELIABLE: QpMask = QpMask::MAX_DEST_RD_ATOMIC
    .union(QpMask::MIN_RNR_TIMER)
    .union(QpMask::TIMEOUT)
    .union(QpMask::RETRY_CNT)
    .union(QpMask::RNR_RETRY)
    .union(QpMask::MAX_QP_RD_ATOMIC);

/// The attributes to use of those that the connection manager of a RoCE NIC gave the program. The
/// connection manager knows ids and not queue pairs, so it gives those of a reliable connection.
pub(crate) fn of_manager(kind: QpKind, mask: QpMask) -> QpMask {
    match kind {
        QpKind::UnreliableConnected => mask - OF_RELIABLE,
        QpKind::ReliableConnected | QpKind::UnreliableDatagram => mask,
    }
}

/// The attributes that a transition needs, and those that it also allows.
fn attributes(rules: &Rules, from: QpState, to: QpState) -> Option<(QpMask, QpMask)> {
    match rules.kind {
        QpKind::ReliableConnected => of_reliable(rules.identity, from, to),
        QpKind::UnreliableConnected => of_unreliable(from, to),
        QpKind::UnreliableDatagram => of_datagrams(from, to),
    }
}

fn of_datagrams(from: QpState, to: QpState) -> Option<(QpMask, QpMask)> {
    use QpMask as M;
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let names = M::PKEY_INDEX | M::PORT | M::QKEY;
    let none = M::empty();
    Some(match (from, to) {
        (Reset, Err) => return None,
        (_, Reset | Err) => (none, none),
        (Reset, Init) => (names, none),
        (Init, Init) => (none, names),
        (Init, Rtr) => (none, M::PKEY_INDEX | M::QKEY),
        (Rtr, Rts) => (M::SQ_PSN, M::CUR_STATE | M::QKEY),
        (Rts | Sqd | Sqe, Rts) => (none, M::CUR_STATE | M::QKEY),
        (Rts, Sqd) => (none, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => (none, M::PKEY_INDEX | M::QKEY),
        _ => return None,
    })
}

fn of_unreliable(from: QpState, to: QpState) -> Option<(QpMask, QpMask)> {
    use QpMask as M;
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let names = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    let changed = M::ALT_PATH | M::ACCESS_FLAGS | M::PATH_MIG_STATE;
    let optional = changed | M::CUR_STATE;
    let none = M::empty();
    Some(match (from, to) {
        (Reset, Err) => return None,
        (_, Reset | Err) => (none, none),
        (Reset, Init) => (names, none),
        (Init, Init) => (none, names),
        (Init, Rtr) => (
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN,
            M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX,
        ),
        (Rtr, Rts) => (M::SQ_PSN, optional),
        (Rts | Sqd, Rts) => (none, optional),
        (Sqe, Rts) => (none, M::CUR_STATE | M::ACCESS_FLAGS),
        (Rts, Sqd) => (none, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Sqd) => (none, changed | M::AV | M::PKEY_INDEX),
        _ => return None,
    })
}

fn of_reliable(identity: Identity, from: QpState, to: QpState) -> Option<(QpMask, QpMask)> {
    use QpMask as M;
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
    let optional = M::CUR_STATE | M::ALT_PATH | M::ACCESS_FLAGS | M::MIN_RNR_TIMER | M::PATH_MIG_STATE;
    let names = M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
    let none = M::empty();
    Some(match (from, to) {
        (Reset, Err) if identity.is_roce() => return None,
        (_, Reset | Err) => (none, none),
        (Reset, Init) => (names, none),
        (Init, Init) => (none, names),
        (Init, Rtr) => (
            M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
            M::ALT_PATH | M::ACCESS_FLAGS | M::PKEY_INDEX,
        ),
        (Rtr, Rts) => (
            M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::SQ_PSN | M::MAX_QP_RD_ATOMIC,
            optional,
        ),
        (Rts, Rts) => (none, optional),
        (Rts, Sqd) => (none, M::EN_SQD_ASYNC_NOTIFY),
        (Sqd, Rts) if identity.is_roce() => (none, optional),
        (Sqe, Rts) if identity.is_roce() => (none, none),
        (Sqd, Sqd) if identity.is_roce() => (
            none,
            names
                | M::AV
                | M::TIMEOUT
                | M::RETRY_CNT
                | M::RNR_RETRY
                | M::MAX_QP_RD_ATOMIC
                | M::MAX_DEST_RD_ATOMIC
                | M::ALT_PATH
                | M::MIN_RNR_TIMER
                | M::PATH_MIG_STATE,
        ),
        _ => return None,
    })
}

/// Checks a change of a queue pair in state `from`. Returns the new state.
///
/// # Errors
/// `EINVAL` if the transition does not exist, a needed attribute is missing, an attribute is not
/// allowed, or a value is out of range.
pub(crate) fn check(rules: &Rules, from: QpState, attr: &QpAttr, mask: QpMask) -> Result<QpState, Refusal> {
    let to = if mask.contains(QpMask::STATE) {
        let state = QpState::from_raw(attr.state);
        state.ok_or_else(|| one_of("qp_state", attr.state, "the states end with ERR, 6"))?
    } else {
        from
    };
    if mask.contains(QpMask::CUR_STATE) && QpState::from_raw(attr.cur_state) != Some(from) {
        let (is, given) = (from, attr.cur_state);
        return Err(Reason::OtherState { is, given }.invalid());
    }
    // The two steps of an RNIC's connection manager: the change to RTR, which names no peer, and
    // the change to RTS, which names only the port.
    let managed = (from, to) == (QpState::Init, QpState::Rtr) && mask == QpMask::RTR_BY_MANAGER;
    if !rules.identity.is_roce() && (managed || mask == QpMask::PORT) {
        return check_values(attr, mask, rules).map(|()| to);
    }
    let (needed, allowed) = attributes(rules, from, to).ok_or(Reason::NoTransition { from, to }.invalid())?;
    let given = mask - QpMask::STATE;
    let (missing, superfluous) = (needed - given, given - (needed | allowed));
    if !missing.is_empty() {
        return Err(Reason::Missing(missing).invalid());
    }
    if !superfluous.is_empty() {
        let attributes = superfluous;
        return Err(Reason::Superfluous { from, to, attributes }.invalid());
    }
    check_values(attr, mask, rules).map(|()| to)
}

/// The values on which the transitions of a queue pair depend.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules {
    pub(crate) identity: Identity,
    pub(crate) kind: QpKind,
    /// The device's limit on outstanding outbound Reads and atomics.
    pub(crate) ord: u32,
}

fn one_of(argument: &'static str, given: u32, valid: &'static str) -> Refusal {
    let given = given.into();
    Reason::Invalid {
        argument,
        given,
        valid,
    }
    .invalid()
}

/// Checks the attributes that the mask names: programs leave the others uninitialised, and valgrind
/// complains about a branch on those. The checks are those of Linux's uverbs layer and of rxe;
/// docs/reference/attributes.md compares them. Other values are used as far as the device can: PSNs
/// and numbers of queue pairs have 24 bits, `min_rnr_timer` has five, and `max_dest_rd_atomic` ends
/// at the device's limit.
fn check_values(attr: &QpAttr, mask: QpMask, rules: &Rules) -> Result<(), Refusal> {
    const PORT: &str = "the device has port 1";
    if mask.contains(QpMask::PORT) && attr.port != 1 {
        return Err(one_of("port_num", attr.port.into(), PORT));
    }
    if mask.contains(QpMask::AV) && attr.av.port != 1 {
        return Err(one_of("ah_attr.port_num", attr.av.port.into(), PORT));
    }
    if mask.contains(QpMask::ALT_PATH) {
        return Err(Reason::Rule("IBV_QP_ALT_PATH: Ethernet has no alternate paths").invalid());
    }
    if mask.contains(QpMask::PATH_MTU) && !(1..=5).contains(&attr.path_mtu) {
        let valid = "1 is IBV_MTU_256, 5 is IBV_MTU_4096";
        return Err(one_of("path_mtu", attr.path_mtu, valid));
    }
    if mask.contains(QpMask::MAX_QP_RD_ATOMIC) {
        at_most("max_rd_atomic", attr.max_rd_atomic.into(), rules.ord.into())?;
    }
    if mask.contains(QpMask::TIMEOUT) && attr.timeout >= 32 {
        return Err(one_of("timeout", attr.timeout.into(), "the largest is 31"));
    }
    Ok(())
}

#[cfg(test)]
mod rows;

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    const RNIC: Rules = Rules {
        identity: Identity::Iwarp,
        kind: QpKind::ReliableConnected,
        ord: 16,
    };
    const ROCE: Rules = Rules {
        identity: Identity::Roce,
        ..RNIC
    };
    const UD: Rules = Rules {
        kind: QpKind::UnreliableDatagram,
        ..ROCE
    };
    const UC: Rules = Rules {
        kind: QpKind::UnreliableConnected,
        ..ROCE
    };
    const STATES: [QpState; 7] = [
        QpState::Reset,
        QpState::Init,
        QpState::Rtr,
        QpState::Rts,
        QpState::Sqd,
        QpState::Sqe,
        QpState::Err,
    ];

    fn attr(state: QpState) -> QpAttr {
        rows::plain(QpState::Reset, state)
    }

    /// The outcome of a change, without the reason of a refusal.
    fn check(rules: &Rules, from: QpState, attr: &QpAttr, mask: QpMask) -> Result<QpState, Errno> {
        super::check(rules, from, attr, mask).map_err(|refusal| refusal.errno)
    }

    #[test]
    fn transitions_to_rts_need_the_attributes_of_the_man_page() {
        let transitions = [
            (
                QpState::Reset,
                QpState::Init,
                QpMask::PKEY_INDEX | QpMask::PORT | QpMask::ACCESS_FLAGS,
            ),
            (
                QpState::Init,
                QpState::Rtr,
                QpMask::AV
                    | QpMask::PATH_MTU
                    | QpMask::DEST_QPN
                    | QpMask::RQ_PSN
                    | QpMask::MAX_DEST_RD_ATOMIC
                    | QpMask::MIN_RNR_TIMER,
            ),
            (
                QpState::Rtr,
                QpState::Rts,
                QpMask::TIMEOUT
                    | QpMask::RETRY_CNT
                    | QpMask::RNR_RETRY
                    | QpMask::SQ_PSN
                    | QpMask::MAX_QP_RD_ATOMIC,
            ),
        ];
        for (from, to, needed) in transitions {
            let mask = needed | QpMask::STATE;
            assert_eq!(check(&RNIC, from, &attr(to), mask), Ok(to));
            for missing in needed.iter() {
                assert_eq!(
                    check(&RNIC, from, &attr(to), mask - missing),
                    Err(Errno::INVAL),
                    "{to:?} without {missing:?}"
                );
            }
            assert_eq!(
                check(&RNIC, from, &attr(to), mask | QpMask::QKEY),
                Err(Errno::INVAL)
            );
        }
    }

    #[test]
    fn a_roce_nic_has_the_transitions_of_a_channel_adapter() {
        let step = |from, to, mask| check(&ROCE, from, &attr(to), QpMask::STATE | mask).is_ok();
        let none = QpMask::empty();
        assert!(step(QpState::Rts, QpState::Sqd, QpMask::EN_SQD_ASYNC_NOTIFY));
        assert!(step(QpState::Sqd, QpState::Rts, none));
        assert!(step(QpState::Sqd, QpState::Sqd, QpMask::AV | QpMask::TIMEOUT));
        assert!(step(QpState::Sqd, QpState::Err, none));
        assert!(!step(QpState::Sqd, QpState::Rts, QpMask::AV));
        assert!(!step(QpState::Init, QpState::Rts, none));
        // An RNIC's connection manager names no peer; that of a channel adapter does.
        let by_manager = QpMask::RTR_BY_MANAGER;
        assert!(!step(QpState::Init, QpState::Rtr, by_manager));
        assert!(step(QpState::Init, QpState::Rtr, QpMask::RTR_OF_CHANNEL_ADAPTER));
        assert!(step(QpState::Rtr, QpState::Rts, QpMask::RTS_OF_CHANNEL_ADAPTER));
        let port = check(&ROCE, QpState::Rts, &attr(QpState::Rts), QpMask::PORT);
        assert_eq!(port, Err(Errno::INVAL));
    }

    #[test]
    fn uc_13_unreliable_queue_pairs_need_fewer_attributes() {
        let step = |rules, from, to, mask| check(rules, from, &attr(to), QpMask::STATE | mask).is_ok();
        let none = QpMask::empty();
        let names = QpMask::PKEY_INDEX | QpMask::PORT;
        assert!(step(&UD, QpState::Reset, QpState::Init, names | QpMask::QKEY));
        assert!(!step(
            &UD,
            QpState::Reset,
            QpState::Init,
            names | QpMask::ACCESS_FLAGS
        ));
        assert!(step(&UD, QpState::Init, QpState::Rtr, none));
        assert!(!step(&UD, QpState::Init, QpState::Rtr, QpMask::AV));
        assert!(step(&UD, QpState::Rtr, QpState::Rts, QpMask::SQ_PSN));
        assert!(!step(&UD, QpState::Rtr, QpState::Rts, none));
        assert!(step(&UD, QpState::Sqe, QpState::Rts, none));
        let rtr = QpMask::AV | QpMask::PATH_MTU | QpMask::DEST_QPN | QpMask::RQ_PSN;
        assert!(step(
            &UC,
            QpState::Reset,
            QpState::Init,
            names | QpMask::ACCESS_FLAGS
        ));
        assert!(step(&UC, QpState::Init, QpState::Rtr, rtr));
        assert!(!step(
            &UC,
            QpState::Init,
            QpState::Rtr,
            rtr | QpMask::MIN_RNR_TIMER
        ));
        assert!(step(&UC, QpState::Rtr, QpState::Rts, QpMask::SQ_PSN));
        assert!(!step(
            &UC,
            QpState::Rtr,
            QpState::Rts,
            QpMask::SQ_PSN | QpMask::TIMEOUT
        ));
        for rules in [&UC, &UD] {
            assert!(step(rules, QpState::Rts, QpState::Sqd, none));
            assert!(step(rules, QpState::Sqd, QpState::Rts, none));
        }
    }

    #[test]
    fn transitions_of_the_connection_manager_name_no_peer() {
        let step = |from, attr: QpAttr, mask| check(&RNIC, from, &attr, mask);
        assert_eq!(
            step(QpState::Init, attr(QpState::Rtr), QpMask::RTR_BY_MANAGER),
            Ok(QpState::Rtr)
        );
        assert_eq!(
            step(QpState::Reset, attr(QpState::Rtr), QpMask::RTR_BY_MANAGER),
            Err(Errno::INVAL)
        );
        for state in STATES {
            assert_eq!(step(state, attr(QpState::Rts), QpMask::PORT), Ok(state));
            let wrong = QpAttr {
                port: 2,
                ..attr(QpState::Rts)
            };
            assert_eq!(step(state, wrong, QpMask::PORT), Err(Errno::INVAL));
        }
    }

    #[test]
    fn only_transitions_of_the_table_are_valid() {
        for from in STATES {
            for to in STATES {
                let any = QpMask::all().iter().map(Some).chain([None]);
                let legal = attributes(&RNIC, from, to).is_some();
                let up = matches!(
                    (from, to),
                    (QpState::Reset | QpState::Init, QpState::Init)
                        | (QpState::Init, QpState::Rtr)
                        | (QpState::Rtr | QpState::Rts, QpState::Rts)
                        | (QpState::Rts, QpState::Sqd)
                );
                assert_eq!(
                    legal,
                    up || matches!(to, QpState::Reset | QpState::Err),
                    "{from:?} to {to:?}"
                );
                if !legal {
                    for bit in any {
                        let mask = QpMask::STATE | bit.unwrap_or_default();
                        assert_eq!(check(&RNIC, from, &attr(to), mask), Err(Errno::INVAL));
                    }
                }
            }
        }
    }

    #[test]
    fn values_out_of_range_are_refused() {
        let init = QpMask::STATE | QpMask::PKEY_INDEX | QpMask::PORT | QpMask::ACCESS_FLAGS;
        let bad = [
            QpAttr {
                port: 2,
                ..attr(QpState::Init)
            },
            QpAttr {
                state: 9,
                ..attr(QpState::Init)
            },
        ];
        for attr in bad {
            assert_eq!(
                check(&RNIC, QpState::Reset, &attr, init),
                Err(Errno::INVAL),
                "{attr:?}"
            );
        }
        let wrong_state = QpAttr {
            cur_state: QpState::Rtr as u32,
            ..attr(QpState::Rts)
        };
        let mask = QpMask::CUR_STATE | QpMask::MIN_RNR_TIMER;
        assert_eq!(check(&RNIC, QpState::Rts, &wrong_state, mask), Err(Errno::INVAL));
        let right_state = QpAttr {
            cur_state: QpState::Rts as u32,
            ..wrong_state
        };
        assert_eq!(check(&RNIC, QpState::Rts, &right_state, mask), Ok(QpState::Rts));
    }
}
