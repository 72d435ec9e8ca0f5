"""With --urnic, the process of the tests has the card."""

import os


def test_this_process_has_the_card():
    assert "liburnic.so" in os.environ["LD_PRELOAD"]
    assert "urnic0" in os.listdir("/sys/class/infiniband")
