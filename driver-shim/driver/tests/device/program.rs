//! The parts of a provider that a test needs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use urnic_bus::inproc::InprocBus;
use urnic_config::Config;
use urnic_device::cqe::{CQE_LEN, Cqe, PHASE};
use urnic_device::vocabulary::{Access, QpState, WcStatus};
use urnic_device::wqe::{BLOCK_LEN, OPERANDS, Opcode, RecvHeader, SendFlags, SendHeader, Sge};
use urnic_driver::{
    AddressVector, Anywhere, AsyncEvent, Completed, Context, ContextEvents, Cq, Driver, Mr, Pd, Poster, Qp,
    QpAttr, QpCaps, QpInit, QpMask,
};
use urnic_process::gids::GidTable;
use zerocopy::{FromBytes, IntoBytes};

/// The one driver of the test process.
pub(crate) static DRIVER: LazyLock<Arc<Driver>> = LazyLock::new(|| start(Config::default()));

/// A separate driver with another configuration. With `URNIC_TEST_LOG` set, the driver logs the
/// life of each connection.
pub(crate) fn start(config: Config) -> Arc<Driver> {
    if let Ok(filter) = std::env::var("URNIC_TEST_LOG") {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .try_init();
    }
    Driver::start(InprocBus::start(&GidTable::of_host(), None).unwrap(), config).unwrap()
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
        self.events.lock().unwrap().push((event, element_cookie));
    }
}

/// Waits until `done`, driving the device as a poller does.
pub(crate) fn until(program: &Program, what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "waited in vain until {what}"
        );
        program.cq.progress();
    }
}

/// A signalled request of one block with one element.
pub(crate) fn signaled(opcode: Opcode, cookie: u64) -> SendHeader {
    SendHeader {
        opcode: opcode as u8,
        flags: SendFlags::SIGNALED.bits(),
        num_sge: 1,
        blocks: 1,
        cookie: cookie.into(),
        ..SendHeader::default()
    }
}

/// A process that uses the device.
pub(crate) struct Program {
    pub(crate) driver: Arc<Driver>,
    pub(crate) received: Arc<ReceivedEvents>,
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) cq: Arc<Cq>,
    consumer: Mutex<u32>,
}

impl Program {
    pub(crate) fn new(driver: &Arc<Driver>) -> Program {
        Program::with_cq(driver, 256)
    }

