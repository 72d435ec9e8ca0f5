//! Tests of the program over TCP: the client of this crate with its server, and misbehaving peers.

mod hostile;

use hostile::{answered, is_counted_as_served};
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Lines, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;
use urnic_nfs::call::Tcp;
use urnic_nfs::client::Client;
use urnic_nfs::memory::Pool;

const PROGRAM: &str = env!("CARGO_BIN_EXE_urnic-nfs");

/// A server at its own port. It ends when dropped.
struct Server {
    child: Child,
    address: SocketAddr,
    /// The standard output, kept open for later lines.
    _said: Lines<BufReader<ChildStdout>>,
}

impl Server {
    fn start(port: u16, what: &[&str]) -> Self {
        let mut child = Command::new(PROGRAM)
            .args([
                "serve",
                "--no-root-squash",
                "--listen",
                "127.0.0.1",
                "--tcp-port",
                &port.to_string(),
            ])
            .args(what)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the server starts");
        let mut lines = BufReader::new(child.stdout.take().expect("its output")).lines();
        let address = lines.find_map(|line| {
            let line = line.ok()?;
            line.split_whitespace().last()?.parse().ok()
        });
        Self {
            child,
            address: address.expect("the server prints its address"),
            _said: lines,
        }
    }

    fn remote(&self, path: &str) -> String {
        format!("127.0.0.1:{path}")
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let port = self.address.port().to_string();
        let mut command = Command::new(PROGRAM);
        command
            .arg(arguments[0])
            .args(["--port", &port, "--patience", "120"])
            .args(&arguments[1..]);
        command.output().expect("the program runs")
    }

    #[track_caller]
    fn does(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{arguments:?}: {stderr}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn null(&self) {
        let tcp = Tcp::connect(self.address).expect("the server listens");
        Client::new(Box::new(tcp), Pool::new())
            .null()
            .expect("the server answers");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection whose reads have a time limit.
fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    Ok(stream)
}

/// A connection from this address of the machine.
fn connect_from(address: Ipv4Addr, to: SocketAddr) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&socket, &SocketAddr::new(address.into(), 0)).expect("an address of this machine");
    connect(&socket, &to).expect("the server listens");
    let stream = TcpStream::from(socket);
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a time");
    stream
}

/// Bytes without short repetitions.
fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..len).map(|_| next()).collect()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

#[test]
fn files_are_copied_unchanged_in_both_directions() {
    let folder = tempfile::tempdir().expect("a folder");
    let export = folder.path().join("export");
    fs::create_dir(&export).expect("a folder");
    for what in [&[text(&export)][..], &["--memory", "64M"]] {
        let server = Server::start(0, what);
        for (size, block) in [
            (0, "1M"),
            (1, "4K"),
            (4097, "4K"),
            (3_000_001, "5000"),
            (9 << 20, "1M"),
        ] {
            let (local, back) = (folder.path().join("local"), folder.path().join("back"));
            let bytes = pattern(size);
            fs::write(&local, &bytes).expect("a file");
            let remote = server.remote(&format!("/file-{size}"));
            server.does(&["put", "--block", block, text(&local), &remote]);
            server.does(&["get", "--block", block, "--depth", "3", &remote, text(&back)]);
            assert!(
                fs::read(&back).expect("a file") == bytes,
                "{size} bytes by {block}"
            );
        }
        let listed = server.does(&["ls", "-l", &server.remote("/")]);
        assert_eq!(listed.lines().count(), 5, "{listed}");
        assert!(listed.contains(" 3000001 file-3000001"), "{listed}");
        let measured = server.does(&[
            "bench",
            "--json",
            "--size",
            "2M",
            "--operations",
            "200",
            &server.remote("/"),
        ]);
        assert!(measured.starts_with("{\"write\": "), "{measured}");
        assert_eq!(
            server.does(&["ls", &server.remote("/")]).lines().count(),
            5,
            "the bench cleans up"
        );
    }
}

#[test]
fn failures_are_reported_in_one_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(0, &["--read-only", text(folder.path())]);
    let local = folder.path().join("local");
    fs::write(&local, "text").expect("a file");
    let (nope, root) = (server.remote("/no/such/file"), server.remote("/"));
    for (arguments, expected) in [
        (&["get", &nope][..], "no such file or directory"),
        (&["get", &root], "is a directory"),
        (&["put", text(&local), &root], "read-only file system"),
        (&["put", text(folder.path()), &root], "is no regular file"),
        (&["ls", "nowhere"], "SERVER:PATH is wanted"),
    ] {
        let output = server.run(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && stderr.contains(expected),
            "{arguments:?}: {stderr}"
        );
    }
}

