//! BAR 2: doorbell pages.
//!
//! A page belongs to one user context and reaches only queues created with it. The device assigns
//! each queue an 8-byte slot of its own in the page when the queue is created, so that a page of
//! plain memory loses no ring. If there are more work queues than slots, queues share a slot, and a
//! ring makes the device check all queues of the slot. The true producer index is in the queue's
//! [record](super::record): a doorbell is only a request to check it.
//!
//! A device that cannot detect a store (for example in another process) has its pages in plain
//! memory and polls them; [`features::DOORBELL_MEMORY`](super::command::features::DOORBELL_MEMORY)
//! shows that. Each page's *wake word* shows when the device stops polling: a driver that has
//! stored a doorbell reads that word after a full fence, and writes
//! [`KICK`](super::registers::KICK) if the device sleeps. The device sets the word, and after a
//! full fence polls once more before it sleeps. Without that feature the store itself rings, and
//! the driver must not read the word.

use crate::vocabulary::numbered;

/// Length of a doorbell page in bytes.
pub const PAGE_LEN: u32 = 4096;
/// Slots in a page: all but the last eight bytes, where the wake word is.
pub const SLOTS: u32 = PAGE_LEN / 8 - 1;
/// Completion queues that get a slot of their own in a page. With more, some share one, and an arm
/// that is overwritten in plain memory before the device reads it is lost: a driver with more of
/// them allocates further pages.
pub const CQ_SLOTS: u32 = SLOTS / 2;
/// Byte offset of the wake word in a page, 32 bits, written by the device: 0 = the device
/// polls the page, 1 = it sleeps until it is kicked.
pub const WAKE: u32 = SLOTS * 8;

numbered! {
    /// The kind of a doorbell.
    Kind: u8 {
        /// Work was posted to a send queue; the index is its producer index in blocks.
        Send = 1,
        /// Buffers were posted to a receive queue; the index is its producer index in entries.
        Receive = 2,
        /// Buffers were posted to a shared receive queue.
        SharedReceive = 3,
        /// Arm a completion queue for the next completion; the index is that after the newest
        /// completion that the driver saw, so that a completion which crosses the doorbell is not
        /// missed.
        Arm = 4,
        /// Arm a completion queue for the next solicited or failed completion.
        ArmSolicited = 5,
    }
}

/// One doorbell write: kind in bits 63:56, queue number in 55:32, index in 31:0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doorbell {
    /// The kind of the doorbell.
    pub kind: Kind,
    /// Device number of the queue (24 bits): `qid`, `srqid` or `cqid`.
    pub queue: u32,
    /// Producer or consumer index, depending on the kind.
    pub index: u32,
}

impl Doorbell {
    /// The 64-bit value to store, little-endian, in the queue's slot.
    #[inline]
    pub fn encode(self) -> u64 {
        (self.kind as u64) << 56 | u64::from(self.queue & 0xff_ffff) << 32 | u64::from(self.index)
    }

    /// Decodes a stored value; `None` if its kind is unknown.
    #[inline]
    pub fn decode(raw: u64) -> Option<Doorbell> {
        Some(Doorbell {
            kind: Kind::from_raw((raw >> 56) as u8)?,
            queue: (raw >> 32) as u32 & 0xff_ffff,
            index: raw as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doorbell_value_decodes_as_encoded() {
        let d = Doorbell {
            kind: Kind::ArmSolicited,
            queue: 0xab_cdef,
            index: 0xdead_beef,
        };
        assert_eq!(d.encode(), 0x05ab_cdef_dead_beef);
        assert_eq!(Doorbell::decode(d.encode()), Some(d));
        assert_eq!(Doorbell::decode(0), None);
    }
}
