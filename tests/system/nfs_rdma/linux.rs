//! Linux' own client, in the guest with soft-iWARP, with our server.
//!
//! Linux 6.1's siw misreads a CRC that comes in two parts, which QEMU's network produces often; so
//! these tests use no CRC.

use std::path::{Path, PathBuf};
use std::process::Command;

use urnic_tests::capture::LOST;
use urnic_tests::guest::{Guest, Packets};
use urnic_tests::or_skip;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, until};

use super::{Export, pattern, read, write};

pub(super) const WITHOUT_CRC: (&str, &str) = ("URNIC_MPA_CRC", "false");

/// Runs a command line in the guest.
#[track_caller]
pub(super) fn guest_output(guest: &Guest, line: &str) -> String {
    guest.start(&format!("exec 2>&1; {line}")).success()
}

/// Mounts the export at `/mnt`, for READs and WRITEs of this many bytes.
#[track_caller]
pub(super) fn mount(guest: &Guest, export: &Export, size: u32) {
    let Export {
        address, tcp, rdma, ..
    } = export;
    guest_output(
        guest,
        &format!(
            "modprobe -a nfsv3 rpcrdma && mkdir -p /mnt && \
             mount -t nfs -o addr={address},vers=3,proto=rdma,port={rdma},mountaddr={address},mountproto=tcp,mountport={tcp},nolock,\
             rsize={size},wsize={size} {address}:/ /mnt && grep -q proto=rdma,.*port={rdma} /proc/mounts"
        ),
    );
}

#[track_caller]
pub(super) fn unmount(guest: &Guest) {
    guest_output(guest, "cd / && umount /mnt");
}

/// A guest with more memory than most tests need, whose packets are not captured.
fn alone() -> Result<Guest, String> {
    Guest::boot(2, 1024, Packets::Passing)
}

#[test]
fn linux_mounts_reads_and_writes() {
    let guest = or_skip!(Guest::borrowed());
    reads_and_writes(&guest, &Export::new("linux", &[WITHOUT_CRC]));
}

/// Linux copies a large file and reads many small ones, by large transfers and by small ones.
#[track_caller]
pub(super) fn reads_and_writes(guest: &Guest, export: &Export) {
    let bytes = pattern(3_000_001);
    write(&export.file("theirs"), &bytes);
    std::fs::create_dir(export.file("folder")).expect("a folder");
    for n in 0..300 {
        write(&export.file(&format!("folder/file-{n}")), &pattern(n));
    }
    for (size, ours) in [(1 << 20, "large"), (4096, "small")] {
        mount(guest, export, size);
        guest_output(
            guest,
            &format!(
                "cd /mnt && cp theirs {ours} && sync && ls folder | wc -l | grep -qx 300 && cat folder/file-* >all"
            ),
        );
        guest_output(
            guest,
            &format!(
                "cd /mnt && ln -s theirs {ours}-link && readlink {ours}-link | grep -qx theirs && mv {ours} {ours}-moved"
            ),
        );
        unmount(guest);
        assert!(
            read(&export.file(&format!("{ours}-moved"))) == bytes,
            "with transfers of {size} bytes"
        );
        // In the order of the shell.
        let mut names: Vec<_> = (0..300).map(|n| format!("folder/file-{n}")).collect();
        names.sort();
        let all: Vec<u8> = names.iter().flat_map(|name| read(&export.file(name))).collect();
        assert!(
            read(&export.file("all")) == all,
            "small files, with transfers of {size} bytes"
        );
    }
}

/// Each file of a tree: its path, kind, rights, time (in whole seconds, and not of links, as the
/// guest's `cp` has it), target and checksum.
#[track_caller]
fn listed(tree: &Path) -> String {
    const LINE: &str = "{ find . -type l -printf '%p -> %l\n'; find . ! -type l -exec stat -c '%n %F %a %Y' {} +; \
                        find . -type f -exec sha256sum {} +; } | sort";
    let find = Command::new("bash").args(["-c", LINE]).current_dir(tree).output();
    let find = find.expect("bash runs");
    assert!(find.status.success(), "{find:?}");
    String::from_utf8_lossy(&find.stdout).into_owned()
}