    pub(crate) fn with_cq(driver: &Arc<Driver>, entries: u32) -> Program {
        let received = Arc::new(ReceivedEvents::default());
        let context = driver.open_context(received.clone()).unwrap();
        let pd = driver.alloc_pd().unwrap();
        let cq = driver.create_cq(&context, entries, 0, 77, &Anywhere).unwrap();
        Program {
            driver: driver.clone(),
            received,
            context,
            pd,
            cq,
            consumer: Mutex::new(0),
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
            context: &self.context,
            pd: &self.pd,
            send_cq: &self.cq,
            recv_cq: &self.cq,
            srq: None,
            caps,
            cookie: 99,
            rings: &Anywhere,
        };
        let qp = self.driver.create_qp(&init).unwrap();
        let posts = Arc::new(Posts {
            qp: qp.clone(),
            index: Mutex::default(),
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
        let mut consumer = self.consumer.lock().unwrap();
        let slot = (*consumer & (self.cq.entries() - 1)) as usize * CQE_LEN;
        let ring = self.cq.ring();
        let phase = 1 ^ (*consumer >> self.cq.log_size() & 1);
        // SAFETY: the slot is inside the ring, its phase word is aligned and written atomically by
        // the device.
        let here = unsafe { AtomicU32::from_ptr(ring.add(slot + PHASE).cast()) }.load(Ordering::Acquire);
        if here & 1 != phase {
            return None;
        }
        let mut bytes = [0; CQE_LEN];
        // SAFETY: the ring is mapped as long as the queue exists, and `slot` is within it; the
        // device does not write the entry until the consumer index moves.
        unsafe { ring.add(slot).copy_to_nonoverlapping(bytes.as_mut_ptr(), CQE_LEN) };
        *consumer += 1;
        self.cq.record().consumer.store(*consumer, Ordering::Release);
        Some(Cqe::read_from_bytes(&bytes).unwrap())
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

/// Producer indices of a queue pair.
#[derive(Default, Clone, Copy)]
struct Index {
    sq_written: u32,
    sq_published: u32,
    rq: u32,
}

/// Writes work queue entries, and publishes them as the gate allows.
pub(crate) struct Posts {
    qp: Arc<Qp>,
    index: Mutex<Index>,
    completed: Mutex<Completed>,
}

impl Posts {
    fn publish(&self, index: &mut Index) {
        self.qp.publish_sends(index.sq_published, index.sq_written);
        index.sq_published = index.sq_written;
    }
}

impl Poster for Posts {
    fn gate_opened(&self) {
        let mut index = self.index.lock().unwrap();
        if index.sq_published != index.sq_written {
            self.publish(&mut index);
        }
    }

    fn is_waiting(&self) -> bool {
        let index = self.index.lock().unwrap();
        index.sq_published != index.sq_written
    }

    fn completed(&self) -> Option<Completed> {
        Some(*self.completed.lock().unwrap())
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
        let dgid = driver.gid(gid).unwrap().raw();
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
        *self.posts.completed.lock().unwrap() = Completed { sends, receives };
    }

    /// Posts a send without a completion.
    pub(crate) fn send_silently(&self, cookie: u64, offset: *const u8, len: usize, mr: &Mr) {
        let header = SendHeader {
            flags: 0,
            ..signaled(Opcode::Send, cookie)
        };
        self.post_send(header, offset, len, mr);
    }

    /// Posts a signalled send.
    pub(crate) fn send(&self, cookie: u64, offset: *const u8, len: usize, mr: &Mr) {
        self.post_send(signaled(Opcode::Send, cookie), offset, len, mr);
    }

    /// Posts a request over one element.
    pub(crate) fn post_send(&self, header: SendHeader, offset: *const u8, len: usize, mr: &Mr) {
        let sge = Sge {
            offset: (offset.addr() as u64).into(),
            len: (len as u32).into(),
            stag: mr.stag.into(),
        };
        let mut index = self.posts.index.lock().unwrap();
        let slot = (index.sq_written & (self.qp.sq_blocks() - 1)) as usize * BLOCK_LEN;
        put(&self.qp, slot, header.as_bytes());
        put(&self.qp, slot + OPERANDS, sge.as_bytes());
        index.sq_written += 1;
        if self.qp.gate_is_open() {
            self.posts.publish(&mut index);
        }
    }

    /// Posts a receive.
    pub(crate) fn receive(&self, cookie: u64, offset: *const u8, len: usize, mr: &Mr) {
        let mut index = self.posts.index.lock().unwrap();
        let slot = ((index.rq & (self.qp.rq_entries() - 1)) as usize) << self.qp.rq_log_stride();
        let sge = Sge {
            offset: (offset.addr() as u64).into(),
            len: (len as u32).into(),
            stag: mr.stag.into(),
        };
        let entry = [RecvHeader::new(cookie, 1).as_bytes(), sge.as_bytes()].concat();
        // SAFETY: the entry lies inside the ring, and the device does not read it before the index
        // moves.
        unsafe {
            self.qp
                .rq()
                .as_ptr()
                .add(slot)
                .copy_from_nonoverlapping(entry.as_ptr(), entry.len())
        };
        index.rq += 1;
        self.qp.publish_receives(index.rq - 1, index.rq);
    }

    pub(crate) fn state(&self) -> QpState {
        QpState::from_raw(self.qp.query().unwrap().state).unwrap()
    }
}

fn put(qp: &Qp, at: usize, bytes: &[u8]) {
    // SAFETY: a block lies inside the ring, and the device does not read it before the index moves.
    unsafe {
        qp.sq()
            .as_ptr()
            .add(at)
            .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
    };
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
