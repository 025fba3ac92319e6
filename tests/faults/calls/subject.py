"""A process whose system calls are watched or failed from outside: run by ``python -m``.

It does one of the campaign's operations a line of its input, and answers each with a line of JSON.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvio
from kvio._native import faults
from kvio.filesystem.descriptors import SHARED
from tests.faults.calls.benches import STORES
from tests.faults.calls.fault_kinds import counted
from tests.posix import faultlab
from tests.posix.scenarios import Memory, Outcome, Scenario
from tests.sharedfile import kills
from tests.sharedfile import test_faults as lives

#: What is looked for between is what the operation does.
BEGIN, END = "/kvio-begin/", "/kvio-end/"


class Subject:
    """One operation in a directory of its own."""

    def prepare(self) -> None:
        """Put the file system into the state before."""

    def run(self) -> Outcome:
        """Do it."""
        raise NotImplementedError

    def look(self) -> dict[str, str | None]:
        """Return which bytes every key has now, in hexadecimal digits."""
        return {}

    def left(self) -> list[str]:
        """Name the files that are there and should not be."""
        return []


class StoreSubject(Subject):
    """A store's operation."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        self.scenario, self.root = scenario, root
        self.store = scenario.open(root)
        self.memory = Memory(self.store)

    def prepare(self) -> None:
        """Arrange files, and a store that knows no more than before.

        What an unlink that was failed on purpose has left is not the next fault's doing.
        """
        for path in faultlab.temporaries(self.root):
            path.unlink()
        self.memory.put_back(expects=self.scenario.expected)
        self.scenario.arrange(self.root, self.store)

    def run(self) -> Outcome:
        """Run the scenario."""
        return self.scenario.run(self.store)

    def look(self) -> dict[str, str | None]:
        """Peek at the file system."""
        found = {}
        for key in self.scenario.keys:
            data = faultlab.peek(self.root, key, layout=self.scenario.layout)
            found[key] = None if data is None else data.hex()
        return found

    def left(self) -> list[str]:
        """Name temporaries."""
        return [path.name for path in faultlab.temporaries(self.root)]


class FileSubject(Subject):
    """A shared file's life."""

    def __init__(self, case: kills.Case, root: Path) -> None:
        self.case, self.root, self.lives = case, root, 0
        self.path = root
        self.made: list[kvio.SharedFile] = []

    def prepare(self) -> None:
        """Begin in a directory of its own: what one life leaves is not the next one's matter."""
        self.lives += 1
        self.path = self.root / f"life{self.lives}" / "f"
        self.path.parent.mkdir(mode=0o700)
        self.made = []

    def run(self) -> Outcome:
        """Create, write by several handles, seal."""
        try:
            lives.seal_all(self.path, self.case, self.made)
        except Exception as exc:  # noqa: BLE001  # what is not of the tree is reported too
            return {"f": exc.with_traceback(None)}  # type: ignore[dict-item]  # reported as it is
        return {"f": None}

    def look(self) -> dict[str, str | None]:
        """See whether the name stands; what does must be whole."""
        stands = kills.check_name(self.path, self.case.payload)
        return {"f": "whole" if stands else None}

    def left(self) -> list[str]:
        """Abort what failed, as a user would, and return the names left beside the file."""
        said = []
        try:
            lives.give_up(self.path, self.made)
        except Exception as exc:  # noqa: BLE001  # what is not of the tree is reported too
            said = [f"cannot be passed on: {exc!r:.200}"]
        self.made = []
        gc.collect()
        return [*said, *(name for name in os.listdir(self.path.parent) if name != "f")]


class TierSubject(Subject):
    """A block that is staged and stored."""

    def __init__(self, root: Path) -> None:
        self.store = kvio.open_store("posix-tmpfile", root=root)
        self.tier = kvio.stage(self.store, capacity="1MiB")

    def run(self) -> Outcome:
        """Write, and wait for the drain."""
        self.tier.write_block("k", bytes(5000), if_exists="replace").wait(timeout=60)
        return {}


class Looks(Subject):
    """What names and counts blocks, and what removes leftovers."""

    def __init__(self, what: str, root: Path) -> None:
        self.what = what
        self.store = kvio.open_store("posix-tmpfile", root=root)
        self.store.write_blocks([(f"k{number}", b"data") for number in range(9)])

    def run(self) -> Outcome:
        """List, sweep or count."""
        if self.what == "sweep":
            assert self.store.sweep() == []
        elif self.what == "list":
            assert len(list(self.store.list_keys())) == 9
        else:
            assert self.store.count_leading([f"k{number}" for number in range(12)]) == 9
        return {}


def all_subjects() -> dict[str, Callable[[Path], Subject]]:
    """Name every operation that can be watched."""
    made: dict[str, Callable[[Path], Subject]] = {
        scenario.name: lambda root, s=scenario: StoreSubject(s, root)  # type: ignore[misc]
        for scenario in STORES
    }
    for case in kills.CASES:
        made[f"shared file, {case}"] = lambda root, c=case: FileSubject(c, root)  # type: ignore[misc]
    made["staging"] = TierSubject
    for what in ("list", "sweep", "count"):
        made[what] = lambda root, w=what: Looks(w, root)  # type: ignore[misc]
    return made


SUBJECTS = all_subjects()


def reported(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome of every key for JSON: null, or the error's type, errno and key."""
    return {
        key: [type(end).__name__, getattr(end, "errno", None), getattr(end, "key", None)]
        if isinstance(end, Exception)
        else None
        for key, end in outcome.items()
    }


def unaccounted() -> int:
    """Count open descriptors beside the directories that stores keep, and close when one lacks."""
    return len(faultlab.open_descriptors()) - len(SHARED._kept)


def watched(name: str, subject: Subject, pause: Callable[[str], None]) -> dict[str, Any]:
    """Do it between two calls that name it, and say what came of it.

    Whoever watches comes in the first pause and leaves in the second.
    """
    subject.prepare()
    before = unaccounted()
    pause("ready")
    with counted() as seen:
        os.access(BEGIN + name, os.F_OK)
        outcome = subject.run()
        os.access(END + name, os.F_OK)
        calls = seen()
    pause("done")
    return {
        "errors": reported(outcome),
        "stored": subject.look(),
        "left": subject.left(),
        "leaked": unaccounted() - before,
        "calls": calls,
    }


def main() -> None:
    """Prepare, say so, wait for a line, do it, answer; a subject a line."""
    parent = Path(sys.argv[1])
    made: dict[str, Subject] = {}

    def pause(said: str) -> None:
        print(said, flush=True)
        os.readv(0, [bytearray(80)])  # read(2) is one of the calls that fail

    gc.disable()
    while name := sys.stdin.readline().strip():
        if name not in made:
            root = parent / f"s{len(made)}"
            root.mkdir(mode=0o700)
            try:
                made[name] = SUBJECTS[name](root)
                watched(name, made[name], lambda _: None)  # whatever is imported late
                with faults.inject("open_temp", error=errno.EIO, times=1 << 20):
                    watched(name, made[name], lambda _: None)
            except (kvio.UnsupportedError, kvio.ConfigError) as exc:
                made.pop(name, None)
                print(json.dumps({"unsupported": str(exc)}), flush=True)
                continue
        answer = watched(name, made[name], pause)
        print(json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
