//! Ways to open a function: its own device file with iommufd, its group's file with a container, or
//! the group's file without an IOMMU.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use super::error::Refused;
use super::function::{DRIVER, Function, Sysfs};
use super::holder::holder_of;
use super::iommu::Iommu;
use super::physical::Physical;
use super::uapi;
use urnic_config::VfioApi;
use urnic_process::fds::InternalFd;

/// A function that this process owns as long as the value lives. The fields are in the order in
/// which they must be dropped.
pub(super) struct Access {
    /// The device.
    pub(super) device: InternalFd,
    /// The function's group, if the function was opened through it. This process owns the group
    /// while the descriptor is open.
    pub(super) group: Option<InternalFd>,
    /// The function's access to memory.
    pub(super) dma: Dma,
}

/// The way of a device's accesses to memory.
pub(super) enum Dma {
    Iommu(Iommu),
    Physical(Physical),
}

/// Opens the function in the requested way, or in the best available way that this user may use.
///
/// # Errors
/// See [`Refused`].
pub(super) fn access(address: &str, api: VfioApi) -> Result<Access, Refused> {
    let sysfs = Sysfs::default();
    let function = sysfs.function(address).map_err(|errno| match errno {
        Errno::NODEV => Refused::Absent(address.to_owned()),
        errno => step(address, "reading /sys", errno),
    })?;
    if function.driver.as_deref() != Some(DRIVER) {
        return Err(Refused::Unbound {
            address: address.to_owned(),
            driver: function.driver,
        });
    }
    if !sysfs.answers(address) {
        return Err(Refused::Silent(address.to_owned()));
    }
    let has_cdev = function.cdev.is_some() && rustix::fs::stat(IOMMUFD).is_ok();
    let no_iommu = function.group.as_ref().map(|group| group.no_iommu);
    let by_group = |wanted: bool| match no_iommu {
        Some(there) if there == wanted => group(&function),
        _ => Err(Refused::NoWay {
            address: address.to_owned(),
            api: api.name(),
        }),
    };
    match api {
        VfioApi::Auto if has_cdev => match cdev(&function) {
            // The administrator may have given this user the group's file.
            Err(denied @ Refused::Denied { .. }) if no_iommu.is_some() => {
                group(&function).map_err(|other| match other {
                    Refused::Denied { .. } => denied,
                    other => other,
                })
            }
            opened => opened,
        },
        VfioApi::Auto => by_group(no_iommu == Some(true)),
        VfioApi::Cdev if has_cdev => cdev(&function),
        VfioApi::Cdev => Err(Refused::NoWay {
            address: address.to_owned(),
            api: api.name(),
        }),
        VfioApi::Group => by_group(false),
        VfioApi::NoIommu => by_group(true),
    }
}

const IOMMUFD: &str = "/dev/iommu";
const CONTAINER: &str = "/dev/vfio/vfio";

fn step(address: &str, step: &'static str, errno: Errno) -> Refused {
    Refused::Step {
        address: address.to_owned(),
        step,
        errno,
    }
}

fn busy(function: &Function) -> Refused {
    let files: Vec<PathBuf> = [function.group_file(), function.cdev_file()]
        .into_iter()
        .flatten()
        .collect();
    Refused::Busy {
        address: function.address.clone(),
        holder: holder_of(&files),
    }
}

fn open_file(function: &Function, file: &Path) -> Result<OwnedFd, Refused> {
    open(file, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| match errno {
        Errno::BUSY => busy(function),
        errno => Refused::Denied {
            address: function.address.clone(),
            file: file.to_owned(),
            errno,
        },
    })
}

/// Keeps a descriptor for the life of the device.
fn kept(function: &Function, fd: OwnedFd) -> Result<InternalFd, Refused> {
    InternalFd::of_device(fd).map_err(|errno| step(&function.address, "keeping a descriptor", errno))
}

