//! Waiting for descriptors.

use crate::events::Requests;
use crate::stream::descriptor::{Descriptor, Descriptors};
use crate::sys::failed::FailedCall;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

/// Events taken at once.
const BATCH: usize = 32;

/// Pause of the background thread after its descriptors were closed.
const LOST: Duration = Duration::from_millis(20);

/// The object that a descriptor belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    /// A queue pair's stream.
    Qp(u32),
    /// A stream in streaming mode.
    Stream(u32),
    /// A listener.
    Listener(u32),
    /// A closing stream.
    Linger,
    /// The notification page's pipe: a peer on this host woke the device.
    NotificationPage,
    /// The port of RoCE v2.
    RocePort,
    /// The background thread must check all its work.
    Wake,
}

impl Token {
    fn encode(self) -> EventData {
        let (kind, id) = match self {
            Token::Qp(id) => (0, id),
            Token::Stream(id) => (1, id),
            Token::Listener(id) => (2, id),
            Token::Linger => (3, 0),
            Token::Wake => (4, 0),
            Token::NotificationPage => (5, 0),
            Token::RocePort => (6, 0),
        };
        EventData::new_u64(kind << 32 | u64::from(id))
    }

    fn decode(data: EventData) -> Token {
        let id = data.u64() as u32;
        match data.u64() >> 32 {
            0 => Token::Qp(id),
            1 => Token::Stream(id),
            2 => Token::Listener(id),
            3 => Token::Linger,
            5 => Token::NotificationPage,
            6 => Token::RocePort,
            _ => Token::Wake,
        }
    }
}

/// What is reported of a descriptor, apart from its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    /// Input alone. A socket has room most of the time, and each registration would report that.
    Input,
    /// Input, and room for output.
    InputAndRoom,
}

impl Interest {
    fn flags(self) -> EventFlags {
        let input = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        match self {
            Interest::Input => input,
            Interest::InputAndRoom => input | EventFlags::OUT,
        }
    }
}

/// The device's epoll instance, and the eventfd that wakes the thread that waits on it.
#[derive(Debug)]
pub(crate) struct Readiness {
    epoll: Descriptor,
    wake: Descriptor,
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

impl Readiness {
    pub(crate) fn new(descriptors: &Arc<Descriptors>) -> io::Result<Readiness> {
        let epoll = FailedCall::named("epoll_create1", epoll::create(CreateFlags::CLOEXEC))?;
        let epoll = descriptors.adopt(epoll)?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = descriptors.adopt(FailedCall::named("eventfd2", eventfd(0, flags))?)?;
        // Level-triggered: pollers see the event, too, and must not take it away from the
        // background thread.
        let added = epoll::add(&epoll, &wake, Token::Wake.encode(), EventFlags::IN);
        FailedCall::named("epoll_ctl", added)?;
        Ok(Readiness { epoll, wake })
    }

    pub(crate) fn add(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, token.encode(), interest.flags())
    }

    /// Removes a descriptor, and waits for the threads that use it.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) {
        // It is not there if it could not be added, which was reported then.
        let _ = epoll::delete(&self.epoll, fd);
    }

    pub(crate) fn change(&self, fd: BorrowedFd<'_>, token: Token, interest: Interest) {
        if let Err(errno) = epoll::modify(&self.epoll, fd, token.encode(), interest.flags()) {
            tracing::error!(%errno, ?token, "a stream cannot be watched");
        }
    }

    /// Wakes the waiting thread.
    pub(crate) fn wake(&self) {
        // It fails only if the counter is full, which wakes as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Takes the wake-ups so far.
    pub(crate) fn take_wakes(&self) {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
    }

    /// Waits for a wake-up only, `timeout` at the longest; returns whether there was one.
    pub(crate) fn wait_for_wake(&self, timeout: Duration) -> bool {
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
        // A signal cannot come; the mask is full.
        poll(&mut fds, Some(&timespec(timeout))).is_ok_and(|ready| ready > 0)
    }

    /// Waits until something is ready, or `other` is readable, for `timeout` at the longest. Takes
    /// no event.
    pub(crate) fn wait_beside(&self, other: BorrowedFd<'_>, timeout: Duration) {
        let mut fds = [
            PollFd::new(&self.epoll, PollFlags::IN),
            PollFd::from_borrowed_fd(other, PollFlags::IN),
        ];
        // A thread that was interrupted checks again.
        let _ = poll(&mut fds, Some(&timespec(timeout)));
    }

    /// Waits until something is ready, for `timeout` at the longest, and passes each event to
    /// `act`.
    pub(crate) fn wait(&self, timeout: Option<Duration>, mut act: impl FnMut(Token, Requests)) {
        let mut timeout = timeout;
        if let Some(short) = timeout
            && !short.is_zero()
            && !short.subsec_nanos().is_multiple_of(1_000_000)
        {
            // Kernels before 5.11 wait on epoll in milliseconds only.
            let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
            let _ = poll(&mut fds, Some(&timespec(short)));
            timeout = Some(Duration::ZERO);
        }
        let zero = timeout.is_some_and(|t| t.is_zero());
        let timeout = timeout.map(timespec);
        let mut events = [MaybeUninit::<Event>::uninit(); BATCH];
        let ready = match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((ready, _)) => ready,
            Err(Errno::INTR) => return,
            Err(_) => {
                // The program has closed the device's descriptors. No event will come, so the
                // thread must not spin.
                if !zero {
                    let _ = rustix::thread::nanosleep(&timespec(LOST));
                }
                return;
            }
        };
        for event in ready.iter() {
            let flags = event.flags;
            let mut requests = Requests::empty();
            if flags.intersects(EventFlags::IN) {
                requests |= Requests::RECEIVE;
            }
            if flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
                requests |= Requests::HANG_UP;
            }
            if flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR) {
                requests |= Requests::WRITABLE;
            }
            act(Token::decode(event.data), requests);
        }
    }
}
