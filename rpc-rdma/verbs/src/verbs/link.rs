//! A queue pair with its work requests and completions.

use super::cm::Id;
use super::device::{Device, Region, Window};
use super::nonblocking::set_nonblocking;
use super::owned::{Owned, Plain};
use super::result::{done, returned};
use rdma_mummy_sys as sys;
use std::io;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// A contiguous part of registered memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    pub(crate) at: usize,
    pub(crate) len: u32,
    pub(crate) key: u32,
}

impl From<&Element> for sys::ibv_sge {
    fn from(element: &Element) -> Self {
        Self {
            addr: element.at as u64,
            length: element.len,
            lkey: element.key,
        }
    }
}

/// A work request.
pub(crate) enum Work<'a> {
    Send {
        invalidate: Option<u32>,
    },
    Read(urnic_rpc_rdma::Segment),
    Write(urnic_rpc_rdma::Segment),
    /// Gives the window a new key.
    Bind {
        window: &'a Window,
        region: &'a Region,
        at: usize,
        len: u32,
        writes: bool,
    },
    Invalidate(u32),
}

/// A completion.
pub(crate) struct Completion {
    pub(crate) number: u64,
    /// The reason of a failure. `None`: the request succeeded.
    pub(crate) failed: Option<Failure>,
    /// Bytes received.
    pub(crate) len: u32,
    pub(crate) invalidated: Option<u32>,
}

/// The reason why a work request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// An earlier request failed.
    Flushed,
    /// The peer refuses the request: the memory does not exist, is too short, or does not permit
    /// this access.
    Refused,
    /// `ibv_wc_status`: the connection or this end failed.
    Other(u32),
}

impl Failure {
    fn of(status: u32) -> Option<Self> {
        use sys::ibv_wc_status as status_of;
        match status {
            status_of::IBV_WC_SUCCESS => None,
            status_of::IBV_WC_WR_FLUSH_ERR => Some(Self::Flushed),
            status_of::IBV_WC_REM_ACCESS_ERR
            | status_of::IBV_WC_REM_INV_REQ_ERR
            | status_of::IBV_WC_REM_OP_ERR => Some(Self::Refused),
            other => Some(Self::Other(other)),
        }
    }
}

/// A queue pair, its completion queue, and the identifier that connects it.
pub(crate) struct Link {
    // In the order in which they are dropped: each one needs those below. The queue pair, which
    // needs the queue, is destroyed before.
    queue: Owned<sys::ibv_cq>,
    channel: Owned<sys::ibv_comp_channel>,
    /// The device, which keeps arenas registered.
    device: Arc<Device>,
    id: Id,
}

