//! A forwarder from one TCP port to another that cuts connections at given points.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_linger;

/// The point at which a connection breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// After this many bytes of both directions together.
    pub after: u64,
    /// The cut is an RST, not a FIN.
    pub reset: bool,
}

/// Forwards connections, one after the other, until it is dropped.
#[derive(Debug)]
pub struct Forwarder {
    /// The port on 127.0.0.1 at which the forwarder listens.
    pub port: u16,
    over: Arc<AtomicBool>,
    cuts: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Forwarder {
    /// Forwards to a port of 127.0.0.1. `plan` returns for each connection, in turn, the point of
    /// its cut, if any.
    pub fn new(to: u16, mut plan: impl FnMut() -> Option<Cut> + Send + 'static) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = listener.local_addr().expect("a TCP socket").port();
        let (over, cuts) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (ends, count) = (Arc::clone(&over), Arc::clone(&cuts));
        let thread = std::thread::spawn(move || {
            for near in listener.incoming() {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                let far = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, to)));
                let (Ok(near), Ok(far)) = (near, far) else {
                    continue;
                };
                let cut = plan();
                if forward(&near, &far, cut, &ends) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Self {
            port,
            over,
            cuts,
            thread: Some(thread),
        }
    }

    /// Connections that were cut so far, as planned.
    pub fn cuts(&self) -> usize {
        self.cuts.load(Ordering::Relaxed)
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // This connection ends the wait of the thread that accepts.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Forwards until the cut, or the end at either side; returns whether the cut was reached.
fn forward(near: &TcpStream, far: &TcpStream, cut: Option<Cut>, over: &AtomicBool) -> bool {
    let mut left = cut.map_or(u64::MAX, |cut| cut.after);
    let mut bytes = vec![0; 1 << 16];
    for stream in [near, far] {
        let _ = stream.set_nodelay(true);
    }
    while left > 0 {
        let mut ends = [near, far].map(|stream| PollFd::new(stream, PollFlags::IN));
        let moment = Duration::from_millis(100).try_into().expect("it fits");
        let ready = poll(&mut ends, Some(&moment));
        if over.load(Ordering::Relaxed) {
            return false;
        }
        if ready.is_err() {
            continue;
        }
        let ready = ends.map(|end| !end.revents().is_empty());
        for (ready, mut from, mut to) in [(ready[0], near, far), (ready[1], far, near)] {
            let room = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            if !ready || room == 0 {
                continue;
            }
            match from.read(&mut bytes[..room]) {
                Ok(count @ 1..) if to.write_all(&bytes[..count]).is_ok() => left -= count as u64,
                _ => return false,
            }
        }
    }
    for stream in [near, far] {
        if cut.is_some_and(|cut| cut.reset) {
            // A socket that closes with a linger time of zero sends RST.
            let _ = set_socket_linger(stream, Some(Duration::ZERO));
        } else {
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
    true
}
