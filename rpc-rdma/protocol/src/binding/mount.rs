//! MOUNT version 3 (RFC 1813 appendix I, RFC 8267 §5.1): short calls, and nothing to place.

use super::Binding;

const PROGRAM: u32 = 100_005;
const VERSION: u32 = 3;

/// The binding. Servers offer MOUNT over TCP in any case.
#[derive(Clone, Copy, Debug)]
pub struct Mount3;

impl Binding for Mount3 {
    fn program(&self) -> (u32, u32) {
        (PROGRAM, VERSION)
    }

    /// MNT, DUMP and EXPORT return lists of any length.
    fn max_results(&self, procedure: u32, _arguments: &[u8]) -> Option<usize> {
        const NULL: u32 = 0;
        const UMNT: u32 = 3;
        const UMNTALL: u32 = 4;
        matches!(procedure, NULL | UMNT | UMNTALL).then_some(0)
    }
}
