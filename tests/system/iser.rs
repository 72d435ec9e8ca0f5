//! iSCSI over RDMA: tgtd, with libiscsi and with Linux' initiator over rdma_rxe.

use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::scratch;
use urnic_tests::debian::script;
use urnic_tests::guest::LINK_HOST;
use urnic_tests::netns::Netns;
use urnic_tests::or_skip;
use urnic_tests::program::{Program, Running};
use urnic_tests::random::Random;
use urnic_tests::skip::installed;

use crate::rxe::Rxe;

const LIMIT: Duration = Duration::from_secs(120);
const TARGET: &str = "iqn.2020-01.org.example:disk";
const INITIATOR: &str = "iqn.2020-01.org.example:us";
const MIB: usize = 1 << 20;

/// A tgtd with a disk of 16 MiB. It always listens for iSER at port 3260, hence the network
/// namespace.
struct Tgtd {
    folder: Folder,
    /// For its control socket, whose path must be short.
    _control: Folder,
    running: Running,
}

impl Tgtd {
    /// Starts tgtd by `place`, which also runs the program that controls it.
    ///
    /// # Errors
    /// The reason for a skip.
    fn start(
        netns: &Netns,
        settings: &[(&str, &str)],
        place: impl Fn(Program) -> Program,
    ) -> Result<Self, String> {
        let tgt = script("tgt", &[])?;
        let folder = Folder::inside(&scratch(), "iser");
        std::fs::write(folder.file("disk"), Random(17).bytes(16 * MIB)).expect("a disk");
        let control = Folder::new("tgt");
        let socket = control.file("socket");
        let within = |program: Program| place(program.env("TGT_IPC_SOCKET", &socket));
        let program = Program::new(format!("{tgt}/tgtd")).line("-f -C 9 --iscsi portal=127.0.0.1:3261");
        let set = |program: Program, (name, value): &(&str, &str)| program.env(name, value);
        let running = within(settings.iter().fold(program, set)).spawn();
        netns.listens(3261);
        let order = |line: &str| {
            let order = Program::plain(format!("{tgt}/tgtadm")).line(&format!("-C 9 --lld iser {line}"));
            within(order).run_for(LIMIT).success()
        };
        order(&format!("--mode target --op new --tid 1 --targetname {TARGET}"));
        order(&format!(
            "--mode logicalunit --op new --tid 1 --lun 1 -b {}",
            folder.file("disk").display()
        ));
        order("--mode target --op bind --tid 1 -I ALL");
        // tgtd's iSER needs the initiator's name in addition to its address.
        order(&format!("--mode target --op bind --tid 1 -Q {INITIATOR}"));
        Ok(Self {
            folder,
            _control: control,
            running,
        })
    }

    fn disk(&self) -> PathBuf {
        self.folder.file("disk")
    }

    /// Ends it: at SIGTERM it does not end while it has a target.
    fn ended(self) -> String {
        self.running.signal(Signal::KILL);
        self.running.stopped().output
    }
}

#[test]
fn libiscsi_reads_and_writes_a_disk_of_tgt() {
    for name in ["iscsi-readcapacity16", "iscsi-test-cu"] {
        or_skip!(installed(name));
    }
    let host = or_skip!(Netns::new());
    let tgtd = or_skip!(Tgtd::start(&host, &[], |program| host.program(program)));
    let ask = |line: &str| {
        let (name, options) = line.split_once(' ').unwrap_or((line, ""));
        let program = Program::new(name).args(["-i", INITIATOR]).line(options);
        let program = program.arg(format!("iser://127.0.0.1:3260/{TARGET}/1"));
        host.program(program).run_for(LIMIT).success()
    };
    let printed = ask("iscsi-readcapacity16");
    assert!(printed.contains("Total size:16777216"), "{printed}");
    for test in [
        "Read10.Simple",
        "Write10.Simple",
        "Verify10.Simple",
        "WriteVerify10.Simple",
    ] {
        let printed = ask(&format!("iscsi-test-cu --dataloss --test=SCSI.{test}"));
        assert!(printed.contains("...passed"), "{test}: {printed}");
    }
    tgtd.ended();
}

/// Requests of the file system's size and of 1 MiB; what is read comes from the target again. A
/// session lasts until the target ends, since iscsistart leaves no program that could end it.
#[test]
fn linux_reads_and_writes_a_disk_of_tgt_over_rxe() {
    const FAULTS: &str = "drop p=0.001; duplicate p=0.01; reorder p=0.01";
    let rxe = or_skip!(Rxe::borrowed());
    let settings = [("URNIC_FAULTS", FAULTS)];
    let tgtd = or_skip!(Tgtd::start(rxe.guest().netns(), &settings, |program| {
        rxe.here(program)
    }));
    let before = std::fs::read(tgtd.disk()).expect("the disk");
    let does = |line: &str| rxe.guest().start(line).success();
    does(&format!(
        "modprobe -a ib_iser sd_mod && iscsistart -i {INITIATOR} -t {TARGET} -g 1 -a {LINK_HOST} -p 3260 \
         --param iface.transport_name=iser && \
         for n in $(seq 300); do [ -b /dev/sda ] && break; sleep 0.1; done; [ -b /dev/sda ]"
    ));
    // The second half becomes the first one, in two ways.
    does("dd if=/dev/sda of=/dev/sda bs=1M skip=8 count=4 iflag=direct oflag=direct");
    does("dd if=/dev/sda of=/dev/sda bs=4k skip=3072 seek=1024 count=1024 conv=fsync");
    does("echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/sda of=/tmp/disk bs=64k");
    does("echo 1 >/sys/block/sda/device/delete");
    let after = std::fs::read(tgtd.disk()).expect("the disk");
    assert!(after[..8 * MIB] == before[8 * MIB..], "what was written");
    assert!(after[8 * MIB..] == before[8 * MIB..], "what was not written");
    let there = does("sha256sum </tmp/disk; rm /tmp/disk");
    let here = Program::plain("sha256sum").arg(tgtd.disk()).run().success();
    assert_eq!(
        there.split_once(' ').map(|(sum, _)| sum),
        here.split_once(' ').map(|(sum, _)| sum)
    );
    let printed = tgtd.ended();
    for fault in 1..=3 {
        assert!(
            printed.contains(&format!("fault {fault}: ")),
            "not struck: fault {fault}"
        );
    }
}
