//! Network namespaces without names: each exists as long as a process of ours holds it, so that
//! nothing remains even when the tests are killed. They need root, or a user namespace of a user
//! who may make one.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};

use rustix::thread::LinkNameSpaceType;

use crate::program::Program;
use crate::wait::{TIME_LIMIT, until};

/// A network namespace with its loopback up.
#[derive(Debug)]
pub struct Netns {
    /// `cat`, in the namespace. It waits for the end of its input, which comes when this process
    /// ends.
    holder: Child,
    /// The network namespace belongs to the holder's user namespace, whose root is this user.
    is_of_user: bool,
}

impl Netns {
    /// A new namespace.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn new() -> Result<Self, String> {
        crate::skip::root()?;
        Self::held_by(&["unshare", "--net", "cat"].map(OsString::from), false)
    }

    /// Two new namespaces; of a user who is not root, in a user namespace.
    ///
    /// # Errors
    /// The reason why this user has none.
    pub fn two() -> Result<[Self; 2], String> {
        if crate::skip::root().is_ok() {
            return Ok([Self::new()?, Self::new()?]);
        }
        let words = ["unshare", "--user", "--map-root-user", "--net", "cat"];
        let first = Self::held_by(&words.map(OsString::from), true)?;
        let second = ["unshare", "--net", "cat"].map(OsString::from);
        let second = Self::held_by(&[first.entry(), second.to_vec()].concat(), true)?;
        Ok([first, second])
    }

    /// The namespace that this command, which becomes `cat`, enters.
    fn held_by(command: &[OsString], is_of_user: bool) -> Result<Self, String> {
        for tool in ["unshare", "nsenter", "ip"] {
            crate::skip::installed(tool)?;
        }
        let holder = Command::new(&command[0])
            .args(&command[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut netns = Self {
            holder: holder.map_err(|error| format!("unshare: {error}"))?,
            is_of_user,
        };
        // unshare leaves our namespace, then becomes cat.
        let ours = std::fs::read_link("/proc/self/ns/net").map_err(|error| error.to_string())?;
        let entered = until(TIME_LIMIT, || {
            let pid = netns.holder.id();
            let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let theirs = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
            match (theirs, netns.holder.try_wait()) {
                (Some(theirs), Ok(None)) if comm.trim() == "cat" => Some(theirs != ours),
                (_, Ok(None)) => None,
                _ => Some(false),
            }
        });
        if entered != Some(true) {
            return Err("network namespaces are not permitted on this machine".to_owned());
        }
        netns.ip("link set lo up");
        Ok(netns)
    }

    /// Two namespaces with a veth between them: 10.77.0.1 and fd77::1 in the first, 10.77.0.2 and
    /// fd77::2 in the second.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn pair() -> Result<[Self; 2], String> {
        let netns = [Self::new()?, Self::new()?];
        Self::join(&netns);
        Ok(netns)
    }

    /// Joins two namespaces as those of [`Netns::pair`].
    pub fn join([a, b]: &[Self; 2]) {
        a.ip(&format!(
            "link add veth0 type veth peer name veth0 netns {}",
            b.holder.id()
        ));
        for (netns, number) in [(a, 1), (b, 2)] {
            netns.ip(&format!("addr add 10.77.0.{number}/24 dev veth0"));
            netns.ip(&format!("addr add fd77::{number}/64 dev veth0 nodad"));
            netns.ip("link set veth0 up");
        }
        // A link-local address is tentative, hence no source, until duplicate detection is over.
        for netns in [a, b] {
            let settled = until(TIME_LIMIT, || {
                let shown = netns
                    .program(Program::plain("ip").line("-6 addr show dev veth0"))
                    .run()
                    .success();
                (shown.contains("fe80") && !shown.contains("tentative")).then_some(())
            });
            assert!(settled.is_some(), "veth0's addresses stay tentative");
        }
    }

    /// Two namespaces with two veths between them: 10.77.0.1 and 10.77.1.1 in the first, 10.77.0.2
    /// and 10.77.1.2 in the second.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn rails() -> Result<[Self; 2], String> {
        let [a, b] = [Self::new()?, Self::new()?];
        for rail in 0..2 {
            let peer = b.holder.id();
            a.ip(&format!(
                "link add rail{rail} type veth peer name rail{rail} netns {peer}"
            ));
            for (netns, number) in [(&a, 1), (&b, 2)] {
                netns.ip(&format!("addr add 10.77.{rail}.{number}/24 dev rail{rail}"));
                netns.ip(&format!("link set rail{rail} up"));
            }
        }
        Ok([a, b])
    }

    /// The program, run inside.
    pub fn program(&self, program: Program) -> Program {
        program.through(self.entry())
    }

    /// The command that runs the one after it inside.
    pub fn entry(&self) -> Vec<OsString> {
        let holder = format!("/proc/{}/ns", self.holder.id());
        let user = [
            format!("--user={holder}/user"),
            "--preserve-credentials".to_owned(),
        ];
        let mut words = vec!["nsenter".to_owned(), format!("--net={holder}/net")];
        words.extend(user.into_iter().filter(|_| self.is_of_user));
        words.push("--".to_owned());
        words.into_iter().map(OsString::from).collect()
    }

    /// A process that is in the namespace as long as this exists.
    pub fn holder(&self) -> u32 {
        self.holder.id()
    }

    /// Runs a part of the test inside the namespace, on a separate thread. Sockets created there
    /// belong to the namespace.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let path = format!("/proc/{}/ns/net", self.holder.id());
        std::thread::scope(|scope| {
            let inside = scope.spawn(move || {
                let netns = std::fs::File::open(path).expect("the holder lives");
                rustix::thread::move_into_link_name_space(netns.as_fd(), Some(LinkNameSpaceType::Network))
                    .expect("root may enter");
                work()
            });
            inside
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Waits until some socket inside listens at `port`.
    #[track_caller]
    pub fn listens(&self, port: u16) {
        let pid = self.holder.id();
        let listening = until(TIME_LIMIT, || crate::wait::listening(pid, port).then_some(()));
        assert!(listening.is_some(), "no listener at {port}");
    }

    /// Waits until `count` UDP sockets inside are at `port`.
    #[track_caller]
    pub fn has_udp_sockets(&self, port: u16, count: usize) {
        let pid = self.holder.id();
        let sockets = || crate::wait::udp_sockets(pid, port);
        let there = until(TIME_LIMIT, || (sockets() >= count).then_some(()));
        assert!(there.is_some(), "{} of {count} sockets at {port}", sockets());
    }

    /// Runs `ip` inside; panics if it fails.
    #[track_caller]
    pub fn ip(&self, line: &str) {
        self.program(Program::plain("ip").line(line)).run().success();
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
