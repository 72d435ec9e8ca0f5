//! Messages that are none, with any descriptors, at the sockets of listeners and UDP ports; and TCP
//! connections that begin MPA start-up and go no further.

use std::io::Write;
use std::net::{Ipv4Addr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use urnic_tests::random::Random;

use crate::descriptors::{Zoo, release};
use crate::options::Options;
use crate::sockets::{MOST_DESCRIPTORS, connected, listeners, names, port_of, send};

/// An MPA Request without private data, which makes a listener look for an offer.
const REQUEST: &[u8] = b"MPA ID Req Frame\x40\x01\0\0";
const CONNECT_LIMIT: Duration = Duration::from_millis(200);

/// Bytes that resemble no message: none, few, or as many as a message has.
fn garbage(random: &mut Random) -> Vec<u8> {
    let len = match random.below(4) {
        0 => random.below(3),
        1 => 4096 + random.below(100),
        _ => random.below(200),
    };
    random.bytes(len)
}

/// Leaves a message at the socket of this name. Returns the socket, if it is to stay open.
fn leave(name: &str, zoo: &mut Zoo, random: &mut Random) -> Option<OwnedFd> {
    let socket = connected(name).ok()?;
    for _ in 0..random.below(3) {
        let count = match random.below(8) {
            0 => MOST_DESCRIPTORS,
            _ => random.below(7),
        };
        // One descriptor many times is as many descriptors for the receiver.
        let kinds = count.min(4);
        let fds: Vec<OwnedFd> = (0..kinds).filter_map(|_| zoo.any(random).ok()).collect();
        let passed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).cycle().take(count).collect();
        let _ = send(socket.as_fd(), &garbage(random), &passed);
        fds.into_iter().for_each(release);
    }
    if random.below(3) > 0 {
        return Some(socket);
    }
    // Another hostile process may have answered.
    release(socket);
    None
}

/// Connects by TCP and begins MPA start-up, whole or in part.
fn begin(port: u16, random: &mut Random) -> Option<OwnedFd> {
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let mut stream = TcpStream::connect_timeout(&address, CONNECT_LIMIT).ok()?;
    let len = match random.below(4) {
        0 => random.below(REQUEST.len()),
        _ => REQUEST.len(),
    };
    let _ = stream.write_all(&REQUEST[..len]);
    Some(stream.into())
}

/// Attacks all names until the time is over.
pub(crate) fn run(options: Options) -> String {
    let mut random = options.random.clone();
    let random = &mut random;
    let mut zoo = Zoo::default();
    let (mut messages, mut connections) = (0, 0);
    while !options.is_over() {
        let (names, ports) = (names(), listeners());
        let mut kept = Vec::new();
        if !names.is_empty() {
            let name = &names[random.below(names.len())];
            for _ in 0..1 + random.below(20) {
                kept.extend(leave(name, &mut zoo, random));
                messages += 1;
            }
            if let Some(port) = port_of(name).filter(|_| !name.contains("udp")) {
                kept.extend(begin(port, random));
                connections += 1;
            }
        }
        if !ports.is_empty() && random.below(4) == 0 {
            kept.extend(begin(ports[random.below(ports.len())], random));
            connections += 1;
        }
        zoo.keep(kept);
        zoo.truncate();
        std::thread::sleep(Duration::from_millis(random.below(10) as u64));
    }
    format!("{messages} messages, {connections} connections")
}
