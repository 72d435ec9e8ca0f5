//! A guest that has urnic as a PCI function, in a QEMU that supports vfio-user. QEMU gets the
//! options of the guide's page. The guest is Debian's own kernel with an IOMMU, unless a test
//! requests another. `scripts/qemu-guest` builds what the guest boots, `scripts/vfio-kernel` the
//! other kernel.
//!
//! The plug-in and `urnic` under test are in the guest's folder `/urnic`. The guest ends when
//! dropped; several guests may run side by side.

use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use urnic_testkit::Folder;

use crate::build::{plugin, scratch, stripped, tree, urnic};
use crate::debian::script;
use crate::netns::Netns;
use crate::page::Block;
use crate::program::{Program, Running};
use crate::shell::{LIMIT, SHELL, Task};
use crate::skip::installed;
use crate::wait::until;

/// The slot of the first function on the guest's bus.
const FIRST_SLOT: usize = 0x10;

/// The port of the guest's shell on 127.0.0.1 of the guest's host.
const SHELL_THERE: u16 = 7007;

/// A port of the guest that others reach by any address of its host: for programs that use TCP
/// beside RDMA.
pub const PORT: u16 = 18_515;

/// The page with QEMU's options.
const PAGE: &str = "docs/guide/serve-and-qemu.md";

/// The socket of the function on that page.
const SOCKET_OF_THE_PAGE: &str = "/tmp/guest";

/// The options of QEMU for a function, as the page gives them: those before the function, and the
/// function itself.
struct PageOptions {
    machine: Vec<String>,
    function: String,
}

impl PageOptions {
    fn read() -> Self {
        let blocks = Block::of(&tree().join(PAGE));
        let block = blocks
            .iter()
            .find(|block| block.text.contains(SOCKET_OF_THE_PAGE));
        let text = block.expect("the page has the line").text.replace("\\\n", " ");
        let (_, line) = text
            .split_once("qemu-system-x86_64 ")
            .expect("the page starts QEMU");
        // No option has a space inside.
        let words = line
            .split_whitespace()
            .map(|word| word.trim_matches('\'').to_owned());
        let mut words: Vec<String> = words.collect();
        assert_eq!(
            words.pop().as_deref(),
            Some("…"),
            "the page's line goes on: {line}"
        );
        let function = words.pop().filter(|word| word.contains(SOCKET_OF_THE_PAGE));
        let function = function.expect("the function is the last option of the page's line");
        assert_eq!(words.pop().as_deref(), Some("-device"), "{line}");
        Self {
            machine: words,
            function,
        }
    }

    /// The function with another socket, at a place on the bus.
    fn function(&self, index: usize, socket: &Path) -> String {
        let slot = FIRST_SLOT + index;
        let path = socket.display().to_string();
        // QEMU abandons a device whose answer takes five seconds by the clock, and a loaded
        // machine may pause for that long.
        let place = format!(r#"{{"bus":"pcie.0","addr":"{slot:#x}","x-msg-timeout":60000,"#);
        self.function
            .replacen('{', &place, 1)
            .replace(SOCKET_OF_THE_PAGE, &path)
    }
}

/// The kernel and the IOMMU of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// Debian's own kernel, and an IOMMU.
    Stock,
    /// Debian's own kernel, and no IOMMU.
    StockNoIommu,
    /// A kernel with iommufd, and an IOMMU.
    Iommufd,
    /// The kernel of `Iommufd`, and no IOMMU.
    NoIommu,
}

/// A running guest. Its host is a network namespace.
#[derive(Debug)]
pub struct PciGuest<'a> {
    qemu: Running,
    host: &'a Netns,
    shared: Shared,
}

/// `urnic serve` in a network namespace, with a socket for each function. It is ended, and the
/// sockets are removed, when this is dropped.
#[derive(Debug)]
pub struct Server {
    running: Option<Running>,
    folder: Folder,
    functions: usize,
}

