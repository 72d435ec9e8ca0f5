//! Constants of pace and size: when a queue pair, a poller and the background thread act, and from
//! which length on a faster path is worth its cost. Each value is a trade-off, measured on machines
//! with two processors; correctness depends on none of them.

use std::time::Duration;

// A thread that polls for completions (`schedule`). Polls in a row without a result decide:
//
// | polls without a result | what the poller does |
// |---|---|
// | every `NOTIFICATIONS_EVERY` | looks at the notification page of local peers, if that found the last arrival |
// | `ALL_STREAMS_AFTER`, and every `ALL_STREAMS_EVERY` polls in all | polls all streams, not only the one that last delivered |
// | every `RELAX_EVERY_POLLS` | makes a short pause |
// | `YIELD_AFTER_POLLS`, then every `YIELD_EVERY_POLLS` | yields its processor |
// | `YIELD_EARLY_AFTER_POLLS` | the same, if the last yield let the sender run (`schedule/patience.rs`) |

/// Polls in a row without a result after which a poller yields its processor: the sender may wait
/// for it. A yield costs next to nothing for a poller with a processor of its own.
pub(crate) const YIELD_AFTER_POLLS: u32 = 256;
/// Such polls between two further yields.
pub(crate) const YIELD_EVERY_POLLS: u32 = 16;
/// Polls before each yield of a poller that shares its processor with the sender that it waits for:
/// nothing arrives while it polls.
pub(crate) const YIELD_EARLY_AFTER_POLLS: u32 = 4;
/// A yield that takes at least this time let another thread run: without one it takes 0.3 us.
pub(crate) const YIELD_GAVE: Duration = Duration::from_nanos(1000);
/// A yield that takes this time gave the processor to a program that computes: a sender that polls
/// returns it after one turn.
pub(crate) const YIELD_LOST: Duration = Duration::from_micros(300);
/// Polls in a row without a result between two short pauses: the processor may share a core with
/// the one that works for the poller.
pub(crate) const RELAX_EVERY_POLLS: u32 = 32;
/// Spin hints of such a pause.
pub(crate) const RELAX_HINTS: u32 = 8;
/// Polls in a row without a result, of the stream that last delivered, between two polls of all
/// streams.
pub(crate) const ALL_STREAMS_AFTER: u32 = 16;
/// Polls between two polls of all streams, whatever they find.
pub(crate) const ALL_STREAMS_EVERY: u32 = 64;
/// Polls in a row without a result between two reads of the notification page, if the last arrival
/// was found there. Each read takes a cache line away from the senders.
pub(crate) const NOTIFICATIONS_EVERY: u32 = 2;

// The background thread (`runtime/background.rs`) leaves the work to threads that poll, and checks
// whether they still do:
//
// | state | left when | ticks every |
// |---|---|---|
// | sends are gathered | the burst has ended for `WARM` | `BURST_TICK` |
// | one-sided messages come at short intervals, and no program polls | nothing arrived for the limit | it polls |
// | a program polls | a tick finds no poll since the one before | `POLLED_TICK`; `POLLED_TICK_LONG` after `POLLED_TICKS_LONG_AFTER` ticks that found polls |
// | something is to be tried again | it succeeds | `RETRY_TICK` |
// | otherwise | a descriptor is ready, or a timer due | never |

