//! NFS between urnic and Linux over RoCE v2: the peer's device is rdma_rxe.

use urnic_tests::or_skip;

use super::Export;
use super::linux::{guest_output, mount, reads_and_writes, unmount};
use super::nfsd::{self, Nfsd};
use super::{pattern, read, write};
use crate::rxe::Rxe;

const ROCE: [(&str, &str); 2] = [("URNIC_IDENTITY", "roce"), ("URNIC_WIRE", "roce")];

#[test]
fn linux_mounts_reads_and_writes_over_rxe() {
    let rxe = or_skip!(Rxe::borrowed());
    let export = Export::linked("rxe", rxe.guest().netns(), &ROCE);
    reads_and_writes(rxe.guest(), &export);
}

#[test]
fn linux_writes_and_reads_over_rxe_through_faults() {
    const FAULTS: &str = "drop p=0.02; duplicate p=0.02; reorder p=0.02";
    let rxe = or_skip!(Rxe::borrowed());
    let settings = [&ROCE[..], &[("URNIC_FAULTS", FAULTS)]].concat();
    let export = Export::linked("rxe-faults", rxe.guest().netns(), &settings);
    let bytes = pattern(3_000_001);
    write(&export.file("there"), &bytes);
    mount(rxe.guest(), &export, 256 << 10);
    guest_output(rxe.guest(), "cp /mnt/there /mnt/back && sync");
    unmount(rxe.guest());
    assert!(read(&export.file("back")) == bytes);
    let printed = export.server.stopped().output;
    for fault in 1..=3 {
        assert!(
            printed.contains(&format!("fault {fault}: ")),
            "not struck: fault {fault}"
        );
    }
}

#[test]
fn our_client_reads_and_writes_files_of_linux_nfsd_over_rxe() {
    let rxe = or_skip!(Rxe::borrowed());
    let nfsd = Nfsd::linked(rxe.guest());
    nfsd::reads_and_writes(&nfsd, "nfsd-rxe", |program| rxe.here(program));
}