#[test]
#[ignore = "make interop"]
fn linux_copies_a_source_tree_there_and_back() {
    let guest = or_skip!(alone());
    let export = Export::new("tree", &[WITHOUT_CRC]);
    // This tree, and further file types that a tree may have.
    let tree = export.file("tree");
    std::fs::create_dir(&tree).expect("a folder");
    let root = urnic_tests::build::tree();
    let parts = std::fs::read_dir(root).expect("the source tree");
    let parts = parts.map(|part| part.expect("an entry").path());
    let parts: Vec<PathBuf> = parts
        .filter(|part| !part.ends_with("target") && !part.ends_with(".git") && !part.ends_with("fuzz"))
        .collect();
    let copied = Command::new("cp").arg("-a").args(&parts).arg(&tree).status();
    assert!(copied.expect("cp runs").success());
    let extra = "cd \"$0\" && ln -s README.md link && ln -s nowhere dangling && mkdir -p a/b/c empty && : >a/b/c/empty \
                 && mkfifo pipe && echo secret >secret && chmod 600 secret && chmod 1777 empty && touch -d 2001-02-03T04:05:06 a/b";
    let extra = Command::new("bash").args(["-c", extra]).arg(&tree).status();
    assert!(extra.expect("bash runs").success());

    mount(&guest, &export, 1 << 20);
    guest_output(&guest, "cp -a /mnt/tree /tmp/tree && cp -a /tmp/tree /mnt/back");
    unmount(&guest);
    let (there, back) = (listed(&tree), listed(&export.file("back")));
    assert!(there.lines().count() > 500, "{there}");
    let differences = there
        .lines()
        .zip(back.lines())
        .filter(|(there, back)| there != back);
    assert_eq!(differences.take(5).collect::<Vec<_>>(), []);
    assert_eq!(there.lines().count(), back.lines().count());
}

#[test]
#[ignore = "make interop"]
fn linux_copies_a_gibibyte_both_ways() {
    const PIECES: u32 = 16;
    const PIECE: usize = 64 << 20;
    let guest = or_skip!(alone());
    let export = Export::new("gibibyte", &[WITHOUT_CRC]);
    let bytes = pattern(PIECES as usize * PIECE);
    write(&export.file("there"), &bytes);
    mount(&guest, &export, 1 << 20);
    // One piece at a time: an emulated machine needs long for all of it. The data read here is in
    // no cache.
    for piece in 0..PIECES {
        let skip = piece * (PIECE as u32 >> 20);
        guest_output(
            &guest,
            &format!(
                "dd if=/mnt/there of=/mnt/back bs=1M count={} skip={skip} seek={skip} conv=notrunc && sync",
                PIECE >> 20
            ),
        );
    }
    unmount(&guest);
    assert!(read(&export.file("back")) == bytes);
}

#[test]
#[ignore = "make interop"]
fn linux_lists_fifty_thousand_files() {
    const FILES: usize = 50_000;
    let guest = or_skip!(alone());
    let export = Export::new("many", &[WITHOUT_CRC]);
    std::fs::create_dir(export.file("many")).expect("a folder");
    let name = |n: usize| format!("a-name-of-some-length-{n}");
    for n in 0..FILES {
        write(&export.file("many").join(name(n)), &[]);
    }
    mount(&guest, &export, 1 << 20);
    // All of them, each once; the second line is about their attributes.
    guest_output(
        &guest,
        &format!(
            "cd /mnt/many && ls >/tmp/names && wc -l </tmp/names | grep -qx {FILES} && sort -u /tmp/names | wc -l | grep -qx {FILES} && \
             ! grep -qv '^a-name-of-some-length-[0-9]*$' /tmp/names"
        ),
    );
    guest_output(
        &guest,
        &format!("ls -l /mnt/many | grep -c '^-rw' | grep -qx {FILES}"),
    );
    unmount(&guest);
}

#[test]
#[ignore = "make interop"]
fn linux_reads_and_writes_by_every_size_of_transfer() {
    let guest = or_skip!(alone());
    let export = Export::new("sizes", &[WITHOUT_CRC]);
    let bytes = pattern(5_000_003);
    write(&export.file("there"), &bytes);
    for size in (12..=20).map(|bits| 1 << bits) {
        mount(&guest, &export, size);
        guest_output(&guest, &format!("cp /mnt/there /mnt/back-{size}"));
        unmount(&guest);
        assert!(
            read(&export.file(&format!("back-{size}"))) == bytes,
            "{size} bytes"
        );
    }
}

/// Copies fio, with all that it needs, to a folder.
fn fio(folder: &Path) -> Result<(), String> {
    installed("fio")?;
    std::fs::create_dir(folder).expect("a folder");
    let line = "fio=$(command -v fio) && ldd \"$fio\" | grep -oE '/[^ ]+' | sort -u | xargs cp -L -t \"$0\" \"$fio\"";
    let status = Command::new("bash").args(["-c", line]).arg(folder).status();
    assert!(status.expect("bash runs").success());
    Ok(())
}