/// The time for which the thread continues to tick after the last burst of sends, so that the next
/// burst need not wake it.
pub(crate) const WARM: Duration = Duration::from_millis(10);
/// Longest time that a gathered send waits for a poller that has stopped, at first.
pub(crate) const BURST_TICK: Duration = Duration::from_micros(100);
/// The interval at which the thread checks that a poller still polls. Each check takes a poller's
/// processor away for 10 to 20 us.
pub(crate) const POLLED_TICK: Duration = Duration::from_millis(1);
/// The interval of these checks after [`POLLED_TICKS_LONG_AFTER`] checks in a row that found polls.
pub(crate) const POLLED_TICK_LONG: Duration = Duration::from_millis(2);
/// Checks in a row that found polls, after which [`POLLED_TICK_LONG`] is the interval.
pub(crate) const POLLED_TICKS_LONG_AFTER: u32 = 32;
/// Longest mean interval between the polls of a program that counts as polling all the time.
pub(crate) const POLLS_EVERY: Duration = Duration::from_micros(20);
/// Time without a poll after which a program counts as not polling.
pub(crate) const POLL_PAUSE: Duration = Duration::from_micros(200);
/// Empty polls since the last arrival, up to which a one-sided message shows that the program does
/// not poll at present: it took its completions, and at most made sure that there are no more.
pub(crate) const LAST_POLLS: u32 = 2;
/// Factor by which the number of arrivals that pollers must find in a row grows, each time that a
/// one-sided message had to wait for the next check whether the polls continue.
pub(crate) const POLLER_BACKOFF: u32 = 4;
/// Largest number of these arrivals.
pub(crate) const POLLER_MAX: u32 = 1 << 14;

// Busy-polling by the background thread (`runtime/busy_poll.rs`). The limit of one busy-poll and
// the share of processor time are options.

/// One-sided messages at short intervals after which the thread busy-polls, at first.
pub(crate) const BUSY_AFTER: u32 = 8;
/// Largest number of these messages, after busy-polls in vain.
pub(crate) const BUSY_AFTER_MAX: u32 = 1 << 12;
/// The interval at which a thread that busy-polls checks that a processor is free: a check takes 5
/// us.
pub(crate) const BUSY_CHECK: Duration = Duration::from_millis(2);
/// The time without busy-polls after another thread took the processor, at first; and the longest
/// time between two checks that find no free processor.
pub(crate) const BUSY_RETRY: Duration = Duration::from_millis(20);
/// The longest time without busy-polls after another thread took the processor: each costs that
/// thread a turn of the scheduler, some 3 ms.
pub(crate) const BUSY_RETRY_MAX: Duration = Duration::from_secs(2);
/// The part of the time, one in so many, up to which the other threads of a process on one
/// processor may use it while a thread busy-polls.
pub(crate) const BUSY_SHARED_BY: u32 = 8;
/// Time between two polls of a busy-poll that shows that another thread had the processor.
pub(crate) const BUSY_PREEMPTED: Duration = Duration::from_micros(100);
/// Such a time though a message came: to take one takes less.
pub(crate) const BUSY_TURN: Duration = Duration::from_millis(1);
/// Polls of the last stream for each poll of all streams.
pub(crate) const BUSY_POLLS_PER_WAIT: u32 = 32;
/// The time over which the share of the processor is measured.
pub(crate) const BUSY_WINDOW: Duration = Duration::from_millis(100);

/// How often listeners that could not accept a connection, and events that found no room, are tried
/// again.
pub(crate) const RETRY_TICK: Duration = Duration::from_millis(20);
/// The time within which a thread that got an event usually waits for the next one.
pub(crate) const EVENT_WAIT_USUAL: Duration = Duration::from_micros(500);

// Gathering of sends (`qp/mod.rs`):
//
// | state | left when | doorbells |
// |---|---|---|
// | served at once | `BURST_RINGS` doorbells with no poll between | each one runs the queue pair |
// | gathering | `IDLE_FLUSHES` flushes in a row found at most one entry | one for `GATHERED` (`GATHERED_CONFIRMED`, `GATHERED_IN_MEMORY`) blocks |
// | after a burst that gathered nothing | gathering would have been useful; each poll halves the number | served at once until `BURST_BACKOFF` times as many doorbells, at most `BURST_RINGS_MAX` |

