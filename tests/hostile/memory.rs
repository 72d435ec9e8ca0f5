//! Changes to the memory that a device shares with its peers.

use std::fs::File;
use std::os::unix::fs::FileExt;

use urnic_tests::random::Random;

/// Bytes at the beginning of shared memory in which most words are.
const WORDS: usize = 4096;

/// Memory of a process that other processes have mapped, too.
#[derive(Debug, Clone, Copy)]
struct Shared {
    start: u64,
    len: usize,
}

/// The writable mappings of files in memory that devices made.
fn shared(pid: u32) -> Vec<Shared> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let parse = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let start = u64::from_str_radix(start, 16).ok()?;
        let len = u64::from_str_radix(end, 16).ok()? - start;
        (rest.starts_with("rw-s") && rest.contains("memfd:urnic")).then_some(Shared {
            start,
            len: len as usize,
        })
    };
    maps.lines().filter_map(parse).collect()
}

/// A word to write: near the present one, or one that a device may take for something else.
fn word(now: u64, thread: u32, random: &mut Random) -> u64 {
    let small = random.below(70) as u64;
    match random.below(12) {
        0 => now.wrapping_add(small),
        1 => now.wrapping_sub(small),
        2 => now ^ 1 << random.below(64),
        3 => 0,
        4 => u64::MAX,
        5 => u64::MAX >> random.below(64),
        6 => now ^ 0xffff_ffff,
        // A number with a flag above it, as that of a thread: one that lives, one that does not.
        7 => 1 << 32 | u64::from(thread),
        8 => 1 << 32 | small,
        9 => small << 32 | now & 0xffff_ffff,
        10 => small,
        _ => random.next(),
    }
}

/// Changes a few words somewhere in the shared memory of a process; returns how many.
pub(crate) fn scribble(pid: u32, thread: u32, memory: &File, random: &mut Random) -> usize {
    let shared = shared(pid);
    if shared.is_empty() {
        return 0;
    }
    let count = 1 + random.below(16);
    (0..count)
        .filter(|_| {
            let Shared { start, len } = shared[random.below(shared.len())];
            let len = if random.below(4) > 0 { len.min(WORDS) } else { len };
            let at = start + random.below(len) as u64 / 4 * 4;
            let mut bytes = [0; 8];
            let _ = memory.read_at(&mut bytes, at);
            let bytes = word(u64::from_le_bytes(bytes), thread, random).to_le_bytes();
            // Half of the words have four bytes.
            memory.write_at(&bytes[..4 + 4 * random.below(2)], at).is_ok()
        })
        .count()
}
