"""The pytest plugin: a fixture for programs that tests start, and `pytest --urnic` for tests that
use verbs themselves."""

import json
import os
import sys

import pytest

import urnic

# Set in the pytest that `--urnic` starts.
_INSIDE = "URNIC_PYTEST"


def pytest_addoption(parser):
    group = parser.getgroup("urnic", "RDMA without hardware")
    group.addoption(
        "--urnic", action="store_true", help="run pytest itself with the card, for tests that use verbs in this process"
    )
    group.addoption(
        "--urnic-strict",
        action="store_true",
        help="check how programs use verbs; a finding is an error of the test that started the program",
    )
    parser.addini("urnic_strict", "as --urnic-strict", type="bool", default=False)


def pytest_configure(config):
    config.addinivalue_line("markers", "urnic_rails(count): the number of devices of the fixture urnic_rails; 2 without")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    if not config.getoption("--urnic") or os.environ.get(_INSIDE):
        return
    environment = urnic.environment()
    environment[_INSIDE] = "1"
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture:
        # The new program writes where this one would have without pytest.
        capture.suspend_global_capture(in_=True)
    sys.stdout.flush()
    arguments = [str(argument) for argument in config.invocation_params.args]
    os.execve(sys.executable, [sys.executable, "-m", "pytest", *arguments], environment)


class Card:
    """The card of one test."""

    def __init__(self, folder, strict):
        self.report = folder / "urnic-report.json"
        # Processes of other tests are not seen here, and theirs do not see these.
        self._base = dict(os.environ, URNIC_PRESENT_DIR=str(folder))
        self._options = {"report": self.report, "strict": strict}

    def environment(self, **options):
        """As `urnic.environment`, for the programs of this test."""
        return urnic.environment(self._base, **(self._options | options))

    def fault(self, process, faults=""):
        """As `urnic.fault`, in a program of this test."""
        return urnic.fault(process, faults, self._base)

    def reports(self):
        """What each process that has ended had to say: counters, failures, findings."""
        if not self.report.exists():
            return []
        return [json.loads(line) for line in self.report.read_text().splitlines()]

    def findings(self):
        """The findings of the option `strict`, in words."""
        return [
            f"{finding['rule']}: {finding['text']}"
            for report in self.reports()
            for finding in report.get("findings", [])
        ]


class Rails(Card):
    """Several devices for the programs of one test, which a test can take down one by one."""

    def __init__(self, folder, strict, count):
        super().__init__(folder, strict)
        # With a plan of faults from the start, all faults can be added later.
        self._options |= {"devices": count, "faults": "none"}

    def down(self, process, rail, seconds):
        """Takes the port of a device of a process down for some time, now; `rail` is its number."""
        self.fault(process, f"port-down for={round(seconds * 1000)}ms device={rail}")


def _fails_by_findings(card):
    findings = card.findings()
    if findings:
        pytest.fail("programs used verbs wrongly:\n" + "\n".join(findings), pytrace=False)


def _is_strict(config):
    return bool(config.getoption("--urnic-strict") or config.getini("urnic_strict"))


@pytest.fixture
def urnic_card(request, tmp_path_factory):
    """A fresh card: `subprocess.run(program, env=urnic_card.environment())`."""
    card = Card(tmp_path_factory.mktemp("urnic"), _is_strict(request.config))
    yield card
    _fails_by_findings(card)


@pytest.fixture
def urnic_rails(request, tmp_path_factory):
    """Two fresh devices, or as many as the marker `urnic_rails` says: start programs with
    `env=urnic_rails.environment()`, and take a rail down with `urnic_rails.down(process, 0, 5)`."""
    marker = request.node.get_closest_marker("urnic_rails")
    count = marker.args[0] if marker else 2
    rails = Rails(tmp_path_factory.mktemp("urnic"), _is_strict(request.config), count)
    yield rails
    _fails_by_findings(rails)


@pytest.fixture
def urnic_env(urnic_card):
    """The environment of a program with a fresh card: `subprocess.run(program, env=urnic_env)`."""
    return urnic_card.environment()
