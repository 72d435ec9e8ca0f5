//! The parts of a provider that a test needs.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use urnic_sync::Mutex;

use urnic_bus::inproc::{InprocBus, Options};
use urnic_config::Config;
use urnic_device::cqe::{CQE_LEN, Cqe};
use urnic_device::record::publish;
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{BLOCK_LEN, Opcode, SendHeader, Sge};
use urnic_driver::{
    AddressVector, Anywhere, AsyncEvent, Completed, Context, ContextEvents, Cq, Driver, Mr, Pd, Poster, Qp,
    QpAttr, QpCaps, QpInit, QpMask,
};
use urnic_process::gids::GidTable;
use urnic_process::log::{Log, LogFilter};
use urnic_testkit::{self as testkit, Memory, Wait, request};
use zerocopy::IntoBytes;

/// The one driver of the test process.
pub(crate) static DRIVER: LazyLock<Arc<Driver>> = LazyLock::new(|| start(Config::default()));

/// A separate driver with another configuration. With `URNIC_TEST_LOG` set to a level, it logs the
/// life of each connection.
pub(crate) fn start(config: Config) -> Arc<Driver> {
    if let Ok(filter) = std::env::var("URNIC_TEST_LOG") {
        let log = Log {
            filter: LogFilter::parse(&filter).expect("a level"),
            stamp: String::new,
            write: |_, line: &str| eprint!("{line}"),
        };
        // Another test may have started it.
        let _ = tracing::subscriber::set_global_default(log);
    }
    Driver::start(
        InprocBus::start(&GidTable::of_host(), Options::default()).unwrap(),
        config,
    )
    .unwrap()
}

/// The events that a context received.
#[derive(Default)]
pub(crate) struct ReceivedEvents {
    pub(crate) completions: AtomicU32,
    pub(crate) events: Mutex<Vec<(AsyncEvent, u64)>>,
}

impl ContextEvents for ReceivedEvents {
    fn completion(&self, _cq_cookie: u64) {
        self.completions.fetch_add(1, Ordering::SeqCst);
    }

    fn async_event(&self, event: AsyncEvent, element_cookie: u64) {
        self.events.lock().push((event, element_cookie));
    }
}

/// The limit of a wait.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Waits until `done`, driving the device as a poller does.
pub(crate) fn until(program: &Program, what: &str, mut done: impl FnMut() -> bool) {
    let mut wait = Wait::new(LIMIT);
    while !done() {
        assert!(!wait.is_over(), "timeout while waiting until {what}");
        program.cq.progress(0);
    }
}

/// Memory of a queue: a ring or a record. The queue must outlive it.
#[derive(Debug, Clone, Copy)]
struct Shared {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is shared with the device's threads, and reached by atomics, or by copies of
// entries that belong to one side at a time (the queues' contract).
unsafe impl Send for Shared {}

impl Shared {
    fn new(start: *const u8, len: usize) -> Shared {
        Shared {
            start: NonNull::new(start.cast_mut()).expect("memory of a queue"),
            len,
        }
    }

    fn record<T>(record: &T) -> Shared {
        Shared::new(std::ptr::from_ref(record).cast(), size_of::<T>())
    }

    /// The address of `len` bytes at an offset.
    fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at + len <= self.len, "within the queue");
        self.start.as_ptr().wrapping_add(at)
    }
}

impl Memory for Shared {
    fn iova(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        let word = self.at(at, size_of::<AtomicU32>()).cast::<u32>();
        assert!(word.is_aligned());
        // SAFETY: inside the memory and aligned; the queue that owns it is alive.
        unsafe { AtomicU32::from_ptr(word) }
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let into = self.at(at, bytes.len());
        // SAFETY: inside the memory; the device does not read the entry before its index moves.
        unsafe { into.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn read(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let from = self.at(at, len);
        // SAFETY: inside the memory; the device does not write an entry that it has completed until
        // the consumer index moves.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
        bytes
    }
}

/// A process that uses the device.
pub(crate) struct Program {
    pub(crate) driver: Arc<Driver>,
    pub(crate) received: Arc<ReceivedEvents>,
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) cq: Arc<Cq>,
    completions: Mutex<testkit::CompletionQueue<Shared>>,
}

impl Program {
    pub(crate) fn new(driver: &Arc<Driver>) -> Program {
        Program::with_cq(driver, 256)
    }

    /// Requests a notification of the next completion after `consumer`.
    pub(crate) fn arm(&self, consumer: u32) {
        if let Some(doorbell) = self.cq.arm_doorbell(consumer, false) {
            self.driver.ring(doorbell);
        }
    }

