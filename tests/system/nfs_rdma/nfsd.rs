//! Our client and Linux' own server, in the guest with soft-iWARP; `super::rxe` has it over
//! rdma_rxe.
//!
//! nfsd gets its parameters by the files that its helper programs would write (`exports(5)`,
//! `nfsd(7)`), so none of the helper programs is in the guest: this test answers in place of
//! rpc.mountd, and in place of rpcbind, without which nfsd does not start, there is a server that
//! accepts every call.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};

use urnic_tests::guest::{Guest, HOST, LINK_GUEST, LINK_HOST};
use urnic_tests::or_skip;
use urnic_tests::peer::hex;
use urnic_tests::program::Program;

use super::lists::list;
use super::{folder, pattern, read, urnic_nfs, write};

/// Answers each call of a connection with success and TRUE.
const RPCBIND: &str = r#"cat >/rpcbind <<'END'
#!/bin/sh
while mark=$(dd bs=1 count=4 2>/dev/null | hexdump -v -e '/1 "%02x"'); [ -n "$mark" ]; do
    printf '\200\000\000\034'
    dd bs=1 count=4 2>/dev/null
    dd bs=1 count=$(( (0x$mark & 0x7fffffff) - 4 )) of=/dev/null 2>/dev/null
    printf '\000\000\000\001\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\001'
done
END
chmod 755 /rpcbind
nc -ll -p 111 -e /rpcbind </dev/null >/dev/null 2>&1 &
echo $! >/rpcbind.pid
until netstat -ltn | grep -q ':111 '; do sleep 0.1; done"#;

/// nfsd, which is stopped when this is dropped.
pub(super) struct Nfsd<'a> {
    guest: &'a Guest,
    /// The address at which our client finds it.
    pub(super) address: &'static str,
    /// The port at which MOUNT is answered.
    mount: u16,
}

impl<'a> Nfsd<'a> {
    /// Exports a tmpfs, by QEMU's user network.
    fn start(guest: &'a Guest) -> Self {
        let (mut nfsd, root) = Self::exports(guest, "127.0.0.1", HOST);
        nfsd.mount = mountd((Ipv4Addr::LOCALHOST, 0), root);
        nfsd
    }

    /// Exports a tmpfs, by the link of a linked guest. The guest passes calls of MOUNT on to here.
    pub(super) fn linked(guest: &'a Guest) -> Self {
        let (mut nfsd, root) = Self::exports(guest, LINK_GUEST, LINK_HOST);
        let here: Ipv4Addr = LINK_HOST.parse().expect("an address");
        let mountd = guest.netns().within(|| mountd((here, 0), root));
        // nfsd's port itself is siw's, too.
        nfsd.mount = 20048;
        nfsd.does(&format!(
            "nc -ll -p {port} -e nc {LINK_HOST} {mountd} </dev/null >/dev/null 2>&1 & echo $! >/mountd.pid; \
             until netstat -ltn | grep -q ':{port} '; do sleep 0.1; done",
            port = nfsd.mount
        ));
        nfsd
    }

    /// Exports a tmpfs to clients, which have this address; also returns the handle of its root.
    fn exports(guest: &'a Guest, address: &'static str, clients: &str) -> (Self, Vec<u8>) {
        const FOR_EVER: u32 = i32::MAX as u32;
        // NFSEXP_INSECURE_PORT, _ASYNC, _NOSUBTREECHECK, _FSID.
        const FLAGS: u32 = 0x2 | 0x10 | 0x400 | 0x2000;
        let nfsd = Self {
            guest,
            address,
            mount: 0,
        };
        let port = guest.port;
        nfsd.does(RPCBIND);
        nfsd.does(
            "modprobe -a rpcrdma nfsd && mkdir -p /export && mount -t tmpfs -o size=300m export /export",
        );
        nfsd.does("grep -q nfsd /proc/mounts || mount -t nfsd nfsd /proc/fs/nfsd");
        nfsd.does("cd /proc/fs/nfsd && echo '-2 +3 -4' >versions");
        nfsd.does(&format!(
            "cd /proc/fs/nfsd && echo 'rdma {port}' >portlist && echo 4 >threads"
        ));
        for (cache, line) in [
            ("auth.unix.ip", format!("nfsd {clients} {FOR_EVER} all")),
            (
                "nfsd.export",
                format!("all /export {FOR_EVER} {FLAGS} 65534 65534 1"),
            ),
            ("nfsd.fh", format!("all 1 \\x01000000 {FOR_EVER} /export")),
        ] {
            nfsd.does(&format!("echo '{line}' >/proc/net/rpc/{cache}/channel"));
        }
        let guest_output =
            nfsd.does("exec 3<>/proc/fs/nfsd/filehandle && echo 'all /export 64' >&3 && cat <&3");
        let root = guest_output.lines().find_map(|line| line.strip_prefix("\\x"));
        let root = hex(root.unwrap_or_else(|| panic!("no handle: {guest_output}")));
        (nfsd, root)
    }

    #[track_caller]
    pub(super) fn does(&self, line: &str) -> String {
        self.guest.start(line).success()
    }

    /// A command of our client. Without CRC, of which siw 6.1 misreads some.
    pub(super) fn client(&self, command: &str) -> Program {
        let (port, mount) = (self.guest.port, self.mount);
        urnic_nfs(&format!(
            "{command} --rdma --patience 60 --port {port} --mount-port {mount}"
        ))
        .env("URNIC_MPA_CRC", "false")
    }
}