/// Doorbells with no poll between that begin a burst, at first.
pub(crate) const BURST_RINGS: u32 = 4;
/// Flushes in a row that find at most one entry, after which a burst ends. A single such flush only
/// shows that the program catches up with its completions.
pub(crate) const IDLE_FLUSHES: u32 = 8;
/// Factor by which the number of doorbells that begin a burst grows after a burst that gathered
/// nothing.
pub(crate) const BURST_BACKOFF: u32 = 8;
/// Largest number of doorbells that begin a burst.
pub(crate) const BURST_RINGS_MAX: u32 = 1 << 12;
/// Blocks that may be posted in a burst without a doorbell.
pub(crate) const GATHERED: u32 = 64;
/// Such blocks if sends complete when the peer confirms them: so many fit into a send queue of 128
/// that the program posts the next ones while the peer works on the first. 300,000 Sends of 64
/// bytes between two hosts (`ib_send_bw`): 2.0 million a second with 64, 2.3 with 32, 2.6 with 24,
/// 2.2 with 20 and with 16.
pub(crate) const GATHERED_CONFIRMED: u32 = 24;
/// Such blocks if the stream passes through memory, where sending is no system call. The number is
/// smaller, so that the peer works on the first blocks while the next are posted.
pub(crate) const GATHERED_IN_MEMORY: u32 = 16;

// Work of one run of a queue pair: after it, others have their turn.

/// Bytes read in one run.
pub(crate) const RX_BUDGET: usize = 256 << 10;
/// FPDUs after which a receiver confirms to a local peer: often enough to keep the sender busy,
/// rarely enough not to transfer the cache line of the confirmation for each FPDU.
pub(crate) const CONFIRMED_TOGETHER: u64 = 16;
/// ULPDUs framed in one run.
pub(crate) const TX_BUDGET: u32 = 4096;
/// ULPDUs dropped in one run.
pub(crate) const DROP_BUDGET: u32 = 4096;
/// Most runs of the receiver before this end closes the connection, each of up to [`RX_BUDGET`]. In
/// total they take more bytes than a ring, or a socket's default buffer, has; a peer that continues
/// to send cannot delay the close without limit.
pub(crate) const LAST_RUNS: u32 = 64;
/// Datagrams made in one run.
pub(crate) const DATAGRAM_TX_BUDGET: usize = 256;
/// Batches of datagrams received in one run.
pub(crate) const DATAGRAM_RX_BATCHES: usize = 16;
/// Datagrams in the first batch of a run. Most runs find none or one: this prepares few places, and
/// the second stays empty, which shows that there are no more.
pub(crate) const DATAGRAM_FIRST_BATCH: usize = 2;

/// Messages of the peer that are confirmed without waiting for a message to it: a quarter of a send
/// queue of 128, which many programs have.
pub(crate) const CONFIRMED_MESSAGES: u32 = 32;
/// Confirmations in a row that waited in vain for a message to the peer, after which the next ones
/// do not wait: the program does not answer what it receives.
pub(crate) const ALONE_MANY: u32 = 4;
/// Bytes of the peer that are confirmed without waiting for a message to it.
pub(crate) const CONFIRMED_BYTES: u64 = 128 << 10;
/// Bytes sent since the last Read request that require another one for confirmation, although there
/// is more to send.
pub(crate) const UNCONFIRMED_MAX: u64 = 256 << 10;

// Framing (`llp/mpa`), in bytes.

/// Payload of at least this length is sent from where it is; for less, a copy is cheaper than an
/// entry of an iovec.
pub(crate) const GATHER_MIN: usize = 2048;
/// Limit on framed but unsent bytes: small enough to stay in cache, large enough to amortise the
/// receiver's wake-up (from 128 KiB to 1 MiB, 64 KiB messages gain a third).
pub(crate) const BACKLOG: u64 = 1 << 20;
/// The length of an FPDU to a peer that takes FPDUs longer than a TCP segment: each FPDU has a cost
/// at both ends, and the kernel passes on segments together (streams of 64 KiB messages gain a
/// third or more). Longer ones gain no more: the peer processes one while the next arrives.
pub(crate) const LONG_FPDU: u32 = 16 << 10;
/// The interval of queries of the segment size: each is a system call.
pub(crate) const MSS_INTERVAL: Duration = Duration::from_secs(1);
/// An FPDU of which at least this much is missing is read exactly to its end, so that the next one
/// starts at the front of the buffer.
pub(crate) const READ_EXACT_MIN: usize = 16 << 10;
/// With CRCs off, payload of which at least this much is missing is received directly to its place.
pub(crate) const RECEIVE_DIRECT_MIN: usize = 4096;
/// Bytes read from memory at a time, unless an FPDU is longer: a read costs little there, and the
/// payload that follows may be received directly to its place.
pub(crate) const MEMORY_READ: usize = 4096;
/// Bytes read from memory beyond the end of payload that is received directly.
pub(crate) const MEMORY_TAIL: usize = 1024;

