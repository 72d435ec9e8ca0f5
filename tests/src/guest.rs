//! Linux with soft-iWARP (siw) in a virtual machine: an iWARP stack that is not ours.
//! `scripts/siw-guest` makes the files that it boots.
//!
//! QEMU's user network connects the two, so the tests need no root: programs here find the guest's
//! listener at 127.0.0.1, programs in the guest find ours at [`HOST`]. The guest boots once, for
//! all tests of the process; one test uses it at a time, because siw has one set of parameters.
//!
//! That network translates ports, so it carries no RoCE v2, whose port is fixed. [`Guest::linked`]
//! has an Ethernet link as well, which needs root.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{OnceLock, mpsc};
use urnic_sync::{Mutex, MutexGuard};

use crate::build::compiled;
use crate::capture::{Wire, fresh};
use crate::debian::script;
use crate::netns::Netns;
use crate::program::{Program, Running};
use crate::shell::{LIMIT, SHELL, Task};
use crate::skip::installed;
use crate::wait::{free_port, until};

/// The address of this machine in the guest.
pub const HOST: &str = "10.0.2.2";

/// The programs that tests run in the guest.
const PROGRAMS: &str = "rping ucmatose rstream rcopy cm_sizes cm_endings cm_many tcp_spin sctp_peer ib_send_bw ib_write_bw ib_read_bw ib_send_lat ib_write_lat ib_read_lat ib_atomic_bw ib_atomic_lat ibv_rc_pingpong ibv_srq_pingpong ibv_uc_pingpong ibv_ud_pingpong udaddy mckey riostream rdma_server rdma_xserver qperf transfer refused";

/// The address of a linked guest's namespace on the link.
pub const LINK_HOST: &str = "10.88.0.1";

/// The address of a linked guest on the link.
pub const LINK_GUEST: &str = "10.88.0.2";

/// siw's own parameters.
pub const DEFAULTS: [(&str, u8); 4] = [
    ("mpa_version", 2),
    ("mpa_crc_required", 0),
    ("mpa_crc_strict", 0),
    ("peer_to_peer", 0),
];

/// How the packets between a guest and this machine are handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packets {
    /// Captured, for [`Guest::wire`].
    Captured,
    /// Too many packets to capture.
    Passing,
}

/// The running guest.
#[derive(Debug)]
pub struct Guest {
    qemu: Running,
    /// The namespace in which QEMU runs; `None` is that of the tests.
    netns: Option<Netns>,
    shell: u16,
    /// The file, without a name, into which QEMU writes every packet.
    packets: Option<File>,
    /// The offset of this test's first packet.
    begin: u64,
    /// The port, of TCP and UDP, at which programs in the guest listen, and at which programs here
    /// reach them on 127.0.0.1.
    pub port: u16,
}

