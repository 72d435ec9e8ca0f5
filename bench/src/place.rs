//! Where the two ends of a measurement run.

use std::fmt;
use std::rc::Rc;

use urnic_tests::netns::Netns;
use urnic_tests::{Pair, Program, Running, compiled};

use crate::table::Measured;

/// The time that a packet of [`Place::far`] takes, in microseconds, and the packets of which one is
/// lost.
const DELAY: u32 = 10_000;
const LOSS: u32 = 1000;

/// The command in front of a program that ends when the process that started it does, however that
/// ends.
pub(crate) const ENDS_WITH_PARENT: [&str; 4] = ["setpriv", "--pdeathsig", "KILL", "--"];

/// One host, or two.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    hosts: Option<Rc<Hosts>>,
    /// The processors of the server and of the client.
    pinned: Option<[usize; 2]>,
    /// The values of urnic's options `same_host` and `faults`.
    same_host: &'static str,
    faults: String,
    /// Further settings of urnic, as environment variables.
    settings: &'static [(&'static str, &'static str)],
    /// The server's address.
    pub(crate) address: &'static str,
    /// The network interface that has it.
    pub(crate) interface: &'static str,
}

#[derive(Debug)]
struct Hosts {
    netns: [Netns; 2],
    /// The process that delays and loses packets between them.
    _link: Option<Running>,
}

impl Place {
    /// Both ends on this host, on the loopback interface.
    pub(crate) fn here() -> Self {
        Self {
            hosts: None,
            pinned: None,
            same_host: "auto",
            faults: String::new(),
            settings: &[("URNIC_LLP", "tcp")],
            address: "127.0.0.1",
            interface: "lo",
        }
    }

    /// Each end in a network namespace, joined by a veth; without the permission to make these, on
    /// this host by TCP, and the reason.
    pub(crate) fn two_hosts() -> (Self, Option<String>) {
        match Netns::two() {
            Ok(netns) => {
                Netns::join(&netns);
                (Self::of(netns, None, "10.77.0.1", "veth0"), None)
            }
            Err(reason) => {
                let loopback = Self {
                    same_host: "off",
                    ..Self::here()
                };
                (loopback, Some(reason))
            }
        }
    }

    /// The same as [`Place::two_hosts`], where TCP's congestion control is CUBIC (RFC 9438),
    /// whatever the host's is.
    pub(crate) fn with_cubic() -> Measured<Self> {
        let netns = Netns::two()?;
        Netns::join(&netns);
        for netns in &netns {
            netns.ip("route replace 10.77.0.0/24 dev veth0 congctl cubic");
        }
        Ok(Self::of(netns, None, "10.77.0.1", "veth0"))
    }

    /// Each end in a network namespace, with 20 ms from one to the other and back, where each
    /// thousandth packet is lost.
    pub(crate) fn far() -> Measured<Self> {
        let netns = Netns::two()?;
        let [a, b] = [&netns[0], &netns[1]].map(Netns::holder);
        let options = format!("-d {DELAY} -l {LOSS} {a} {b}");
        let program = Program::plain(compiled("far_link")?).line(&options);
        let mut link = netns[0].program(program).spawn();
        link.wait_for_output("joined", |output| output.contains("joined").then_some(()));
        for (netns, number) in netns.iter().zip(1..) {
            netns.ip(&format!("addr add 10.78.0.{number}/24 dev far0"));
            // The queue has room for all that TCP sends at once: packets are lost as we say only.
            netns.ip("link set far0 up txqueuelen 10000");
        }
        Ok(Self::of(netns, Some(link), "10.78.0.1", "far0"))
    }

    fn of(netns: [Netns; 2], link: Option<Running>, address: &'static str, interface: &'static str) -> Self {
        Self {
            hosts: Some(Rc::new(Hosts { netns, _link: link })),
            pinned: None,
            same_host: "auto",
            faults: String::new(),
            settings: &[("URNIC_LLP", "tcp")],
            address,
            interface,
        }
    }

    /// Whether the ends have a network each.
    pub(crate) fn is_two_hosts(&self) -> bool {
        self.hosts.is_some()
    }

    /// The same place, where urnic's connections take the time of [`Place::far`].
    pub(crate) fn delayed(&self) -> Self {
        Self {
            faults: format!("delay time={DELAY}us"),
            ..self.clone()
        }
    }

    /// The same place, where urnic's connections are sessions over SCTP.
    pub(crate) fn over_sctp(&self) -> Self {
        Self {
            settings: &[("URNIC_LLP", "sctp")],
            ..self.clone()
        }
    }

    /// The same place, where urnic's queue pairs speak RoCE v2.
    pub(crate) fn over_roce(&self) -> Self {
        Self {
            settings: &[("URNIC_IDENTITY", "roce"), ("URNIC_WIRE", "roce")],
            ..self.clone()
        }
    }

    /// The same place, where each end has a processor of its own.
    pub(crate) fn pinned(&self) -> Measured<Self> {
        let allowed = rustix::thread::sched_getaffinity(None).map_err(|errno| errno.to_string())?;
        let mut processors = (0..rustix::thread::CpuSet::MAX_CPU).filter(|at| allowed.is_set(*at));
        match (processors.next(), processors.next()) {
            (Some(server), Some(client)) => Ok(Self {
                pinned: Some([server, client]),
                ..self.clone()
            }),
            _ => Err("there is one processor only".to_owned()),
        }
    }

    /// The program, run at the server's (0) or the client's (1) end. It ends with this process.
    fn end(&self, end: usize, program: &Program) -> Program {
        let mut program = program.clone().env_unless_set("URNIC_SAME_HOST", self.same_host);
        for (name, value) in self.settings {
            program = program.env_unless_set(name, value);
        }
        if !self.faults.is_empty() {
            program = program.env("URNIC_FAULTS", &self.faults);
        }
        program = program.through(ENDS_WITH_PARENT);
        if let Some(processors) = self.pinned {
            program = program.through(["taskset", "--cpu-list", &processors[end].to_string()]);
        }
        match &self.hosts {
            Some(hosts) => hosts.netns[end].program(program),
            None => program,
        }
    }

    /// A program of the server.
    pub(crate) fn server(&self, program: &Program) -> Program {
        self.end(0, program)
    }

    /// A program of the client.
    pub(crate) fn client(&self, program: &Program) -> Program {
        self.end(1, program)
    }

    /// The same program at both ends.
    pub(crate) fn pair(&self, program: &Program) -> Pair {
        let mut pair = Pair::new(program).at(self.address);
        pair.server = self.server(program);
        pair.client = self.client(program);
        pair
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.hosts, self.same_host) {
            (Some(_), _) => f.write_str("two network namespaces"),
            (None, "off") => f.write_str("TCP over loopback"),
            (None, _) => f.write_str("one host"),
        }
    }
}
