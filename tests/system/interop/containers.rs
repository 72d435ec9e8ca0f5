//! Containers that get the device by its CDI specification, with Debian's podman, on an image made
//! of a root of the other Debian release.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use urnic_testkit::Folder;
use urnic_tests::build::{plugin, tree, urnic};
use urnic_tests::debian::Debian;
use urnic_tests::netns::Netns;
use urnic_tests::program::Program;
use urnic_tests::skip::installed;
use urnic_tests::wait::{TIME_LIMIT, until};
use urnic_tests::{Pair, or_skip};

const LIMIT: Duration = Duration::from_secs(120);
const IMAGE: &str = "localhost/urnic-test";

/// podman with an image and containers of its own. All of its processes end when this is dropped.
struct Podman {
    state: Folder,
    /// `scripts/podman-in`, which ends with its input.
    holder: Child,
}

impl Podman {
    /// podman, with the root of the other Debian release as [`IMAGE`].
    fn new() -> Result<Self, String> {
        for name in ["podman", "crun", "unshare", "nsenter"] {
            installed(name)?;
        }
        let root = Debian::other()?.outside("/");
        let state = Folder::new("podman");
        let mut hold = Command::new(tree().join("scripts/podman-in"));
        hold.arg(state.path())
            .args(["sh", "-c", "touch /run/cdi/ready; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null());
        let mut podman = Self {
            holder: hold.spawn().map_err(|error| format!("podman-in: {error}"))?,
            state,
        };
        let ready = podman.state.file("cdi/ready");
        until(TIME_LIMIT, || {
            let ended = podman.holder.try_wait().expect("our own child").is_some();
            (ended || ready.exists()).then_some(())
        });
        assert!(
            ready.exists(),
            "podman-in made no namespaces: see its line on standard error"
        );
        let image = podman.state.file("image.tar");
        Program::plain("tar")
            .args(["--one-file-system", "--create", "--directory"])
            .arg(root)
            .arg("--file")
            .arg(&image)
            .arg(".")
            .run_for(LIMIT)
            .success();
        podman
            .podman()
            .arg("import")
            .arg(&image)
            .arg(IMAGE)
            .run_for(LIMIT)
            .success();
        std::fs::remove_file(image).expect("our own file");
        Ok(podman)
    }

    /// podman, to which a command is added.
    fn podman(&self) -> Program {
        // unshare waits outside for the first process of the namespaces.
        let list = format!("/proc/{0}/task/{0}/children", self.holder.id());
        let first = std::fs::read_to_string(list).expect("the holder lives");
        let enter = ["nsenter", "--mount", "--pid", "--target", first.trim(), "--"];
        Program::plain("podman").through(enter)
    }

    /// Writes the specification with these options of `urnic cdi`.
    fn specify(&self, line: &str) {
        Program::plain(urnic())
            .arg("cdi")
            .arg("--output")
            .arg(self.state.file("cdi/urnic.json"))
            .line(line)
            .env("URNIC_LIB", plugin())
            .run()
            .success();
    }

    /// A container in the network of its surroundings, with these options of `podman run`, to which
    /// a program is added.
    fn run(&self, options: &str) -> Program {
        self.podman().line("run --rm").line(options).arg(IMAGE)
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

#[test]
#[ignore = "make interop"]
fn a_container_has_the_device_by_cdi() {
    let podman = or_skip!(Podman::new());
    podman.specify("--identity roce");
    let none = podman.run("").arg("ibv_devinfo").run_for(LIMIT).failure();
    assert!(none.contains("IB devices"), "{none}");

    // Also with nothing that can be written but /tmp and /run, and as an ordinary user.
    for options in ["", "--read-only", "--user 61234"] {
        let shown = podman
            .run(&format!("--device urnic.io/rnic=all {options}"))
            .arg("ibv_devinfo")
            .run_for(LIMIT)
            .success();
        for expected in ["hca_id:\turnic0", "PORT_ACTIVE", "link_layer:\t\tEthernet"] {
            assert!(
                shown.contains(expected),
                "{options}: no {expected:?} in:\n{shown}"
            );
        }
    }
    // The container's own `urnic`, which connects two programs.
    let doctor = podman
        .run("--device urnic.io/rnic=all")
        .line("urnic doctor")
        .run_for(LIMIT)
        .success();
    assert!(doctor.contains("exchanged 1000 messages"), "{doctor}");

    // Nothing else: two files, which cannot be written, and the variables.
    let script = "cut -d ' ' -f 2,4 /proc/self/mounts | sed 's/,.*//' | grep urnic; env | grep -E 'URNIC|PRELOAD' | sort
        ! touch /usr/bin/urnic || echo written";
    let seen = podman
        .run("--device urnic.io/rnic=urnic0")
        .args(["sh", "-c", script])
        .run_for(LIMIT)
        .success();
    for line in [
        "/usr/lib/urnic/liburnic.so ro",
        "/usr/bin/urnic ro",
        "LD_PRELOAD=/usr/lib/urnic/liburnic.so\nURNIC_DEVICES=1\nURNIC_IDENTITY=roce\nURNIC_NAME=urnic0\n",
        "Read-only file system",
    ] {
        assert!(seen.contains(line), "no {line:?} in:\n{seen}");
    }
    assert_eq!(seen.lines().count(), 7, "{seen}");
}

#[test]
#[ignore = "make interop"]
fn a_container_has_the_device_that_it_names() {
    let podman = or_skip!(Podman::new());
    podman.specify("--name mlx5_0 --devices 2 --kind example.org/two");
    for (device, names) in [
        ("all", &["mlx5_0", "mlx5_1"][..]),
        ("mlx5_0", &["mlx5_0"]),
        ("mlx5_1", &["mlx5_1"]),
    ] {
        let shown = podman
            .run(&format!("--device example.org/two={device}"))
            .arg("ibv_devices")
            .run_for(LIMIT)
            .success();
        let listed: Vec<_> = shown
            .split_whitespace()
            .filter(|word| word.starts_with("mlx5_"))
            .collect();
        assert_eq!(listed, names, "{shown}");
    }
}

#[test]
#[ignore = "make interop"]
fn two_containers_exchange_data_by_cdi() {
    let podman = or_skip!(Podman::new());
    podman.specify("");
    let [first, second] = or_skip!(Netns::pair());
    let end = |netns: &Netns| {
        let pingpong = podman.run("--device urnic.io/rnic=all");
        netns.program(pingpong.line("ibv_rc_pingpong -d urnic0 -g 0 -n 1000"))
    };
    let mut pair = Pair::new(&Program::plain("true")).at("10.77.0.1");
    pair.server = end(&first);
    pair.client = end(&second);
    pair.limit = LIMIT;
    let both = pair.succeeds();
    for end in [both.server, both.client] {
        assert!(end.output.contains("1000 iters in"), "{end}");
    }
}
