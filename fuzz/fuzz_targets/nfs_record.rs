//! RPC records over TCP: for any stream, the memory in use is at most a few times the received
//! bytes, and all of it is released.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::io;
use std::net::Ipv4Addr;
use std::sync::LazyLock;
use urnic_nfs::memory::Pool;
use urnic_nfs::shares::Shares;
use urnic_nfs::tcp::record::{Room, receive};

static POOL: LazyLock<Pool> = LazyLock::new(|| Pool::limited(64 << 20));

fuzz_target!(|stream: &[u8]| {
    let shares = Shares::new(64 << 20);
    let account = shares.account(Ipv4Addr::LOCALHOST.into());
    let limit = (10 * stream.len() as u64).max(64 << 10);
    let room = Room {
        pool: &POOL,
        charge: &|bytes| {
            let charge = account.take(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
            assert!(account.held() <= limit, "{} bytes of {limit}", account.held());
            Ok(charge)
        },
    };
    let mut rest = stream;
    while let Ok(received) = receive(&mut rest, &room) {
        assert!(received.message.len() <= stream.len());
    }
    assert_eq!(shares.used(), 0);
});
