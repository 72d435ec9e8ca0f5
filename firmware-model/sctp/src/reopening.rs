//! A receive window that opens again. The library says so only when the peer's next DATA chunk
//! comes, and a peer with a closed window sends one in seconds. So the library gets the last one
//! again, which it acknowledges with the window that there is now.

/// The window of an association, as the peer knows it.
#[derive(Debug)]
pub(crate) struct Reopening {
    /// What the last SACK said.
    advertised: usize,
    /// Bytes that were read after it.
    freed: usize,
    /// The DATA chunks of the last packet that has some, if the window was small then.
    last: Option<Vec<u8>>,
}

/// The type of a SACK chunk.
const SACK: u8 = 3;

impl Reopening {
    pub(crate) fn new(window: usize) -> Reopening {
        Reopening {
            advertised: window,
            freed: 0,
            last: None,
        }
    }

    /// The library sends this packet. A SACK is its first chunk.
    pub(crate) fn sends(&mut self, packet: &[u8]) {
        let window = packet.get(20..).and_then(|bytes| bytes.first_chunk());
        if let (Some(&SACK), Some(window)) = (packet.get(12), window) {
            self.advertised = u32::from_be_bytes(*window) as usize;
            self.freed = 0;
        }
    }

    /// Whether the next DATA chunks are to be kept, of a window of this many bytes.
    pub(crate) fn is_small(&self, window: usize) -> bool {
        self.advertised < window / 4
    }

    /// Keeps DATA chunks.
    pub(crate) fn keep(&mut self, data: Vec<u8>) {
        self.last = Some(data);
    }

    /// A message of this many bytes was read; returns what is to be repeated.
    pub(crate) fn read(&mut self, len: usize, window: usize) -> Option<Vec<u8>> {
        self.freed += len;
        self.last.take_if(|_| self.advertised + self.freed >= window / 2)
    }
}
