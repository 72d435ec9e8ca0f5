//! Server and clients of an ordinary user, many at once.

use std::os::unix::fs::PermissionsExt;

use urnic_tests::or_skip;
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

/// The sets of capabilities of a thread, from its `status` file.
fn capability_sets(status: &str) -> Vec<u64> {
    let sets = ["CapInh:", "CapPrm:", "CapEff:"].into_iter().map(|set| {
        let line = status.lines().find_map(|line| line.strip_prefix(set));
        u64::from_str_radix(line.expect("a set").trim(), 16).expect("a number")
    });
    sets.collect()
}

/// A caller must not exceed quotas, or use the blocks that a file system reserves.
#[test]
fn a_server_of_root_does_not_keep_cap_sys_resource() {
    const CAP_CHOWN: u64 = 1;
    const CAP_SYS_RESOURCE: u64 = 1 << 24;
    // Root of a user namespace has all capabilities, also where this process lacks some.
    let in_namespace = |program: Program| program.through(["unshare", "--user", "--map-root-user"]);
    let without_server = in_namespace(Program::plain("cat").arg("/proc/self/status")).run();
    or_skip!(match without_server.ok() {
        true => Ok(()),
        false => Err("no user namespace can be made".to_owned()),
    });
    let sets = capability_sets(&without_server.output);
    assert_eq!(sets[1..], [sets[1]; 2]);
    assert_ne!(sets[1] & CAP_SYS_RESOURCE, 0, "{without_server}");

    let server = urnic_nfs("serve --no-root-squash --memory 16M --tcp-port 0 --rdma-port 0");
    let mut server = in_namespace(server).spawn();
    let (tcp, rdma) = listening(&mut server);
    let folder = folder("capabilities");
    let sent = folder.file("sent");
    write(&sent, &pattern(70_001));
    for way in [format!("--port {tcp}"), format!("--rdma --port {rdma}")] {
        let put = urnic_nfs(&format!("put {way} --mount-port {tcp}"));
        // Its root directory takes files of root only.
        in_namespace(put.arg(&sent).arg("127.0.0.1:/file"))
            .run()
            .success();
    }
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).expect("the server's threads");
    let mut threads = 0;
    // A thread may end meanwhile.
    for status in tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok()) {
        let sets = capability_sets(&status);
        assert!(sets.iter().all(|set| set & CAP_SYS_RESOURCE == 0), "{status}");
        assert_eq!(sets[2] & CAP_CHOWN, CAP_CHOWN, "{status}");
        threads += 1;
    }
    assert!(threads > 1, "{threads} threads");
}