#[test]
fn handles_stay_valid_over_a_server_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = Server::start(0, &[text(folder.path())]);
    let tcp = Tcp::connect(first.address).expect("the server listens");
    let mut client = Client::new(Box::new(tcp), Pool::new());
    let root = client.mount(b"/").expect("a handle");
    fs::write(folder.path().join("file"), "text").expect("a file");
    let file = client.lookup(root, b"file").expect("a handle").file;
    drop(first);
    let second = Server::start(0, &[text(folder.path())]);
    let tcp = Tcp::connect(second.address).expect("the server listens");
    let mut client = Client::new(Box::new(tcp), Pool::new());
    assert_eq!(client.attributes(file).expect("the handle is still good").size, 4);
}

#[test]
fn peers_with_invalid_messages_are_dropped_others_served() {
    let server = Server::start(0, &["--memory", "1M"]);
    let connect = || connect(server.address).expect("the server listens");
    // A record longer than any call, and an endless record. The connection ends.
    for bytes in [&[0xff; 8][..], &[0; 8192]] {
        let mut stream = connect();
        stream.write_all(bytes).expect("it is taken");
        let ended = stream.read_exact(&mut [0; 1]).map_err(|error| error.kind());
        assert!(
            matches!(ended, Err(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)),
            "{ended:?}"
        );
        server.null();
    }
    // A message that is no call has no answer, but a call after it has, in fragments of a few
    // bytes.
    let mut stream = connect();
    stream.write_all(&[0x80, 0, 0, 3, 1, 2, 3]).expect("it is taken");
    let words = [7, 0, 2, 100_003, 3, 0, 0, 0, 0, 0]
        .map(u32::to_be_bytes)
        .concat();
    for (at, piece) in words.chunks(8).enumerate() {
        let last = if at == 4 { 0x80 } else { 0 };
        stream
            .write_all(&[&[last, 0, 0, 8], piece].concat())
            .expect("it is taken");
    }
    let mut reply = [0; 28];
    stream.read_exact(&mut reply).expect("an answer");
    assert_eq!(reply[..12], [0x80, 0, 0, 24, 0, 0, 0, 7, 0, 0, 0, 1]);
    // The data of this WRITE is incomplete.
    let mut stream = connect();
    stream.write_all(&[0x80, 0x0f, 0, 0]).expect("it is taken");
    stream.write_all(&words).expect("it is taken");
    drop(stream);
    server.null();
}

/// The connection of the other address has sent no message for the longest time, and stays.
#[test]
fn the_address_with_most_connections_makes_room() {
    const CONNECTIONS: usize = 512;
    let server = Server::start(0, &["--memory", "1M"]);
    let other = connect_from(Ipv4Addr::new(127, 0, 0, 2), server.address);
    is_counted_as_served(&other);
    let many: Vec<TcpStream> = (0..CONNECTIONS)
        .map(|_| {
            let stream = connect(server.address).expect("the server listens");
            is_counted_as_served(&stream);
            stream
        })
        .collect();
    answered(&other).expect("an answer, still");
    let ended = (&many[0]).read(&mut [0; 1]).map_err(|error| error.kind());
    assert!(
        matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)),
        "{ended:?}"
    );
    answered(&many[1]).expect("an answer to the next");
}

#[test]
fn many_clients_at_once() {
    let server = Server::start(0, &["--memory", "64M"]);
    std::thread::scope(|scope| {
        for n in 0..32 {
            let server = &server;
            scope.spawn(move || {
                let folder = tempfile::tempdir().expect("a folder");
                let (local, back) = (folder.path().join("local"), folder.path().join("back"));
                let bytes = pattern(100_000 + n);
                fs::write(&local, &bytes).expect("a file");
                let remote = server.remote(&format!("/{n}"));
                server.does(&["put", text(&local), &remote]);
                server.does(&["get", &remote, text(&back)]);
                assert!(fs::read(&back).expect("a file") == bytes);
            });
        }
    });
}

#[test]
fn the_manual_page_has_every_option() {
    let manual =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/urnic-nfs.1")).expect("the page");
    let manual = manual.replace('\\', "");
    for command in ["serve", "get", "put", "ls", "bench"] {
        let output = Command::new(PROGRAM)
            .args([command, "--help"])
            .output()
            .expect("the program runs");
        let help = String::from_utf8_lossy(&output.stdout);
        let options = help.split_whitespace().filter_map(|word| {
            let word = word.trim_end_matches([',', ']', '.']);
            word.starts_with("--").then_some(word)
        });
        let options: Vec<_> = options.filter(|option| *option != "--help").collect();
        assert!(!options.is_empty(), "{help}");
        for option in options {
            assert!(manual.contains(option), "{option} of {command}");
        }
    }
}
