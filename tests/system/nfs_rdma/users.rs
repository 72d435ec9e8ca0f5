//! Server and clients of an ordinary user, many at once.

use std::os::unix::fs::PermissionsExt;

use urnic_tests::program::Program;
use urnic_tests::skip::root;
use urnic_tests::user::{NOBODY, Staged};

use super::{folder, listening, pattern, program, read, urnic_nfs, write};

#[test]
fn thirty_two_clients_of_an_ordinary_user_put_and_get_at_once() {
    let staged = Staged::new();
    let binary = staged.add(program());
    let folder = binary.parent().expect("it is in a folder");
    let all = PermissionsExt::from_mode(0o1777);
    std::fs::set_permissions(folder, all).expect("our own folder");
    // A user other than root is an ordinary user.
    let nfs = |line: &str| {
        let program = Program::new(&binary).line(line);
        if root().is_ok() {
            staged.program(NOBODY, program)
        } else {
            program
        }
    };
    let mut server = nfs("serve --memory 128M --tcp-port 0 --rdma-port 0").spawn();
    let (tcp, rdma) = listening(&mut server);
    let client = |command: &str| {
        nfs(&format!(
            "{command} --rdma --patience 120 --port {rdma} --mount-port {tcp}"
        ))
    };
    let bytes = pattern(2_000_003);
    let files: Vec<_> = (0..32_usize).map(|n| &bytes[n..n + 40_000 * n + 1]).collect();
    let name = |n: usize, what: &str| folder.join(format!("{what}-{n}"));

    let puts: Vec<_> = (0..)
        .zip(&files)
        .map(|(n, file)| {
            write(&name(n, "sent"), file);
            client("put")
                .arg(name(n, "sent"))
                .arg(format!("127.0.0.1:/{n}"))
                .spawn()
        })
        .collect();
    puts.into_iter().for_each(|put| drop(put.wait().success()));
    let gets: Vec<_> = (0..files.len())
        .map(|n| {
            client("get")
                .arg(format!("127.0.0.1:/{n}"))
                .arg(name(n, "got"))
                .spawn()
        })
        .collect();
    gets.into_iter().for_each(|get| drop(get.wait().success()));
    for (n, file) in (0..).zip(&files) {
        assert!(&read(&name(n, "got")) == file, "file {n}");
    }
}

/// A server at the unspecified address of IPv6 accepts both families, by TCP and by RDMA.
#[test]
fn clients_of_both_families_are_served_at_one_address() {
    let folder = folder("families");
    let mut server =
        urnic_nfs("serve --no-root-squash --memory 16M --listen :: --tcp-port 0 --rdma-port 0").spawn();
    let (tcp, rdma) = listening(&mut server);
    let bytes = pattern(70_001);
    let (sent, got) = (folder.file("sent"), folder.file("got"));
    write(&sent, &bytes);
    for (at, host) in ["127.0.0.1", "[::1]"].into_iter().enumerate() {
        for way in [
            format!("--port {tcp} --mount-port {tcp}"),
            format!("--rdma --port {rdma} --mount-port {tcp}"),
        ] {
            let remote = format!("{host}:/{at}");
            let client = |command: &str| urnic_nfs(&format!("{command} {way}"));
            client("put").arg(&sent).arg(&remote).run().success();
            client("get").arg(&remote).arg(&got).run().success();
            assert!(read(&got) == bytes, "{host} {way}");
            std::fs::remove_file(&got).expect("our own file");
        }
    }
}
