//! The command queue: administration of the device's objects.
//!
//! [`Command`]s of 128 bytes are in a ring; the driver rings
//! [`CMD_DOORBELL`](super::registers::CMD_DOORBELL) with its producer index. The device writes one
//! [`Completion`] of 64 bytes for each command, in any order, with the command's tag, into a ring
//! of the same size with a phase like that of a [`cqe`](super::cqe). At most as many commands as
//! the ring has entries may be outstanding. No command waits for a peer: operations that take time
//! (connecting, receiving) end with an [event](super::event).
//!
//! Arguments are typed structures at the start of `payload`; longer data goes through the buffers
//! `input` and `output`.

use crate::layouts::layouts;
use crate::vocabulary::numbered;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of a command.
pub const COMMAND_LEN: usize = 128;
/// Bytes of a completion.
pub const COMPLETION_LEN: usize = 64;
/// Bytes of a command's payload.
pub const PAYLOAD_LEN: usize = 96;
/// Bytes of a completion's payload.
pub const RESULT_LEN: usize = 48;

numbered! {
    /// The commands. Parentheses contain the payload and the contents of the completion.
    Opcode: u16 {
        /// Device attributes (output buffer: [`DeviceAttributes`]).
        QueryDevice = 1,
        /// Address table (output buffer: array of [`super::stream::Address`]; result: [`Count`]).
        QueryAddresses = 2,
        /// Counters of a queue pair ([`Handle`]), or of the whole device (0) (output buffer: array
        /// of u64, one for each [`Counter`](super::counter::Counter); result: [`Count`]).
        QueryCounters = 3,
        /// Allocate a doorbell page (result: [`Handle`]: its page number).
        AllocUar = 8,
        /// Free a doorbell page ([`Handle`]).
        FreeUar = 9,
        /// Make a protection domain (result: [`Handle`]).
        AllocPd = 10,
        /// Free a protection domain ([`Handle`]); busy while anything is in it.
        FreePd = 11,
        /// Make an event queue ([`CreateEq`]; result: [`Handle`]).
        CreateEq = 12,
        /// Destroy an event queue ([`Handle`]).
        DestroyEq = 13,
        /// Register memory ([`CreateMr`]; page list, if any, in the input buffer; result:
        /// [`Handle`]: the STag).
        CreateMr = 16,
        /// Revoke a STag ([`Handle`]): when it completes, nothing more is placed or read through
        /// it.
        DestroyMr = 17,
        /// Change a registration ([`ModifyMr`]), whose STag stays.
        ModifyMr = 18,
        /// Make a memory window ([`CreateMw`]; result: [`Handle`]: its STag).
        CreateMw = 19,
        /// Destroy a memory window ([`Handle`]).
        DestroyMw = 20,
        /// Make a completion queue ([`CreateCq`]; result: [`QueueHandle`]).
        CreateCq = 24,
        /// Destroy a completion queue ([`Handle`]); busy while a queue pair uses it.
        DestroyCq = 25,
        /// Move a completion queue to a new ring ([`ResizeCq`]; result: [`Count`]: entries carried
        /// over).
        ResizeCq = 26,
        /// Have its notifications wait for more completions ([`ModerateCq`]), with feature
        /// `MODERATION`.
        ModerateCq = 27,
        /// Make a shared receive queue ([`CreateSrq`]; result: [`QueueHandle`]).
        CreateSrq = 28,
        /// Arm its limit ([`ModifySrq`]).
        ModifySrq = 29,
        /// Destroy it ([`Handle`]).
        DestroySrq = 30,
        /// Make a queue pair ([`CreateQp`]; result: [`QueueHandle`]).
        CreateQp = 32,
        /// Change a queue pair's state or attributes ([`ModifyQp`]).
        ModifyQp = 33,
        /// Query a queue pair's state (payload [`Handle`]; result: [`QpStatus`]; output buffer, if
        /// any: the [`super::stream::Endpoints`] of its stream, all zero without one).
        QueryQp = 34,
        /// Destroy a queue pair ([`Handle`]). The data of its completed sends still arrive.
        DestroyQp = 35,
        /// Open a stream ([`super::stream::Connect`]; result: [`Handle`]: its sid; then an event).
        StreamConnect = 48,
        /// Listen ([`super::stream::Listen`]; result: [`super::stream::Listening`]).
        StreamListen = 49,
        /// Stop listening ([`Handle`]: lid).
        StreamUnlisten = 50,
        /// Send bytes in streaming mode (payload [`Handle`]: sid; input buffer: the bytes).
        StreamSend = 51,
        /// Receive exactly the output buffer's length in streaming mode (payload [`Handle`]: sid;
        /// then an event). The buffer must stay valid until that event.
        StreamReceive = 52,
        /// Both addresses of a stream, and whether there is input (payload [`Handle`]: sid; result:
        /// [`super::stream::Endpoints`] in the output buffer).
        StreamQuery = 53,
        /// Hand a stream to a queue pair: RDMA mode begins ([`super::stream::Attach`]).
        StreamAttach = 54,
        /// Close a stream that is not attached ([`super::stream::Close`]).
        StreamClose = 55,
        /// Make a queue pair its own peer, with no stream at all ([`super::stream::Attach`] with
        /// sid 0).
        LoopbackAttach = 56,
        /// Bind a UDP port for a queue pair of kind UD ([`super::stream::BindDatagrams`]; result:
        /// [`super::stream::DatagramPort`]), with feature `DATAGRAMS`.
        BindDatagrams = 57,
        /// Close a UDP port that no queue pair has ([`Handle`]).
        CloseDatagrams = 58,
        /// Receive the datagrams of a multicast group as well ([`super::stream::Multicast`]).
        AttachMulticast = 59,
        /// End that ([`super::stream::Multicast`]).
        DetachMulticast = 60,
        /// Name the peer of a queue pair that speaks RoCE v2: its requests are executed from now on
        /// ([`super::stream::Path`]).
        ConnectPath = 61,
        /// The requests of a queue pair that speaks RoCE v2 are sent from now on
        /// ([`super::stream::Retries`]).
        StartPath = 62,
    }
}

