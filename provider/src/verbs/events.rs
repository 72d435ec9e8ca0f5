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

/// The object of an event.
///
/// Cookies are the addresses of the provider's objects. The driver delivers no event of an object
/// after its destruction returned, and the provider frees an object only then.
///
/// # Safety
/// The driver delivers an event of an object of type `T` with this cookie.
unsafe fn object<'a, T>(cookie: u64) -> Option<&'a T> {
    // SAFETY: the cookie of a live object, as above.
    unsafe { (cookie as *const T).as_ref() }
}

impl ContextEvents for Events {
    fn completion(&self, cq_cookie: u64) {
        // SAFETY: completions are events of a completion queue.
        if let Some(cq) = unsafe { object::<Cq>(cq_cookie) } {
            cq.notify();
        }
    }

    fn async_event(&self, event: AsyncEvent, element_cookie: u64) {
        // SAFETY: the events of each arm are those of objects of its type.
        let reported = unsafe {
            match event {
                AsyncEvent::CqErr => object::<Cq>(element_cookie).map(|cq| &cq.asynchronous),
                AsyncEvent::QpFatal
                | AsyncEvent::QpReqErr
                | AsyncEvent::QpAccessErr
                | AsyncEvent::QpLastWqe => object::<Qp>(element_cookie).map(|qp| &qp.asynchronous),
                AsyncEvent::SrqLimit => object::<Srq>(element_cookie).map(|srq| &srq.asynchronous),
                // The element is the port, which does not count events.
                AsyncEvent::DeviceFatal
                | AsyncEvent::GidChange
                | AsyncEvent::PortErr
                | AsyncEvent::PortActive => return self.send(&Reported::default(), event, 1),
            }
        };
        if let Some(reported) = reported {
            self.send(reported, event, element_cookie);
        }
    }
}
