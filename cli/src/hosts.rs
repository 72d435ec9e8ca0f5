//! `urnic hosts`: several hosts in one machine, for programs that insist on more than one.
//!
//! Each is a network namespace with an address of its own, and all are in a user namespace, so that
//! an ordinary user can make them. The tools of util-linux and iproute2 do it.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use crate::answer::Failure;
use crate::environment::Environment;
use crate::program::find;

/// Most hosts: their addresses are 192.0.2.1 and on.
pub(crate) const MOST: u32 = 250;

/// $1 is the number of hosts, and the rest the command. A host waits until it has its interface.
const SCRIPT: &str = r#"
set -e
count=$1
shift
go=$(mktemp -d)
trap 'rm -rf "$go"' EXIT
# The user is root here, and must not look for the files of the real root.
export URNIC_PRESENT_DIR="${URNIC_PRESENT_DIR:-$go}"
ip link set lo up
ip link add name hosts type bridge
ip link set hosts up
addresses=
host=0
while [ "$host" -lt "$count" ]; do
    addresses="$addresses 192.0.2.$((host + 1))"
    host=$((host + 1))
done
export HOSTS="${addresses# }"
pids=
host=0
while [ "$host" -lt "$count" ]; do
    HOST=$host HOST_ADDRESS=192.0.2.$((host + 1)) GO="$go/$host" unshare --net sh -c '
        tries=0
        until [ -e "$GO" ]; do
            tries=$((tries + 1))
            [ "$tries" -lt 200 ] || exit 1
            sleep 0.05
        done
        ip link set lo up
        ip address add "$HOST_ADDRESS/24" dev eth0
        ip link set eth0 up
        unset GO
        exec "$@"' "host $host" "$@" &
    pid=$!
    pids="$pids $pid"
    # Until unshare(1) has made the namespace, the process is in ours.
    tries=0
    while [ "$(readlink /proc/self/ns/net)" = "$(readlink "/proc/$pid/ns/net")" ]; do
        tries=$((tries + 1))
        [ "$tries" -lt 200 ] || { echo "urnic hosts: no network namespace" >&2; exit 1; }
        sleep 0.05
    done
    ip link add "host$host" type veth peer name eth0 netns "$pid"
    ip link set "host$host" master hosts up
    host=$((host + 1))
done
host=0
while [ "$host" -lt "$count" ]; do
    : >"$go/$host"
    host=$((host + 1))
done
status=0
for pid in $pids; do
    wait "$pid" || status=$?
done
exit "$status"
"#;

/// Runs the command on each host, with the device; returns only if that fails.
pub(crate) fn run(env: &Environment, count: u32, command: &[OsString]) -> Result<ExitCode, Failure> {
    for (tool, package) in [
        ("unshare", "util-linux"),
        ("ip", "iproute2"),
        ("mktemp", "coreutils"),
    ] {
        if find(tool.as_ref()).is_none() {
            return Err(Failure::runtime(format!(
                "there is no {tool}: install {package} (Debian: apt-get install {package})"
            )));
        }
    }
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--user",
        "--map-root-user",
        "--net",
        "--mount",
        "sh",
        "-c",
        SCRIPT,
        "urnic hosts",
    ]);
    unshare.arg(count.to_string()).args(command).envs(env.variables());
    let error = unshare.exec();
    Err(Failure::runtime(format!("cannot run unshare: {error}")))
}
