"""A network card for RDMA programs, urnic0, without RDMA hardware, kernel modules or root.

Programs get it by their environment: `python -m urnic run -- PROGRAM`, or

    import subprocess, urnic
    subprocess.run(["ibv_devinfo"], env=urnic.environment())
"""

import json
import os
import subprocess
from pathlib import Path

__all__ = ["environment", "fault", "program", "Error"]


class Error(Exception):
    """What `urnic` wrote to standard error."""


def program():
    """The path of the program `urnic` in this package."""
    return str(Path(__file__).parent / "files" / "bin" / "urnic")


def environment(base=None, *, settings=None, **options):
    """The environment of a program that finds the card.

    `base` is the environment to add it to: that of this process if it is missing. `options` are
    those of `urnic run`, with _ for -: environment(faults="drop p=0.01", strict=True, devices=2).
    `settings` are the keys of `--set`: environment(settings={"mpa.crc": False}).

    Raises `Error` for a wrong option, or where the card cannot be made present.
    """
    base = dict(os.environ if base is None else base)
    arguments = [program(), "env", "--format", "json"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not False and value is not None:
            arguments.append(f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    for key, value in (settings or {}).items():
        text = str(value).lower() if isinstance(value, bool) else value
        arguments.append(f"--set={key}={text}")
    made = subprocess.run(arguments, env=base, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise Error(made.stderr.strip())
    return base | json.loads(made.stdout)


def fault(process, faults="", base=None):
    """Lets something go wrong in a process that runs, now: as `urnic fault PID FAULTS`.

    `process` is a `subprocess.Popen` or a process number, `faults` what `--faults` takes:
    fault(server, "port-down for=5s device=0"), fault(server, "@rail-down"). Returns one line for
    each fault of the process; without `faults`, that is all it does.

    Raises `Error` for a wrong fault, or if the process has no device open.
    """
    pid = getattr(process, "pid", process)
    arguments = [program(), "fault", str(pid), *([faults] if faults else [])]
    made = subprocess.run(arguments, env=base, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise Error(made.stderr.strip())
    return made.stdout.splitlines()
