//! The MPA private data of native connections: the queue pairs of initiator and responder.
//!
//! ```text
//!  0                   1                   2                   3
//! |             "uRNC"              | version | kind  | known | RNR |
//! |          sender's QPN           |         peer's QPN           |   kind = 0 (RC), 16 (UC): Request or accepting Reply
//! |          sender's sq_psn        |         its rq_psn           |
//! |                         nonce of the Request                   |
//! |                         ticket, if known                       |
//! ```
//!
//! Two ends of different kinds do not connect; versions of urnic without UC refuse kind 16.
//!
//! All fields are in network order. A rejecting Reply ends after the first eight bytes, and `kind`
//! has the reason. The private data does not contain the source address: the responder gets the
//! address from TCP (`responder.rs`).
//!
//! A Request without a `sq_psn` connects nothing. It is a *nudge*: its sender is at RTR and
//! requests that the peer initiate. The nonce of the nudge goes to a port that only the named peer
//! can have, so the peer authenticates its own Request by repeating the nonce as *ticket*.

use std::time::Duration;

use urnic_wire::mpa::startup::{MAX_PRIVATE_DATA, WORD_LEN};
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::mpa_startup::Time;

const MAGIC: [u8; 4] = *b"uRNC";
/// The version of this layout and of the rules that depend on it.
const VERSION: u8 = 1;

/// `kind` of a Request or accepting Reply of a queue pair of kind RC.
const RELIABLE: u8 = 0;
/// `kind` of a Request or accepting Reply of a queue pair of kind UC.
const UNRELIABLE: u8 = 16;

/// The sender has reached RTS, and includes its `sq_psn`.
const HAS_SQ_PSN: u8 = 1;
/// The sender includes its `rnr_retry`.
const HAS_RNR_RETRY: u8 = 2;
/// The Request repeats the nonce of a nudge.
const HAS_TICKET: u8 = 4;

/// PSNs have 24 bits; higher bits that programs exchange are ignored.
pub const PSN_MASK: u32 = 0xff_ffff;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: u8,
    kind: u8,
    known: u8,
    rnr_retry: u8,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Layout {
    head: Head,
    from: U32,
    to: U32,
    sq_psn: U32,
    rq_psn: U32,
    nonce: U64,
}

const _: () = assert!(size_of::<Layout>() == 32);
const _: () = assert!(size_of::<Layout>() + size_of::<U64>() + WORD_LEN <= MAX_PRIVATE_DATA);

/// The private data of one end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    /// The sender's queue pair number.
    pub from: u32,
    /// The peer's queue pair number.
    pub to: u32,
    /// The sender's queue pair is of kind UC.
    pub unreliable: bool,
    /// The sender's first PSN; set from RTS on.
    pub sq_psn: Option<u32>,
    /// The first PSN that the sender expects.
    pub rq_psn: u32,
    /// Retries of the sender's Sends when the peer has no receive posted; 7 = no limit. Set from
    /// RTS on.
    pub rnr_retry: Option<u8>,
    /// Distinguishes Requests between the same queue pairs.
    pub nonce: u64,
    /// Nonce of the peer's nudge that this Request answers.
    pub ticket: Option<u64>,
}

/// The reason of a rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Reason {
    /// The queue pair is not ready: the initiator retries.
    Busy = 1,
    /// No queue pair has this number.
    Unknown = 2,
    /// The queue pair names another peer, or an earlier queue pair with the same number.
    OtherPeer = 3,
    /// The queue pair failed or was closed.
    Closed = 4,
    /// The queue pair is connected already.
    Connected = 5,
    /// The initiator uses another version, or is not a native peer.
    NotNative = 6,
    /// The source address of the stream differs from the address of the peer named at RTR.
    Address = 7,
}

impl Reason {
    /// Parses the reason in a rejecting Reply; [`Reason::NotNative`] if another kind of device
    /// sent the Reply.
    pub(super) fn parse(private_data: &[u8]) -> Reason {
        match Head::read_from_prefix(private_data) {
            Ok((head, _)) if head.magic == MAGIC => match head.kind {
                1 => Reason::Busy,
                2 => Reason::Unknown,
                3 => Reason::OtherPeer,
                4 => Reason::Closed,
                5 => Reason::Connected,
                7 => Reason::Address,
                _ => Reason::NotNative,
            },
            _ => Reason::NotNative,
        }
    }