    pub(crate) fn with_cq(driver: &Arc<Driver>, entries: u32) -> Program {
        let received = Arc::new(ReceivedEvents::default());
        let context = driver.open_context(received.clone()).unwrap();
        let pd = driver.alloc_pd().unwrap();
        let cq = driver
            .create_cq(&context, entries, 0, 77, true, &Anywhere)
            .unwrap();
        let ring = Shared::new(cq.ring(), CQE_LEN << cq.log_size());
        let completions = testkit::CompletionQueue::new(ring, Shared::record(cq.record()), cq.log_size());
        Program {
            driver: driver.clone(),
            received,
            context,
            pd,
            cq,
            completions: Mutex::new(completions),
        }
    }

    pub(crate) fn qp(&self) -> TestQp {
        let caps = QpCaps {
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline: 64,
        };
        let init = QpInit {
            kind: urnic_device::vocabulary::QpKind::ReliableConnected,
            context: &self.context,
            pd: &self.pd,
            send_cq: &self.cq,
            recv_cq: &self.cq,
            srq: None,
            caps,
            cookie: 99,
            rings: &Anywhere,
            max_datagram: 0,
            blocks_own_multicast: false,
        };
        let qp = self.driver.create_qp(&init).unwrap();
        let record = Shared::record(qp.record());
        let sq = Shared::new(qp.sq().as_ptr(), qp.sq_blocks() as usize * BLOCK_LEN);
        let rq_len = (qp.rq_entries() as usize) << qp.rq_log_stride();
        let rq = Shared::new(qp.rq().as_ptr(), rq_len);
        let queues = Queues {
            sends: testkit::SendQueue::new(sq, record, qp.sq_blocks().ilog2()),
            published: 0,
            receives: testkit::ReceiveQueue::new(rq, record, qp.rq_entries().ilog2(), qp.rq_log_stride()),
        };
        let posts = Arc::new(Posts {
            qp: qp.clone(),
            queues: Mutex::new(queues),
            completed: Mutex::new(Completed {
                sends: 0,
                receives: 0,
            }),
        });
        qp.set_poster(posts.clone());
        TestQp { qp, posts }
    }

    pub(crate) fn register(&self, memory: &mut [u8]) -> Mr {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let (addr, len) = (memory.as_mut_ptr(), memory.len());
        self.driver
            .register(
                &self.pd,
                addr.cast(),
                len,
                addr.expose_provenance() as u64,
                access,
            )
            .unwrap()
    }

    /// The next completion, if there is one.
    pub(crate) fn poll(&self) -> Option<Cqe> {
        self.completions.lock().poll()
    }

    /// Waits for a completion.
    pub(crate) fn completion(&self) -> Cqe {
        let mut cqe = None;
        until(self, "a completion comes", || {
            cqe = self.poll();
            cqe.is_some()
        });
        cqe.unwrap()
    }

    /// Destroys all objects but queue pairs, which were destroyed before.
    pub(crate) fn close(self) {
        self.cq.destroy().unwrap();
        self.driver.free_pd(&self.pd).unwrap();
        self.driver.close_context(&self.context).unwrap();
    }
}

/// The queues of a queue pair.
struct Queues {
    sends: testkit::SendQueue<Shared>,
    /// The producer index that the device has seen, in blocks.
    published: u32,
    receives: testkit::ReceiveQueue<Shared>,
}

/// Writes work queue entries, and publishes them as the gate allows.
pub(crate) struct Posts {
    qp: Arc<Qp>,
    queues: Mutex<Queues>,
    completed: Mutex<Completed>,
}

impl Posts {
    fn publish(&self, queues: &mut Queues) {
        let (old, new) = (queues.published, queues.sends.producer());
        let record = self.qp.record();
        if publish(&record.sq_producer, &record.sq_event, old, new) {
            self.qp.driver().ring(self.qp.send_doorbell(new));
        }
        queues.published = new;
    }
}

impl Poster for Posts {
    fn gate_opened(&self) {
        let mut queues = self.queues.lock();
        if queues.published != queues.sends.producer() {
            self.publish(&mut queues);
        }
    }

    fn waiting_since(&self) -> Option<Duration> {
        let queues = self.queues.lock();
        (queues.published != queues.sends.producer()).then_some(Duration::ZERO)
    }

    fn completed(&self) -> Option<Completed> {
        Some(*self.completed.lock())
    }
}

/// A queue pair of a test.
pub(crate) struct TestQp {
    pub(crate) qp: Arc<Qp>,
    posts: Arc<Posts>,
}

impl TestQp {
    pub(crate) fn psn(&self) -> u32 {
        self.qp.qpn & 0xff_ffff
    }

