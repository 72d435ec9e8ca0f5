"""Three tests with --urnic-strict; the program of the second uses verbs wrongly: its client fills a
buffer in which it has posted receives."""

import socket
import subprocess
import time


def listens(port):
    """Whether a program listens, without disturbing it."""
    suffix = f":{port:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as lines:
            if any(line.split()[1].endswith(suffix) and line.split()[3] == "0A" for line in lines if ":" in line.split()[1]):
                return True
    return False


def pingpong(environment, *options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["ibv_rc_pingpong", "-d", "urnic0", "-g", "0", "-n", "100", "-p", str(port), *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as server:
        deadline = time.monotonic() + 30
        while not listens(port) and time.monotonic() < deadline:
            time.sleep(0.05)
        subprocess.run([*command, "127.0.0.1"], env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)
        assert server.wait(60) == 0


def test_before(urnic_env):
    pingpong(urnic_env)


def test_wrong(urnic_env):
    pingpong(urnic_env, "-c")


def test_behind():
    pass
