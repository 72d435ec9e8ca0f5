//! Names that belong to the ports of others, taken by a process that answers with nonsense, or
//! never.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::net::{RecvFlags, SocketFlags, accept_with, recv};
use urnic_tests::random::Random;

use crate::descriptors::{Zoo, release};
use crate::options::Options;
use crate::sockets::{names, send, taken};

/// What devices write for the address of a listener: any address, and this host's.
const ADDRESSES: [&str; 6] = ["*", "127.0.0.1", "0.0.0.0", "::", "::1", "::ffff:127.0.0.1"];
/// Listeners that the squatter has at most.
const MOST: usize = 400;

/// The names beside this one: the same port of other addresses.
fn variations(name: &str) -> Vec<String> {
    let mut parts: Vec<&str> = name.split('/').collect();
    let Some(place) = parts.len().checked_sub(2) else {
        return Vec::new();
    };
    let names = ADDRESSES.map(|address| {
        parts[place] = address;
        parts.join("/")
    });
    names.into_iter().collect()
}

/// Answers one that connected, if there is one.
fn answer(listener: &OwnedFd, zoo: &mut Zoo, random: &mut Random) -> bool {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = accept_with(listener, flags) else {
        return false;
    };
    let mut offer = vec![0; 4096];
    // The message stays in the socket: to take it would close what was passed with it, which may
    // block.
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let len = recv(&socket, &mut offer, flags).map_or(0, |(len, _)| len);
    offer.truncate(len);
    // What it was sent is a message that is nearly right.
    if !offer.is_empty() && random.below(2) == 0 {
        let at = random.below(offer.len());
        offer[at] ^= 1 << random.below(8);
    }
    let count = random.below(6);
    let fds: Vec<OwnedFd> = (0..count).filter_map(|_| zoo.any(random).ok()).collect();
    let passed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let _ = match random.below(4) {
        0 => send(socket.as_fd(), b"x", &passed),
        1 => send(socket.as_fd(), &offer, &passed),
        2 => send(socket.as_fd(), &offer, &[]),
        _ => Ok(0),
    };
    fds.into_iter().for_each(release);
    match random.below(3) {
        0 => release(socket),
        _ => zoo.keep(vec![socket]),
    }
    true
}

/// Takes names and answers until the time is over.
pub(crate) fn run(options: Options) -> String {
    let mut random = options.random.clone();
    let random = &mut random;
    let mut zoo = Zoo::default();
    let mut listeners: HashMap<String, OwnedFd> = HashMap::new();
    let mut answers = 0;
    while !options.is_over() {
        if listeners.len() >= MOST {
            // Ports of connections that were: the names of those that are come again.
            listeners.drain().for_each(|(_, listener)| release(listener));
        }
        for name in names().iter().flat_map(|name| variations(name)) {
            if !listeners.contains_key(&name)
                && let Ok(socket) = taken(&name)
            {
                listeners.insert(name, socket);
            }
        }
        for listener in listeners.values() {
            while answer(listener, &mut zoo, random) {
                answers += 1;
            }
        }
        zoo.truncate();
        std::thread::sleep(Duration::from_millis(1));
    }
    format!("{} names, {answers} answers", listeners.len())
}