impl Server {
    /// A server of functions with one address each, with further options.
    #[track_caller]
    pub fn start(host: &Netns, addresses: &[&str], options: &str) -> Self {
        let folder = Folder::inside(&scratch(), "serve");
        let mut program = Program::plain(urnic()).arg("serve");
        for (function, address) in addresses.iter().enumerate() {
            let socket = folder.file(&function.to_string());
            program = program.arg("--socket").arg(socket).args(["--addr", address]);
        }
        let mut running = host
            .program(program.line(options))
            .through(["setpriv", "--pdeathsig", "KILL"])
            .spawn();
        let functions = addresses.len();
        running.wait_for_output("that it serves", |printed| {
            (printed.matches("serving ").count() == functions).then_some(())
        });
        Self {
            running: Some(running),
            folder,
            functions,
        }
    }

    /// The sockets of the guest's functions.
    pub fn sockets(&self) -> Vec<PathBuf> {
        (0..self.functions)
            .map(|function| self.folder.file(&function.to_string()))
            .collect()
    }

    /// kill -9.
    pub fn kill(&mut self) {
        if let Some(running) = self.running.take() {
            running.signal(Signal::KILL);
            running.wait();
        }
    }

    /// The output so far.
    pub fn output(&self) -> String {
        self.running.as_ref().map(Running::output).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.running.take());
    }
}

/// The content of the guest's `/urnic`; removed when dropped.
#[derive(Debug)]
struct Shared(Folder);

impl Shared {
    fn new() -> Result<Self, String> {
        let shared = Self(Folder::inside(&scratch(), "guest"));
        for file in [plugin(), &urnic()] {
            stripped(file, &shared.0.path().join(file.file_name().expect("a file")))?;
        }
        Ok(shared)
    }
}

impl<'a> PciGuest<'a> {
    /// Boots a guest on that host, with a function for each of these vfio-user sockets, at which a
    /// server listens.
    ///
    /// # Errors
    /// The reason for a skip.
    #[track_caller]
    pub fn boot(host: &'a Netns, sockets: &[PathBuf]) -> Result<Self, String> {
        Self::boot_as(Machine::Stock, host, sockets)
    }

    /// Boots a guest of this kind of machine.
    ///
    /// # Errors
    /// The reason for a skip.
    #[track_caller]
    pub fn boot_as(machine: Machine, host: &'a Netns, sockets: &[PathBuf]) -> Result<Self, String> {
        installed("setpriv")?;
        let folder = script("qemu-guest", &[])?;
        let kernel = match machine {
            Machine::Stock | Machine::StockNoIommu => format!("{folder}/kernel"),
            Machine::Iommufd | Machine::NoIommu => script("vfio-kernel", &[])?,
        };
        let page = PageOptions::read();
        let mut of_page = page.machine.clone();
        if matches!(machine, Machine::NoIommu | Machine::StockNoIommu) {
            let iommu = of_page.iter().position(|word| word.starts_with("intel-iommu"));
            let iommu = iommu.expect("the page's machine has an IOMMU");
            of_page.drain(iommu - 1..=iommu);
        }
        let shared = Shared::new()?;
        let mut qemu = Program::plain(format!("{folder}/qemu"))
            .line("-accel tcg,thread=multi -cpu max -smp 2 -nodefaults -no-user-config -no-reboot")
            .line("-display none -serial stdio")
            .args(of_page)
            .arg("-netdev")
            .arg(format!(
                "user,id=network,hostfwd=tcp:127.0.0.1:{SHELL_THERE}-:{SHELL},hostfwd=tcp::{PORT}-:{PORT}"
            ))
            .line("-device virtio-net-pci,netdev=network,romfile=")
            .args(["-kernel", &kernel])
            .args(["-initrd", &format!("{folder}/initramfs")])
            // no_timer_check: on a busy machine the kernel would find that the timer does not tick,
            // and panic.
            .args([
                "-append",
                "console=ttyS0 quiet panic=-1 intel_iommu=on no_timer_check",
            ])
            .through(["setpriv", "--pdeathsig", "KILL"]);
        for (tag, path) in [
            ("root", Path::new(&format!("{folder}/root"))),
            ("urnic", shared.0.path()),
        ] {
            let path = path.display();
            let share = format!("local,path={path},mount_tag={tag},security_model=none,readonly=on");
            qemu = qemu.args(["-virtfs", &format!("{share},multidevs=remap")]);
        }
        for (index, socket) in sockets.iter().enumerate() {
            qemu = qemu.arg("-device").arg(page.function(index, socket));
        }
        let mut qemu = host.program(qemu).spawn();
        let up = until(LIMIT, || {
            let up = qemu.output().contains("The guest is up.");
            up.then_some(true).or_else(|| qemu.ended().map(|_| false))
        });
        assert!(up == Some(true), "the guest does not boot:\n{}", qemu.output());
        Ok(Self { qemu, host, shared })
    }