numbered! {
    /// The result of a command.
    Status: u16 {
        /// Done.
        Ok = 0,
        /// No such command.
        UnknownOpcode = 1,
        /// An argument is out of range or contradicts another.
        InvalidArgument = 2,
        /// No such object.
        InvalidHandle = 3,
        /// Out of objects or memory.
        NoResources = 4,
        /// The command is not valid in this state.
        WrongState = 5,
        /// Still in use.
        Busy = 6,
        /// The function may not do this.
        Denied = 7,
        /// A DMA address could not be reached.
        DmaFault = 8,
        /// The device does not support this.
        NotSupported = 9,
        /// The address is in use.
        AddressInUse = 10,
        /// The address is not one of this function's.
        AddressNotAvailable = 11,
        /// The network cannot be reached from here.
        Unreachable = 12,
    }
}

/// A command.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Command {
    /// [`Opcode`].
    pub opcode: U16,
    /// Returned in the completion.
    pub tag: U16,
    /// Length of the input buffer.
    pub input_len: U32,
    /// IOVA of the input buffer.
    pub input: U64,
    /// IOVA of the output buffer.
    pub output: U64,
    /// Length of the output buffer.
    pub output_len: U32,
    reserved: U32,
    /// Arguments.
    pub payload: [u8; PAYLOAD_LEN],
}

/// A completion.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Completion {
    /// The command's tag.
    pub tag: U16,
    /// [`Status`].
    pub status: U16,
    /// Of a refused command: 1 + the offset, in the command's payload, of the argument at fault;
    /// 0 = the device does not say.
    pub argument: U32,
    /// Results.
    pub payload: [u8; RESULT_LEN],
    reserved2: U32,
    /// Phase, bit 0.
    pub phase: U32,
}

