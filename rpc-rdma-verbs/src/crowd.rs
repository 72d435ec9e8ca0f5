//! Who makes room when there are too many connections.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Instant;

/// Of connections, each with its client's address and when something last came on it, the one that is silent for longest, of those of the address that
/// has most: whoever holds on to many makes room himself. Those with no such time count, and stay.
pub fn longest_idle<Key>(
    connections: impl IntoIterator<Item = (IpAddr, Option<Instant>, Key)>,
) -> Option<Key> {
    let connections: Vec<_> = connections.into_iter().collect();
    let mut counts = HashMap::<IpAddr, usize>::new();
    for (address, ..) in &connections {
        *counts.entry(*address).or_default() += 1;
    }
    connections
        .into_iter()
        .filter_map(|(address, heard, key)| Some((Reverse(counts.get(&address).copied()), heard?, key)))
        .min_by_key(|(count, heard, _)| (*count, *heard))
        .map(|(.., key)| key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::time::Duration;

    #[test]
    fn whoever_has_most_makes_room_and_who_is_at_work_stays() {
        let start = Instant::now();
        let at = |host, seconds: Option<u64>, key| {
            let heard = seconds.map(|seconds| start + Duration::from_secs(seconds));
            (IpAddr::from(Ipv4Addr::new(192, 0, 2, host)), heard, key)
        };
        let alone = at(1, Some(0), "silent for longest, alone");
        assert_eq!(longest_idle([alone]), Some("silent for longest, alone"));
        let all = [
            alone,
            at(2, None, "at work"),
            at(2, Some(9), "later"),
            at(2, Some(5), "earlier"),
        ];
        assert_eq!(longest_idle(all), Some("earlier"));
        assert_eq!(longest_idle([at(2, None, "at work")]), None);
    }
}