impl Drop for Nfsd<'_> {
    fn drop(&mut self) {
        let line = "echo 0 >/proc/fs/nfsd/threads; echo f >/proc/net/rpc/nfsd.export/flush; umount /export; kill $(cat /rpcbind.pid /mountd.pid)";
        let _ = self.guest.start(line).tries();
    }
}

/// Answers MOUNT (RFC 1813 appendix I) at a port, which it returns, while the tests last: of what
/// there is, only `/` is a directory.
fn mountd(at: (Ipv4Addr, u16), root: Vec<u8>) -> u16 {
    let listener = TcpListener::bind(at).expect("a port");
    let port = listener.local_addr().expect("a TCP socket").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let _ = answer(stream, &root);
        }
    });
    port
}

fn answer(mut stream: TcpStream, root: &[u8]) -> std::io::Result<()> {
    const NFS3ERR_NOTDIR: u32 = 20;
    loop {
        let mut mark = [0; 4];
        stream.read_exact(&mut mark)?;
        let mut call = vec![0; (u32::from_be_bytes(mark) & 0x7fff_ffff) as usize];
        stream.read_exact(&mut call)?;
        let mut words = vec![
            u32::from_be_bytes(*call.first_chunk().expect("an xid")),
            1,
            0,
            0,
            0,
            0,
        ];
        let mut handle: &[u8] = &[];
        // MNT; its argument, a path, comes last: of one byte, and three of padding.
        if call[20..24] == 1_u32.to_be_bytes() {
            if call.ends_with(b"\0\0\0\x01/\0\0\0") {
                handle = root;
                words.extend([0, root.len() as u32]);
            } else {
                words.push(NFS3ERR_NOTDIR);
            }
        }
        let mut reply: Vec<u8> = words.into_iter().flat_map(u32::to_be_bytes).collect();
        reply.extend(handle);
        if !handle.is_empty() {
            // One flavour: AUTH_SYS.
            reply.extend([0, 0, 0, 1, 0, 0, 0, 1]);
        }
        let mark = 0x8000_0000 | reply.len() as u32;
        stream.write_all(&[&mark.to_be_bytes(), &reply[..]].concat())?;
    }
}

#[test]
#[ignore = "make interop"]
fn our_client_reads_and_writes_files_of_linux_nfsd() {
    let guest = or_skip!(Guest::borrowed());
    let nfsd = Nfsd::start(&guest);
    reads_and_writes(&nfsd, "nfsd", |program| program);
}

/// Our client, which runs in this place, copies files to the server and others from it.
#[track_caller]
pub(super) fn reads_and_writes(nfsd: &Nfsd<'_>, name: &str, place: impl Fn(Program) -> Program) {
    let folder = folder(name);
    let address = nfsd.address;
    let client = |command: &str| place(nfsd.client(command));
    for (name, len) in [
        ("empty", 0),
        ("small", 100),
        ("odd", 65_537),
        ("large", 3_000_001),
    ] {
        let bytes = pattern(len);
        write(&folder.file("sent"), &bytes);
        let put = client("put")
            .arg(folder.file("sent"))
            .arg(format!("{address}:/{name}"));
        put.run().success();
        // Linux reads it, too.
        nfsd.does(&format!(
            "cd /export && [ $(wc -c <{name}) = {len} ] && cat {name} >{name}-too"
        ));
        let get = client("get")
            .arg(format!("{address}:/{name}-too"))
            .arg(folder.file("got"));
        get.run().success();
        assert!(read(&folder.file("got")) == bytes, "{name}");
    }
    let listed = client("ls").arg(format!("{address}:/")).run().success();
    // After the warnings of the device.
    let names = "empty\nempty-too\nlarge\nlarge-too\nodd\nodd-too\nsmall\nsmall-too\n";
    assert!(listed.ends_with(names), "{listed}");
}

/// nfsd takes no list that is longer than a page, but two of them.
#[test]
#[ignore = "make interop"]
fn rpc_k_07_linux_nfsd_takes_and_returns_our_long_lists() {
    const USERS: u32 = 300;
    let guest = or_skip!(Guest::borrowed());
    let nfsd = Nfsd::start(&guest);
    let folder = folder("nfsd-lists");
    let lists = list("", USERS, "rwx") + &list("default:", USERS, "rwx");
    write(&folder.file("lists"), lists.as_bytes());
    nfsd.does("mkdir /export/dir");
    let acl = || nfsd.client("acl").arg("127.0.0.1:/dir");
    acl().arg("--set").arg(folder.file("lists")).run().success();
    let got = acl().run().success();
    assert!(got.ends_with(&lists), "{got}");
    // One of them is removed, and the other stays; then the other is removed.
    let (access, default) = (
        "user::rwx\ngroup::r-x\nother::---\n",
        list("default:", USERS, "rwx"),
    );
    write(&folder.file("access"), access.as_bytes());
    acl().arg("--set").arg(folder.file("access")).run().success();
    let got = acl().run().success();
    assert!(got.ends_with(&format!("{access}{default}")), "{got}");
    acl().arg("--remove-default").run().success();
    let got = acl().run().success();
    assert!(got.ends_with(access) && !got.contains("default:"), "{got}");
}
