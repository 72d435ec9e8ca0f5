//! What a send queue tells the options `strict` and `trace`.

use rustix::io::Errno;
use urnic_device::wqe::{OPERANDS, Opcode, SendFlags, Sge};
use urnic_rdma_core::{IBV_SEND_INLINE, ibv_send_wr};

use super::SendQueue;
use crate::guard::contained;
use crate::strict::{Element, Request};
use crate::verbs::send_entry::Entry;

impl SendQueue {
    /// Shows an entry to what looks at the requests. What it fetches may have to go elsewhere.
    #[cold]
    pub(super) fn show(&mut self, entry: &mut Entry) {
        let Some(opcode) = entry.opcode() else { return };
        let lists = match opcode {
            Opcode::LocalInv | Opcode::BindMw => 0,
            _ => usize::from(entry.header.num_sge),
        };
        // The elements are the last operands.
        let first = entry.operand_len.saturating_sub(lists * size_of::<Sge>());
        let elements: Vec<Element> = (0..lists)
            .map(|number| {
                let at = self.block_offset() + OPERANDS + first + number * size_of::<Sge>();
                let at = at & (self.ring_len() - 1);
                // SAFETY: `put` wrote this element, which does not wrap.
                let sge = unsafe { self.ring.as_ptr().add(at).cast::<Sge>().read_unaligned() };
                Element {
                    key: sge.stag.get(),
                    offset: sge.offset.get(),
                    len: sge.len.get(),
                }
            })
            .collect();
        let mut held = None;
        contained(|| {
            let (slot, wr_id, opcode) = (self.posted, entry.wr_id, opcode.completion());
            if let Some(check) = self.ledger.check() {
                held = check.send_posted(&Request {
                    slot,
                    wr_id,
                    opcode,
                    signalled: entry.header.flags & SendFlags::SIGNALED.bits() != 0,
                    elements: &elements,
                });
            }
            if let Some(trace) = self.ledger.trace() {
                let bytes = elements.iter().map(|element| u64::from(element.len)).sum::<u64>();
                let inline = u64::from(entry.header.inline_len.get());
                trace.send_posted(slot, wr_id, opcode, bytes + inline);
            }
        });
        if let Some(Element { key, offset, len }) = held {
            entry.clear_data();
            entry.header.num_sge = 1;
            self.put(
                entry,
                Sge {
                    offset: offset.into(),
                    len: len.into(),
                    stag: key.into(),
                },
            );
        }
    }

    /// Why [`post`](Self::post) refuses a request with this error.
    #[cold]
    pub(in crate::verbs) fn why_refused(&self, wr: &ibv_send_wr, errno: Errno) -> String {
        let count = wr.num_sge as u32;
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        match errno {
            Errno::NOMEM => format!(
                "the send queue is full: {} requests are outstanding",
                self.shape.slots
            ),
            _ if count > self.shape.max_sge => {
                format!(
                    "the request has {count} elements, and max_send_sge is {}",
                    self.shape.max_sge
                )
            }
            _ if inline => format!(
                "the request is inline: that is for Sends and Writes of at most max_inline_data, {} B",
                self.shape.max_inline
            ),
            _ => format!(
                "the queue pair has no requests of opcode {} with send_flags {:#x} and {count} elements",
                wr.opcode, wr.send_flags
            ),
        }
    }
}