    /// Whether a retry may succeed. After `Address` the peer also initiates, and that attempt may
    /// succeed.
    pub(super) fn is_temporary(self) -> bool {
        matches!(self, Reason::Busy | Reason::Connected | Reason::Address)
    }

    /// The private data of a rejecting Reply with this reason.
    pub(super) fn emit(self) -> Vec<u8> {
        Head {
            magic: MAGIC,
            version: VERSION,
            kind: self as u8,
            known: 0,
            rnr_retry: 0,
        }
        .as_bytes()
        .to_vec()
    }
}

impl Identity {
    /// Parses private data; `None` if the data does not belong to a native connection of this
    /// version.
    pub(super) fn parse(private_data: &[u8]) -> Option<Identity> {
        let (layout, rest) = Layout::read_from_prefix(private_data).ok()?;
        let head = &layout.head;
        if head.magic != MAGIC || head.version != VERSION {
            return None;
        }
        let unreliable = match head.kind {
            RELIABLE => false,
            UNRELIABLE => true,
            _ => return None,
        };
        Some(Identity {
            unreliable,
            from: layout.from.get(),
            to: layout.to.get(),
            sq_psn: (head.known & HAS_SQ_PSN != 0).then_some(layout.sq_psn.get() & PSN_MASK),
            rq_psn: layout.rq_psn.get() & PSN_MASK,
            rnr_retry: (head.known & HAS_RNR_RETRY != 0).then_some(head.rnr_retry),
            nonce: layout.nonce.get(),
            ticket: (head.known & HAS_TICKET != 0)
                .then(|| U64::read_from_prefix(rest).ok())
                .flatten()
                .map(|(ticket, _)| ticket.get()),
        })
    }

    /// The private data of a Request or of an accepting Reply.
    pub(super) fn emit(&self) -> Vec<u8> {
        let known = if self.sq_psn.is_some() { HAS_SQ_PSN } else { 0 }
            | if self.rnr_retry.is_some() {
                HAS_RNR_RETRY
            } else {
                0
            }
            | if self.ticket.is_some() { HAS_TICKET } else { 0 };
        let mut bytes = Layout {
            head: Head {
                magic: MAGIC,
                version: VERSION,
                kind: if self.unreliable { UNRELIABLE } else { RELIABLE },
                known,
                rnr_retry: self.rnr_retry.unwrap_or(0),
            },
            from: self.from.into(),
            to: self.to.into(),
            sq_psn: self.sq_psn.unwrap_or(0).into(),
            rq_psn: self.rq_psn.into(),
            nonce: self.nonce.into(),
        }
        .as_bytes()
        .to_vec();
        bytes.extend(self.ticket.iter().flat_map(|ticket| ticket.to_be_bytes()));
        bytes
    }

    /// Whether the queue pair numbers name each other, and the queue pairs are of one kind.
    pub(super) fn names(&self, peer: &Identity) -> bool {
        self.from == peer.to && self.to == peer.from && self.unreliable == peer.unreliable
    }

    /// Whether `peer` is the expected peer: the queue pair numbers name each other, at least one
    /// `sq_psn` is present, and each one that is present equals the other end's `rq_psn`. The PSNs
    /// detect a queue pair number that was used again.
    pub(super) fn matches(&self, peer: &Identity) -> bool {
        let follows = |sent: Option<u32>, expected: u32| sent.is_none_or(|psn| psn == expected);
        self.names(peer)
            && (peer.sq_psn.is_some() || self.sq_psn.is_some())
            && follows(peer.sq_psn, self.rq_psn)
            && follows(self.sq_psn, peer.rq_psn)
    }

    /// Whether this Request has precedence over the peer's when they cross. Both ends have both
    /// Requests, and so agree.
    pub(super) fn has_precedence_over(&self, peer: &Identity) -> bool {
        (self.from, self.nonce) < (peer.from, peer.nonce)
    }
}

/// The number of wrong Requests that a queue pair examines at RTR before it rejects others
/// unexamined.
const MAX_MISMATCHES: u32 = 16;
/// The interval after which the queue pair examines one more Request.
const MISMATCH_INTERVAL: Duration = Duration::from_secs(1);

/// The Requests with wrong PSNs that one queue pair received.
#[derive(Debug, Default)]
pub(super) struct PsnMismatches {
    /// Examined Requests that still count.
    recent: u32,
    /// The time since which the oldest of `recent` counts.
    since: Time,
    /// All Requests with wrong PSNs, including the Requests that were rejected unexamined.
    total: u64,
}

