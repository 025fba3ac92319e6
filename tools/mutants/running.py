"""Runs mutants, several at once, each worker in its own copy of the tree."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from tools.mutants.mutant import Mutant, plain
from tools.mutants.recording import PYTEST, Reached, test_files
from tools.mutants.tree import EXTENSION, Core, copy_tree

#: A test may take so much longer than when it was recorded before its mutant counts as hanging.
_SLOWER: Final = 6.0
_SPARE_S: Final = 15.0
_IMPORT_S: Final = 90.0


class Place:
    """A copy of the tree with a built C core, in which one file at a time is changed."""

    def __init__(self, root: Path, where: Path) -> None:
        self.tree = where / "tree"
        copy_tree(root, self.tree)
        self.core = Core(self.tree)
        self.core.build()
        self.clean = where / "clean.so"
        shutil.copy2(self.tree / EXTENSION, self.clean)

    @contextmanager
    def changed(self, mutant: Mutant) -> Iterator[str]:
        """Change a file; yield why the mutant is none, or nothing if it is one."""
        path = self.tree / mutant.path
        text, status = path.read_text(), path.stat()
        new = mutant.apply(text)
        path.write_text(new)
        # Bytecode is found by the time of its source in seconds, and its length.
        os.utime(path, (1, int(status.st_mtime) + 1 + int(mutant.key[:6], 16)))
        try:
            if path.suffix == ".py":
                yield _judge_python(text, new, exports=path.name == "__init__.py")
            else:
                yield self._judge_c(mutant.path)
        finally:
            path.write_text(text)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            if path.suffix != ".py":
                spare = self.tree / "back.so"
                shutil.copy2(self.clean, spare)
                spare.replace(self.tree / EXTENSION)

    def _judge_c(self, path: str) -> str:
        differ = self.core.changed(path)
        if isinstance(differ, str):
            return "not compiling"
        if not differ:
            return "same code"
        return "not compiling" if self.core.link({**self.core.objects, **differ}) else ""


def _judge_python(text: str, new: str, *, exports: bool) -> str:
    code = plain(new, exports=exports)
    if code is None:
        return "not compiling"
    return "same code" if code == plain(text, exports=exports) else ""


class Worker:
    """A place, and a process that runs tests in it."""

    def __init__(self, root: Path, where: Path, reached: Reached) -> None:
        self.place = Place(root, where)
        self.reached = reached
        command = [sys.executable, "-m", "tools.mutants.worker", str(self.place.tree)]
        env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, str(where / "tmp")],
            cwd=root,
            env=os.environ | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        # Imports everything, with bytecode, and shows that clean code passes.
        quick = sorted(reached.seconds, key=reached.seconds.__getitem__)[:20]
        answer = self.ask(quick, files=test_files(root))
        assert not answer["killed"], f"tests fail without a mutant: {answer}"

    def ask(self, tests: Sequence[str], *, files: Sequence[str] = ()) -> dict[str, Any]:
        """Run tests until one fails."""
        limits = {test: _SLOWER * self.reached.seconds[test] + _SPARE_S for test in tests}
        options = [*PYTEST, "-p", "no:randomly", "-x", "--timeout", "3600"]
        request = {
            "tests": list(tests),
            "files": list(files),
            "options": options,
            "limits": limits,
            "import_s": _IMPORT_S,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Pool:
    """Workers that share a queue of mutants.

    Args:
        reach_s: recorded seconds of the tests that are tried on one mutant.
        done: called with the result of each mutant.
    """

    def __init__(
        self,
        root: Path,
        cache: Path,
        reached: Reached,
        *,
        reach_s: float,
        done: Callable[[Mutant, dict[str, Any]], None],
    ) -> None:
        self.root, self.cache, self.reached = root, cache, reached
        self.reach_s = reach_s
        self.done = done
        self.todo: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        self.stop = threading.Event()
        self._killers: dict[str, Counter[str]] = {}

    def run(self, mutants: Sequence[Mutant], *, workers: int) -> None:
        """Run all of them, or until `stop` is set."""
        for mutant in mutants:
            self.todo.put(mutant)
        threads = [threading.Thread(target=self._work, args=(n,)) for n in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def chosen(self, mutant: Mutant) -> tuple[list[str], int]:
        """Choose tests for a mutant, and count all that reach it.

        What has killed mutants of the same file comes first, then the quickest: one set of
        parameters of each test, then a second of each.
        """
        tests = self.reached.tests(mutant.path, mutant.line, mutant.last)
        killers = self._killers.get(mutant.path, Counter[str]())
        seen: Counter[str] = Counter()
        turns = {}
        for test in tests:
            function = test.partition("[")[0]
            turns[test] = seen[function]
            seen[function] += 1
        tests.sort(key=lambda test: (-killers[test], turns[test], self.reached.seconds[test]))
        spent = accumulate(self.reached.seconds[test] for test in tests)
        inside = [test for test, until in zip(tests, spent, strict=True) if until <= self.reach_s]
        return inside or tests[:1], len(tests)

    def _work(self, number: int) -> None:
        worker = Worker(self.root, self.cache / f"worker{number}", self.reached)
        try:
            while not self.stop.is_set():
                try:
                    mutant = self.todo.get_nowait()
                except queue.Empty:
                    return
                self.done(mutant, self._try(worker, mutant))
        finally:
            worker.close()

    def _try(self, worker: Worker, mutant: Mutant) -> dict[str, Any]:
        with worker.place.changed(mutant) as none:
            if none:
                return {"status": none}
            tests, known = self.chosen(mutant)
            if not tests:
                return {"status": "survived", "how": "no test reaches it", "seconds": 0.0}
            answer = worker.ask(tests)
        if answer["killed"]:
            self._killers.setdefault(mutant.path, Counter())[answer["by"]] += 1
        status = "timeout" if answer["how"] == "timeout" else "killed"
        found = {"status": status if answer.pop("killed") else "survived"}
        return {**found, **answer, "chosen": len(tests), "known": known}
