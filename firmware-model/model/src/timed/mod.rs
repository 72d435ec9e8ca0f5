//! A network that reports when messages pass on the connections of queue pairs, to the observer of
//! the process. Without an observer it is not there, and costs nothing.

mod observer;
mod stream;
#[cfg(test)]
mod tests;

use crate::stream::datagram::{DatagramOptions, DatagramSocket};
use crate::stream::{Listener, Network, Stream};
pub(crate) use observer::observer;
pub use observer::{Observer, Passed, observe};
use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use std::net::SocketAddr;
use std::sync::Arc;
use stream::TimedStream;

/// A network, and who is told.
#[derive(Debug)]
pub(crate) struct Timed {
    network: Arc<dyn Network>,
    observer: &'static dyn Observer,
}

#[derive(Debug)]
struct TimedListener {
    listener: Box<dyn Listener>,
    observer: &'static dyn Observer,
}

impl Timed {
    pub(crate) fn new(network: Arc<dyn Network>, observer: &'static dyn Observer) -> Timed {
        Timed { network, observer }
    }
}

impl Network for Timed {
    fn connect(
        &self,
        remote: SocketAddr,
        local: Option<SocketAddr>,
        traffic_class: u8,
    ) -> Result<Box<dyn Stream>, Errno> {
        let stream = self.network.connect(remote, local, traffic_class)?;
        Ok(Box::new(TimedStream::new(stream, self.observer)))
    }

    fn listen(
        &self,
        local: SocketAddr,
        backlog: u32,
        traffic_class: u8,
        ipv6_only: bool,
    ) -> Result<Box<dyn Listener>, Errno> {
        Ok(Box::new(TimedListener {
            listener: self.network.listen(local, backlog, traffic_class, ipv6_only)?,
            observer: self.observer,
        }))
    }

    fn bind_datagrams(
        &self,
        local: SocketAddr,
        options: DatagramOptions,
    ) -> Result<Box<dyn DatagramSocket>, Errno> {
        self.network.bind_datagrams(local, options)
    }
}

impl Listener for TimedListener {
    fn accept(&mut self) -> Result<Option<Box<dyn Stream>>, Errno> {
        let accepted = self.listener.accept()?;
        Ok(accepted.map(|stream| -> Box<dyn Stream> { Box::new(TimedStream::new(stream, self.observer)) }))
    }

    fn local(&self) -> SocketAddr {
        self.listener.local()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.listener.descriptor()
    }
}