impl Guest {
    /// The guest, for this test alone. siw has its own default parameters.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn borrowed() -> Result<MutexGuard<'static, Self>, String> {
        static GUEST: OnceLock<Result<Mutex<Guest>, String>> = OnceLock::new();
        let guest = GUEST.get_or_init(|| Self::boot(1, 512, Packets::Captured).map(Mutex::new));
        let guest = guest.as_ref().map_err(Clone::clone)?;
        let mut guest = guest.lock();
        guest.stop();
        guest.begin = guest.captured().metadata().map_err(|e| e.to_string())?.len();
        guest.set(&DEFAULTS);
        Ok(guest)
    }

    /// A guest with this many processors and MiB for the caller alone. The guest ends when it is
    /// dropped.
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn boot(processors: u8, memory: u32, packets: Packets) -> Result<Self, String> {
        Self::boot_in(None, &format!("-smp {processors} -m {memory}"), packets)
    }

    /// A guest in a network namespace of its own, for the caller alone. An Ethernet link is between
    /// the two: the namespace has [`LINK_HOST`], and the guest's `eth1` has [`LINK_GUEST`].
    ///
    /// # Errors
    /// The reason for a skip.
    pub fn linked() -> Result<Self, String> {
        let netns = Netns::new()?;
        netns.ip("tuntap add tap0 mode tap");
        netns.ip(&format!("addr add {LINK_HOST}/24 dev tap0"));
        netns.ip("link set tap0 up");
        let guest = Self::boot_in(Some(netns), "-smp 1 -m 512", Packets::Passing)?;
        guest
            .start(&format!(
                "ip link set eth1 up && ip addr add {LINK_GUEST}/24 dev eth1"
            ))
            .success();
        Ok(guest)
    }

    fn boot_in(netns: Option<Netns>, machine: &str, packets: Packets) -> Result<Self, String> {
        installed("qemu-system-x86_64")?;
        let folder = script("siw-guest", &[])?;
        let (shell, port) = (free_port(), free_port());
        let dump = (packets == Packets::Captured).then(|| fresh("pcap"));
        let mut network = "user,id=network,model=virtio-net-pci".to_owned();
        for (protocol, here, there) in [("tcp", shell, SHELL), ("tcp", port, port), ("udp", port, port)] {
            let _ = write!(network, ",hostfwd={protocol}:127.0.0.1:{here}-:{there}");
        }
        let mut qemu = Program::plain("qemu-system-x86_64")
            // QEMU emulates "rep movsb" byte by byte, and PCLMULQDQ bit by bit: a guest that finds
            // these instructions copies, and computes CRCs, far more slowly.
            .line("-accel tcg,thread=multi -cpu max,-erms,-pclmulqdq -nodefaults -no-user-config -no-reboot")
            .line(machine)
            .line("-display none -serial stdio")
            .args(["-nic", &network])
            .args(["-kernel", &format!("{folder}/kernel")])
            .args(["-initrd", &format!("{folder}/initramfs")])
            // Reading any other clock goes through QEMU, one processor at a time.
            .args([
                "-append",
                "console=ttyS0 quiet panic=-1 no_timer_check clocksource=tsc tsc=reliable",
            ])
            .through(["setpriv", "--pdeathsig", "KILL"]);
        if let Some(netns) = &netns {
            let tap = "tap,ifname=tap0,script=no,downscript=no,model=virtio-net-pci";
            qemu = netns.program(qemu.args(["-nic", tap]));
        }
        if let Some(file) = &dump {
            let filter = format!("filter-dump,id=packets,netdev=network,file={}", file.display());
            qemu = qemu.args(["-object", &filter]);
        }
        let qemu = up(qemu)?;
        let packets = dump.as_ref().map(|file| {
            let opened = File::open(file);
            let _ = std::fs::remove_file(file);
            opened.map_err(|error| format!("QEMU captures nothing: {error}"))
        });
        Ok(Self {
            qemu,
            netns,
            shell,
            packets: packets.transpose()?,
            begin: 0,
            port,
        })
    }

    /// The namespace of a [linked](Guest::linked) guest.
    ///
    /// # Panics
    /// Another guest has none.
    pub fn netns(&self) -> &Netns {
        self.netns.as_ref().expect("it is linked")
    }

    /// Runs `work` where QEMU runs.
    fn where_qemu_runs<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        match &self.netns {
            Some(netns) => netns.within(work),
            None => work(),
        }
    }

    /// Sets parameters of siw, for future connections.
    #[track_caller]
    pub fn set(&self, parameters: &[(&str, u8)]) {
        let mut line = "cd /sys/module/siw/parameters".to_owned();
        for (name, value) in parameters {
            let _ = write!(line, " && echo {value} >{name}");
        }
        self.start(&line).success();
    }

    fn captured(&self) -> &File {
        self.packets.as_ref().expect("its packets are captured")
    }

    /// The wire since the start of this test.
    pub fn wire(&self) -> Wire {
        const HEADER: usize = 24;
        let length = self.captured().metadata().expect("a file").len();
        let mut bytes = vec![0; HEADER + usize::try_from(length - self.begin).expect("it fits in memory")];
        let (header, packets) = bytes.split_at_mut(HEADER);
        let file = self.captured();
        file.read_exact_at(header, 0).expect("a capture file");
        file.read_exact_at(packets, self.begin).expect("a capture file");
        let copy = fresh("pcap");
        std::fs::write(&copy, bytes).expect("a capture file is written");
        Wire::of(copy)
    }

    /// Copies a file into the guest, to this path, as a program.
    ///
    /// # Panics
    /// When the file cannot be read or copied.
    #[track_caller]
    pub fn bring(&self, file: &Path, to: &str) {
        let bytes = std::fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let bind = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let listener = self.where_qemu_runs(bind).expect("a port");
        let port = listener.local_addr().expect("it is bound").port();
        let there = self.start(&format!(
            "nc {HOST} {port} >{to} && chmod 755 {to} && sha256sum {to}"
        ));
        listener.set_nonblocking(true).expect("a socket");
        let called = until(LIMIT, || listener.accept().ok());
        let (mut stream, _) = called.unwrap_or_else(|| panic!("the guest does not fetch {to}"));
        stream.set_nonblocking(false).expect("a socket");
        stream.write_all(&bytes).expect("the guest reads");
        drop(stream);
        let sum = Program::plain("sha256sum").arg(file).run().success();
        let (sum, _) = sum.split_once(' ').expect("a sum and a name");
        let printed = there.success();
        assert!(
            printed.contains(sum),
            "{} is not {sum}: {printed}",
            file.display()
        );
    }

    /// Ends the programs that run in the guest.
    #[track_caller]
    pub fn stop(&self) {
        let (_, _nobody_there) = self.start(&format!("killall -q -9 {PROGRAMS}")).ends();
    }

    /// Starts a command line of the guest's shell.
    #[track_caller]
    pub fn start(&self, line: &str) -> Task {
        // siw refuses registrations above that limit, for root too.
        let line = format!("ulimit -l unlimited; {line}");
        self.where_qemu_runs(|| Task::start(self.shell, &line))
            .unwrap_or_else(|error| panic!("the guest's shell: {error}\n{}", self.qemu.output()))
    }

    /// Lets the kernel's SCTP use UDP (RFC 6951), at [`Guest::port`], and puts `sctp_peer` there,
    /// whose path this returns.
    ///
    /// # Errors
    /// The reason for a skip.
    #[track_caller]
    pub fn with_sctp(&self) -> Result<&'static str, String> {
        const PEER: &str = "/tmp/sctp_peer";
        let program = compiled("sctp_peer")?;
        let port = self.port;
        self.start(&format!(
            "modprobe sctp && echo {port} >/proc/sys/net/sctp/udp_port"
        ))
        .success();
        self.bring(&program, PEER);
        Ok(PEER)
    }

    /// Starts a command line that listens at the TCP port [`Guest::port`], and waits until it does.
    #[track_caller]
    pub fn listener(&self, line: &str) -> Task {
        self.listener_at(self.port, line)
    }

    /// Starts a command line that listens at this TCP port, and waits until it does.
    #[track_caller]
    pub fn listener_at(&self, port: u16, line: &str) -> Task {
        self.listens(line, &format!("netstat -ltn | grep -q ':{port} '"))
    }

    /// Starts a command line that listens at the SCTP port [`Guest::port`], and waits until it
    /// does.
    #[track_caller]
    pub fn sctp_listener(&self, line: &str) -> Task {
        self.listens(line, &format!("grep -q ' {} ' /proc/net/sctp/eps", self.port))
    }

    /// Starts a command line, and waits until the condition, another command line, is fulfilled.
    #[track_caller]
    pub fn listens(&self, line: &str, condition: &str) -> Task {
        let task = self.start(line);
        let wait =
            format!("n=0; until {condition}; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done");
        if !self.start(&wait).ends().0 {
            panic!("{line} does not listen: {}", task.ends().1);
        }
        task
    }
}

/// Starts QEMU and waits until the guest is up.
fn up(qemu: Program) -> Result<Running, String> {
    // No destructor runs at the end of a process: the kernel ends QEMU, when the thread that
    // started it ends. This thread ends no earlier than the process.
    let (started, starts) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = started.send(qemu.spawn());
        loop {
            std::thread::park();
        }
    });
    let mut qemu = starts.recv().map_err(|_| "QEMU does not start".to_owned())?;
    let up = until(LIMIT, || {
        let up = qemu.output().contains("The guest is up.");
        up.then_some(true).or_else(|| qemu.ended().map(|_| false))
    });
    assert!(up == Some(true), "the guest does not boot:\n{}", qemu.output());
    Ok(qemu)
}
