//! FPDUs of the fast path equal those of the usual path, and payload is read from memory in bounded
//! steps.

use super::{Agreed, Filled, FpduReceiver, MAX_SHORT, Mpa};
use crate::host::{Piece, PieceMut};
use crate::llp::Head;
use crate::llp::buffers::BufferPool;
use crate::memory::MemoryTable;
use crate::stream::no_stream::NoStream;
use crate::stream::{Ends, FullOperation, QpNumbers, Stream, StreamError};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::Read;
use urnic_wire::ddp::UntaggedHeader;
use urnic_wire::mpa::fpdu::{CRC_LEN, CrcMode, emit_length, padding};

/// Passes through memory. Takes so many bytes at its first call, and all afterwards.
#[derive(Debug)]
struct Narrow {
    first: usize,
    bytes: Vec<u8>,
    /// Bytes that the stream delivers.
    arriving: VecDeque<u8>,
}

impl Narrow {
    fn taking(first: usize) -> Narrow {
        Narrow {
            first,
            bytes: Vec::new(),
            arriving: VecDeque::new(),
        }
    }
}

impl Stream for Narrow {
    fn send(&mut self, _: &[Piece<'_>]) -> Result<usize, StreamError> {
        Err(StreamError::Fault)
    }

    fn send_bytes(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        let room = std::mem::replace(&mut self.first, usize::MAX);
        let taken = &bytes[..bytes.len().min(room)];
        self.bytes.extend_from_slice(taken);
        match taken.len() {
            0 => Err(StreamError::WouldBlock),
            taken => Ok(taken),
        }
    }

    fn receive(&mut self, into: &mut [PieceMut<'_>]) -> Result<usize, StreamError> {
        let mut received = 0;
        for piece in PieceMut::as_io_slices(into) {
            received += self.arriving.read(piece).unwrap();
        }
        Ok(received)
    }

    fn has_input(&mut self) -> Option<bool> {
        Some(!self.arriving.is_empty())
    }

    fn has_room(&mut self) -> bool {
        true
    }

    fn peek(&mut self) -> Result<bool, StreamError> {
        Err(StreamError::WouldBlock)
    }

    fn finish(&mut self) {}

    fn reset(&mut self) {}

    fn mss(&self) -> u32 {
        65_483
    }

    fn established(&mut self) -> Result<bool, Errno> {
        Ok(true)
    }

    fn unacknowledged(&self) -> u32 {
        0
    }

    fn ends(&self) -> Ends {
        NoStream.ends()
    }

    fn enter_full_operation(self: Box<Self>, _: QpNumbers) -> FullOperation {
        FullOperation::of(self)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn mpa() -> Mpa {
    Mpa::new(Agreed {
        crc: CrcMode::Off,
        markers_tx: false,
        markers_rx: false,
    })
}

/// For each length, and whatever part of an FPDU the stream takes at once.
#[test]
fn a_short_fpdu_is_that_of_the_usual_way() {
    let (buffers, memory) = (BufferPool::default(), MemoryTable::new(1, 1, 1, [1; 5]));
    let head = Head::from(UntaggedHeader {
        last: true,
        rsvd_ulp: 0x43,
        rsvd_ulp_word: 0x0102_0304,
        qn: 0,
        msn: 7,
        mo: 0,
    });
    for len in 0..=MAX_SHORT {
        let payload: Vec<u8> = (0..len).map(|n| n as u8 ^ 0x5a).collect();
        let (mut usual, mut stream) = (mpa(), Narrow::taking(usize::MAX));
        usual.tx.open(&buffers, &head, len);
        usual.tx.put(len).copy_from_slice(&payload);
        let position = usual.tx.seal();
        assert_eq!(usual.tx.flush(&memory, &mut stream, &mut 0), Ok(true));
        let expected = stream.bytes;
        assert!(FpduReceiver::ulpdu_of(&expected).unwrap().ends_with(&payload));
        for first in 0..=expected.len() {
            let (mut short, mut stream) = (mpa(), Narrow::taking(first));
            let fill = |place: &mut [u8]| {
                place.copy_from_slice(&payload);
                Some(())
            };
            assert_eq!(
                short.tx.send_short(&buffers, &head, len, fill, &mut stream),
                Some(position)
            );
            assert_eq!(short.tx.taken(), first as u64);
            assert_eq!(short.tx.is_flushed(), first == expected.len());
            assert_eq!(short.tx.flush(&memory, &mut stream, &mut 0), Ok(true));
            assert_eq!(
                (short.tx.taken(), &stream.bytes),
                (position, &expected),
                "{len}, {first}"
            );
        }
        // A source that cannot be read leaves no FPDU.
        let (mut short, mut stream) = (mpa(), Narrow::taking(usize::MAX));
        assert_eq!(
            short.tx.send_short(&buffers, &head, len, |_| None, &mut stream),
            None
        );
        assert!(short.tx.is_flushed() && stream.bytes.is_empty());
    }
}

/// Bytes that pass by the buffer are counted like bytes that pass through it.
#[test]
fn only_one_whole_fpdu_is_taken_past_the_buffer() {
    let buffers = BufferPool::default();
    let mut fpdu = vec![0, 2, 0xaa, 0xbb];
    fpdu.extend([0; 4]);
    assert_eq!(FpduReceiver::ulpdu_of(&fpdu), Some(&[0xaa, 0xbb][..]));
    let two = [&fpdu[..], &fpdu].concat();
    for other in [&[][..], &[0], &fpdu[..7], &two, &two[..9]] {
        assert_eq!(FpduReceiver::ulpdu_of(other), None, "{} bytes", other.len());
    }
    let mut rx = mpa().rx;
    rx.pass(fpdu.len());
    rx.accept(&buffers, &two[..9]);
    assert!(!rx.is_plain_and_empty());
    assert_eq!(rx.next(), Ok(true));
    assert_eq!(rx.ulpdu(), [0xaa, 0xbb]);
    rx.consume();
    assert_eq!((rx.next(), rx.position(), rx.buffered()), (Ok(false), 16, 1));
}

/// Sends of 64 KiB have two segments each, a long and a short one. The payload of the long one
/// stays in the stream until its place is known.
#[test]
fn payload_in_memory_is_read_to_its_place_after_short_segments() {
    const LONG: usize = 64_000;
    const SHORT: usize = 800;
    let buffers = BufferPool::default();
    let head = [0x41, 0x43, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0];
    let mut stream = Narrow::taking(0);
    for (payload, byte) in [(SHORT, 1u8), (LONG, 2), (SHORT, 3), (LONG, 4)] {
        let ulpdu_len = head.len() + payload;
        stream.arriving.extend(emit_length(ulpdu_len));
        stream.arriving.extend(head);
        stream.arriving.extend(vec![byte; payload]);
        stream.arriving.extend(vec![0; padding(ulpdu_len) + CRC_LEN]);
    }
    let mut rx = mpa().rx;
    let mut long = vec![0; LONG];
    for (round, [short_byte, long_byte]) in [[1, 2], [3, 4]].into_iter().enumerate() {
        if round == 0 {
            assert_eq!(rx.fill(&buffers, &mut stream), Ok((4096, Filled::All)));
        }
        assert_eq!(rx.next(), Ok(true), "the short one is there");
        assert!(rx.ulpdu()[head.len()..].iter().all(|byte| *byte == short_byte));
        rx.consume();
        assert_eq!(rx.next(), Ok(false));
        assert!(rx.direct_candidate().is_some(), "of the long one the head is");
        let missing = rx.begin_direct();
        assert!(missing >= LONG - 4096, "{missing}");
        let mut pieces = vec![PieceMut::of(&mut long[..missing])];
        let (placed, ..) = rx.fill_direct(&buffers, &mut stream, &mut pieces).unwrap();
        drop(pieces);
        assert_eq!(placed, missing);
        assert!(rx.direct_ended() && long[..missing].iter().all(|byte| *byte == long_byte));
    }
    assert!(stream.arriving.is_empty() && rx.at_boundary());
}
