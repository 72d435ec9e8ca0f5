//! Objects, their limits, and rejected arguments.

use std::sync::Arc;

use rustix::io::Errno;
use urnic_device::vocabulary::{Access, QpState};
use urnic_driver::{Anywhere, QpAttr, QpCaps, QpInit, QpMask};

use super::program::{DRIVER, Program, ReceivedEvents, mask};

#[test]
fn attributes_and_addresses_come_from_the_device() {
    let attributes = DRIVER.attributes();
    assert!(
        attributes.max_qp > 0 && attributes.max_cqe > 0 && attributes.max_sge > 0 && attributes.max_ird > 0
    );
    assert!(attributes.completion_vectors > 0);
    assert!(!DRIVER.gids().is_empty());
    let [.., high, low] = DRIVER.gids()[0].raw();
    assert_eq!(DRIVER.lid(), u16::from_be_bytes([high, low]));
    assert_eq!(DRIVER.port_gids().len(), DRIVER.gids().len());
}

#[test]
fn objects_in_use_cannot_be_destroyed() {
    let program = Program::new(&DRIVER);
    let qp = program.qp();
    assert_eq!(
        program.cq.destroy().map_err(|refusal| refusal.errno),
        Err(Errno::BUSY)
    );
    assert_eq!(DRIVER.free_pd(&program.pd), Err(Errno::BUSY));
    qp.qp.destroy().unwrap();
    program.close();
}

#[test]
fn completion_queue_limits_are_checked() {
    let context = DRIVER.open_context(Arc::new(ReceivedEvents::default())).unwrap();
    let attributes = DRIVER.attributes();
    let make = |entries, vector| {
        DRIVER
            .create_cq(&context, entries, vector, 0, true, &Anywhere)
            .map(|cq| cq.destroy().unwrap())
            .map_err(|refusal| refusal.errno)
    };
    assert_eq!(make(0, 0), Err(Errno::INVAL));
    assert_eq!(make(attributes.max_cqe + 1, 0), Err(Errno::INVAL));
    assert_eq!(make(1, attributes.completion_vectors), Err(Errno::INVAL));
    assert_eq!(make(1, attributes.completion_vectors - 1), Ok(()));
    assert_eq!(make(attributes.max_cqe, 0), Ok(()));
    DRIVER.close_context(&context).unwrap();
}

#[test]
fn queue_pairs_are_at_least_as_large_as_requested() {
    let program = Program::new(&DRIVER);
    let attributes = DRIVER.attributes();
    let make = |caps| {
        let init = QpInit {
            kind: urnic_device::vocabulary::QpKind::ReliableConnected,
            context: &program.context,
            pd: &program.pd,
            send_cq: &program.cq,
            recv_cq: &program.cq,
            srq: None,
            caps,
            cookie: 0,
            rings: &Anywhere,
        };
        DRIVER.create_qp(&init).map_err(|refusal| refusal.errno)
    };
    let most = QpCaps {
        max_send_wr: attributes.max_qp_wr,
        max_recv_wr: attributes.max_qp_wr,
        max_send_sge: attributes.max_sge,
        max_recv_sge: attributes.max_sge,
        max_inline: attributes.max_inline,
    };
    let odd = QpCaps {
        max_send_wr: 3,
        max_recv_wr: 5,
        max_send_sge: 3,
        max_recv_sge: 7,
        max_inline: 33,
    };
    for requested in [QpCaps::default(), odd, most] {
        let qp = make(requested).unwrap();
        let got = qp.caps();
        assert!(got.max_send_wr >= requested.max_send_wr && got.max_send_wr <= attributes.max_qp_wr);
        assert!(got.max_recv_wr >= requested.max_recv_wr && got.max_recv_wr <= attributes.max_qp_wr);
        assert!(got.max_send_sge >= requested.max_send_sge && got.max_send_sge <= attributes.max_sge);
        assert!(got.max_recv_sge >= requested.max_recv_sge && got.max_recv_sge <= attributes.max_sge);
        assert!(got.max_inline >= requested.max_inline && got.max_inline <= attributes.max_inline);
        qp.destroy().unwrap();
    }
    for caps in [
        QpCaps {
            max_send_wr: attributes.max_qp_wr + 1,
            ..odd
        },
        QpCaps {
            max_recv_wr: attributes.max_qp_wr + 1,
            ..odd
        },
        QpCaps {
            max_send_sge: attributes.max_sge + 1,
            ..odd
        },
        QpCaps {
            max_recv_sge: attributes.max_sge + 1,
            ..odd
        },
        QpCaps {
            max_inline: attributes.max_inline + 1,
            ..odd
        },
    ] {
        assert_eq!(make(caps).map(drop), Err(Errno::INVAL));
    }
    program.close();
}

