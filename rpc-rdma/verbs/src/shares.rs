//! The shares of clients in a limited amount, such as memory, counted by address.
//!
//! A client may take more while its new total is at most the remainder. One client alone can
//! therefore have half. If N clients take as much as they can, each gets 1/(N + 1), so one part is
//! always free for the next client. Taking and returning an amount needs a few atomic additions and
//! no lock.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use urnic_sync::{Condvar, Mutex};

/// The network addresses that count as one client: an IPv4 address, or an IPv6 network of 64 bits,
/// of which a host can have all addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Client(IpAddr);

impl From<IpAddr> for Client {
    fn from(address: IpAddr) -> Self {
        Self(match address.to_canonical() {
            IpAddr::V6(v6) => {
                const NETWORK: u128 = !0 << 64;
                Ipv6Addr::from_bits(v6.to_bits() & NETWORK).into()
            }
            v4 => v4,
        })
    }
}

/// Interval in which a waiting thread checks whether its connection has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// An amount that clients share. Clones are the same shares.
#[derive(Clone)]
pub struct Shares(Arc<Inner>);

struct Inner {
    total: u64,
    used: AtomicU64,
    clients: Mutex<HashMap<Client, Weak<Sum>>>,
    holders: Mutex<Vec<Weak<dyn Holder>>>,
    /// The amount that all clients hold.
    wanted: AtomicU64,
    turn: Mutex<()>,
    freed: Condvar,
}

/// The amounts of a client.
#[derive(Default)]
struct Sum {
    held: AtomicU64,
    /// The amount that its threads wait for.
    wanted: AtomicU64,
}

/// A connection that holds a part. It is ended if others wait for this part and it makes no
/// progress.
pub trait Holder: Send + Sync {
    /// The account of the connection.
    fn account(&self) -> &Account;

    /// Time since the connection began to receive or send its present message; `None` without one.
    fn stuck(&self) -> Option<Duration>;

    /// Ends the connection, which then returns its part.
    fn end(&self);
}

impl Shares {
    /// Shares of `total`.
    pub fn new(total: u64) -> Self {
        Self(Arc::new(Inner {
            total,
            used: AtomicU64::new(0),
            clients: Mutex::default(),
            holders: Mutex::default(),
            wanted: AtomicU64::new(0),
            turn: Mutex::default(),
            freed: Condvar::new(),
        }))
    }

    /// An account for a connection from this address.
    pub fn account(&self, address: IpAddr) -> Account {
        let client = Client::from(address);
        let mut clients = self.0.clients.lock();
        let held = clients.get(&client).and_then(Weak::upgrade).unwrap_or_else(|| {
            clients.retain(|_, held| held.strong_count() > 0);
            let held = Arc::default();
            clients.insert(client, Arc::downgrade(&held));
            held
        });
        drop(clients);
        Account(Arc::new(Own {
            shares: self.clone(),
            client: held,
            own: AtomicU64::new(0),
        }))
    }

    /// Makes a connection known to [`end_stuck`](Self::end_stuck) while it exists.
    pub fn watch(&self, holder: Weak<dyn Holder>) {
        let mut holders = self.0.holders.lock();
        holders.retain(|holder| holder.strong_count() > 0);
        holders.push(holder);
    }

    /// The amount that all clients hold.
    pub fn used(&self) -> u64 {
        self.0.used.load(Ordering::Relaxed)
    }

    /// While threads wait, ends connections that hold a part and have been at the same message for
    /// `least`: first those of the client that holds most, and of these the ones without progress
    /// for the longest time, until they hold as much as the threads wait for. No connection is
    /// ended for a client that holds more than the connection's client. Returns the number of ended
    /// connections.
    pub fn end_stuck(&self, least: Duration) -> usize {
        if !self.wanted() {
            return 0;
        }
        let clients: Vec<_> = self.0.clients.lock().values().filter_map(Weak::upgrade).collect();
        let waiting = clients.iter().map(|sum| {
            let [held, wanted] = [&sum.held, &sum.wanted].map(|sum| sum.load(Ordering::Relaxed));
            (held, wanted)
        });
        let waiting: Vec<_> = waiting.filter(|(_, wanted)| *wanted > 0).collect();
        let holders: Vec<_> = self.0.holders.lock().iter().filter_map(Weak::upgrade).collect();
        let mut stuck: Vec<_> = holders
            .into_iter()
            .filter_map(|holder| {
                let own = &holder.account().0;
                let (held, all) = (
                    own.own.load(Ordering::Relaxed),
                    own.client.held.load(Ordering::Relaxed),
                );
                let stuck = holder.stuck().filter(|stuck| *stuck >= least)?;
                (held > 0).then_some((all, stuck, held, holder))
            })
            .collect();
        stuck.sort_by_key(|(all, stuck, ..)| std::cmp::Reverse((*all, *stuck)));
        let mut freed = 0;
        let mut ended = 0;
        for (all, _, held, holder) in stuck {
            let smaller = waiting.iter().filter(|(held, _)| *held <= all);
            if freed >= smaller.map(|(_, wanted)| wanted).sum() {
                break;
            }
            holder.end();
            freed += held;
            ended += 1;
        }
        ended
    }