impl Link {
    /// Makes a queue pair with room for this number of send requests and receives. If it fails,
    /// parameters are dropped in reverse order, so the device is dropped before the identifier.
    pub(crate) fn new(id: Id, device: Arc<Device>, sends: u32, receives: u32) -> io::Result<Self> {
        let context = device.context.as_ptr();
        let elements = device.limits.elements;
        // SAFETY: the device is open as long as the identifier exists.
        let channel = unsafe { Owned::made(sys::ibv_create_comp_channel(context)) }?;
        let len = (sends + receives) as i32;
        // SAFETY: the device is open as long as the identifier exists, and the channel was just
        // made. Both are dropped after the queue.
        let queue = unsafe {
            Owned::made(sys::ibv_create_cq(
                context,
                len,
                ptr::null_mut(),
                channel.as_ptr(),
                0,
            ))
        }?;
        let domain = device.domain.as_ptr();
        let link = Self {
            queue,
            channel,
            device,
            id,
        };
        set_nonblocking(link.fd())?;
        let mut attributes = sys::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: link.queue.as_ptr(),
            recv_cq: link.queue.as_ptr(),
            srq: ptr::null_mut(),
            cap: sys::ibv_qp_cap {
                max_send_wr: sends,
                max_recv_wr: receives,
                max_send_sge: elements,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: identifier, domain and queue exist and belong to one device.
        done(unsafe { sys::rdma_create_qp(link.id.0.as_ptr(), domain, &mut attributes) })?;
        link.arm()?;
        Ok(link)
    }

    pub(crate) fn id(&self) -> &Id {
        &self.id
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The queue pair. Null after [`destroy_queue_pair`](Self::destroy_queue_pair).
    fn queue_pair(&self) -> *mut sys::ibv_qp {
        // SAFETY: the identifier exists. A thread that posts or destroys holds the endpoint, so
        // only one thread does so at a time.
        unsafe { (*self.id.0.as_ptr()).qp }
    }

    /// A descriptor that becomes readable when there are completions after [`arm`](Self::arm).
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the channel, which this object owns.
        unsafe { BorrowedFd::borrow_raw((*self.channel.as_ptr()).fd) }
    }

    pub(crate) fn connect(&self, private_data: &[u8], reads: u8) -> io::Result<()> {
        let mut parameters = parameters(private_data, reads, reads);
        // SAFETY: the identifier has a queue pair, and the private data is valid during the call.
        done(unsafe { sys::rdma_connect(self.id.0.as_ptr(), &mut parameters) })
    }

    pub(crate) fn accept(&self, private_data: &[u8], reads: u8, served_reads: u8) -> io::Result<()> {
        let mut parameters = parameters(private_data, reads, served_reads);
        // SAFETY: the identifier has a queue pair, and the private data is valid during the call.
        done(unsafe { sys::rdma_accept(self.id.0.as_ptr(), &mut parameters) })
    }

    /// Starts the end of the connection.
    pub(crate) fn disconnect(&self) {
        // SAFETY: the identifier exists. If the connection has already ended, the call fails.
        unsafe { sys::rdma_disconnect(self.id.0.as_ptr()) };
    }

    /// Destroys the queue pair. When this returns, no posted request continues, and no window of
    /// type 2 is bound.
    pub(crate) fn destroy_queue_pair(&self) {
        if !self.queue_pair().is_null() {
            // SAFETY: the identifier exists, and has a queue pair.
            unsafe { sys::rdma_destroy_qp(self.id.0.as_ptr()) };
        }
    }

    /// A new window, not bound to memory.
    pub(crate) fn window(&self) -> io::Result<Window> {
        self.device.window()
    }

    /// Requests an event at the next completion, and takes the events that have already arrived.
    pub(crate) fn arm(&self) -> io::Result<()> {
        let (mut queue, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel exists, the places for the results are valid, and the descriptor does
        // not block.
        while unsafe { sys::ibv_get_cq_event(self.channel.as_ptr(), &mut queue, &mut context) } == 0 {
            // SAFETY: one event of this queue was just taken.
            unsafe { sys::ibv_ack_cq_events(queue, 1) };
        }
        // SAFETY: the queue exists as long as `self`.
        returned(unsafe { sys::ibv_req_notify_cq(self.queue.as_ptr(), 0) })
    }

    /// Takes a limited number of completions.
    pub(crate) fn poll(&self, into: &mut Vec<Completion>) -> io::Result<()> {
        const BATCH: usize = 32;
        let mut taken = [sys::ibv_wc::zeroes(); BATCH];
        // SAFETY: the queue exists, and the array has room for this number of completions.
        let count = unsafe { sys::ibv_poll_cq(self.queue.as_ptr(), BATCH as i32, taken.as_mut_ptr()) };
        let count = usize::try_from(count).map_err(|_| io::Error::from_raw_os_error(-count))?;
        into.extend(taken.iter().take(count).map(|wc| {
            Completion {
                number: wc.wr_id,
                failed: Failure::of(wc.status),
                len: wc.byte_len,
                // SAFETY: both members of the union are any 32 bits.
                invalidated: (wc.wc_flags & sys::ibv_wc_flags::IBV_WC_WITH_INV.0 != 0)
                    .then_some(unsafe { wc.imm_data_invalidated_rkey_union.invalidated_rkey }),
            }
        }));
        Ok(())
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// `NotConnected` without a queue pair; the errors of ibv_post_recv(3).
    ///
    /// # Safety
    /// The memory must stay valid, and no code may access it, until the receive completes or the
    /// link is dropped.
    pub(crate) unsafe fn post_receive(&self, number: u64, into: &Element) -> io::Result<()> {
        let mut element = into.into();
        let mut request = sys::ibv_recv_wr {
            wr_id: number,
            next: ptr::null_mut(),
            sg_list: &mut element,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        let qp = NonNull::new(self.queue_pair()).ok_or(io::ErrorKind::NotConnected)?;
        // SAFETY: the queue pair exists. The caller promises that the memory stays valid.
        returned(unsafe { sys::ibv_post_recv(qp.as_ptr(), &mut request, &mut bad) })
    }

    /// Posts work requests, in order, with one doorbell.
    ///
    /// # Errors
    /// `NotConnected` without a queue pair; the errors of ibv_post_send(3).
    ///
    /// # Safety
    /// The memory of the elements must stay valid until their request or a later one completes, or
    /// the link is dropped. Until then, no code may access memory of Reads or change other memory.
    /// Memory that is bound to a window must stay valid until the window is invalidated, or the
    /// link is dropped. Windows and regions must exist.
    pub(crate) unsafe fn post(&self, mut batch: Batch) -> io::Result<()> {
        let mut elements = batch.elements.as_mut_ptr();
        let mut next = ptr::null_mut();
        for request in &mut batch.requests {
            request.sg_list = elements;
            elements = elements.wrapping_add(request.num_sge as usize);
        }
        for request in batch.requests.iter_mut().rev() {
            request.next = next;
            next = request;
        }
        if next.is_null() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        let qp = NonNull::new(self.queue_pair()).ok_or(io::ErrorKind::NotConnected)?;
        // SAFETY: the queue pair exists. The batch owns requests and elements, and the caller
        // promises the rest.
        returned(unsafe { sys::ibv_post_send(qp.as_ptr(), next, &mut bad) })?;
        for request in &batch.requests {
            if request.opcode == sys::ibv_wr_opcode::IBV_WR_BIND_MW {
                // SAFETY: this is the union member of the opcode, and the window exists. The user
                // of the verb must store the key (ibv_bind_mw(3)), and posting may read the
                // previous key.
                unsafe {
                    let bind = request.bind_mw_tso_union.bind_mw;
                    (*bind.mw).rkey = bind.rkey;
                }
            }
        }
        Ok(())
    }
}

/// Work requests that are posted together.
#[derive(Default)]
pub(crate) struct Batch {
    requests: Vec<sys::ibv_send_wr>,
    /// Elements of all requests, one after the other.
    elements: Vec<sys::ibv_sge>,
}

impl Batch {
    /// Adds a request. If `signaled`, its completion has this number.
    pub(crate) fn push(&mut self, number: u64, signaled: bool, work: Work<'_>, elements: &[Element]) {
        use sys::ibv_wr_opcode as opcode;
        let mut request = sys::ibv_send_wr::zeroes();
        request.wr_id = number;
        request.num_sge = elements.len() as i32;
        self.elements.extend(elements.iter().map(sys::ibv_sge::from));
        if signaled {
            request.send_flags = sys::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        match work {
            Work::Send { invalidate: None } => request.opcode = opcode::IBV_WR_SEND,
            Work::Send {
                invalidate: Some(key),
            } => {
                request.opcode = opcode::IBV_WR_SEND_WITH_INV;
                request.imm_data_invalidated_rkey_union.invalidated_rkey = key;
            }
            Work::Read(remote) | Work::Write(remote) => {
                request.opcode = match work {
                    Work::Read(_) => opcode::IBV_WR_RDMA_READ,
                    _ => opcode::IBV_WR_RDMA_WRITE,
                };
                request.wr.rdma = sys::rdma_t {
                    remote_addr: remote.offset,
                    rkey: remote.handle,
                };
            }
            Work::Bind {
                window,
                region,
                at,
                len,
                writes,
            } => {
                request.opcode = opcode::IBV_WR_BIND_MW;
                let access = if writes {
                    sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
                } else {
                    sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ
                };
                request.bind_mw_tso_union.bind_mw = sys::bind_mw_t {
                    mw: window.0.as_ptr(),
                    rkey: window.next_key(),
                    bind_info: sys::ibv_mw_bind_info {
                        mr: region.region.as_ptr(),
                        addr: at as u64,
                        length: len.into(),
                        mw_access_flags: access.0,
                    },
                };
            }
            Work::Invalidate(key) => {
                request.opcode = opcode::IBV_WR_LOCAL_INV;
                request.imm_data_invalidated_rkey_union.invalidated_rkey = key;
            }
        }
        self.requests.push(request);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.destroy_queue_pair();
    }
}

fn parameters(private_data: &[u8], reads: u8, served_reads: u8) -> sys::rdma_conn_param {
    sys::rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: private_data.len() as u8,
        responder_resources: served_reads,
        initiator_depth: reads,
        flow_control: 1,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: 0,
        qp_num: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::ibv_wc_status as status;

    #[test]
    fn only_a_refusal_by_the_peer_fails_the_call() {
        assert_eq!(Failure::of(status::IBV_WC_SUCCESS), None);
        assert_eq!(Failure::of(status::IBV_WC_WR_FLUSH_ERR), Some(Failure::Flushed));
        for refused in [
            status::IBV_WC_REM_ACCESS_ERR,
            status::IBV_WC_REM_INV_REQ_ERR,
            status::IBV_WC_REM_OP_ERR,
        ] {
            assert_eq!(Failure::of(refused), Some(Failure::Refused));
        }
        for other in [
            status::IBV_WC_RETRY_EXC_ERR,
            status::IBV_WC_FATAL_ERR,
            status::IBV_WC_LOC_PROT_ERR,
        ] {
            assert_eq!(Failure::of(other), Some(Failure::Other(other)));
        }
    }
}
