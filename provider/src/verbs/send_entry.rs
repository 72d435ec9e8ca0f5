//! The limits of a send queue, and an entry that is being written.

use urnic_device::vocabulary::QpKind;
use urnic_device::wqe::{AtomicOperands, BindOperands, Opcode, SendFlags, SendHeader};

/// The size of a send queue. The ring holds as many entries of maximum length as there are slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SendShape {
    /// Maximum number of outstanding work requests.
    pub(crate) slots: u32,
    /// Maximum number of scatter/gather elements of a work request.
    pub(crate) max_sge: u32,
    /// Maximum number of inline bytes of a work request.
    pub(crate) max_inline: u32,
    /// The number of blocks in the ring, a power of two.
    pub(crate) blocks: u32,
}

/// Further limits on posting, from the device and from the creation of the queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SendRules {
    /// The service of the queue pair.
    pub(crate) kind: QpKind,
    /// Every work request makes a completion (`sq_sig_all`).
    pub(crate) signal_all: bool,
    /// Maximum number of elements of an RDMA Read.
    pub(crate) max_sge_read: u32,
    /// The device supports atomics.
    pub(crate) atomics: bool,
    /// The device supports immediate data.
    pub(crate) immediate: bool,
    /// The device supports memory windows.
    pub(crate) windows: bool,
}

impl SendRules {
    #[inline]
    pub(super) fn is_datagrams(&self) -> bool {
        self.kind == QpKind::UnreliableDatagram
    }

    /// Whether the service of the queue pair has this operation.
    #[inline]
    pub(super) fn has_opcode(&self, opcode: Opcode) -> bool {
        match self.kind {
            QpKind::ReliableConnected => true,
            QpKind::UnreliableConnected => matches!(
                opcode,
                Opcode::Send
                    | Opcode::SendImm
                    | Opcode::Write
                    | Opcode::WriteImm
                    | Opcode::BindMw
                    | Opcode::LocalInv
            ),
            QpKind::UnreliableDatagram => matches!(opcode, Opcode::Send | Opcode::SendImm),
        }
    }
}

/// An incomplete entry: its header, and the current length of its operands.
#[derive(Clone, Copy, Default)]
pub(crate) struct Entry {
    pub(crate) header: SendHeader,
    pub(super) operand_len: usize,
    /// Bytes of operands in front of the list or the data: the address of a datagram.
    pub(super) prefix: usize,
    pub(super) wr_id: u64,
}

impl Entry {
    pub(super) fn opcode(&self) -> Option<Opcode> {
        Opcode::from_raw(self.header.opcode)
    }

    /// Sets the peer's memory that the operation accesses.
    pub(crate) fn set_remote(&mut self, stag: u32, offset: u64) {
        self.header.stag = stag.into();
        self.header.remote_offset = offset.into();
    }

    /// Removes elements and inline data.
    pub(crate) fn clear_data(&mut self) {
        self.operand_len = self.prefix;
        self.operand_len += match self.opcode() {
            Some(Opcode::CompareSwap | Opcode::FetchAdd) => size_of::<AtomicOperands>(),
            Some(Opcode::BindMw) => size_of::<BindOperands>(),
            _ => 0,
        };
        self.header.num_sge = 0;
        self.header.inline_len = 0.into();
        self.header.flags &= !SendFlags::INLINE.bits();
    }
}
