//! Who calls whom: the MPA private data of native connections.
//!
//! ```text
//!  0                   1                   2                   3
//! |             "uRNC"              | version | what  | known | RNR |
//! |          caller's QPN           |         called QPN           |   what = 0: Request or accepting Reply
//! |          speaker's sq_psn       |         its rq_psn           |
//! |                         nonce of the call                      |
//! |                         ticket, if known                       |
//! ```
//!
//! All in network order; a rejecting Reply ends behind the first eight bytes, and `what` says why.
//! The source address of a call is no part of it: the responder takes that from TCP
//! ([`super::admission`]).
//!
//! A Request without a `sq_psn` connects nothing. It is a *nudge*: its sender is at RTR and asks
//! the other side to initiate. The nonce of the nudge goes to a port that only the named peer can
//! have, so the peer's own Request proves itself by repeating it as *ticket*.

use urnic_wire::mpa::startup::{MAX_PRIVATE_DATA, WORD_LEN};
use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"uRNC";
/// Version of this layout and of what follows from it.
const VERSION: u8 = 1;

/// The speaker's `sq_psn` is known: it has reached RTS.
const KNOWS_SQ_PSN: u8 = 1;
/// Its `rnr_retry` too.
const KNOWS_RNR: u8 = 2;
/// The Request repeats the nonce of a nudge.
const HAS_TICKET: u8 = 4;

/// PSNs have 24 bits; programs that exchange more mean these.
pub const PSN_MASK: u32 = 0xff_ffff;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Head {
    magic: [u8; 4],
    version: u8,
    what: u8,
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

/// One end of a pair, as it introduces itself to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    /// Its queue pair number.
    pub from: u32,
    /// That of the peer.
    pub to: u32,
    /// Its first PSN, once it knows.
    pub sq_psn: Option<u32>,
    /// The first PSN it expects.
    pub rq_psn: u32,
    /// How often its sends try again when we have no receive posted, once it knows; 7 = for ever.
    pub rnr_retry: Option<u8>,
    /// Tells calls of the same pair apart.
    pub nonce: u64,
    /// Nonce of the peer's nudge that this Request answers.
    pub ticket: Option<u64>,
}

/// Why a call is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Reason {
    /// Not now: try again.
    Busy = 1,
    /// There is no such queue pair.
    Unknown = 2,
    /// It is bound to another peer, or to an earlier life of this one.
    Elsewhere = 3,
    /// It failed or was closed.
    Gone = 4,
    /// It is connected to this very peer already.
    Connected = 5,
    /// The caller speaks another version, or is no native peer at all.
    Foreign = 6,
    /// The source address of the call is not that of the peer named at RTR.
    Address = 7,
}

impl Reason {
    /// The reason that a rejecting Reply gives; another kind of device knows none of ours.
    pub(super) fn parse(private_data: &[u8]) -> Reason {
        match Head::read_from_prefix(private_data) {
            Ok((head, _)) if head.magic == MAGIC => match head.what {
                1 => Reason::Busy,
                2 => Reason::Unknown,
                3 => Reason::Elsewhere,
                4 => Reason::Gone,
                5 => Reason::Connected,
                7 => Reason::Address,
                _ => Reason::Foreign,
            },
            _ => Reason::Foreign,
        }
    }

    /// Whether calling again may help. After `Address` the peer calls as well, which may go
    /// through.
    pub(super) fn is_passing(self) -> bool {
        matches!(self, Reason::Busy | Reason::Connected | Reason::Address)
    }

    /// Private data of a rejecting Reply.
    pub(super) fn emit(self) -> Vec<u8> {
        Head {
            magic: MAGIC,
            version: VERSION,
            what: self as u8,
            known: 0,
            rnr_retry: 0,
        }
        .as_bytes()
        .to_vec()
    }
}

impl Identity {
    /// Reads private data; `None` if it is not that of a native call of our version.
    pub(super) fn parse(private_data: &[u8]) -> Option<Identity> {
        let (layout, rest) = Layout::read_from_prefix(private_data).ok()?;
        let head = &layout.head;
        if head.magic != MAGIC || head.version != VERSION || head.what != 0 {
            return None;
        }
        Some(Identity {
            from: layout.from.get(),
            to: layout.to.get(),
            sq_psn: (head.known & KNOWS_SQ_PSN != 0).then_some(layout.sq_psn.get() & PSN_MASK),
            rq_psn: layout.rq_psn.get() & PSN_MASK,
            rnr_retry: (head.known & KNOWS_RNR != 0).then_some(head.rnr_retry),
            nonce: layout.nonce.get(),
            ticket: (head.known & HAS_TICKET != 0)
                .then(|| U64::read_from_prefix(rest).ok())
                .flatten()
                .map(|(ticket, _)| ticket.get()),
        })
    }

