//! Entry points for fuzzers; compiled with `--cfg fuzzing` only.

use crate::testing::rig::Hostile;

/// Feeds an engine the bytes of a fuzzer: two bytes of circumstances, then either ULPDUs, each
/// after its length in two bytes, in good FPDUs; or raw bytes, with CRCs off.
pub fn engine_rx(data: &[u8]) {
    let [options, cut, rest @ ..] = data else {
        return;
    };
    let option = |bit: u32| options >> bit & 1 != 0;
    let framed = option(6);
    let peer = Hostile {
        crc: framed && option(0),
        markers: option(1),
        native: option(2),
        initiator: option(3),
        extensions: option(4),
        delivered: option(7),
        fills: framed && cut % 2 == 1,
        knows_stag: option(5),
        cut: usize::from(*cut).pow(2) + 1,
    };
    if !framed {
        return peer.send(Vec::new(), rest);
    }
    let mut ulpdus = Vec::new();
    let mut rest = rest;
    while let Some((length, behind)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes(*length)).min(behind.len());
        ulpdus.push(behind[..len].to_vec());
        rest = &behind[len..];
    }
    peer.send(ulpdus, rest);
}
