//! NFS over RDMA: our server, our client, and Linux' independent client.

mod cuts;
mod hostile;
mod linux;
mod lists;
mod nfsd;
mod rpcbind;
mod rxe;
mod users;

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::process::Signal;
use urnic_testkit::Folder;
use urnic_tests::build::{nfs, scratch};
use urnic_tests::guest::{HOST, LINK_HOST};
use urnic_tests::netns::Netns;
use urnic_tests::program::{Program, Running};
use urnic_tests::wait::{TIME_LIMIT, descriptors, until};

/// The path of `urnic-nfs`.
fn program() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(nfs)
}

fn urnic_nfs(line: &str) -> Program {
    Program::new(program()).line(line)
}

/// The ports of TCP and RDMA from the server's output.
fn listening(server: &mut Running) -> (String, String) {
    let mut port = |way: &str| {
        server.wait_for_output(way, |guest_output| {
            let line = guest_output.lines().find(|line| line.contains(way))?;
            line.rsplit(':').next().map(str::to_owned)
        })
    };
    (port("over TCP at"), port("over RDMA at"))
}

/// A folder in the target folder, for a test with NFS.
fn folder(name: &str) -> Folder {
    Folder::inside(&scratch(), &format!("nfs-{name}"))
}

/// The server of a directory in this folder.
fn directory(folder: &Folder) -> Program {
    let served = folder.file("served");
    std::fs::create_dir_all(&served).expect("a folder");
    urnic_nfs("serve --no-root-squash").arg(&served)
}

/// A served directory, or a served tree in memory; ended and removed when dropped.
struct Export {
    folder: Folder,
    server: Running,
    program: Program,
    /// The server's address in a guest.
    address: &'static str,
    tcp: String,
    rdma: String,
}

impl Export {
    /// Serves a directory.
    fn new(name: &str, settings: &[(&str, &str)]) -> Self {
        let folder = folder(name);
        let program = directory(&folder);
        Self::start(folder, program, settings)
    }

    /// Serves a directory from a linked guest's namespace.
    fn linked(name: &str, netns: &Netns, settings: &[(&str, &str)]) -> Self {
        let folder = folder(name);
        let program = netns.program(directory(&folder));
        Self {
            address: LINK_HOST,
            ..Self::start(folder, program, settings)
        }
    }

    /// Serves a tree in memory.
    fn of_memory(name: &str, settings: &[(&str, &str)]) -> Self {
        let program = urnic_nfs("serve --no-root-squash --memory 64M");
        Self::start(folder(name), program, settings)
    }

    fn start(folder: Folder, program: Program, settings: &[(&str, &str)]) -> Self {
        let program = settings
            .iter()
            .fold(program, |program, (name, value)| program.env(name, value));
        let mut server = program.clone().line("--tcp-port 0 --rdma-port 0").spawn();
        let (tcp, rdma) = listening(&mut server);
        Self {
            address: HOST,
            tcp,
            rdma,
            server,
            program,
            folder,
        }
    }

    /// Kills the server with SIGKILL and starts it again, at the same ports.
    fn start_again(&mut self) {
        let Self { tcp, rdma, .. } = self;
        let again = (self.program.clone()).line(&format!("--tcp-port {tcp} --rdma-port {rdma}"));
        self.server.signal(Signal::KILL);
        let ended = until(TIME_LIMIT, || self.server.ended());
        assert!(ended.is_some(), "the server is still there");
        self.server = again.spawn();
        listening(&mut self.server);
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.file("served").join(name)
    }

    fn here(&self, name: &str) -> PathBuf {
        self.folder.file(name)
    }

    /// A command of our client, by RDMA.
    fn client(&self, command: &str) -> Program {
        self.client_through(command, &self.rdma)
    }

    /// A command of our client, by RDMA through another port.
    fn client_through(&self, command: &str, port: &str) -> Program {
        let tcp = &self.tcp;
        urnic_nfs(&format!(
            "{command} --rdma --port {port} --mount-port {tcp} --patience 120"
        ))
    }
}

/// The number of descriptors of a server without clients: descriptors of connections that the
/// server is still closing do not count.
fn idle(server: u32) -> usize {
    let looks = (0..300).map(|_| {
        std::thread::sleep(std::time::Duration::from_millis(2));
        descriptors(server)
    });
    looks.min().unwrap_or_default()
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

fn read(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn files_of_every_length_go_both_ways() {
    let export = Export::new("both-ways", &[]);
    for len in [0, 1, 100, 4095, 65_537, 1 << 20, 9_000_001] {
        let bytes = pattern(len);
        write(&export.here("sent"), &bytes);
        export
            .client("put")
            .arg(export.here("sent"))
            .arg("127.0.0.1:/file")
            .run()
            .success();
        assert!(read(&export.file("file")) == bytes, "{len} bytes put");
        export
            .client("get")
            .arg("127.0.0.1:/file")
            .arg(export.here("got"))
            .run()
            .success();
        assert!(read(&export.here("got")) == bytes, "{len} bytes got");
        for file in ["got", "sent"] {
            std::fs::remove_file(export.here(file)).expect("ours");
        }
        std::fs::remove_file(export.file("file")).expect("ours");
    }
}
