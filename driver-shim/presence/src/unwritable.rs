//! Sockets in the place of files that can only be read.
//!
//! A channel of the kernel never becomes writable. Programs wait for both directions of it
//! (InfiniStore does, by libuv), and would never sleep if a socket said that it has room.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};

/// Most packets that fill the smallest buffer of a socket.
const MOST: usize = 64;

/// Lets this end of a socketpair never be writable, by packets that the other end does not read.
/// Best effort: a program that waits for it to be writable wakes up too often.
pub(crate) fn make_unwritable(end: impl AsFd) {
    // The kernel grants its smallest buffer.
    let _ = sockopt::set_socket_send_buffer_size(end.as_fd(), 0);
    for _ in 0..MOST {
        match send(end.as_fd(), &[0], SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// To be called before `other`, the other end, is closed: a reader of [this](make_unwritable) end
/// gets `ECONNRESET` in place of the end of the file if packets are left.
pub(crate) fn take_back(other: impl AsFd) {
    let mut byte = [0u8];
    while matches!(
        recv(other.as_fd(), byte.as_mut_slice(), RecvFlags::DONTWAIT),
        Ok((_, 1..))
    ) {}
}
