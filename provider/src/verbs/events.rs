//! Events from the driver to the program: each event is sent to the object that it belongs to,
//! which counts the event ([`reported`](super::reported)).

use std::sync::Arc;

use urnic_driver::{AsyncEvent, ContextEvents};
use urnic_presence::ChannelSender;
use urnic_rdma_core::ib_uverbs_async_event_desc;

use super::cq::Cq;
use super::qp::Qp;
use super::reported::Reported;
use super::srq::Srq;

/// The events of one context: completion events go to the channel of their queue, asynchronous
/// events to the `async_fd` of the context.
pub(crate) struct Events {
    channel: Arc<ChannelSender>,
}

impl Events {
    /// The events of a context whose `async_fd` is the program's end of this channel.
    pub(crate) fn new(channel: Arc<ChannelSender>) -> Events {
        Events { channel }
    }

    fn send(&self, reported: &Reported, event: AsyncEvent, element: u64) {
        let record = ib_uverbs_async_event_desc {
            element,
            event_type: event as u32,
            reserved: 0,
        };
        let mut bytes = [0; size_of::<ib_uverbs_async_event_desc>()];
        let (head, tail) = bytes.split_at_mut(8);
        head.copy_from_slice(&record.element.to_ne_bytes());
        tail.split_at_mut(4)
            .0
            .copy_from_slice(&record.event_type.to_ne_bytes());
        reported.send(&self.channel, &bytes);
    }
}

// Cookies are the addresses of the provider's objects. The driver delivers no event of an object
// after its destruction returned, and the provider frees an object only then.
impl ContextEvents for Events {
    fn completion(&self, cq_cookie: u64) {
        // SAFETY: the cookie of a live completion queue, see the comment on this impl.
        if let Some(cq) = unsafe { (cq_cookie as *const Cq).as_ref() } {
            cq.notify();
        }
    }

    fn async_event(&self, event: AsyncEvent, element_cookie: u64) {
        match event {
            AsyncEvent::CqErr => {
                // SAFETY: the cookie of a live completion queue, see the comment on this impl.
                if let Some(cq) = unsafe { (element_cookie as *const Cq).as_ref() } {
                    self.send(&cq.asynchronous, event, element_cookie);
                }
            }
            AsyncEvent::QpFatal | AsyncEvent::QpReqErr | AsyncEvent::QpAccessErr | AsyncEvent::QpLastWqe => {
                // SAFETY: the cookie of a live queue pair, see the comment on this impl.
                if let Some(qp) = unsafe { (element_cookie as *const Qp).as_ref() } {
                    self.send(&qp.asynchronous, event, element_cookie);
                }
            }
            // The element is the port, which does not count events.
            AsyncEvent::DeviceFatal
            | AsyncEvent::GidChange
            | AsyncEvent::PortErr
            | AsyncEvent::PortActive => self.send(&Reported::default(), event, 1),
            AsyncEvent::SrqLimit => {
                // SAFETY: the cookie of a live shared receive queue, see the comment on this impl.
                if let Some(srq) = unsafe { (element_cookie as *const Srq).as_ref() } {
                    self.send(&srq.asynchronous, event, element_cookie);
                }
            }
        }
    }
}