    /// Private data of a Request or of an accepting Reply.
    pub(super) fn emit(&self) -> Vec<u8> {
        let known = if self.sq_psn.is_some() { KNOWS_SQ_PSN } else { 0 }
            | if self.rnr_retry.is_some() { KNOWS_RNR } else { 0 }
            | if self.ticket.is_some() { HAS_TICKET } else { 0 };
        let mut bytes = Layout {
            head: Head {
                magic: MAGIC,
                version: VERSION,
                what: 0,
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

    /// Whether the queue pair numbers name each other.
    pub(super) fn names(&self, peer: &Identity) -> bool {
        self.from == peer.to && self.to == peer.from
    }

    /// Whether `peer` is the expected one: queue pair numbers name each other, and what each sends
    /// first is what the other expects, as far as it is known by now, and at least in one
    /// direction. So a number that was used again is not mistaken.
    pub(super) fn meets(&self, peer: &Identity) -> bool {
        let follows = |sent: Option<u32>, expected: u32| sent.is_none_or(|psn| psn == expected);
        self.names(peer)
            && (peer.sq_psn.is_some() || self.sq_psn.is_some())
            && follows(peer.sq_psn, self.rq_psn)
            && follows(self.sq_psn, peer.rq_psn)
    }

    /// Whether our call goes before the peer's when they cross. Both see both, and so agree.
    pub(super) fn goes_before(&self, peer: &Identity) -> bool {
        (self.from, self.nonce) < (peer.from, peer.nonce)
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
        )
            .prop_map(|(from, to, sq_psn, rq_psn, rnr_retry, nonce, ticket)| Identity {
                from,
                to,
                sq_psn,
                rq_psn,
                rnr_retry,
                nonce,
                ticket,
            })
    }

    proptest! {
        #[test]
        fn an_identity_comes_back_as_it_was_sent(identity in identity()) {
            prop_assert_eq!(Identity::parse(&identity.emit()), Some(identity));
        }

        #[test]
        fn garbage_is_nobody(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            prop_assume!(!bytes.starts_with(&MAGIC));
            prop_assert_eq!(Identity::parse(&bytes), None);
            prop_assert_eq!(Reason::parse(&bytes), Reason::Foreign);
        }

        #[test]
        fn of_two_crossing_calls_exactly_one_goes_first(a in identity(), b in identity()) {
            prop_assume!((a.from, a.nonce) != (b.from, b.nonce));
            prop_assert!(a.goes_before(&b) != b.goes_before(&a));
        }
    }

    #[test]
    fn another_version_is_nobody() {
        let identity = Identity {
            from: 1,
            to: 2,
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
    fn reasons_come_back() {
        use Reason::{Address, Busy, Connected, Elsewhere, Foreign, Gone, Unknown};
        for reason in [Busy, Unknown, Elsewhere, Gone, Connected, Foreign, Address] {
            assert_eq!(Reason::parse(&reason.emit()), reason);
        }
    }

    #[test]
    fn a_reused_number_is_told_by_its_psn() {
        let us = Identity {
            from: 7,
            to: 9,
            sq_psn: Some(100),
            rq_psn: 200,
            rnr_retry: Some(7),
            nonce: 1,
            ticket: None,
        };
        let peer = Identity {
            from: 9,
            to: 7,
            sq_psn: Some(200),
            rq_psn: 100,
            rnr_retry: Some(7),
            nonce: 2,
            ticket: None,
        };
        assert!(us.meets(&peer) && peer.meets(&us));
        assert!(
            us.meets(&Identity { sq_psn: None, ..peer }),
            "a peer at RTR does not know its own yet"
        );
        let unproven = Identity { sq_psn: None, ..us };
        assert!(
            !unproven.meets(&Identity { sq_psn: None, ..peer }),
            "nothing was compared"
        );
        for wrong in [
            Identity {
                sq_psn: Some(201),
                ..peer
            },
            Identity { rq_psn: 101, ..peer },
            Identity { from: 10, ..peer },
            Identity { to: 8, ..peer },
        ] {
            assert!(!us.meets(&wrong), "{wrong:?}");
        }
    }
}