/// Opens the function by its own file, with iommufd.
fn cdev(function: &Function) -> Result<Access, Refused> {
    let fail = |what| move |errno| step(&function.address, what, errno);
    let file = function.cdev_file().unwrap_or_default();
    let device = kept(function, open_file(function, &file)?)?;
    let iommufd = kept(function, open_file(function, Path::new(IOMMUFD))?)?;
    let (device_fd, iommu_fd) = match (device.get(), iommufd.get()) {
        (Some(device), Some(iommufd)) => (device, iommufd),
        _ => return Err(fail("opening")(Errno::IO)),
    };
    let mut bind = uapi::BindIommufd {
        size: 0,
        flags: 0,
        iommufd: iommu_fd.as_raw_fd(),
        device: 0,
    };
    uapi::call(device_fd, &mut bind).map_err(|errno| match errno {
        // The kernel returns these when the file was opened twice.
        Errno::BUSY | Errno::INVAL => busy(function),
        errno => fail("VFIO_DEVICE_BIND_IOMMUFD")(errno),
    })?;
    let mut ioas = uapi::IoasAlloc {
        size: 0,
        flags: 0,
        ioas: 0,
    };
    uapi::call(iommu_fd, &mut ioas).map_err(fail("IOMMU_IOAS_ALLOC"))?;
    let ioas = ioas.ioas;
    let mut attach = uapi::AttachIommufd {
        size: 0,
        flags: 0,
        ioas,
    };
    uapi::call(device_fd, &mut attach).map_err(fail("VFIO_DEVICE_ATTACH_IOMMUFD_PT"))?;
    let iommu = Iommu::iommufd(iommufd, ioas).map_err(fail("IOMMU_IOAS_IOVA_RANGES"))?;
    Ok(Access {
        device,
        group: None,
        dma: Dma::Iommu(iommu),
    })
}

/// Opens the function by the group's file and a container; also without an IOMMU.
fn group(function: &Function) -> Result<Access, Refused> {
    let fail = |what| move |errno| step(&function.address, what, errno);
    let lost = || fail("opening")(Errno::IO);
    let no_iommu = function.group.as_ref().is_some_and(|group| group.no_iommu);
    let file = function.group_file().unwrap_or_default();
    let group = kept(function, open_file(function, &file)?)?;
    let container = kept(function, open_file(function, Path::new(CONTAINER))?)?;
    let (group_fd, container_fd) = (group.get().ok_or_else(lost)?, container.get().ok_or_else(lost)?);
    if uapi::api_version(container_fd) != Ok(uapi::API_VERSION) {
        return Err(fail("VFIO_GET_API_VERSION")(Errno::OPNOTSUPP));
    }
    let mut status = uapi::GroupStatus { size: 0, flags: 0 };
    uapi::call(group_fd, &mut status).map_err(fail("VFIO_GROUP_GET_STATUS"))?;
    if status.flags & uapi::GROUP_VIABLE == 0 {
        return Err(Refused::NotViable {
            address: function.address.clone(),
            others: function
                .group
                .iter()
                .flat_map(|group| group.others.clone())
                .collect(),
        });
    }
    uapi::set_container(group_fd, container_fd).map_err(|errno| match errno {
        Errno::BUSY => busy(function),
        errno => fail("VFIO_GROUP_SET_CONTAINER")(errno),
    })?;
    let kind = if no_iommu {
        uapi::NOIOMMU_IOMMU
    } else {
        uapi::TYPE1V2_IOMMU
    };
    if !uapi::has_extension(container_fd, kind) {
        return Err(fail("VFIO_CHECK_EXTENSION")(Errno::OPNOTSUPP));
    }
    uapi::set_iommu(container_fd, kind).map_err(fail("VFIO_SET_IOMMU"))?;
    let name = CString::new(function.address.as_str()).map_err(|_| lost())?;
    let device = uapi::device_of(group_fd, &name).map_err(|errno| match errno {
        Errno::BUSY => busy(function),
        errno => fail("VFIO_GROUP_GET_DEVICE_FD")(errno),
    })?;
    let device = kept(function, device)?;
    let dma = if no_iommu {
        let physical = Physical::open(Some(container)).map_err(|errno| match errno {
            Errno::PERM => Refused::NoPhysicalAddresses,
            errno => fail("/proc/self/pagemap")(errno),
        })?;
        Dma::Physical(physical)
    } else {
        Dma::Iommu(Iommu::type1(container).map_err(fail("VFIO_IOMMU_GET_INFO"))?)
    };
    Ok(Access {
        device,
        group: Some(group),
        dma,
    })
}
