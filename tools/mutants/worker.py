"""A process that has imported what tests need, but for kvio, and forks a child for each mutant.

It reads requests from standard input and answers on standard output, a JSON object a line.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

#: What the first child's tests import beside this is imported into the worker before the second.
_WARM: Final = ("hypothesis", "numpy", "cffi", "google_crc32c", "ml_dtypes", "asyncio")
_OURS: Final = ("kvio", "tests", "conftest", "tools", "__main__")


class Chosen:
    """A pytest plugin that runs chosen tests in the order they are given, and reports each."""

    def __init__(self, tests: Sequence[str], pipe: int) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.pipe = pipe

    def report(self, event: str, test: str) -> None:
        """Report to the worker."""
        os.write(self.pipe, f"{event}\t{test}\n".encode())

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen ones."""
        items[:] = sorted(
            (item for item in items if item.nodeid in self.order),
            key=lambda item: self.order[item.nodeid],
        )

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Report that a test begins."""
        self.report("begin", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Report that a test failed."""
        if report.failed:
            self.report("fail", report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """Report that a file cannot be imported."""
        if report.failed:
            self.report("fail", f"{report.nodeid} (at import)")


def _child(request: Mapping[str, Any], pipe: int, log: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.close(out)
    gc.unfreeze()
    tests = request["tests"]
    files = request.get("files") or dict.fromkeys(test.split("::")[0] for test in tests)
    arguments = [*request["options"], *files]
    code = int(pytest.main(arguments, plugins=[Chosen(tests, pipe)]))
    if request.get("modules"):
        loaded = [n for n in sys.modules if n.split(".")[0] not in _OURS and "plugin" not in n]
        Path(request["modules"]).write_text(json.dumps(loaded))
    os._exit(code)


def _end(pid: int) -> None:
    """Kill a child, its group, and whatever else it has left behind."""
    for end in (os.killpg, os.kill):
        try:
            end(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for left in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if int(left) != pid:
            os.kill(int(left), signal.SIGKILL)
            os.waitpid(int(left), 0)


def run(request: Mapping[str, Any], log: str) -> dict[str, Any]:
    """Run tests in a child until one fails; say how it ended."""
    read_end, write_end = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read_end)
            _child(request, write_end, log)
        finally:
            os._exit(70)
    os.close(write_end)
    limits: dict[str, float] = request["limits"]
    deadline = began + float(request["import_s"])
    at, failed, timed_out, rest, ran = "(import)", "", False, b"", 0
    while not failed:
        wait = deadline - time.monotonic()
        if wait <= 0 or not select.select([read_end], [], [], wait)[0]:
            timed_out = True
            break
        got = os.read(read_end, 65536)
        if not got:
            break
        *events, rest = (rest + got).split(b"\n")
        for event in events:
            what, _, test = event.decode(errors="replace").partition("\t")
            if what == "fail":
                failed = failed or test
            else:
                at, ran = test, ran + 1
                deadline = time.monotonic() + limits.get(test, 60.0)
    code = None
    if not failed and not timed_out:
        # Whoever inherited the pipe may have closed it before the child ends.
        while wait := max(0.0, deadline - time.monotonic()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(min(0.02, wait))
        timed_out = code is None
    os.close(read_end)
    _end(pid)
    if code is None:
        os.waitpid(pid, 0)
    killed = bool(failed or timed_out or code)
    how = "timeout" if timed_out else "failed" if failed else f"exit {code}"
    seconds = round(time.monotonic() - began, 2)
    return {"killed": killed, "how": how, "by": failed or at, "ran": ran, "seconds": seconds}


def main() -> None:
    """Answer requests until there are no more."""
    tree, temporary = Path(sys.argv[1]), Path(sys.argv[2])
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "src")]
    os.environ["PYTHONPATH"] = str(tree / "src")
    os.environ["TMPDIR"] = str(temporary)
    _subreap()
    for name in _WARM:
        importlib.import_module(name)
    warmed = False
    for line in sys.stdin:
        request = json.loads(line)
        modules = temporary.parent / "modules.json"
        if not warmed:
            request["modules"] = str(modules)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(exist_ok=True)  # a process of the last test may have made more
        answer = run(request, str(temporary.parent / "log"))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        if not warmed and modules.exists():
            for name in json.loads(modules.read_text()):
                try:
                    importlib.import_module(name)
                except Exception:  # noqa: BLE001  # it is an optimisation
                    continue
            gc.collect()
            gc.freeze()
            warmed = True
            # A mutant's bytecode must not be taken for the code that comes back after it.
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            sys.dont_write_bytecode = True


def _subreap() -> None:
    """Become the parent of orphaned descendants, so that they can be found and killed."""
    import ctypes

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


if __name__ == "__main__":
    main()