#[test]
fn a_new_queue_pair_is_in_init_and_reaches_rts() {
    let program = Program::new(&DRIVER);
    let a = program.qp();
    assert_eq!(
        a.state(),
        QpState::Init,
        "the state that an RNIC reports after creation"
    );
    let attr = a.attr(&DRIVER, 0, (a.qp.qpn ^ 1, 1));
    let go = |state: QpState, mask: QpMask| {
        let attr = QpAttr {
            state: state as u32,
            ..attr
        };
        a.qp.modify(&attr, mask).map_err(|refusal| refusal.errno)
    };
    assert_eq!(a.qp.modify(&attr, QpMask::empty()), Ok(()));
    assert_eq!(go(QpState::Rtr, mask(QpState::Rtr)), Err(Errno::INVAL));
    assert_eq!(go(QpState::Init, QpMask::STATE), Err(Errno::INVAL));
    assert_eq!(go(QpState::Init, mask(QpState::Init)), Ok(()));
    assert_eq!(go(QpState::Rts, mask(QpState::Rts)), Err(Errno::INVAL));
    assert_eq!(go(QpState::Rtr, mask(QpState::Rtr)), Ok(()));
    assert_eq!(go(QpState::Rts, mask(QpState::Rts)), Ok(()));
    assert_eq!(a.state(), QpState::Rts);
    let set = a.qp.query().unwrap();
    assert_eq!(
        (set.dest_qpn, set.rq_psn, set.sq_psn, set.av),
        (attr.dest_qpn, attr.rq_psn, attr.sq_psn, attr.av)
    );
    assert_eq!(
        (
            set.max_rd_atomic,
            set.max_dest_rd_atomic,
            set.timeout,
            set.rnr_retry
        ),
        (4, 4, 14, 7)
    );
    assert_eq!(go(QpState::Err, QpMask::STATE), Ok(()));
    assert_eq!(a.state(), QpState::Err);
    assert_eq!(go(QpState::Rts, mask(QpState::Rts)), Err(Errno::INVAL));
    assert_eq!(go(QpState::Reset, QpMask::STATE), Ok(()));
    assert_eq!(go(QpState::Init, mask(QpState::Init)), Ok(()));
    a.qp.destroy().unwrap();
    program.close();
}

#[test]
fn addresses_without_a_peer_are_invalid() {
    let program = Program::new(&DRIVER);
    let a = program.qp();
    let attr = a.attr(&DRIVER, 0, (a.qp.qpn ^ 1, 1));
    a.to(QpState::Init, &attr);
    let mut bad_gid_index = attr;
    bad_gid_index.av.sgid_index = 255;
    let mut no_address = attr;
    no_address.av.is_global = false;
    let no_port = QpAttr { dest_qpn: 17, ..attr };
    for bad in [bad_gid_index, no_address, no_port] {
        let bad = QpAttr {
            state: QpState::Rtr as u32,
            ..bad
        };
        assert_eq!(
            a.qp.modify(&bad, mask(QpState::Rtr))
                .map_err(|refusal| refusal.errno),
            Err(Errno::INVAL),
            "{bad:?}"
        );
    }
    a.to(QpState::Rtr, &attr);
    a.qp.destroy().unwrap();
    program.close();
}

#[test]
fn registrations_are_checked() {
    let program = Program::new(&DRIVER);
    let mut memory = vec![0u8; 10_000];
    let addr = memory.as_mut_ptr();
    let register = |addr: *mut u8, len, access| {
        let base = addr.addr() as u64;
        DRIVER
            .register(&program.pd, addr.cast(), len, base, access)
            .map(|mr| DRIVER.deregister(&mr).unwrap())
    };
    assert_eq!(register(addr, 10_000, Access::LOCAL_WRITE), Ok(()));
    assert_eq!(register(addr, 10_000, Access::REMOTE_READ), Ok(()));
    assert_eq!(register(addr, 10_000, Access::REMOTE_WRITE), Err(Errno::INVAL));
    assert_eq!(
        register(std::ptr::without_provenance_mut(4096), 1, Access::LOCAL_WRITE),
        Err(Errno::FAULT)
    );
    let mr = DRIVER
        .register(&program.pd, addr.cast(), 100, 0, Access::LOCAL_WRITE)
        .unwrap();
    assert_eq!(DRIVER.free_pd(&program.pd), Err(Errno::BUSY));
    DRIVER.deregister(&mr).unwrap();
    program.close();
}

#[test]
fn a_thousand_rounds_leak_no_descriptor() {
    let open_fds = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = || {
        let program = Program::new(&DRIVER);
        let qp = program.qp();
        qp.qp.destroy().unwrap();
        program.close();
    };
    round();
    let before = open_fds();
    (0..1000).for_each(|_| round());
    // Other tests of this process open and close fds; a leak of one per round would be larger.
    assert!(open_fds() < before + 700);
}
