//! Why a function cannot be opened, and what to do about it.

use std::path::PathBuf;

use rustix::io::Errno;
use thiserror::Error;

use super::holder::Holder;

/// Why a function cannot be opened.
#[derive(Debug, Error)]
pub enum Refused {
    /// The function does not exist.
    #[error("there is no PCI function {0}: `lspci -D` lists them")]
    Absent(String),
    /// The function exists, but does not answer.
    #[error(
        "PCI function {0} does not answer: the device was removed (with QEMU: its `urnic serve` ended); restart the machine to use it again"
    )]
    Silent(String),
    /// The function is no urnic device.
    #[error("PCI function {address} is {vendor:04x}:{device:04x}, which is not a urnic device")]
    WrongId {
        /// The function's address.
        address: String,
        /// The function's vendor id.
        vendor: u16,
        /// The function's device id.
        device: u16,
    },
    /// The kernel does not offer the function to user space.
    #[error("PCI function {address} is driven by {}, not by vfio-pci: `urnic doctor --device vfio:{address}` prints the command to bind it",
        driver.as_deref().unwrap_or("nothing"))]
    Unbound {
        /// The function's address.
        address: String,
        /// The driver of the function.
        driver: Option<String>,
    },
    /// The function is bound to VFIO, but the kernel offers none of the requested interfaces.
    #[error("PCI function {address}: the kernel offers no {api} interface to it")]
    NoWay {
        /// The function's address.
        address: String,
        /// The requested interface.
        api: &'static str,
    },
    /// The files belong to another user.
    #[error("{}: {errno}: `urnic doctor --device vfio:{address}` prints the command to give it to this user", file.display())]
    Denied {
        /// The function's address.
        address: String,
        /// The file.
        file: PathBuf,
        /// The kernel's error.
        errno: Errno,
    },
    /// Another process has the function.
    #[error("PCI function {address} is in use by {}: one process at a time can have it",
        holder.as_ref().map_or_else(|| "a process that this user may not see".to_owned(), Holder::to_string))]
    Busy {
        /// The function's address.
        address: String,
        /// The process that has the function, if this user may see it.
        holder: Option<Holder>,
    },
    /// Kernel drivers use other functions in the function's group.
    #[error("PCI function {address} shares its IOMMU group with {}: bind them to vfio-pci too, or to nothing", others.join(", "))]
    NotViable {
        /// The function's address.
        address: String,
        /// The other functions of the group.
        others: Vec<String>,
    },
    /// The function lacks a feature that every urnic device has.
    #[error("PCI function {address}: {what}")]
    Unusable {
        /// The function's address.
        address: String,
        /// The missing feature.
        what: &'static str,
    },
    /// Without an IOMMU the device needs physical addresses, and the kernel shows them to few
    /// processes.
    #[error(
        "without an IOMMU the device needs physical addresses, and only CAP_SYS_ADMIN may read them from /proc/self/pagemap"
    )]
    NoPhysicalAddresses,
    /// The kernel refused a step.
    #[error("PCI function {address}: {step}: {errno}")]
    Step {
        /// The function's address.
        address: String,
        /// The step.
        step: &'static str,
        /// The kernel's error.
        errno: Errno,
    },
}

impl Refused {
    /// The errno that verbs return for this refusal.
    pub fn errno(&self) -> Errno {
        match self {
            Refused::Absent(_)
            | Refused::Silent(_)
            | Refused::WrongId { .. }
            | Refused::Unbound { .. }
            | Refused::Unusable { .. } => Errno::NODEV,
            Refused::NoWay { .. } => Errno::OPNOTSUPP,
            Refused::Busy { .. } => Errno::BUSY,
            Refused::NotViable { .. } | Refused::NoPhysicalAddresses => Errno::PERM,
            Refused::Denied { errno, .. } | Refused::Step { errno, .. } => *errno,
        }
    }
}
