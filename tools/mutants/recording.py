"""Which test reaches which statement, found by running every test once."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tools.mutants.tree import EXTENSION, NATIVE, Core, copy_tree, digest, sources

#: Where the tests of what is mutated are. Those of the campaign of faults take an hour.
TESTS: Final = (
    *("tests/posix", "tests/sharedfile", "tests/staging", "tests/connectors"),
    *("tests/core", "tests/filesystem", "tests/diagnostics/test_doctor.py"),
    "tests/testing/test_fakes.py",
    *(f"tests/test_{name}.py" for name in ("conformance", "stateful", "format")),
    *(f"tests/placement/test_{name}.py" for name in ("applying", "pools")),
    *(f"tests/cli/test_{name}.py" for name in ("blocks", "checks")),
)
#: Options of every run: tests that mount something are left out, as a mutant may leave it mounted.
#: pytest would rewrite the assertions of kvio too, past the probes and with bytecode of its own.
PYTEST: Final = (
    "--assert=plain",
    *("-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark"),
    *("-m", "not root and not torch and not numa and not gpu", "--hypothesis-seed=0"),
)
_PROBES: Final = Path(__file__).parent / "probes"
_MAP_BYTES: Final = 4 << 20


def test_files(root: Path) -> list[str]:
    """List the files with the tests, relative to *root*."""
    found: list[str] = []
    for name in TESTS:
        path = root / name
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [str(file.relative_to(root)) for file in files]
    return found


class Reached:
    """The tests by the statement that they reach.

    Attributes:
        seconds: how long each test took while it was recorded.
    """

    def __init__(self, root: Path, lines: Sequence[dict[str, object]]) -> None:
        self.root = root
        self.seconds: dict[str, float] = {}
        self._tests: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        self._spans: dict[str, list[tuple[int, int]]] = {}
        for line in lines:
            test = str(line["test"])
            self.seconds[test] = float(line["seconds"])  # type: ignore[arg-type]  # JSON
            for path, numbers in line["reached"].items():  # type: ignore[attr-defined]  # JSON
                for number in numbers:
                    self._tests[path][number].append(test)

    def files(self) -> set[str]:
        """List the files of which any statement is reached."""
        return set(self._tests)

    def tests(self, path: str, first: int, last: int) -> list[str]:
        """List the tests that reach any statement of some lines, the quickest first.

        Lines that are executed at import, or of which no test is known to reach the statement but
        the C compiler may have merged it with another, count as reached by all tests of the file.
        """
        found: set[str] = set()
        for number in range(first, last + 1):
            found.update(self._of_line(path, number))
        return sorted(found, key=lambda test: (self.seconds[test], test))

    def _of_line(self, path: str, number: int) -> list[str]:
        known = self._tests[path]
        if path.endswith(".py"):
            at = self._statement(path, number)
            if at is not None:
                return known.get(at, [])
        else:
            first, last = self._function(path, number)
            lines = sorted(line for line in known if first <= line <= last)
            nearest = bisect_right(lines, number)
            if first and not lines:
                return []
            if first and nearest:
                # The nearest may be one way out of a branch, marked with the branch's own line:
                # who takes the other is among those that reach the line before.
                return [test for at in lines[max(nearest - 2, 0) : nearest] for test in known[at]]
            return [test for line in lines or known for test in known[line]]
        return [test for tests in known.values() for test in tests]

    def _statement(self, path: str, number: int) -> int | None:
        """Find where the innermost statement of a function begins; None at import."""
        if path not in self._spans:
            tree = ast.parse((self.root / path).read_text())
            spans = set()
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    for child in node.body:
                        for part in ast.walk(child):
                            if isinstance(part, ast.stmt):
                                spans.add((part.lineno, part.end_lineno or part.lineno))
            self._spans[path] = sorted(spans)
        around = [first for first, last in self._spans[path] if first <= number <= last]
        return max(around, default=None)

    def _function(self, path: str, number: int) -> tuple[int, int]:
        """Find the C function around a line, by the braces in the first column; 0, 0 outside."""
        text = (self.root / path).read_text().splitlines()
        opened = [i for i, line in enumerate(text, 1) if line.startswith("{")]
        closed = [i for i, line in enumerate(text, 1) if line.startswith("}")]
        for first, last in zip(opened, closed, strict=False):
            if first <= number <= last:
                return first, last
        return 0, 0


def record(root: Path, cache: Path, *, workers: int, only: Sequence[str] = ()) -> Reached:
    """Return what was recorded for these very sources, after recording what is missing.

    Args:
        root: the working tree.
        cache: where recordings are kept.
        workers: so many processes run tests.
        only: record these files of tests again.
    """
    known = cache / f"reached-{digest(root, sources(root))}.jsonl"
    lines = [json.loads(line) for line in known.read_text().splitlines()] if known.exists() else []
    files = test_files(root)
    have = {str(line["test"]).split("::")[0] for line in lines} | {
        line["empty"] for line in lines if "empty" in line
    }
    todo = [name for name in files if name not in have or name in only]
    if todo:
        lines = [line for line in lines if str(line["test"]).split("::")[0] not in todo]
        lines += _run(root, cache, todo, workers)
        cache.mkdir(parents=True, exist_ok=True)
        new = known.with_suffix(".new")
        new.write_text("".join(json.dumps(line) + "\n" for line in lines))
        new.replace(known)
    return Reached(root, [line for line in lines if "empty" not in line])


def _run(root: Path, cache: Path, files: Sequence[str], workers: int) -> list[dict[str, object]]:
    tree = cache / "recording"
    copy_tree(root, tree)
    core = Core(
        tree,
        flags=("-O0", "-g", "-fsanitize-coverage=trace-pc"),
        extra=(_PROBES / "trace.c",),
    )
    core.build()
    bases, at = {}, 1
    for path in sources(root):
        if path.endswith(".py"):
            bases[path] = at
            at += len((root / path).read_text().splitlines()) + 1
    running = []
    for number in range(workers):
        prefix = tree / f"probes{number}"
        Path(f"{prefix}.index").write_text(json.dumps({"root": str(tree), "bases": bases}))
        Path(f"{prefix}.map").write_bytes(bytes(at))
        Path(f"{prefix}.c.map").write_bytes(bytes(_MAP_BYTES))
        temporary = tree / f"tmp{number}"
        temporary.mkdir()
        env = {
            "PYTHONPATH": f"{_PROBES}:{tree / 'src'}",
            "TMPDIR": str(temporary),
            "KVIO_PROBES": str(prefix),
            "KVIO_PROBES_C": f"{prefix}.c.map",
            "KVIO_PROBES_OUT": f"{prefix}.out",
        }
        command = [sys.executable, "-m", "pytest", "-p", "tools.mutants.recorder", *PYTEST]
        command += ["-p", "no:randomly", *files[number::workers]]
        with open(f"{prefix}.log", "w") as log:
            child = subprocess.Popen(command, cwd=tree, env=os.environ | env, stdout=log)
        running.append((prefix, child))
    lines: list[dict[str, object]] = []
    for prefix, child in running:
        code = child.wait()
        sys.stderr.write(f"recording ended with {code}; see {prefix}.log\n")
        if Path(f"{prefix}.out").exists():
            lines.extend(map(json.loads, Path(f"{prefix}.out").read_text().splitlines()))
    places = _places(tree, {pc for line in lines for pc in line["native"]})  # type: ignore[attr-defined]
    for line in lines:
        line["reached"] = _by_file(line, bases, places)
        del line["python"], line["native"]
    quiet = set(files) - {str(line["test"]).split("::")[0] for line in lines}
    lines.extend({"test": name, "empty": name} for name in sorted(quiet))
    return lines


def _by_file(
    line: dict[str, object], bases: dict[str, int], places: dict[int, tuple[str, int]]
) -> dict[str, list[int]]:
    found = defaultdict(set)
    names, starts = list(bases), list(bases.values())
    for number in line["python"]:  # type: ignore[attr-defined]  # JSON
        at = bisect_right(starts, number) - 1
        found[names[at]].add(number - starts[at])
    for pc in line["native"]:  # type: ignore[attr-defined]  # JSON
        if pc in places:
            path, number = places[pc]
            found[path].add(number)
    return {path: sorted(numbers) for path, numbers in found.items()}


def _places(tree: Path, counters: set[int]) -> dict[int, tuple[str, int]]:
    """Find the file and line of return addresses in the extension."""
    ordered = sorted(counters)
    asked = "".join(f"{pc - 1:x}\n" for pc in ordered)
    command = ["addr2line", "-e", str(tree / EXTENSION)]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    found = {}
    for pc, answer in zip(ordered, done.stdout.splitlines(), strict=True):
        path, _, number = answer.partition(" ")[0].rpartition(":")
        name = Path(path).name
        if number.isdecimal() and (tree / NATIVE / name).exists():
            found[pc] = (str(NATIVE / name), int(number))
    return found
