"""Tests of how rail_failover takes the failure of a rail: `pytest` in this folder, with the package
urnic installed. RAIL_FAILOVER is the program, if it is not the one that `make` has built here."""

import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

PROGRAM = os.environ.get("RAIL_FAILOVER", str(Path(__file__).parent / "rail_failover"))
LIMIT = 60


class Party:
    """A process of the program, and what it has written."""

    def __init__(self, environment, *arguments):
        self.lines = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [PROGRAM, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()

    def text(self):
        return "\n".join(self.lines)

    def says(self, line, since=0):
        """Waits until it has written this line, after the first `since` lines; returns how many
        lines there are up to it."""
        found = lambda: next((n for n, said in enumerate(self.lines) if n >= since and line in said), None)
        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, LIMIT), f"no {line!r} in:\n{self.text()}"
            return found() + 1

    def ends(self):
        """Waits for its end; returns its status."""
        status = self.process.wait(LIMIT)
        self._reader.join()
        return status

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()


@pytest.fixture
def parties(urnic_rails):
    """Starts a receiver and a sender with these options."""
    started = []

    def start(*options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        receiver = Party(urnic_rails.environment(), "-p", port)
        started.append(receiver)
        receiver.says("rail 1: ")
        deadline = time.monotonic() + LIMIT
        while not listens(int(port)) and time.monotonic() < deadline:
            time.sleep(0.02)
        sender = Party(urnic_rails.environment(), "-p", port, *options, "127.0.0.1")
        started.append(sender)
        sender.says("rail 1 works")
        sender.says("traffic on rail 0")
        return sender, receiver

    yield start
    for party in started:
        party.kill()


def listens(port):
    """Whether a program listens, without disturbing it."""
    with open("/proc/net/tcp", encoding="ascii") as lines:
        return any(line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A" for line in list(lines)[1:])


def finish(sender, receiver):
    """Ends both; returns how many messages arrived on each rail."""
    sender.process.terminate()
    assert sender.ends() == 0, sender.text()
    assert receiver.ends() == 0, receiver.text()
    sent = re.search(r"(\d+) messages were acknowledged", sender.text())
    arrived = re.search(r"(\d+) messages arrived: (\d+) on rail 0, (\d+) on rail 1", receiver.text())
    assert sent and arrived and sent[1] == arrived[1], f"{sender.text()}\n{receiver.text()}"
    return int(arrived[2]), int(arrived[3])


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_traffic_moves_to_the_other_rail_and_returns(urnic_rails, parties, end):
    sender, receiver = parties()
    urnic_rails.down(sender.process if end == "sender" else receiver.process, 0, 4)
    failed = sender.says("rail 0 failed: transport retry counter exceeded")
    moved = sender.says("traffic on rail 1", failed)
    sender.says("traffic on rail 0", moved)
    down = sender if end == "sender" else receiver
    down.says("rail 0: port active", down.says("rail 0: port error"))
    on_first, on_second = finish(sender, receiver)
    assert on_first > 0 and on_second > 0


def test_a_port_error_is_enough(urnic_rails, parties):
    sender, receiver = parties("-e")
    urnic_rails.down(sender.process, 0, 1)
    failed = sender.says("rail 0 failed: port error")
    moved = sender.says("traffic on rail 1", failed)
    sender.says("traffic on rail 0", moved)
    finish(sender, receiver)


def test_a_short_flap_fails_no_rail(urnic_rails, parties):
    sender, receiver = parties()
    urnic_rails.down(sender.process, 0, 0.2)
    sender.says("rail 0: port active")
    finish(sender, receiver)
    assert "failed" not in sender.text(), sender.text()


def test_the_rail_that_is_not_used_may_fail(urnic_rails, parties):
    sender, receiver = parties("-e")
    urnic_rails.down(sender.process, 1, 0.5)
    failed = sender.says("rail 1 failed: port error")
    sender.says("rail 1 works", failed)
    finish(sender, receiver)
    assert not any("traffic" in line for line in sender.lines[failed:]), sender.text()


def test_no_rail_is_an_error(urnic_rails, parties):
    sender, _receiver = parties("-e", "-t", "1")
    urnic_rails.fault(sender.process, "port-down for=60s")
    assert sender.ends() == 1
    assert "no rail works" in sender.text() and "no rail has worked for 1 s" in sender.text()


def test_a_lost_acknowledgement_moves_the_traffic(urnic_rails, parties):
    """The message has arrived, and arrives again on the other rail."""
    sender, receiver = parties()
    urnic_rails.fault(sender.process, "complete status=RETRY_EXC_ERR device=0")
    failed = sender.says("rail 0 failed: transport retry counter exceeded")
    moved = sender.says("traffic on rail 1", failed)
    sender.says("traffic on rail 0", moved)
    finish(sender, receiver)
    assert re.search(r"[1-9]\d* came twice", receiver.text()), receiver.text()
