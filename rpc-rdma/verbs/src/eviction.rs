//! The choice of the connection that makes room when there are too many, and a limit for log lines
//! about it.

use crate::shares::Client;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};
use urnic_sync::Mutex;

/// A connection that may make room.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<Key> {
    /// The client's address.
    pub address: IpAddr,
    /// Whether a call of this connection was answered.
    pub served: bool,
    /// Time of the last message. `None` if a thread works for the connection, which then stays but
    /// is counted.
    pub last_message: Option<Instant>,
    /// The key of the connection, chosen by the owner of the list.
    pub key: Key,
}

/// The connection to end to make room for another: one of the [client](Client) with the most
/// connections. Of these, connections without an answered call come first, and then the connection
/// without a message for the longest time.
pub fn select_for_eviction<Key>(connections: impl IntoIterator<Item = Candidate<Key>>) -> Option<Key> {
    let connections: Vec<_> = connections.into_iter().collect();
    let mut counts = HashMap::<Client, usize>::new();
    for connection in &connections {
        *counts.entry(connection.address.into()).or_default() += 1;
    }
    connections
        .into_iter()
        .filter_map(|connection| {
            let count = counts.get(&connection.address.into()).copied();
            let order = (Reverse(count), connection.served, connection.last_message?);
            Some((order, connection.key))
        })
        .min_by_key(|(order, _)| *order)
        .map(|(_, key)| key)
}

/// Allows one line in the log per second, so that clients cannot fill the log.
#[derive(Debug, Default)]
pub struct LogLimit(Mutex<(Option<Instant>, u64)>);

impl LogLimit {
    /// The number of lines that were left out since the last one, if a line is allowed now.
    pub fn allows(&self) -> Option<u64> {
        let (last, left_out) = &mut *self.0.lock();
        let now = Instant::now();
        if last.is_some_and(|last| now - last < Duration::from_secs(1)) {
            *left_out += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    #[test]
    fn the_client_with_most_connections_makes_room() {
        let start = Instant::now();
        let at = |host, seconds: Option<u64>, key| Candidate {
            address: IpAddr::from(Ipv4Addr::new(192, 0, 2, host)),
            served: true,
            last_message: seconds.map(|seconds| start + Duration::from_secs(seconds)),
            key,
        };
        let alone = at(1, Some(0), "silent for longest, alone");
        assert_eq!(select_for_eviction([alone]), Some("silent for longest, alone"));
        let all = [
            alone,
            at(2, None, "at work"),
            at(2, Some(9), "later"),
            at(2, Some(5), "earlier"),
        ];
        assert_eq!(select_for_eviction(all), Some("earlier"));
        assert_eq!(select_for_eviction([at(2, None, "at work")]), None);
        let never_served = Candidate {
            served: false,
            ..at(2, Some(10), "no call yet")
        };
        let all = all.into_iter().chain([never_served]);
        assert_eq!(select_for_eviction(all), Some("no call yet"));
    }

    #[test]
    fn many_log_lines_in_a_second_become_one() {
        let limit = LogLimit::default();
        assert_eq!(limit.allows(), Some(0));
        assert!((0..10).filter_map(|_| limit.allows()).count() <= 1);
    }
}
