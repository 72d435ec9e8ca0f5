//! Copies of memory that may be inaccessible.
//!
//! Pieces refer to a program's memory, which only the kernel reads. So bytes to be captured pass
//! through a file in memory: the kernel copies them there, or reports that they are inaccessible,
//! and this module copies them from there.

use crate::host::Piece;
use crate::stream::descriptor::{Descriptor, Descriptors};
use rustix::fd::AsFd;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::sync::Arc;

/// Most bytes of one copy: more than a sender offers at once (its backlog and an FPDU), because a
/// sender whose bytes are not all taken assumes that the stream is full, and waits for it.
pub(super) const MAX: usize = 2 << 20;
/// Most pieces of one system call (UIO_MAXIOV).
const MAX_PIECES: usize = 1024;

/// The file; it is created at the first use.
#[derive(Debug)]
pub(super) struct Staging {
    descriptors: Arc<Descriptors>,
    file: Option<Descriptor>,
}

impl Staging {
    pub(super) fn new(descriptors: Arc<Descriptors>) -> Staging {
        Staging {
            descriptors,
            file: None,
        }
    }

    fn file(&mut self) -> Result<&Descriptor, Errno> {
        if self.file.is_none() {
            // Growing a file beyond the limit raises a signal, which would end the program.
            if getrlimit(Resource::Fsize)
                .current
                .is_some_and(|limit| limit < MAX as u64)
            {
                return Err(Errno::FBIG);
            }
            let file = memfd_create("urnic-capture", MemfdFlags::CLOEXEC)?;
            self.file = Some(self.descriptors.adopt(file)?);
        }
        self.file.as_ref().ok_or(Errno::BADF)
    }

    /// The first bytes of the pieces, up to an inaccessible one and at most [`MAX`] bytes.
    ///
    /// # Errors
    /// `FAULT` if no byte could be copied.
    pub(super) fn copy(&mut self, pieces: &[Piece<'_>]) -> Result<Vec<u8>, Errno> {
        let mut room = MAX;
        let mut cut = Vec::with_capacity(pieces.len().min(MAX_PIECES));
        for piece in pieces.iter().take(MAX_PIECES) {
            let piece = piece.first(room);
            room -= piece.len();
            cut.push(piece);
        }
        if room == MAX {
            return Ok(Vec::new());
        }
        let file = self.file()?.as_fd();
        let len = loop {
            match rustix::io::pwritev(file, Piece::as_io_slices(&cut), 0) {
                Err(Errno::INTR) => {}
                written => break written?,
            }
        };
        let mut bytes = vec![0; len];
        let mut read = 0;
        while read < len {
            match rustix::io::pread(file, &mut bytes[read..], read as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(n) => read += n,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_copied_in_order_up_to_the_limit() {
        let mut staging = Staging::new(Descriptors::new(4, None));
        assert!(staging.copy(&[]).unwrap().is_empty());
        assert_eq!(
            staging
                .copy(&[Piece::of(b"ab"), Piece::of(b""), Piece::of(b"cde")])
                .unwrap(),
            b"abcde"
        );
        let long = vec![7; MAX + 5];
        assert_eq!(
            staging.copy(&[Piece::of(b"x"), Piece::of(&long)]).unwrap().len(),
            MAX
        );
        assert_eq!(staging.copy(&[Piece::of(b"f")]).unwrap(), b"f");
    }

    #[test]
    fn memory_beyond_the_end_of_its_file_is_an_error_after_the_bytes_before_it() {
        let page = rustix::param::page_size();
        let file = rustix::fs::memfd_create("one page", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, page as u64).unwrap();
        let pages = urnic_sys::Pages::of_file(&file, 0, 2 * page, rustix::mm::ProtFlags::READ).unwrap();
        // SAFETY: the slice only names the pages, which stay mapped; nothing refers to them.
        let piece = unsafe { Piece::of(std::slice::from_raw_parts(pages.start().as_ptr(), 2 * page)) };
        let mut staging = Staging::new(Descriptors::new(4, None));
        assert_eq!(staging.copy(&[piece]).unwrap().len(), page);
        assert_eq!(staging.copy(&[piece.skip(page)]), Err(Errno::FAULT));
    }
}
