//! CRC32C at the size of FPDUs: what the device uses, against the library called directly.

use std::hint::black_box;
use std::time::Instant;

use urnic_wire::crc::crc32c;

/// Bytes digested per run.
const BYTES: usize = 64 << 20;

/// Runs of each, one after the other in turn, so that a machine that slows down slows both.
const RUNS: usize = 15;

/// GB/s of urnic's CRC and of the library's for FPDUs of `len` bytes: one pair for each run.
pub(crate) fn rates(len: usize) -> [(f64, f64); RUNS] {
    let fpdu: Vec<u8> = (0..len).map(|at| at as u8).collect();
    let library = |bytes: &[u8]| crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32;
    assert_eq!(crc32c(&fpdu), library(&fpdu), "two answers to one question");
    [(); RUNS].map(|()| (rate(&fpdu, crc32c), rate(&fpdu, library)))
}

fn rate(fpdu: &[u8], digest: impl Fn(&[u8]) -> u32) -> f64 {
    let count = BYTES / fpdu.len();
    let start = Instant::now();
    for _ in 0..count {
        black_box(digest(black_box(fpdu)));
    }
    (count * fpdu.len()) as f64 / start.elapsed().as_secs_f64() / 1e9
}