    /// Whether threads wait.
    pub fn wanted(&self) -> bool {
        self.0.wanted.load(Ordering::SeqCst) > 0
    }

    fn fits(&self, held: u64, used: u64) -> bool {
        held <= self.0.total.saturating_sub(used)
    }

    fn notify_waiters(&self) {
        // A waiting thread counts itself before its last check.
        if self.wanted() {
            drop(self.0.turn.lock());
            self.0.freed.notify_all();
        }
    }
}

/// The amount that one connection holds, as a part of its client's. Clones are the same account.
#[derive(Clone)]
pub struct Account(Arc<Own>);

struct Own {
    shares: Shares,
    client: Arc<Sum>,
    own: AtomicU64,
}

impl Account {
    /// Takes an amount, if it is within the share of the client.
    pub fn take(&self, amount: u64) -> Option<Charge> {
        let Own { shares, client, own } = &*self.0;
        let held = client.held.fetch_add(amount, Ordering::SeqCst) + amount;
        let used = shares.0.used.fetch_add(amount, Ordering::SeqCst);
        own.fetch_add(amount, Ordering::Relaxed);
        let charge = Charge {
            account: self.clone(),
            amount,
        };
        if shares.fits(held, used) {
            return Some(charge);
        }
        // Another thread may have been refused because of the amount that this one counted.
        drop(charge);
        None
    }

    /// Takes an amount, and waits until it is within the share of the client. `None` if `over` ends
    /// the wait.
    pub fn wait(&self, amount: u64, mut over: impl FnMut() -> bool) -> Option<Charge> {
        if let Some(charge) = self.take(amount) {
            return Some(charge);
        }
        let _wanted = self.want(amount);
        let inner = &self.0.shares.0;
        let mut turn = inner.turn.lock();
        loop {
            // Without the lock, which the return of an amount takes.
            drop(turn);
            if let Some(charge) = self.take(amount) {
                return Some(charge);
            }
            if over() {
                return None;
            }
            turn = inner.turn.lock();
            turn = inner.freed.wait_timeout(turn, CHECK_INTERVAL).0;
        }
    }

    /// Counts an amount as wanted.
    pub fn want(&self, amount: u64) -> Wanted {
        self.0.client.wanted.fetch_add(amount, Ordering::Relaxed);
        self.0.shares.0.wanted.fetch_add(amount, Ordering::SeqCst);
        Wanted {
            account: self.clone(),
            amount,
        }
    }

    /// The amount that the connection holds.
    pub fn held(&self) -> u64 {
        self.0.own.load(Ordering::Relaxed)
    }
}

/// An amount that counts as wanted until this value is dropped.
pub struct Wanted {
    account: Account,
    amount: u64,
}

impl Drop for Wanted {
    fn drop(&mut self) {
        let Own { shares, client, .. } = &*self.account.0;
        client.wanted.fetch_sub(self.amount, Ordering::Relaxed);
        shares.0.wanted.fetch_sub(self.amount, Ordering::SeqCst);
    }
}

/// An amount that was taken. It is returned when this value is dropped.
pub struct Charge {
    account: Account,
    amount: u64,
}

