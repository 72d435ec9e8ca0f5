//! Segments, chunks and the three lists of a header (RFC 8166 §3.4, §4.3).
//!
//! ```text
//! segment      handle(4) length(4) offset(8)                "HLOO"
//! Read list    { 1 position segment }* 0                    "1 PHLOO 1 PHLOO 0"
//! Write list   { 1 count segment*count }* 0                 "1 2 HLOO HLOO 0"
//! Reply chunk  0 | 1 count segment*count
//! ```

use crate::limits::Limits;
use crate::malformed::Malformed;
use crate::xdr::{Reader, UNIT, put_hyper, put_word};
use std::fmt;

/// Bytes of a plain segment.
pub(crate) const SEGMENT_LEN: usize = 4 * UNIT;

/// A contiguous part of the requester's memory (RFC 8166 §3.4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// STag or R_key.
    pub handle: u32,
    /// Bytes. 0 makes an *empty segment*.
    pub length: u32,
    /// Tagged offset or address of the first byte.
    pub offset: u64,
}

impl Segment {
    fn parse(reader: &mut Reader) -> Result<Self, Malformed> {
        Ok(Self {
            handle: reader.word()?,
            length: reader.word()?,
            offset: reader.hyper()?,
        })
    }

    fn emit(&self, out: &mut Vec<u8>) {
        put_word(self.handle, out);
        put_word(self.length, out);
        put_hyper(self.offset, out);
    }
}

impl fmt::Display for Segment {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}@{:#x}:{:#x}", self.length, self.handle, self.offset)
    }
}

/// One entry of a Read list (RFC 8166 §3.4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadSegment {
    /// Position of the segment's chunk in the unreduced Payload stream, a multiple of four.
    pub position: u32,
    /// The memory that holds the bytes.
    pub segment: Segment,
}

/// A Write chunk or the Reply chunk: memory for one result or for a whole reply. A Write chunk
/// without segments is *empty* and requests its result inline (RFC 8166 §4.3.2.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WriteChunk(pub Vec<Segment>);

impl WriteChunk {
    /// Bytes of the chunk: the sum of the segments' lengths.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|segment| u64::from(segment.length)).sum()
    }

    /// Whether the chunk has no segment.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The chunk that a responder returns after it placed `len` bytes, segment after segment: the
    /// same segments with the lengths used (RFC 8166 §3.4.6). `None` if `len` bytes do not fit.
    pub fn filled(&self, len: u64) -> Option<Self> {
        let mut left = len;
        let filled = self
            .0
            .iter()
            .map(|segment| {
                let length = u64::from(segment.length).min(left) as u32;
                left -= u64::from(length);
                Segment { length, ..*segment }
            })
            .collect();
        (left == 0).then_some(Self(filled))
    }

    /// Whether a responder can have returned this chunk for `offered`: the same segments in the
    /// same order, filled one after the other, none beyond its length.
    pub fn returns(&self, offered: &Self) -> bool {
        offered.filled(self.bytes()).as_ref() == Some(self)
    }

    fn parse(reader: &mut Reader, budget: &mut usize) -> Result<Self, Malformed> {
        let count = reader.word()? as usize;
        spend(budget, count)?;
        // The message must contain all counted segments, so a count alone allocates nothing.
        if reader.0.len() / SEGMENT_LEN < count {
            return Err(Malformed::Truncated);
        }
        (0..count)
            .map(|_| Segment::parse(reader))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    fn emit(&self, out: &mut Vec<u8>) {
        put_word(self.0.len() as u32, out);
        for segment in &self.0 {
            segment.emit(out);
        }
    }

    const fn encoded_len(&self) -> usize {
        UNIT + self.0.len() * SEGMENT_LEN
    }
}

fn spend(budget: &mut usize, count: usize) -> Result<(), Malformed> {
    *budget = budget.checked_sub(count).ok_or(Malformed::Segments)?;
    Ok(())
}

/// A Read chunk: one argument, or at position zero a whole call, in the requester's memory (RFC
/// 8166 §3.4.5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadChunk {
    /// Position of the chunk in the unreduced Payload stream.
    pub position: u32,
    /// The memory that holds the bytes, in order.
    pub segments: Vec<Segment>,
}

