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


@pytest.fixture
def urnic_card(request, tmp_path_factory):
    """A fresh card: `subprocess.run(program, env=urnic_card.environment())`."""
    strict = request.config.getoption("--urnic-strict") or request.config.getini("urnic_strict")
    card = Card(tmp_path_factory.mktemp("urnic"), bool(strict))
    yield card
    findings = card.findings()
    if findings:
        pytest.fail("programs used verbs wrongly:\n" + "\n".join(findings), pytrace=False)


@pytest.fixture
def urnic_env(urnic_card):
    """The environment of a program with a fresh card: `subprocess.run(program, env=urnic_env)`."""
    return urnic_card.environment()