// What the requester does in the memory of a local peer (`rdmap/requester/local_peer.rs`), and the
// memory between two processes (`stream/same_host`), in bytes.
//
// | what | length | how it goes |
// |---|---|---|
// | Send | up to `MAX_SHORT` | in the ring; alone, past the staging buffer |
// | Send, no other one posted or in flight | `FILL_ALONE_MIN` to `ACCESS_MAX` | filled into the peer's receive |
// | Send among others | `FILL_MIN` to `ACCESS_MAX` | filled, several by one call up to `FILL_TOGETHER_MAX` |
// | other Sends | | in the ring |
// | Write, Read | any; from `WAIT_MIN` it waits for what was sent before | by one access of at most `ACCESS_MAX`, or in a run of at most `RUN_BYTES_MAX` |

/// Most bytes of one access to the peer's memory: a revocation waits for it.
pub(crate) const ACCESS_MAX: usize = 1 << 20;
/// A request of at least this length waits until the peer has processed all that was sent, so that
/// it is direct: that takes less time than the copies of the stream.
pub(crate) const WAIT_MIN: u64 = 16 << 10;
/// Inline data of at most this length is short: clearing a buffer for the longest takes longer than
/// the copy.
pub(crate) const INLINE_SHORT: usize = 64;
/// Bytes placed directly that count as one ULPDU of a run.
pub(crate) const DIRECT_BYTES_PER_ULPDU: usize = 4096;
/// A Send of at least this length, and at most [`ACCESS_MAX`], is filled into the peer's receive.
/// Above, payload may be in no cache, and then copies by both processors, through the ring, take
/// less time.
pub(crate) const FILL_MIN: usize = 24 << 10;
/// A Send of at least this length is also filled into the peer's receive, but only while no other
/// request is posted or in flight: a program that waits for the Send waits for one copy, not two.
pub(crate) const FILL_ALONE_MIN: usize = 3 << 10;
/// Most bytes of Sends that are filled by one call: above, the call takes far less time than the
/// copies.
pub(crate) const FILL_TOGETHER_MAX: u64 = 256 << 10;
/// Most bytes of a run of Writes or Reads: a revocation waits for all.
pub(crate) const RUN_BYTES_MAX: u64 = 128 << 10;
/// Most bytes of a run that are inline.
pub(crate) const RUN_INLINE_MAX: usize = 2 << 10;
/// Bytes after which an end of a ring shows how far it is: the other end copies at the same time.
pub(crate) const RING_PART: usize = 16 << 10;
/// The time for which a check that a process number is the peer's, with the same program, is valid:
/// far shorter than the time until a number is used again.
pub(crate) const IDENTITY_LEASE: Duration = Duration::from_millis(10);

// Rings of datagrams (`stream/same_host/datagram_rings`). The first three count datagrams.

/// Datagrams to a port until it is offered a ring again.
pub(crate) const OFFER_AGAIN_AFTER: u32 = 4096;
/// Datagrams between two checks for the answer to an offer that was not answered at once.
pub(crate) const OFFER_LOOK_EVERY: u32 = 32;
/// Datagrams between two checks that the receiver still exists.
pub(crate) const RECEIVER_CHECK_EVERY: u32 = 64;
/// The number of checks of an offer, one each second, before it is withdrawn.
pub(crate) const OFFER_LOOKS: u32 = 2;
/// Offers that are examined for one datagram.
pub(crate) const OFFERS_LOOKED_AT: usize = 16;

/// Scheduling slice, in nanoseconds, and priority that the device's threads request: a thread that
/// waits for them often spins, and must yield to them.
pub(crate) const SLICE_NS: u64 = 100_000;
pub(crate) const NICE: i32 = -10;
