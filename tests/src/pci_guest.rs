//! A guest that is given urnic as a PCI function: Debian's own kernel with an IOMMU, in a QEMU that speaks vfio-user.
//! `scripts/qemu-guest` makes what it boots.
//!
//! The plug-in and `urnic` under test are in the guest's folder `/urnic`. It ends when dropped; several may run side by side.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::process::Signal;

use crate::build::{plugin, scratch, urnic};
use crate::debian::script;
use crate::program::{Program, Running};
use crate::shell::{LIMIT, SHELL, Task};
use crate::skip::installed;
use crate::wait::{free_port, until};

/// The slot of the first function on the guest's bus.
const FIRST_SLOT: usize = 0x10;

/// A running guest.
#[derive(Debug)]
pub struct PciGuest {
    qemu: Running,
    shell: u16,
    _shared: Shared,
}

/// What the guest finds in `/urnic`; removed when dropped.
#[derive(Debug)]
struct Shared(PathBuf);

impl Shared {
    fn new() -> Result<Self, String> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = scratch().join(format!("guest-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder in the target folder");
        let shared = Self(folder);
        for file in [plugin(), &urnic()] {
            // An emulated machine reads what is for debuggers only as slowly as the rest.
            let copy = shared.0.join(file.file_name().expect("a file"));
            let strip = Command::new("strip")
                .arg("--strip-debug")
                .arg("-o")
                .args([&copy, file])
                .status();
            match strip {
                Ok(status) if status.success() => {}
                _ => return Err("strip is not installed".to_owned()),
            }
        }
        Ok(shared)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl PciGuest {
    /// Boots a guest with a function for each of these vfio-user sockets, at which a server listens.
    ///
    /// # Errors
    /// The reason for a skip.
    #[track_caller]
    pub fn boot(sockets: &[&Path]) -> Result<Self, String> {
        installed("setpriv")?;
        let folder = script("qemu-guest", &[])?;
        let shared = Shared::new()?;
        let shell = free_port();
        let mut qemu = Program::plain(format!("{folder}/qemu"))
            .line("-accel tcg,thread=multi -cpu max -smp 2 -nodefaults -no-user-config -no-reboot")
            .line("-display none -serial stdio")
            // A device in another process reaches the guest's memory by its descriptor.
            .line("-machine q35,kernel-irqchip=split,memory-backend=memory")
            .line("-object memory-backend-memfd,id=memory,size=1G,share=on")
            .line("-device intel-iommu,intremap=on,caching-mode=on")
            .arg("-netdev")
            .arg(format!("user,id=network,hostfwd=tcp:127.0.0.1:{shell}-:{SHELL}"))
            .line("-device virtio-net-pci,netdev=network,romfile=")
            .args(["-kernel", &format!("{folder}/kernel")])
            .args(["-initrd", &format!("{folder}/initramfs")])
            .args(["-append", "console=ttyS0 quiet panic=-1 intel_iommu=on"])
            .through(["setpriv", "--pdeathsig", "KILL"]);
        for (tag, path) in [
            ("root", Path::new(&format!("{folder}/root"))),
            ("urnic", &shared.0),
        ] {
            let path = path.display();
            let share = format!("local,path={path},mount_tag={tag},security_model=none,readonly=on");
            qemu = qemu.args(["-virtfs", &format!("{share},multidevs=remap")]);
        }
        for (index, socket) in sockets.iter().enumerate() {
            let slot = FIRST_SLOT + index;
            let path = socket.display();
            qemu = qemu.arg("-device").arg(format!(
                r#"{{"driver":"vfio-user-pci","bus":"pcie.0","addr":"{slot:#x}","socket":{{"type":"unix","path":"{path}"}}}}"#
            ));
        }
        let mut qemu = qemu.spawn();
        let up = until(LIMIT, || {
            let up = qemu.output().contains("The guest is up.");
            up.then_some(true).or_else(|| qemu.ended().map(|_| false))
        });
        assert!(up == Some(true), "the guest does not boot:\n{}", qemu.output());
        Ok(Self {
            qemu,
            shell,
            _shared: shared,
        })
    }

    /// Where the guest has a function, by the order of [`PciGuest::boot`].
    pub fn address(function: usize) -> String {
        format!("0000:00:{:02x}.0", FIRST_SLOT + function)
    }

    /// Gives a function to vfio-pci, as an administrator does.
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
        Task::start(self.shell, line)
            .unwrap_or_else(|error| panic!("the guest's shell: {error}\n{}", self.qemu.output()))
    }

    /// Runs a command line of the guest's shell; its output. Panics with that if it fails.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        self.start(line).success()
    }

    /// The start of a command line for a program that has the RNIC, by this function.
    pub fn with_urnic(function: usize, line: &str) -> String {
        let address = Self::address(function);
        format!("LD_PRELOAD=/urnic/liburnic.so URNIC_DEVICE=vfio:{address} {line}")
    }

    /// What the guest's kernel and QEMU said.
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
