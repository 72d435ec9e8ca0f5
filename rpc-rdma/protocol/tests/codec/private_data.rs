//! The private data of RFC 8797.

use proptest::prelude::*;
use urnic_rpc_rdma::engine::Terms;
use urnic_rpc_rdma::{DEFAULT_INLINE, PrivateData};

const BOTH: PrivateData = PrivateData {
    remote_invalidation: true,
    send_size: 4096,
    receive_size: 8192,
};

#[test]
fn rpc_i_02_a_threshold_is_the_smaller_of_both_ends_sizes() {
    let peer = PrivateData {
        remote_invalidation: true,
        send_size: 1024,
        receive_size: 2048,
    };
    assert_eq!((BOTH.threshold(&peer), peer.threshold(&BOTH)), (2048, 1024));
    let terms = Terms::agreed(&BOTH, &peer);
    assert_eq!((terms.send, terms.receive), (2048, 1024));
    let terms = Terms::agreed(&peer, &BOTH);
    assert_eq!((terms.send, terms.receive), (1024, 2048));
}

#[test]
fn rpc_i_04_remote_invalidation_needs_both_ends() {
    for (ours, theirs) in [(false, false), (false, true), (true, false), (true, true)] {
        let private_data = |remote_invalidation| PrivateData {
            remote_invalidation,
            ..BOTH
        };
        let terms = Terms::agreed(&private_data(ours), &private_data(theirs));
        assert_eq!(terms.remote_invalidation, ours && theirs, "{ours} and {theirs}");
    }
    assert!(!Terms::agreed(&BOTH, &PrivateData::default()).remote_invalidation);
}

#[test]
fn rpc_i_02_sizes_are_whole_kibibytes_from_1_to_256() {
    let byte = |size| {
        PrivateData {
            send_size: size,
            ..BOTH
        }
        .emit()[6]
    };
    for (size, expected) in [
        (0, 0),
        (1023, 0),
        (1024, 0),
        (2047, 0),
        (2048, 1),
        (262_144, 255),
        (usize::MAX, 255),
    ] {
        assert_eq!(byte(size), expected, "{size}");
    }
}

#[test]
fn rpc_i_01_a_peer_without_private_data_accepts_1024_bytes() {
    let silent = PrivateData::find(b"something else entirely").unwrap_or_default();
    assert_eq!(DEFAULT_INLINE, 1024);
    assert_eq!(BOTH.threshold(&silent), DEFAULT_INLINE);
    assert_eq!(silent.threshold(&BOTH), DEFAULT_INLINE);
    assert!(!silent.remote_invalidation);
}

#[test]
fn rpc_i_03_the_magic_is_found_at_any_offset() {
    for before in 0..9 {
        let bytes = [&vec![0xf6; before][..], &BOTH.emit(), b"more"].concat();
        assert_eq!(PrivateData::find(&bytes), Some(BOTH), "{before}");
    }
}

/// The rest of the message is valid.
#[test]
fn rpc_i_03_another_magic_is_ignored() {
    for at in 0..4 {
        let mut other = BOTH.emit();
        other[at] ^= 1;
        assert_eq!(PrivateData::find(&other), None, "byte {at}");
        let behind = [&other[..], &BOTH.emit()].concat();
        assert_eq!(PrivateData::find(&behind), Some(BOTH), "the message follows");
    }
}

#[test]
fn rpc_i_03_truncated_or_unknown_versions_are_ignored() {
    let bytes = BOTH.emit();
    assert_eq!(PrivateData::find(&bytes[..7]), None);
    for version in [0, 2, 255] {
        let mut other = bytes;
        other[4] = version;
        assert_eq!(PrivateData::find(&other), None);
    }
}

#[test]
fn rpc_i_02_reserved_flags_are_ignored() {
    let mut bytes = BOTH.emit();
    bytes[5] = 0xff;
    assert_eq!(PrivateData::find(&bytes), Some(BOTH));
    bytes[5] = 0xfe;
    assert!(!PrivateData::find(&bytes).unwrap().remote_invalidation);
}

proptest! {
    #[test]
    fn emitted_private_data_is_found(remote_invalidation: bool, send in 1..=256_usize, receive in 1..=256_usize, before: Vec<u8>) {
        let private_data = PrivateData { remote_invalidation, send_size: send << 10, receive_size: receive << 10 };
        prop_assume!(PrivateData::find(&[&before[..], &private_data.emit()[..7]].concat()).is_none());
        prop_assert_eq!(PrivateData::find(&[&before[..], &private_data.emit()].concat()), Some(private_data));
    }
}
