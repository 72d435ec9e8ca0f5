//! Access control lists: our client's, and those of Linux', by `setfacl` and `getfacl` in the
//! guest. Linux makes long calls only for such lists.

use std::path::PathBuf;

use urnic_tests::capture::LOST;
use urnic_tests::guest::Guest;
use urnic_tests::or_skip;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;

use super::linux::{WITHOUT_CRC, guest_output, mount, unmount};
use super::{Export, write};

/// Users on a file's list: more than fit into the 4096 bytes that go without chunks, at 12 each,
/// and not more than ext4 keeps.
const OF_FILE: u32 = 450;
/// Users on each of a directory's two lists.
const OF_DIRECTORY: u32 = 200;

/// The output of `getfacl -cnE` for a list with this many users.
pub(super) fn list(of: &str, users: u32, all: &str) -> String {
    let rights =
        |n: u32| [(4, 'r'), (2, 'w'), (1, 'x')].map(|(bit, letter)| if n & bit == 0 { '-' } else { letter });
    let named = (0..users).map(|n| {
        format!(
            "{of}user:{}:{}\n",
            10_000 + n,
            rights(n % 8).iter().collect::<String>()
        )
    });
    let named: String = named.collect();
    format!("{of}user::{all}\n{named}{of}group::r--\n{of}group:777:r-x\n{of}mask::{all}\n{of}other::---\n")
}

/// Copies `setfacl` and `getfacl` to the guest, with the libraries that the guest does not have.
fn bring_programs(guest: &Guest) -> Result<(), String> {
    let programs = [installed("setfacl")?, installed("getfacl")?];
    let needed = Program::plain("ldd").args(&programs).run().success();
    let libraries = needed
        .split_whitespace()
        .filter(|word| word.starts_with('/') && !word.ends_with(':'));
    let mut files: Vec<_> = programs
        .iter()
        .cloned()
        .chain(libraries.map(PathBuf::from))
        .collect();
    files.sort();
    files.dedup();
    for file in files {
        let there = file.to_string_lossy();
        let missing = guest_output(guest, &format!("[ -e {there} ] || echo missing"));
        if missing.contains("missing") {
            guest_output(guest, &format!("mkdir -p $(dirname {there})"));
            guest.bring(&file, &there);
        }
    }
    Ok(())
}

/// Sets lists in the guest, and gets them there; the wire has them in long calls and long replies.
fn linux_sets_and_gets(guest: &Guest, export: &Export) {
    let lists = [
        ("file", list("", OF_FILE, "rw-")),
        (
            "dir",
            list("", OF_DIRECTORY, "rwx") + &list("default:", OF_DIRECTORY, "rwx"),
        ),
    ];
    mount(guest, export, 1 << 20);
    guest_output(guest, "cd /mnt && : >file && mkdir dir");
    for (name, text) in &lists {
        let list = export.here(&format!("{name}.acl"));
        write(&list, text.as_bytes());
        guest.bring(&list, &format!("/tmp/{name}.acl"));
        guest_output(
            guest,
            &format!("cd /mnt && setfacl --set-file=/tmp/{name}.acl {name}"),
        );
    }
    // Linux' cache ends with the mount.
    for _ in 0..2 {
        for (name, _) in &lists {
            guest_output(
                guest,
                &format!("cd /mnt && getfacl -cnE {name} | grep . >/tmp/got && cmp /tmp/got /tmp/{name}.acl"),
            );
        }
        unmount(guest);
        mount(guest, export, 1 << 20);
    }
    // A file created in the directory has the directory's list, within the mode of `open`,
    // regardless of the umask; and another mode is another mask.
    guest_output(
        guest,
        &format!(
            "cd /mnt && umask 077 && : >dir/new && getfacl -cnE dir/new >/tmp/got && grep -c '^user:1' /tmp/got | grep -qx {OF_DIRECTORY} && \
             grep -qx mask::rw- /tmp/got && chmod 640 dir/new && getfacl -cnE dir/new | grep -qx mask::r-- && \
             setfacl -b dir/new && getfacl -cnE dir/new | grep -c . | grep -qx 3"
        ),
    );
    // A directory has it, too, whether the list names users or not.
    for default in ["u::rwx,g::r-x,o::---", "u::rwx,g::r-x,u:1001:rwx,m::rwx,o::---"] {
        guest_output(
            guest,
            &format!(
                "cd /mnt && rm -rf above && mkdir above && setfacl -d -m {default} above && mkdir above/below && \
                 getfacl -cnE above | grep ^default: >/tmp/above && getfacl -cnE above/below | grep ^default: >/tmp/below && cmp /tmp/above /tmp/below"
            ),
        );
    }
    unmount(guest);
}