    /// Attributes for reaching `peer` from GID `gid`, for all states.
    pub(crate) fn attr(&self, driver: &Driver, gid: usize, peer: (u32, u32)) -> QpAttr {
        let dgid = driver.gids()[gid].raw();
        QpAttr {
            port: 1,
            path_mtu: 3,
            access: (Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ).bits(),
            dest_qpn: peer.0,
            rq_psn: peer.1,
            sq_psn: self.psn(),
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            av: AddressVector {
                is_global: true,
                dgid,
                sgid_index: gid as u8,
                port: 1,
                ..AddressVector::default()
            },
            ..QpAttr::default()
        }
    }

    pub(crate) fn to(&self, state: QpState, attr: &QpAttr) {
        self.qp
            .modify(
                &QpAttr {
                    state: state as u32,
                    ..*attr
                },
                mask(state),
            )
            .unwrap();
    }

    /// Changes the queue pair to RTS, through all states.
    pub(crate) fn up(&self, driver: &Driver, gid: usize, peer: (u32, u32)) {
        let attr = self.attr(driver, gid, peer);
        [QpState::Init, QpState::Rtr, QpState::Rts]
            .into_iter()
            .for_each(|state| self.to(state, &attr));
    }

    /// Sets how many completions of sends and receives the test has seen. Sends have the cookies 0,
    /// 1, 2, …
    pub(crate) fn settle(&self, sends: u32, receives: u32) {
        *self.posts.completed.lock() = Completed { sends, receives };
    }

    /// Posts a send without a completion.
    pub(crate) fn send_silently(&self, cookie: u64, offset: *const u8, len: usize, mr: &Mr) {
        let header = SendHeader {
            flags: 0,
            ..request(Opcode::Send, cookie)
        };
        self.post_send(header, offset, len, mr);
    }

    /// Posts a signalled send.
    pub(crate) fn send(&self, cookie: u64, offset: *const u8, len: usize, mr: &Mr) {
        self.post_send(request(Opcode::Send, cookie), offset, len, mr);
    }

    /// Posts a request over one element.
    pub(crate) fn post_send(&self, header: SendHeader, offset: *const u8, len: usize, mr: &Mr) {
        let sge = element(offset, len, mr);
        let (entry, blocks) = testkit::SendQueue::<Shared>::entry(header, sge.as_bytes(), 1);
        let mut queues = self.posts.queues.lock();
        queues.sends.write(&entry);
        queues.sends.advance(blocks);
        if self.qp.gate_is_open() {
            self.posts.publish(&mut queues);
        }
    }

    /// Posts a receive.
    pub(crate) fn receive(&self, cookie: u64, offset: *const u8, len: usize, mr: &Mr) {
        let mut queues = self.posts.queues.lock();
        let old = queues.receives.producer();
        queues.receives.put(cookie, &[element(offset, len, mr)]);
        let new = queues.receives.producer();
        let record = self.qp.record();
        if publish(&record.rq_producer, &record.rq_event, old, new) {
            self.qp.driver().ring(self.qp.receive_doorbell(new));
        }
    }

    pub(crate) fn state(&self) -> QpState {
        QpState::from_raw(self.qp.query().unwrap().state).unwrap()
    }
}

fn element(offset: *const u8, len: usize, mr: &Mr) -> Sge {
    Sge {
        offset: (offset.addr() as u64).into(),
        len: (len as u32).into(),
        stag: mr.stag.into(),
    }
}

/// The attributes that `ibv_modify_qp` needs for the change to a state.
pub(crate) fn mask(state: QpState) -> QpMask {
    QpMask::STATE
        | match state {
            QpState::Init => QpMask::PKEY_INDEX | QpMask::PORT | QpMask::ACCESS_FLAGS,
            QpState::Rtr => {
                QpMask::AV
                    | QpMask::PATH_MTU
                    | QpMask::DEST_QPN
                    | QpMask::RQ_PSN
                    | QpMask::MAX_DEST_RD_ATOMIC
                    | QpMask::MIN_RNR_TIMER
            }
            QpState::Rts => {
                QpMask::TIMEOUT
                    | QpMask::RETRY_CNT
                    | QpMask::RNR_RETRY
                    | QpMask::SQ_PSN
                    | QpMask::MAX_QP_RD_ATOMIC
            }
            _ => QpMask::empty(),
        }
}

pub(crate) fn status(cqe: &Cqe) -> Option<WcStatus> {
    WcStatus::from_raw(cqe.status)
}
