//! The RNIC as a PCI function of a guest: Debian's own kernel and programs, vfio-pci, an IOMMU.

use urnic_tests::or_skip;
use urnic_tests::pci_guest::PciGuest;

#[test]
fn a_guest_boots_with_an_iommu_and_what_the_tests_need() {
    let guest = or_skip!(PciGuest::boot(&[]));
    let said = guest.run("ls /sys/kernel/iommu_groups /dev/vfio && rping -h 2>&1 | head -n 1; ls /urnic");
    for word in ["vfio", "rping", "liburnic.so", "urnic"] {
        assert!(said.contains(word), "no {word:?} in:\n{said}");
    }
    let (ok, said) = guest.start("exit_status_of_something_that_is_not_there").ends();
    assert!(!ok && said.contains("127"), "{said}");
    let said = guest.run("LD_PRELOAD=/urnic/liburnic.so ibv_devinfo");
    assert!(said.contains("urnic0"), "{said}");
}