layouts! {
    /// Nothing.
    Nothing {}
    /// An object's number.
    Handle {
        /// The number.
        id: U32,
    }
    /// A number of objects.
    Count {
        /// The count.
        count: U32,
    }
    /// A queue's number and doorbell.
    QueueHandle {
        /// The number: cqid, srqid or qid, 24 bits.
        id: U32,
        /// Byte offset of its slot in its doorbell page.
        doorbell: U32,
    }
    /// Arguments of `CreateEq`.
    CreateEq {
        /// Ring of 32-byte entries.
        ring: U64,
        /// [`EqRecord`](super::record::EqRecord).
        record: U64,
        /// log2 of the entries.
        log_size: U32,
        /// Interrupt vector.
        vector: U32,
    }
    /// Arguments of `CreateMr`.
    CreateMr {
        /// First tagged offset: the virtual address, or 0 if zero-based.
        base: U64,
        /// Length in bytes.
        len: U64,
        /// IOVA of the first byte if contiguous; byte offset into the first page with a page list.
        dma: U64,
        /// Protection domain.
        pd: U32,
        /// [`Access`](crate::vocabulary::Access).
        access: U32,
        /// log2 of the page size of the list in the input buffer (array of u64 IOVAs); 0 =
        /// contiguous; [`NULL_REGION`].
        log_page: U32,
        /// Reserved, 0.
        reserved: U32,
    }
    /// Arguments of `ModifyMr`: those of `CreateMr`, and the fields to take from them.
    ModifyMr {
        /// The STag of the region.
        stag: U32,
        /// [`reregister`].
        what: U32,
        /// New values.
        new: CreateMr,
    }
    /// Arguments of `CreateMw`.
    CreateMw {
        /// Protection domain.
        pd: U32,
        /// 1 or 2, as in `enum ibv_mw_type`.
        kind: U32,
    }
    /// Arguments of `CreateCq`.
    CreateCq {
        /// Ring of 64-byte entries, zeroed.
        ring: U64,
        /// [`CqRecord`](super::record::CqRecord).
        record: U64,
        /// log2 of the entries.
        log_size: U32,
        /// Event queue for its completion notifications; 0 = never notifies.
        eq: U32,
        /// Doorbell page.
        uar: U32,
        /// Bits of [`cq`].
        flags: U32,
    }
    /// Arguments of `ResizeCq`. Indices continue: with the consumer index C at the time of the
    /// command, the entry of index i is from then on in slot (i − C) modulo the new size, and its
    /// phase is 1 on the first pass over the new ring. The driver does not consume entries while
    /// the command is outstanding.
    ResizeCq {
        /// New ring, zeroed.
        ring: U64,
        /// The queue.
        cq: U32,
        /// log2 of the new entries.
        log_size: U32,
    }
    /// Arguments of `ModerateCq`.
    ModerateCq {
        /// The queue.
        cq: U32,
        /// A notification waits for this number of completions; 0 or 1: no wait. At most 65535.
        count: U32,
        /// The wait ends this number of microseconds after the first completion; 0: no wait. At
        /// most 65535.
        period: U32,
        /// Reserved, 0.
        reserved: U32,
    }
    /// Arguments of `CreateSrq`.
    CreateSrq {
        /// Ring.
        ring: U64,
        /// [`QueueRecord`](super::record::QueueRecord).
        record: U64,
        /// Protection domain.
        pd: U32,
        /// log2 of the entries.
        log_size: U32,
        /// log2 of the bytes of an entry.
        log_stride: U32,
        /// Doorbell page.
        uar: U32,
    }
    /// Arguments of `ModifySrq`.
    ModifySrq {
        /// The queue.
        srq: U32,
        /// An event comes once fewer buffers than this are left; 0 = none.
        limit: U32,
    }
    /// Arguments of `CreateQp`.
    CreateQp {
        /// Send queue ring of 64-byte blocks.
        sq_ring: U64,
        /// Receive queue ring; unused with a shared receive queue.
        rq_ring: U64,
        /// [`QueueRecord`](super::record::QueueRecord).
        record: U64,
        /// Protection domain.
        pd: U32,
        /// Completion queue of sends.
        send_cq: U32,
        /// Completion queue of receives.
        recv_cq: U32,
        /// Shared receive queue; 0 = none.
        srq: U32,
        /// Doorbell page.
        uar: U32,
        /// Returned in completions: the program's number of the queue pair.
        label: U32,
        /// log2 of the send queue's blocks.
        sq_log_size: U32,
        /// log2 of the receive queue's entries.
        rq_log_size: U32,
        /// log2 of the bytes of a receive entry.
        rq_log_stride: U32,
        /// [`QpKind`](crate::vocabulary::QpKind).
        kind: U32,
        /// The UDP port of a queue pair of kind UD without the rule
        /// [`ROCE`](create_qp::ROCE), which the queue pair owns from now on; else 0.
        /// The low 24 bits of `label` are the number of such a queue pair on the wire.
        datagrams: U32,
        /// Rules of the queue pair: see [`create_qp`].
        rules: U32,
        /// The longest payload that a queue pair of kind UD sends, in bytes: the MTU of the port.
        /// 0 = that of the device, 4,096.
        max_datagram: U32,
        /// Of queue pair 1 with the rule `ROCE`: the upper 16 bits of the numbers of this device's
        /// queue pairs and connections, by which other devices of the user pass messages on to it;
        /// 0 = none. Else 0.
        member: U32,
    }
    /// Arguments of `ModifyQp`.
    ModifyQp {
        /// The queue pair.
        qp: U32,
        /// Which of the following to take: see [`modify`].
        mask: U32,
        /// [`QpState`](crate::vocabulary::QpState).
        state: U32,
        /// Remote rights: [`Access`](crate::vocabulary::Access).
        access: U32,
        /// Most outstanding inbound Reads and atomics (`max_dest_rd_atomic`).
        ird: U32,
        /// Most outstanding outbound Reads and atomics (`max_rd_atomic`).
        ord: U32,
        /// The time that a Send waits for a receive before it fails, milliseconds;
        /// `u32::MAX` = for ever. Only with
        /// [`attach::STALL_ON_EMPTY_RQ`](super::stream::attach::STALL_ON_EMPTY_RQ).
        rnr_timeout_ms: U32,
        /// Q_Key of a queue pair of kind UD: it receives only datagrams with this key.
        qkey: U32,
        /// How long the peer's host may be silent while a request waits for it, milliseconds; 0 =
        /// as long as TCP retransmits.
        ack_timeout_ms: U32,
        /// Reserved, 0.
        reserved: U32,
    }
    /// Result of `QueryQp`.
    QpStatus {
        /// [`QpState`](crate::vocabulary::QpState).
        state: U32,
        /// [`attached`](super::stream::attached): whether a stream is attached, and which way its
        /// bytes take.
        attached: U32,
        /// Terminate control word sent; 0 = none.
        terminate_sent: U32,
        /// Terminate control word received; 0 = none.
        terminate_received: U32,
        /// The IRD in force.
        ird: U32,
        /// The ORD in force.
        ord: U32,
        /// Bytes of the current transfer, which is the oldest Read, or else the message that is
        /// being sent; 0 = none.
        transfer_len: U32,
        /// Bytes of that transfer that have arrived, or are sent.
        transfer_done: U32,
    }
    /// The output of `QueryDevice`.
    DeviceAttributes {
        /// Largest registration.
        max_mr_size: U64,
        /// Firmware version: major, minor, patch in 16 bits each.
        firmware: U64,
        /// Counts.
        max_qp: U32,
        /// Work requests per queue.
        max_qp_wr: U32,
        /// Elements per send or receive entry.
        max_sge: U32,
        /// Elements of a Read.
        max_sge_rd: U32,
        /// Inline bytes.
        max_inline: U32,
        /// Completion queues.
        max_cq: U32,
        /// Entries per completion queue.
        max_cqe: U32,
        /// Regions.
        max_mr: U32,
        /// Protection domains.
        max_pd: U32,
        /// Windows.
        max_mw: U32,
        /// Shared receive queues.
        max_srq: U32,
        /// Entries per shared receive queue.
        max_srq_wr: U32,
        /// Inbound Reads per queue pair.
        max_ird: U32,
        /// Outbound Reads per queue pair.
        max_ord: U32,
        /// Vectors usable for completions.
        completion_vectors: U32,
        /// [`features`].
        features: U32,
    }
}

/// As `CreateMr::log_page`: a region without memory, which reads as zeroes and discards writes;
/// its length and base limit the addresses. Only local rights.
pub const NULL_REGION: u32 = u32::MAX;

mod bits;
mod layout;
mod messages;

pub use bits::{cq, create_qp, features, modify, reregister};