    /// The host that the guest runs on.
    pub fn host(&self) -> &'a Netns {
        self.host
    }

    /// The PCI address of a function in the guest, in the order of [`PciGuest::boot`].
    pub fn address(function: usize) -> String {
        format!("0000:00:{:02x}.0", FIRST_SLOT + function)
    }

    /// Copies a file into `/urnic`.
    #[track_caller]
    pub fn bring(&self, file: &Path) {
        let name = file.file_name().expect("a file");
        std::fs::copy(file, self.shared.0.path().join(name)).expect("the file is copied");
    }

    /// Binds a function to vfio-pci, as an administrator does.
    #[track_caller]
    pub fn bind(&self, function: usize) {
        let address = Self::address(function);
        let device = format!("/sys/bus/pci/devices/{address}");
        self.run(&format!(
            "echo vfio-pci >{device}/driver_override && echo {address} >/sys/bus/pci/drivers_probe &&
             test $(basename $(realpath {device}/driver)) = vfio-pci"
        ));
    }

    /// Starts a command line of the guest's shell.
    #[track_caller]
    pub fn start(&self, line: &str) -> Task {
        let shell = self
            .host
            .within(|| TcpStream::connect((Ipv4Addr::LOCALHOST, SHELL_THERE)));
        shell
            .and_then(|shell| Task::over(shell, line))
            .unwrap_or_else(|error| panic!("the guest's shell: {error}\n{}", self.qemu.output()))
    }

    /// Starts a command line that listens at this TCP port of the guest, and waits until it does.
    #[track_caller]
    pub fn listener(&self, line: &str, port: u16) -> Task {
        let task = self.start(line);
        let wait = format!(
            "n=0; until netstat -ltn | grep -q ':{port} '; do n=$((n+1)); [ $n -lt 300 ] || exit 1; sleep 0.1; done"
        );
        if !self.start(&wait).ends().0 {
            panic!("{line} does not listen: {}", task.ends().1);
        }
        task
    }

    /// Runs a command line in the guest's shell and returns the output. Panics with the output if
    /// the command fails.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        match self.start(line).tries() {
            Ok((true, output)) => output,
            Ok((false, printed)) => panic!("{line} in the guest:\n{printed}"),
            Err(printed) => panic!("{printed}\n{}", self.console()),
        }
    }

    /// The start of a command line for a program that uses the RNIC through this function.
    pub fn with_urnic(function: usize, line: &str) -> String {
        let address = Self::address(function);
        format!("LD_PRELOAD=/urnic/liburnic.so URNIC_DEVICE=vfio:{address} {line}")
    }

    /// The messages of the guest's kernel and of QEMU.
    pub fn console(&self) -> String {
        self.qemu.output()
    }

    /// The process of QEMU.
    pub fn pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// kill -9 of QEMU.
    pub fn kill(self) {
        self.qemu.signal(Signal::KILL);
        self.qemu.wait();
    }
}
