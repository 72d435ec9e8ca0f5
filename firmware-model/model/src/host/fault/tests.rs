//! The accesses to mapped memory, and to unmapped memory.

use super::Unreachable;
use super::{copy, install, probe, update};
use rustix::mm::{MprotectFlags, ProtFlags};

const PAGE: usize = 4096;

/// Pages of which some are taken away.
struct Pages(*mut u8, urnic_sys::Pages);

impl Pages {
    fn new(count: usize) -> Pages {
        Pages::of(urnic_sys::Pages::zeroed(count * PAGE).unwrap())
    }

    fn of(pages: urnic_sys::Pages) -> Pages {
        Pages(pages.start().as_ptr(), pages)
    }

    /// Pages of a file of the same length, and that file.
    fn of_file(count: usize) -> (Pages, std::os::fd::OwnedFd) {
        let file = rustix::fs::memfd_create("guarded", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, (count * PAGE) as u64).unwrap();
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let pages = urnic_sys::Pages::of_file(&file, 0, count * PAGE, rights).unwrap();
        (Pages::of(pages), file)
    }

    /// Page number `page` may be accessed like this; it stays reserved, so that no other test finds
    /// its memory there.
    fn protect(&self, page: usize, rights: MprotectFlags) {
        self.1.protect(page * PAGE, PAGE, rights).unwrap();
    }
}

/// Every short length, and those around the limits at which the copy changes its method.
fn lengths() -> impl Iterator<Item = usize> {
    (0..300).chain([511, 512, 2047, 2048, 4095, 4096, 4097, 3 * PAGE - 64])
}

#[test]
fn a_copy_is_exact_at_every_length_and_place() {
    let source: Vec<u8> = (0..4 * PAGE).map(|n| (n * 31 + n / 256) as u8).collect();
    for len in lengths() {
        for skew in [0, 1, 7, 31] {
            let mut target = vec![0xaa; len + 64];
            // SAFETY: both ranges are inside of live vectors.
            unsafe { copy(target.as_mut_ptr().add(skew), source.as_ptr().add(2 * skew), len) }.unwrap();
            assert_eq!(&target[skew..][..len], &source[2 * skew..][..len]);
            let around = target[..skew].iter().chain(&target[skew + len..]);
            assert!(around.copied().all(|byte| byte == 0xaa), "{len} at {skew}");
        }
    }
}

#[test]
fn a_copy_into_a_hole_and_out_of_one_is_an_error() {
    install();
    let pages = Pages::new(5);
    pages.protect(1, MprotectFlags::empty());
    let mut bytes = vec![1; 3 * PAGE];
    for len in lengths().filter(|len| *len > 0) {
        // One byte in the hole is enough, at either end of the range.
        for at in [PAGE + 1 - len.min(PAGE), 2 * PAGE - 1] {
            let hole = pages.0.wrapping_add(at);
            // SAFETY: `hole` is inside of the mapping, and `bytes` is a live vector of at least
            // `len` bytes.
            let (read, written) = unsafe {
                (
                    copy(bytes.as_mut_ptr(), hole, len),
                    copy(hole, bytes.as_ptr(), len),
                )
            };
            assert_eq!(
                (read, written),
                (Err(Unreachable), Err(Unreachable)),
                "{len} at {at}"
            );
        }
    }
}

#[test]
fn a_probe_finds_a_hole_wherever_it_is() {
    install();
    let pages = Pages::new(4);
    pages.protect(2, MprotectFlags::empty());
    for skew in [0, 1, 100, PAGE - 1] {
        for len in [1, 2, 64, PAGE, PAGE + 1, 2 * PAGE] {
            for page in 0..2 {
                let at = page * PAGE + skew;
                let whole = at + len <= 2 * PAGE;
                let found = probe(pages.0.wrapping_add(at), len);
                assert_eq!(found.is_ok(), whole, "{len} at {at}");
            }
        }
    }
}

#[test]
fn memory_that_is_read_only_is_read_and_not_written() {
    install();
    let pages = Pages::new(1);
    pages.protect(0, MprotectFlags::READ);
    let mut bytes = [7; 256];
    // SAFETY: inside of the mapping, and of a live array.
    unsafe {
        assert_eq!(copy(pages.0, bytes.as_ptr(), 256), Err(Unreachable));
        assert_eq!(copy(bytes.as_mut_ptr(), pages.0, 256), Ok(()));
        assert_eq!(update(pages.0.cast(), |old| old), Err(Unreachable));
    }
    assert_eq!(bytes, [0; 256]);
}

#[test]
fn a_truncated_file_is_an_error() {
    install();
    let (pages, file) = Pages::of_file(2);
    let mut bytes = [7; 64];
    rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
    // SAFETY: inside of the mapping, and of a live array.
    unsafe {
        assert_eq!(copy(pages.0, bytes.as_ptr(), 64), Ok(()));
        assert_eq!(copy(pages.0.add(PAGE), bytes.as_ptr(), 64), Err(Unreachable));
        assert_eq!(copy(bytes.as_mut_ptr(), pages.0.add(PAGE), 64), Err(Unreachable));
    }
}

#[test]
fn a_word_is_replaced_in_one_step_or_not_at_all() {
    install();
    let pages = Pages::new(2);
    let word = pages.0.cast::<u64>();
    std::thread::scope(|scope| {
        let address = word.expose_provenance();
        for _ in 0..2 {
            scope.spawn(move || {
                for _ in 0..100_000 {
                    // SAFETY: an aligned word of the mapping, which everybody uses as an atomic.
                    unsafe { update(std::ptr::with_exposed_provenance_mut(address), |old| old + 1) }.unwrap();
                }
            });
        }
    });
    // SAFETY: an aligned word of the mapping, which nobody else uses any more.
    assert_eq!(unsafe { update(word, |old| old) }, Ok(200_000));
    pages.protect(1, MprotectFlags::empty());
    // SAFETY: an aligned word of the mapping, in a page that cannot be accessed.
    let unmapped = unsafe { update(word.byte_add(PAGE), |old| old) };
    assert_eq!(unmapped, Err(Unreachable));
}
