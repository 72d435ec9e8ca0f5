//! Waiting for conditions, never for times; and ports that are not in use.

use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::path::Path;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

pub use urnic_testkit::Wait;

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

/// The time limit for an action that is normally immediate, on a loaded machine.
pub const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Polls until `condition` gives a value; `None` when it took longer than `limit`.
pub fn until<T>(limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let mut wait = Wait::new(limit);
    loop {
        if let Some(value) = condition() {
            return Some(value);
        }
        if wait.is_over() {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Whether a socket listens at `port`, in the network namespace of process `pid`: by TCP, or as a
/// listener of rdma_cm whose port is not that of TCP. (This does not connect, because the server
/// would take the connection for the client's.)
pub fn listening(pid: u32, port: u16) -> bool {
    tcp_listening(pid, port) || udp_sockets(pid, port) > 0
}

/// Whether a socket listens at the TCP port, in the network namespace of process `pid`.
pub fn tcp_listening(pid: u32, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let wanted = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        table.lines().any(|line| {
            let mut fields = line.split_whitespace().skip(1);
            fields.next().is_some_and(|local| local.ends_with(&wanted)) && fields.nth(1) == Some(LISTEN)
        })
    })
}

/// The number of UDP sockets at `port`, in the network namespace of process `pid`.
pub fn udp_sockets(pid: u32, port: u16) -> usize {
    let wanted = format!(":{port:04X}");
    let count = |table: &str| {
        let table = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        let local = |line: &str| {
            line.split_whitespace()
                .nth(1)
                .map(|local| local.ends_with(&wanted))
        };
        table.lines().filter(|line| local(line) == Some(true)).count()
    };
    count("udp") + count("udp6")
}

/// Whether this process exists and is not a zombie.
pub fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(')')
        .next()
        .unwrap_or_default()
        .trim_start()
        .chars()
        .next();
    Path::new(&format!("/proc/{pid}")).exists() && !matches!(state, None | Some('Z' | 'X'))
}

/// A port that TCP and UDP do not use and that no other test of this process gets. Below the range
/// from which the kernel picks ports.
pub fn free_port() -> u16 {
    const FIRST: u16 = 20_000;
    const COUNT: u16 = 12_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Test processes that run side by side start at different places.
    let start = (std::process::id().wrapping_mul(97) % u32::from(COUNT)) as u16;
    for _ in 0..COUNT {
        let step = NEXT.fetch_add(1, Ordering::Relaxed) % COUNT;
        let port = FIRST + (start + step) % COUNT;
        let free = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
            && TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).is_ok()
            && UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).is_ok()
            && UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).is_ok();
        if free {
            return port;
        }
    }
    panic!("no free port from {FIRST} on");
}

/// The number of descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    descriptor_numbers(pid).len()
}

fn descriptor_numbers(pid: u32) -> Vec<u64> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let names = folder.map(|entry| entry.expect("a folder").file_name());
    names
        .map(|name| name.to_str().and_then(|text| text.parse().ok()))
        .map(|number| number.expect("a number"))
        .collect()
}

/// Limits the numbers of a child's new descriptors to those below `limit`; `None`: as this
/// process's are, from which it has its limit.
pub fn limit_descriptors(pid: u32, limit: Option<u64>) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let ours = getrlimit(Resource::Nofile);
    let limit = Rlimit {
        current: limit.or(ours.current),
        ..ours
    };
    prlimit(pid, Resource::Nofile, limit).expect("our own child");
}

/// Lets a child have this many more descriptors than it has now.
pub fn leave_descriptors(pid: u32, count: usize) {
    let used = descriptor_numbers(pid);
    limit_descriptors(pid, (0..).filter(|number| !used.contains(number)).nth(count));
}

/// Memory of a process, in KiB.
pub fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .expect("a size");
    line.split_whitespace()
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("a number")
}
