//! Paths to a PCI function that Debian's own kernels lack, on a kernel that has them
//! (`scripts/vfio-kernel`): for `make interop`, since that kernel takes minutes to build.

use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::pci_guest::{Machine, PciGuest, Server};

use crate::qemu::{End, FIRST, SECOND, programs_run};

/// Checks that the device is reached in this way (`urnic info`), that it conforms, and that
/// programs in the guest exchange data with programs of the host, with either side as the
/// initiator.
#[track_caller]
fn all_is_as_it_should_be(guest: &PciGuest<'_>, host: &Netns, way: &str) {
    let device = PciGuest::address(0);
    let printed = guest.run(&format!("/urnic/urnic info --device vfio:{device}"));
    let memory_line = printed.lines().find(|line| line.contains("program memory"));
    assert!(
        memory_line.is_some_and(|line| line.ends_with(way)),
        "not {way}:\n{printed}"
    );
    let printed = guest.run(&PciGuest::with_urnic(0, "ibv_devinfo -v"));
    for expected in ["urnic0", "PORT_ACTIVE", "ffff:0a4d:0001"] {
        assert!(printed.contains(expected), "no {expected:?} in:\n{printed}");
    }
    let printed = guest.run(&format!("/urnic/urnic conformance --device vfio:{device}"));
    assert!(printed.contains(" 0 failed, 0 not applicable"), "{printed}");
    let (guest, host) = (End::Guest(guest, 0), End::Host(host));
    programs_run(&guest, &host, SECOND, SECOND);
    programs_run(&host, &guest, FIRST, FIRST);
}

#[test]
#[ignore = "make interop"]
fn guest_programs_have_a_function_by_its_file_and_iommufd() {
    let [first, second] = or_skip!(Netns::pair());
    let server = Server::start(&first, &[FIRST], "");
    let guest = or_skip!(PciGuest::boot_as(Machine::Iommufd, &first, &server.sockets()));
    guest.bind(0);
    let printed = guest.run(&format!(
        "/urnic/urnic doctor --device vfio:{}",
        PciGuest::address(0)
    ));
    let files = "/dev/vfio/devices/vfio0 and /dev/iommu open";
    assert!(
        printed.contains(files) && printed.contains("all well"),
        "{printed}"
    );
    all_is_as_it_should_be(&guest, &second, "IOMMU (iommufd)");
}

#[test]
#[ignore = "make interop"]
fn guest_programs_have_a_function_without_an_iommu_if_allowed() {
    let [first, second] = or_skip!(Netns::pair());
    let server = Server::start(&first, &[FIRST], "");
    let guest = or_skip!(PciGuest::boot_as(Machine::NoIommu, &first, &server.sockets()));
    let doctor = format!("/urnic/urnic doctor --device vfio:{}", PciGuest::address(0));
    let (ok, printed) = guest.start(&doctor).ends();
    let allow = "echo 1 >/sys/module/vfio/parameters/enable_unsafe_noiommu_mode";
    assert!(
        !ok && printed.contains("WRONG IOMMU group") && printed.contains(allow),
        "{printed}"
    );
    guest.run(&format!("{allow} && sysctl vm.nr_hugepages=32"));
    guest.bind(0);
    let printed = guest.run(&doctor);
    let warned = printed.contains("the device can reach all memory, and nothing is pinned");
    assert!(warned && printed.contains("all well"), "{printed}");
    all_is_as_it_should_be(&guest, &second, "physical addresses, not pinned");
}
