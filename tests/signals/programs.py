"""Programs that get a signal in the middle of their work, and report what they saw as JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.posix import strace

#: What every program begins with.
_PRELUDE = '''
import json, os, signal, subprocess, sys, threading
import kvio

root = sys.argv[1]


class Stop(Exception):
    """What a handler raises: no KeyboardInterrupt, so that nothing knows it."""


stopped = []


def stop(*_):
    if not stopped:
        stopped.append(True)
        raise Stop


signal.signal(signal.SIGUSR1, stop)


def send_when(ready):
    """Have another process send the signal to this one, once ready() is true."""

    other = subprocess.Popen(
        ["sh", "-c", f"read _ && kill -USR1 {os.getpid()}"], stdin=subprocess.PIPE
    )

    def watch():
        while not ready():
            pass
        other.communicate(b"\\n")

    threading.Thread(target=watch, daemon=True).start()


def names():
    return sorted(os.listdir(root))


def published():
    return sum(not name.startswith(".") for name in names())


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def report(**facts):
    print(json.dumps(facts), flush=True)
'''


def run(program: str, root: Path, *, before: Sequence[str] = ()) -> dict[str, Any]:
    """Run a program on a directory and return what it reported; it must end with status 0."""
    command = [*before, sys.executable, "-c", _PRELUDE + program, str(root)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    facts: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return facts


class Traced:
    """Runs programs under strace, which delays or signals system calls of theirs."""

    def __init__(self, log: Path, *injections: str) -> None:
        self._log = log
        calls = ",".join(injection.partition(":")[0] for injection in injections)
        options = [part for injection in injections for part in ("-e", f"inject={injection}")]
        self._before = strace.command(log, "-e", f"trace={calls}", *options)

    def run(self, program: str, root: Path) -> dict[str, Any]:
        """Run a program as `run` does."""
        return run(program, root, before=self._before)

    def calls(self, name: str) -> int:
        """Count the calls of a name that the program made."""
        return len(re.findall(rf"\b{name}\(", self._log.read_text()))