/// tshark finds nothing malformed, and long calls and replies.
fn check_lists(guest: &Guest, export: &Export) {
    let wire = guest.wire().realigned();
    let lost = wire.tshark_of_rpc(&LOST.0, LOST.1);
    assert_eq!(lost, "", "malformed");
    let port = &export.rdma;
    let filters = [
        format!("tcp.dstport == {port} && rpcordma.msg_type == 1 && rpcordma.position == 0"),
        format!("tcp.srcport == {port} && rpcordma.msg_type == 1 && rpcordma.reply_count == 1"),
    ];
    let counts = filters.map(|filter| {
        let frames = wire.tshark_of_rpc(&["-T", "fields", "-e", "frame.number"], &filter);
        frames.lines().count()
    });
    println!("long calls, long replies: {counts:?}");
    assert!(!counts.contains(&0), "{counts:?}");
}

#[test]
#[ignore = "make interop"]
fn rpc_k_07_linux_sets_and_gets_long_lists_of_a_tree_in_memory() {
    or_skip!(installed("tshark"));
    let guest = or_skip!(Guest::borrowed());
    or_skip!(bring_programs(&guest));
    let export = Export::of_memory("lists-memory", &[WITHOUT_CRC]);
    linux_sets_and_gets(&guest, &export);
    check_lists(&guest, &export);
}

#[test]
#[ignore = "make interop"]
fn rpc_k_07_linux_sets_and_gets_long_lists_of_a_directory() {
    or_skip!(installed("tshark"));
    let guest = or_skip!(Guest::borrowed());
    or_skip!(bring_programs(&guest));
    let export = Export::new("lists", &[WITHOUT_CRC]);
    let here = |program: &str, line: &str, name: &str| {
        let program = Program::plain(program).line(line).arg(export.file(name));
        program.run()
    };
    write(&export.file("ours"), &[]);
    if !here("setfacl", "-m u:4711:r--", "ours").ok() {
        return urnic_tests::skip::report("the file system has no access control lists");
    }
    linux_sets_and_gets(&guest, &export);
    check_lists(&guest, &export);
    // The lists on this side are those set on the other side, and the other way round.
    for name in ["file", "dir"] {
        let text = here("getfacl", "-cnpE", name).success();
        let expected = super::read(&export.here(&format!("{name}.acl")));
        assert_eq!(text.trim_end().as_bytes(), expected.trim_ascii_end(), "{name}");
    }
    mount(&guest, &export, 1 << 20);
    guest_output(&guest, "cd /mnt && getfacl -cnE ours | grep -qx user:4711:r--");
    unmount(&guest);
}

/// 12 KiB each way, of which 4 go without chunks.
#[test]
fn rpc_k_07_our_client_sets_a_long_list_and_gets_it_back() {
    let export = Export::of_memory("lists-ours", &[]);
    let (sent, set) = (export.here("sent"), export.here("list"));
    write(&sent, b"");
    let expected = list("", 1000, "rw-");
    write(&set, expected.as_bytes());
    let put = export.client("put").arg(&sent).arg("127.0.0.1:/file");
    put.run().success();
    let client = || export.client("acl").arg("127.0.0.1:/file");
    client().arg("--set").arg(&set).run().success();
    let got = client().run().success();
    // After the warnings of the device.
    assert!(got.ends_with(&expected), "{got}");
}