#[test]
#[ignore = "make interop"]
fn fio_finds_what_it_wrote_at_random_for_a_minute() {
    let export = Export::new("fio", &[WITHOUT_CRC]);
    or_skip!(fio(&export.file("fio")));
    let guest = or_skip!(alone());
    mount(&guest, &export, 1 << 20);
    // fio runs in its working folder.
    let fio = |name: &str, more: &str| {
        let reported = guest_output(
            &guest,
            &format!(
                "/mnt/fio/ld-linux-x86-64.so.2 --library-path /mnt/fio /mnt/fio/fio --directory=/mnt --name={name} --rw=randrw \
                 --verify=crc32c --verify_fatal=1 --runtime=30 --time_based --ioengine=psync --fallocate=none {more}"
            ),
        );
        assert!(
            reported.contains("err= 0") && !reported.contains("verify:"),
            "{reported}"
        );
        println!("{reported}");
    };
    fio("direct", "--direct=1 --bs=16k --size=16m --verify_backlog=64");
    fio(
        "cached",
        "--direct=0 --bs=4k --size=16m --verify_backlog=256 --end_fsync=1 --numjobs=2",
    );
    unmount(&guest);
}

/// The dissector, which is independently written, can decode the wire; and there are calls and
/// replies of each kind, except long calls, which NFSv3 does not need: Linux' longest calls go by
/// Read chunk. (Its access control lists are long: `lists`.)
#[test]
#[ignore = "make interop"]
fn messages_of_linux_and_urnic_are_well_formed() {
    or_skip!(installed("tshark"));
    let guest = or_skip!(Guest::borrowed());
    let export = Export::new("dissected", &[WITHOUT_CRC]);
    let bytes = pattern(2_000_001);
    write(&export.file("there"), &bytes);
    std::fs::create_dir(export.file("folder")).expect("a folder");
    for n in 0..300 {
        write(&export.file(&format!("folder/a-name-of-some-length-{n}")), &[]);
    }
    mount(&guest, &export, 256 << 10);
    guest_output(
        &guest,
        "cd /mnt && cp there back && sync && ls -l folder | wc -l | grep -qx 301",
    );
    unmount(&guest);
    assert!(read(&export.file("back")) == bytes);

    let wire = guest.wire().realigned();
    let lost = wire.tshark_of_rpc(&LOST.0, LOST.1);
    assert_eq!(lost, "", "malformed");
    const FIELDS: [&str; 5] = [
        "tcp.dstport",
        "rpcordma.msg_type",
        "rpcordma.reads_count",
        "rpcordma.writes_count",
        "rpcordma.reply_count",
    ];
    let mut fields = vec!["-T", "fields"];
    fields.extend(FIELDS.iter().flat_map(|field| ["-e", field]));
    let messages = wire.tshark_of_rpc(&fields, "rpcordma");
    let count = |call: bool, fits: &dyn Fn(&[&str]) -> bool| {
        let messages = messages.lines().map(|line| line.split('\t').collect::<Vec<_>>());
        let messages = messages.filter(|message| (message[0] == export.rdma) == call && fits(&message[1..]));
        messages.count()
    };
    let counts = [
        count(true, &|call| call[..2] == ["0", "0"]),
        count(true, &|call| call[0] == "0" && call[1] != "0"),
        count(false, &|reply| reply[..3] == ["0", "0", "0"]),
        count(false, &|reply| reply[0] == "0" && reply[2] != "0"),
        count(false, &|reply| reply[0] == "1" && reply[3] == "1"),
    ];
    println!("short calls, with Read chunks; short replies, with Write chunks, long: {counts:?}");
    assert!(!counts.contains(&0), "{counts:?}\n{messages}");
}

/// While a file is copied the server is killed and started again: Linux continues, and the copy is
/// complete.
#[test]
#[ignore = "make interop"]
fn linux_continues_after_the_server_was_killed_and_restarted() {
    const LEN: usize = 48 << 20;
    let guest = or_skip!(alone());
    let mut export = Export::new("killed", &[WITHOUT_CRC]);
    let bytes = pattern(LEN);
    write(&export.file("there"), &bytes);
    mount(&guest, &export, 64 << 10);
    let copy = guest.start("exec 2>&1; cp /mnt/there /mnt/back && sync");
    for part in 1..=3 {
        let far = || {
            let len = std::fs::metadata(export.file("back")).map_or(0, |file| file.len());
            (len >= (LEN / 8 * part) as u64).then_some(())
        };
        assert!(until(TIME_LIMIT * 3, far).is_some(), "the copy does not continue");
        export.start_again();
    }
    copy.success();
    unmount(&guest);
    assert!(read(&export.file("back")) == bytes);
}