impl Charge {
    /// Returns all but `amount`.
    pub fn shrink(&mut self, amount: u64) {
        let less = self.amount.saturating_sub(amount);
        if less == 0 {
            return;
        }
        self.amount -= less;
        let Own { shares, client, own } = &*self.account.0;
        client.held.fetch_sub(less, Ordering::SeqCst);
        own.fetch_sub(less, Ordering::Relaxed);
        shares.0.used.fetch_sub(less, Ordering::SeqCst);
        shares.notify_waiters();
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::sync::atomic::AtomicBool;

    fn host(n: u8) -> IpAddr {
        Ipv4Addr::new(192, 0, 2, n).into()
    }

    fn all_of(account: &Account, step: u64) -> Vec<Charge> {
        std::iter::from_fn(|| account.take(step)).collect()
    }

    #[test]
    fn one_client_has_half_and_leaves_a_share_for_the_next() {
        let shares = Shares::new(1000);
        // Connections of one address share its share.
        let accounts = [shares.account(host(1)), shares.account(host(1))];
        let held: Vec<_> = accounts.iter().flat_map(|account| all_of(account, 10)).collect();
        assert_eq!((held.len(), shares.used()), (50, 500));
        let mut others = Vec::new();
        for n in 2..100 {
            let taken = all_of(&shares.account(host(n)), 1);
            assert!(!taken.is_empty(), "client {n} of {} used", shares.used());
            others.extend(taken);
            if shares.used() > 990 {
                break;
            }
        }
        drop((held, others));
        assert_eq!(shares.used(), 0);
    }

    #[test]
    fn addresses_of_one_network_are_one_client() {
        let client = |text: &str| Client::from(text.parse::<IpAddr>().expect("an address"));
        assert_eq!(client("2001:db8::1"), client("2001:db8::ffff:1:2:3"));
        assert_ne!(client("2001:db8::1"), client("2001:db8:0:1::1"));
        assert_eq!(client("::ffff:192.0.2.1"), client("192.0.2.1"));
        assert_ne!(client("192.0.2.1"), client("192.0.2.2"));
    }

    #[test]
    fn a_thread_waits_until_enough_is_returned() {
        let shares = Shares::new(100);
        let account = shares.account(host(1));
        let mut held = account.take(50).expect("half");
        assert!(account.take(1).is_none());
        assert!(account.wait(1, || true).is_none(), "the wait ends at once");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| account.wait(10, || false).map(|charge| charge.amount));
            while shares.0.wanted.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            held.shrink(30);
            assert_eq!(waits.join().expect("no panic"), Some(10));
        });
        drop(held);
        assert_eq!((shares.used(), shares.0.wanted.load(Ordering::SeqCst)), (0, 0));
    }

    struct Connection(Account, Option<Duration>, AtomicBool);

    impl Holder for Connection {
        fn account(&self) -> &Account {
            &self.0
        }

        fn stuck(&self) -> Option<Duration> {
            self.1
        }

        fn end(&self) {
            self.2.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn the_largest_clients_oldest_stuck_connection_is_ended() {
        let shares = Shares::new(1000);
        let seconds = |n| Some(Duration::from_secs(n));
        let connections = [(1, seconds(9)), (2, seconds(5)), (2, seconds(7)), (2, None)]
            .map(|(n, stuck)| Arc::new(Connection(shares.account(host(n)), stuck, AtomicBool::new(false))));
        for connection in &connections {
            let holder: Weak<dyn Holder> = Arc::downgrade(connection) as _;
            shares.watch(holder);
        }
        let _held: Vec<_> = connections
            .iter()
            .map(|connection| connection.0.take(50))
            .collect();
        let ended = || {
            let ended = connections
                .iter()
                .map(|connection| connection.2.load(Ordering::Relaxed));
            ended.collect::<Vec<_>>()
        };
        let least = Duration::from_secs(2);
        assert_eq!(shares.end_stuck(least), 0, "no thread waits");
        let wanted = connections[0].0.want(10);
        assert_eq!(shares.end_stuck(least), 1);
        assert_eq!(ended(), [false, false, true, false]);
        drop(wanted);
        // The client that holds most waits. Another client that holds less loses no connection for
        // it.
        let wanted = connections[3].0.want(120);
        assert_eq!(shares.end_stuck(least), 2);
        assert_eq!(ended(), [false, true, true, false]);
        drop(wanted);
        let _wanted = shares.account(host(3)).want(120);
        assert_eq!(shares.end_stuck(least), 3);
        assert_eq!(ended(), [true, true, true, false], "the last connection stays");
    }
}
