//! The counters of the device, for each queue pair and as a whole: the output of
//! [`QueryCounters`](super::command::Opcode::QueryCounters) is an array of u64 in this order.

macro_rules! counters {
    ($($(#[$m:meta])* $name:ident = $text:literal,)*) => {
        /// The counters, in the order of `QueryCounters`' output. New ones come last.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Counter { $($(#[$m])* $name,)* }
        impl Counter {
            /// All of them, in order.
            pub const ALL: &'static [Counter] = &[$(Counter::$name,)*];
            /// The name under which tools show it.
            pub fn name(self) -> &'static str { match self { $(Counter::$name => $text,)* } }
        }
    };
}

counters! {
    /// Bytes handed to streams.
    TxBytes = "tx_bytes",
    /// FPDUs handed to streams.
    TxFpdus = "tx_fpdus",
    /// RDMA messages sent.
    TxMessages = "tx_messages",
    /// Bytes taken from streams.
    RxBytes = "rx_bytes",
    /// Valid FPDUs received.
    RxFpdus = "rx_fpdus",
    /// RDMA messages delivered or placed to their end.
    RxMessages = "rx_messages",
    /// FPDUs whose CRC was wrong (RFC 5044 §8, code 2).
    RxCrcErrors = "rx_crc_errors",
    /// Terminates sent.
    TxTerminates = "tx_terminates",
    /// Terminates received.
    RxTerminates = "rx_terminates",
    /// First FPDUs that an initiator received before it had sent one, as with the MPA Reply in one
    /// segment (MPA-S-16).
    EarlyFpdus = "early_fpdus",
    /// ULPDUs above the 64768 bytes that RFC 5044 §3 allows, accepted all the same (MPA-F-07).
    OversizeUlpdus = "oversize_ulpdus",
    /// First FPDUs that were not the RTR agreed on (EMPA-21).
    RtrMismatches = "rtr_mismatches",
    /// System calls that sent.
    TxCalls = "tx_calls",
    /// System calls that received.
    RxCalls = "rx_calls",
    /// Times a full stream stalled the send queue.
    TxStalls = "tx_stalls",
    /// Times an empty receive queue stalled the stream.
    RxStalls = "rx_stalls",
    /// Doorbells rung by the driver.
    Doorbells = "doorbells",
    /// Bursts of gathered work requests flushed.
    GatheredFlushes = "gathered_flushes",
    /// Polls that drove the receive side.
    Polls = "polls",
    /// Times the background thread woke.
    Wakeups = "wakeups",
    /// Completion queues that overflowed.
    CqOverflows = "cq_overflows",
    /// FPDUs whose markers and length disagreed (RFC 5044 §8, code 3).
    RxMarkerErrors = "rx_marker_errors",
    /// Streams that were lost (RFC 5044 §8, code 1).
    StreamsLost = "streams_lost",
    /// Connections that were to confirm delivery and whose peers accept no Read.
    UnconfirmedConnections = "unconfirmed_connections",
    /// Datagrams sent.
    TxDatagrams = "tx_datagrams",
    /// Datagrams that the network did not take: too long for the path, no route, not allowed.
    TxDatagramDrops = "tx_datagram_drops",
    /// Datagrams delivered.
    RxDatagrams = "rx_datagrams",
    /// Datagrams that found no receive posted, or none that was long enough, or no room in the
    /// buffer of the port.
    RxDatagramDrops = "rx_datagram_drops",
    /// Packets at the port of queue pairs of RoCE v2 that are not for them: malformed, with a wrong
    /// ICRC, of a stranger, for a queue pair that is not there.
    RxDatagramErrors = "rx_datagram_errors",
    /// Datagrams with another Q_Key than that of the queue pair.
    QkeyViolations = "qkey_violations",
    /// Messages of kind UC that found no stream. They count as sent, too.
    TxMessageDrops = "tx_message_drops",
    /// Messages of kind UC that found no receive or one that was too short, that memory refused, or
    /// of which only a part came.
    RxMessageDrops = "rx_message_drops",
    /// RDMA Writes that were placed in the memory of a peer on this host, at least in part. They
    /// count as sent, too. The peer, whose device has no part in it, counts their bytes only.
    DirectWrites = "direct_writes",
    /// RDMA Reads that were fetched from the memory of a peer on this host. They count as sent,
    /// too. The peer counts their bytes only.
    DirectReads = "direct_reads",
    /// Datagrams that went to a port on this host through memory. They count as sent, too.
    DirectDatagrams = "direct_datagrams",
    /// Sends whose payload was placed in the receive of a peer on this host, at least in part. They
    /// count as sent, too. The peer counts them as received.
    DirectSends = "direct_sends",
    /// Doorbells that reached no queue, and had no effect: of an unknown kind, for a number that no
    /// queue of this page has (any more), or in a slot of no queue.
    InvalidDoorbells = "invalid_doorbells",
    /// Confirmations sent: Writes of length zero that tell the peer how far its messages are
    /// processed.
    TxConfirmations = "tx_confirmations",
    /// Confirmations received.
    RxConfirmations = "rx_confirmations",
    /// RDMA Writes, Reads and atomics from the peer that carried or requested bytes: the program
    /// gets no completion for them.
    RxOneSided = "rx_one_sided",
    /// Messages that the background thread found while it busy-polled.
    BusyPollFinds = "busy_poll_finds",
    /// Microseconds for which the background thread busy-polled.
    BusyPollMicros = "busy_poll_us",
}
