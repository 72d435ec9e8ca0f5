//! Times that the protocol has as codes of five bits.

/// Codes are five bits.
const CODE_MASK: u8 = 0x1f;

/// Nanoseconds of a timer code of an RNR NAK (§9.7.5.2.8 of the InfiniBand Architecture
/// Specification, table 45): how long the requester waits at least until it sends the message
/// again. Code 0 is the longest, 655.36 ms; code 1 is 10 us. Only the low five bits count.
pub const fn rnr_timer_ns(code: u8) -> u64 {
    const STEP_NS: u64 = 10_000;
    match code & CODE_MASK {
        0 => 65_536 * STEP_NS,
        1 => STEP_NS,
        // Two codes for each power of two: the power, and one and a half times the power.
        code if code % 2 == 0 => STEP_NS << (code / 2),
        code => (STEP_NS << (code / 2)) / 2 * 3,
    }
}

/// Nanoseconds of a Local ACK Timeout (§9.7.6.1.3): 4.096 us times two to the power of the code;
/// none for code 0, which disables the timer. Only the low five bits count.
pub const fn local_ack_timeout_ns(code: u8) -> Option<u64> {
    match code & CODE_MASK {
        0 => None,
        code => Some(4096 << code),
    }
}