impl PsnMismatches {
    /// Whether the queue pair examines no more Requests at this time.
    pub(super) fn are_exhausted(&mut self, now: Time) -> bool {
        let expired = now.saturating_sub(self.since).as_nanos() / MISMATCH_INTERVAL.as_nanos();
        let expired = u32::try_from(expired).unwrap_or(u32::MAX);
        if expired > 0 {
            self.recent = self.recent.saturating_sub(expired);
            self.since += MISMATCH_INTERVAL * expired;
        }
        self.recent >= MAX_MISMATCHES
    }

    /// Counts a Request; returns the total if a log line about the Request is due.
    pub(super) fn count(&mut self, now: Time, examined: bool) -> Option<u64> {
        if examined {
            if self.recent == 0 {
                self.since = now;
            }
            self.recent = self.recent.saturating_add(1);
        }
        self.total += 1;
        (self.total.is_power_of_two()).then_some(self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn identity() -> impl Strategy<Value = Identity> {
        let psn = 0..=PSN_MASK;
        (
            any::<u32>(),
            any::<u32>(),
            proptest::option::of(psn.clone()),
            psn,
            proptest::option::of(0..8u8),
            any::<u64>(),
            any::<Option<u64>>(),
            any::<bool>(),
        )
            .prop_map(
                |(from, to, sq_psn, rq_psn, rnr_retry, nonce, ticket, unreliable)| Identity {
                    from,
                    to,
                    unreliable,
                    sq_psn,
                    rq_psn,
                    rnr_retry,
                    nonce,
                    ticket,
                },
            )
    }

    proptest! {
        #[test]
        fn identities_round_trip(identity in identity()) {
            prop_assert_eq!(Identity::parse(&identity.emit()), Some(identity));
        }

        #[test]
        fn arbitrary_bytes_have_no_identity(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            prop_assume!(!bytes.starts_with(&MAGIC));
            prop_assert_eq!(Identity::parse(&bytes), None);
            prop_assert_eq!(Reason::parse(&bytes), Reason::NotNative);
        }

        #[test]
        fn of_two_crossing_requests_one_has_precedence(a in identity(), b in identity()) {
            prop_assume!((a.from, a.nonce) != (b.from, b.nonce));
            prop_assert!(a.has_precedence_over(&b) != b.has_precedence_over(&a));
        }
    }

    #[test]
    fn other_versions_and_short_data_have_no_identity() {
        let identity = Identity {
            from: 1,
            to: 2,
            unreliable: false,
            sq_psn: None,
            rq_psn: 3,
            rnr_retry: None,
            nonce: 4,
            ticket: None,
        };
        let mut bytes = identity.emit();
        bytes[4] = 2;
        assert_eq!(Identity::parse(&bytes), None);
        assert_eq!(Identity::parse(&identity.emit()[..31]), None);
    }

    #[test]
    fn reasons_round_trip() {
        use Reason::{Address, Busy, Closed, Connected, NotNative, OtherPeer, Unknown};
        for reason in [Busy, Unknown, OtherPeer, Closed, Connected, NotNative, Address] {
            assert_eq!(Reason::parse(&reason.emit()), reason);
        }
    }

    #[test]
    fn a_reused_number_is_detected_by_its_psn() {
        let local = Identity {
            from: 7,
            to: 9,
            unreliable: false,
            sq_psn: Some(100),
            rq_psn: 200,
            rnr_retry: Some(7),
            nonce: 1,
            ticket: None,
        };
        let peer = Identity {
            from: 9,
            to: 7,
            unreliable: false,
            sq_psn: Some(200),
            rq_psn: 100,
            rnr_retry: Some(7),
            nonce: 2,
            ticket: None,
        };
        assert!(local.matches(&peer) && peer.matches(&local));
        assert!(
            local.matches(&Identity { sq_psn: None, ..peer }),
            "a peer at RTR has no sq_psn yet"
        );
        let unproven = Identity {
            sq_psn: None,
            ..local
        };
        assert!(
            !unproven.matches(&Identity { sq_psn: None, ..peer }),
            "no PSN was compared"
        );
        for wrong in [
            Identity {
                sq_psn: Some(201),
                ..peer
            },
            Identity { rq_psn: 101, ..peer },
            Identity { from: 10, ..peer },
            Identity { to: 8, ..peer },
            Identity {
                unreliable: true,
                ..peer
            },
        ] {
            assert!(!local.matches(&wrong), "{wrong:?}");
        }
    }
}
