"""Tests as users of the pytest plugin write them: all pass."""

import os
import subprocess

import pytest
import urnic


def devices(environment):
    return subprocess.run(["ibv_devices"], env=environment, capture_output=True, text=True, check=True).stdout


def test_a_program_finds_the_card(urnic_env):
    assert "urnic0" in devices(urnic_env)


def test_options_are_those_of_run(urnic_card):
    shown = devices(urnic_card.environment(name="card7", settings={"mpa.crc": False}))
    assert "card7" in shown and "urnic0" not in shown


def test_this_process_has_no_card():
    assert "liburnic.so" not in os.environ.get("LD_PRELOAD", "")


def test_a_wrong_option_is_an_error():
    with pytest.raises(urnic.Error, match="rest"):
        urnic.environment(faults="rest")


def test_each_process_reports(urnic_card):
    subprocess.run(["ibv_devinfo"], env=urnic_card.environment(), capture_output=True, check=True)
    (report,) = urnic_card.reports()
    assert report["command"] == ["ibv_devinfo"]
    assert urnic_card.findings() == []


def test_rails_are_several_devices(urnic_rails):
    assert "urnic0" in (shown := devices(urnic_rails.environment())) and "urnic1" in shown


@pytest.mark.urnic_rails(3)
def test_a_marker_says_how_many_rails(urnic_rails):
    assert "urnic2" in devices(urnic_rails.environment())


def test_a_fault_needs_a_process_with_a_device(urnic_rails):
    with pytest.raises(urnic.Error, match="has no urnic device open"):
        urnic_rails.down(os.getpid(), 0, 1)
    with pytest.raises(urnic.Error, match="rest"):
        urnic_rails.fault(os.getpid(), "rest")


def test_scenarios_come_with_the_package():
    assert urnic.environment(faults="@rail-down")["URNIC_FAULTS"].startswith("port-down ")
