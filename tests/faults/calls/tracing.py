"""strace attached to a process that waits: what it calls from then on is listed, or fails.

Needs strace (Debian package strace) and leave to trace (root, or ptrace_scope 0).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest

from tests.faults.calls.subject import BEGIN, END

_ROOT: Final = Path(__file__).parents[3]
_CALL: Final = re.compile(r"^(\d+) +(\w+)\((.*)$")
_LONG_S: Final = 60


class Traced:
    """A subject's process (`tests.faults.calls.subject`), and strace beside it on demand."""

    def __init__(self, work: Path, **env: str) -> None:
        if shutil.which("strace") is None:
            pytest.skip("needs strace (Debian package strace)")
        self.log = work / "strace"
        roots = work / "roots"
        roots.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.calls.subject", str(roots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **env},
        )

    def prepare(self, name: str) -> str | None:
        """Let it prepare an operation; why it cannot."""
        said = self._ask(name)
        if said == "ready":
            return None
        return str(json.loads(said)["unsupported"])

    def go(self, *options: str) -> dict[str, Any]:
        """Let it do what it prepared, under strace with *options*; what it says of it."""
        if options:
            with self._strace(*options):
                said = self._ask("go")
        else:
            said = self._ask("go")
        assert said == "done"
        answer: dict[str, Any] = json.loads(self._ask("look"))
        return answer

    def _ask(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline().strip()
        assert said, f"the subject died over {line!r}"
        return said

    @contextmanager
    def _strace(self, *options: str) -> Iterator[None]:
        """Attach strace to all its threads, and detach it in the end."""
        command = ["strace", "-f", "-qq", "-o", str(self.log), *options]
        tracer = subprocess.Popen(
            [*command, "-p", str(self.process.pid)], stderr=subprocess.PIPE, text=True
        )
        try:
            self._wait_for(tracer)
            yield
        finally:
            tracer.terminate()
            tracer.communicate(timeout=_LONG_S)

    def _wait_for(self, tracer: subprocess.Popen[str]) -> None:
        """Return when every thread is traced."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        while tracer.poll() is None:
            states = []
            for task in tasks.iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):  # it may have ended
                    states.append((task / "status").read_text())
            if all(f"TracerPid:\t{tracer.pid}\n" in state for state in states):
                return
        assert tracer.stderr is not None
        pytest.skip(f"strace may not attach: {tracer.stderr.read().strip():.200}")

    def listed(self) -> dict[str, Counter[str]]:
        """Count the calls that the log has between the marks, by operation."""
        return {name: Counter(call for _, call in made) for name, made in self._made().items()}

    def listed_of_one_thread(self, name: str) -> Counter[str]:
        """Count each call by the thread that makes most of it: strace counts by thread, too."""
        most: Counter[str] = Counter()
        for (_, call), number in Counter(self._made()[name]).items():
            most[call] = max(most[call], number)
        return most

    def _made(self) -> dict[str, list[tuple[str, str]]]:
        """Return threads and calls between the marks, by operation."""
        found: dict[str, list[tuple[str, str]]] = {}
        name = None
        for line in self.log.read_text(errors="replace").splitlines():
            parts = _CALL.match(line)
            if parts is None:
                continue
            thread, call, rest = parts.groups()
            if BEGIN in rest:
                name = rest.partition(BEGIN)[2].partition('"')[0]
                found[name] = []
            elif END in rest:
                name = None
            elif name is not None:
                found[name].append((thread, call))
        return found

    def close(self) -> None:
        """Let the subject end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(_LONG_S)
        self.process.stdout.close()