impl ReadChunk {
    /// Bytes of the chunk: the sum of the segments' lengths.
    pub fn bytes(&self) -> u64 {
        self.segments
            .iter()
            .map(|segment| u64::from(segment.length))
            .sum()
    }

    /// Position and bytes of the chunk, in the form that [`payload`](crate::payload) uses.
    pub fn place(&self) -> (u32, u64) {
        (self.position, self.bytes())
    }
}

/// The chunk lists of RDMA_MSG and RDMA_NOMSG (RFC 8166 §4.3).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkLists {
    /// Read list: arguments. Always empty in replies.
    pub reads: Vec<ReadSegment>,
    /// Write list: memory for results (calls), or the chunks with the placed bytes (replies).
    pub writes: Vec<WriteChunk>,
    /// Reply chunk: memory for a whole reply (calls), or the chunk with the placed lengths
    /// (replies).
    pub reply: Option<WriteChunk>,
}

impl ChunkLists {
    /// Whether all three lists are absent.
    pub fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.writes.is_empty() && self.reply.is_none()
    }

    /// The chunks of the Read list by ascending position. Entries with equal positions form one
    /// chunk, in list order.
    pub fn read_chunks(&self) -> Vec<ReadChunk> {
        let mut reads = self.reads.clone();
        reads.sort_by_key(|read| read.position);
        reads
            .chunk_by(|one, next| one.position == next.position)
            .map(|entries| ReadChunk {
                position: entries[0].position,
                segments: entries.iter().map(|read| read.segment).collect(),
            })
            .collect()
    }

    /// All handles of the lists, in list order.
    pub fn handles(&self) -> impl Iterator<Item = u32> {
        let reads = self.reads.iter().map(|read| &read.segment);
        let writes = self.writes.iter().chain(&self.reply).flat_map(|chunk| &chunk.0);
        reads.chain(writes).map(|segment| segment.handle)
    }

    pub(crate) fn parse(reader: &mut Reader, limits: &Limits) -> Result<Self, Malformed> {
        let mut lists = Self::default();
        let mut budget = limits.segments;
        let mut read_bytes = 0;
        while reader.follows()? {
            spend(&mut budget, 1)?;
            let position = reader.word()?;
            // RFC 8166 §3.4.5: "MUST be a multiple of four".
            if !position.is_multiple_of(UNIT as u32) {
                return Err(Malformed::Position(position));
            }
            let segment = Segment::parse(reader)?;
            read_bytes += u64::from(segment.length);
            if read_bytes > limits.read_bytes {
                return Err(Malformed::ReadBytes(read_bytes));
            }
            lists.reads.push(ReadSegment { position, segment });
        }
        while reader.follows()? {
            // An empty chunk counts as much as a segment, so that a list of empty chunks is
            // bounded, too.
            spend(&mut budget, 1)?;
            lists.writes.push(WriteChunk::parse(reader, &mut budget)?);
        }
        if reader.follows()? {
            lists.reply = Some(WriteChunk::parse(reader, &mut budget)?);
        }
        Ok(lists)
    }

    pub(crate) fn emit(&self, out: &mut Vec<u8>) {
        for ReadSegment { position, segment } in &self.reads {
            put_word(1, out);
            put_word(*position, out);
            segment.emit(out);
        }
        put_word(0, out);
        for chunk in &self.writes {
            put_word(1, out);
            chunk.emit(out);
        }
        put_word(0, out);
        put_word(u32::from(self.reply.is_some()), out);
        if let Some(chunk) = &self.reply {
            chunk.emit(out);
        }
    }

    pub(crate) fn encoded_len(&self) -> usize {
        let reads = self.reads.len() * (2 * UNIT + SEGMENT_LEN);
        let writes: usize = self.writes.iter().map(|chunk| UNIT + chunk.encoded_len()).sum();
        let reply = self.reply.as_ref().map_or(0, WriteChunk::encoded_len);
        reads + writes + reply + 3 * UNIT
    }
}

impl fmt::Display for ChunkLists {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        for read in &self.reads {
            write!(f, " read {} +{}", read.segment, read.position)?;
        }
        for (name, chunk) in (self.writes.iter().map(|chunk| ("write", chunk)))
            .chain(self.reply.iter().map(|chunk| ("reply", chunk)))
        {
            write!(f, " {name}")?;
            for segment in &chunk.0 {
                write!(f, " {segment}")?;
            }
        }
        Ok(())
    }
}
