//! The rules of the wire at a live process: a raw TCP peer is the other end of native connections,
//! in both roles, and compares the answers byte by byte. Tests carry the ids of the rows that they
//! show.

mod ddp;
mod hostile;
mod mpa_crc;
mod mpa_errors;
mod mpa_framing;
mod mpa_markers;
mod mpa_paths;
mod mpa_startup;
mod peers;
mod rdma_cm;
mod rdma_cm_calls;
mod rdma_cm_faults;
mod rdmap;
mod rdmap_terminate;

use urnic_tests::peer::End;
use urnic_tests::startup::{CRC, MARKERS};
use urnic_tests::target_process::{
    ARENA_SEED, Link, PAGE, QpParams, ROLES, Role, TargetProcess, event, filled, state, status,
};
use urnic_tests::ulpdu::{complaint, send, write};

/// The target's variables for flags M and C of its frames.
fn variables(flags: u8) -> Vec<(&'static str, &'static str)> {
    // The target warns that CRCs are off; its output must contain only the answers.
    let mut variables = vec![("URNIC_LOG", "off")];
    if flags & CRC == 0 {
        variables.push(("URNIC_MPA_CRC", "false"));
    }
    if flags & MARKERS != 0 {
        variables.push(("URNIC_MPA_MARKERS", "true"));
    }
    variables
}

/// The completions of the receives of a link that never took a message.
const ALL_FLUSHED: [(u64, u64); 4] = [
    (0, status::FLUSHED),
    (1, status::FLUSHED),
    (2, status::FLUSHED),
    (3, status::FLUSHED),
];

/// The completions of a link whose first message was to invalidate an STag, and may not.
const INVALIDATION_REFUSED: [(u64, u64); 4] = [
    (0, status::REM_INV_REQ_ERR),
    (1, status::FLUSHED),
    (2, status::FLUSHED),
    (3, status::FLUSHED),
];

/// A target, and one connection of it that no test misuses.
struct Scene {
    target: TargetProcess,
    bystander: Link,
    exchanges: u32,
}

impl Scene {
    fn start(variables: &[(&str, &str)]) -> Result<Self, String> {
        Self::around(TargetProcess::start(variables)?, CRC)
    }

    /// A scene whose target has these flags in its frames.
    fn with(flags: u8) -> Result<Self, String> {
        Self::around(TargetProcess::start(&variables(flags))?, flags)
    }

    fn around(mut target: TargetProcess, flags: u8) -> Result<Self, String> {
        let bystander = target.link_as(Role::Responder, &QpParams::default(), flags);
        Ok(Self {
            target,
            bystander,
            exchanges: 0,
        })
    }

    /// In both roles: the peer sends these ULPDUs, of which the last is at fault; the target
    /// reports that in a Terminate, sends FIN, flushes, and places nothing of the last ULPDU, or
    /// after it.
    #[track_caller]
    fn refuses(&mut self, error: u16, ulpdus: &[Vec<u8>]) {
        self.refuses_after(error, ulpdus, &ALL_FLUSHED);
    }

    /// In both roles: the peer sends these ULPDUs, of which the last is at fault; the target
    /// answers with a Terminate and makes these completions (identifier and status).
    #[track_caller]
    fn refuses_after(&mut self, error: u16, ulpdus: &[Vec<u8>], completions: &[(u64, u64)]) {
        for role in ROLES {
            let link = self.target.link(role);
            self.breaks(link, error, ulpdus, completions);
        }
        self.continues();
    }

    #[track_caller]
    fn breaks(&mut self, mut link: Link, error: u16, ulpdus: &[Vec<u8>], completions: &[(u64, u64)]) {
        let bytes = link.peer.framed(ulpdus);
        let last = ulpdus.last().map_or(&[][..], Vec::as_slice);
        self.breaks_by(&mut link, error, &bytes, last, completions);
        self.is_pristine();
    }

    /// Like [`Self::breaks`], with bytes that are not the MPA encoding of ULPDUs. `at_fault`: the
    /// ULPDU that the Terminate is about.
    #[track_caller]
    fn breaks_by(
        &mut self,
        link: &mut Link,
        error: u16,
        bytes: &[u8],
        at_fault: &[u8],
        completions: &[(u64, u64)],
    ) {
        // DDP-T-01, MPA-E-02: data after a fault is dropped without an answer. It is sent in one
        // piece, so that it has arrived at once.
        let late = write(self.target.stag("all"), self.target.buffer(), b"too late");
        let late = link.peer.framed(&[late]);
        link.peer.send(&[bytes, &late].concat());
        assert_eq!(
            link.peer.ulpdu(),
            complaint(error, at_fault),
            "for {error:04x}, {at_fault:02x?}"
        );
        // MPA-E-04, RDM-T-04, RDM-T-05: then FIN, without waiting for ours, and nothing between.
        self.is_over(link, End::Closed, completions);
        let kind = match error >> 8 {
            0x01 | 0x11 => event::QP_ACCESS_ERR,
            0x02 | 0x12 => event::QP_REQ_ERR,
            _ => event::QP_FATAL,
        };
        assert_eq!(self.target.event(), (kind, link.qp.index));
    }

    /// Checks that the connection has ended without further bytes, and that its queue pair has
    /// ended with these completions and no others.
    #[track_caller]
    fn is_over(&mut self, link: &mut Link, end: End, completions: &[(u64, u64)]) {
        assert_eq!(link.peer.end(), end);
        self.target.completes(link.qp, completions);
        assert!(self.target.has_no_completion(link.qp));
        assert_eq!(self.target.state(link.qp), state::ERR);
    }

    /// Checks that nothing was placed in the buffer, nor around it.
    #[track_caller]
    fn is_pristine(&mut self) {
        assert!(
            self.target.arena() == filled(ARENA_SEED, 3 * PAGE),
            "something was placed"
        );
    }

    /// Checks that the program's other traffic continues, with a raw peer and between queue pairs
    /// of the program, and that no asynchronous event is pending.
    #[track_caller]
    fn continues(&mut self) {
        self.others_continue();
        assert!(self.target.is_quiet(), "an asynchronous event too many");
    }

    /// Checks that the program's other traffic continues. Asynchronous events may be pending.
    #[track_caller]
    fn others_continue(&mut self) {
        let Link { qp, peer } = &mut self.bystander;
        self.exchanges += 1;
        let msn = self.exchanges;
        peer.send_ulpdus(&[send(msn, &[msn as u8; 100])]);
        assert_eq!(self.target.received(*qp), (u64::from(msn) - 1, 100));
        self.target.receives(*qp, u64::from(msn) + 3);
        self.target.sends(*qp, 0x1000, 5);
        self.target.completes(*qp, &[(0x1000, status::SUCCESS)]);
        assert_eq!(peer.ulpdu(), send(msn, &self.target.dump("arena", PAGE, 5)));
        self.target.is_healthy();
    }

    /// The end of the test: checks that the program still works.
    #[track_caller]
    fn ends(mut self) {
        self.continues();
        self.target.quits();
    }
}
