"""What must hold of a file system after a crash, by what had been promised before."""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import kvio
from tests.faults.blocks.workload import PLAIN_FILES, ROOT, Scenario, Version, content
from tests.posix import faultlab

#: ``lost``: a receipt that is not kept. ``torn``: a name over bytes that were never written, where
#: a sync had to come first. ``wrong``: bytes returned as good that are not. ``left``: what no
#: sweep takes. ``unmountable``: no file system is left. ``untyped``: an error that is not kvio's.
Verdict: TypeAlias = Literal["lost", "torn", "wrong", "left", "unmountable", "untyped"]
_EXAMPLES: Final = 5
TORN: Final = "torn"
Found: TypeAlias = "bytes | Literal['torn'] | None"


class Promises:
    """What had been begun and promised at a moment, key by key."""

    def __init__(self) -> None:
        self._begun: dict[str, list[Version]] = {}
        self._kept: dict[str, int] = {}
        self.receipts = 0

    def learn(self, mark: Any) -> None:
        """Go on to the next mark of a log."""
        for key, version in mark.get("begin", ()):
            self._begun.setdefault(key, []).append(version)
        for key, version in mark.get("done", ()):
            begun = self._begun[key]
            at = len(begun) - 1 - begun[::-1].index(version)
            self._kept[key] = max(at, self._kept.get(key, -1))
            self.receipts += 1

    @property
    def keys(self) -> Iterable[str]:
        """All keys that may be there."""
        return self._begun.keys()

    def begun(self, key: str) -> list[Version]:
        """List what a key was to have, in order."""
        return self._begun[key]

    def promised(self, key: str) -> bool:
        """Return whether anything is promised of a key."""
        return key in self._kept

    def allowed(self, key: str) -> list[Version]:
        """List what a key may have: what was promised last, and what was begun after it."""
        if key not in self._kept:
            return [None, *self._begun[key]]
        return self._begun[key][self._kept[key] :]


@dataclass(slots=True)
class Verdicts:
    """What was found wrong, and a few examples in words.

    Attributes:
        states: disks that were looked at.
        receipts: promises that were made.
        reported: torn blocks of which nothing was promised, and of which a read said so.
        counts: what is bad, by its verdict.
        examples: some of it.
    """

    states: int = 0
    receipts: int = 0
    reported: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        counted = {"states": self.states, "receipts": self.receipts, "reported": self.reported}
        return {**counted, "bad": dict(self.counts), "examples": self.examples}

    def bad(self, verdict: Verdict, what: str) -> None:
        """Count something that must not be."""
        self.counts[verdict] += 1
        if self.counts[verdict] <= _EXAMPLES:
            self.examples.append(f"{verdict}: {what}")


def judge(
    found: Found, key: str, promises: Promises, verdicts: Verdicts, *, tearable: bool
) -> None:
    """Compare what is under a key with what may be there."""
    allowed = promises.allowed(key)
    if found == TORN:
        if promises.promised(key):
            verdicts.bad("lost", f"{key!r} is torn, {allowed} was promised or begun")
        elif not tearable:
            verdicts.bad("torn", f"{key!r} stands under its name and is torn")
        else:
            verdicts.reported += 1
        return
    if found is None:
        if None not in allowed:
            verdicts.bad("lost", f"{key!r} is not there, {allowed} was promised or begun")
        return
    if any(version is not None and found == content(key, version) for version in allowed):
        return
    known = [v for v in promises.begun(key) if v is not None and found == content(key, v)]
    if known:
        verdicts.bad("lost", f"{key!r} has version {known[0]}, older than {allowed}")
    else:
        verdicts.bad("wrong", f"{key!r} has {len(found)} bytes that nobody wrote")


def check(
    mountpoint: str,
    scenario: Scenario,
    promises: Promises,
    verdicts: Verdicts,
    *,
    sweep_older_s: float | None = None,
) -> None:
    """Look at a file system after a crash, through kvio and without it.

    Temporaries are those of a dead process; else *sweep_older_s* says how old they are at least.
    """
    root = Path(mountpoint, ROOT)
    if not root.is_dir():
        for key in promises.keys:
            judge(None, key, promises, verdicts, tearable=True)
    elif scenario.shared:
        _check_shared(root, promises, verdicts)
    else:
        with scenario.open(mountpoint, "visible") as store:
            _check_blocks(store, root, scenario, promises, verdicts)
            if _strangers(root, scenario, promises):
                _sweep(store, sweep_older_s)
            if strangers := _strangers(root, scenario, promises):
                verdicts.bad("left", ", ".join(strangers))


def _check_blocks(
    store: kvio.Store, root: Path, scenario: Scenario, promises: Promises, verdicts: Verdicts
) -> None:
    for key in promises.keys:
        found = _read(store, key)
        judge(found, key, promises, verdicts, tearable=scenario.tearable)
        peeked = _peek(root, key, scenario.layout)
        if peeked != found:
            verdicts.bad(
                "wrong", f"{key!r}: kvio says {_say(found)}, the file system {_say(peeked)}"
            )
        for other in looks(store, key, found):
            verdicts.bad("wrong", f"{key!r}: read_block says {_say(found)}, {other}")


def looks(store: kvio.Store, key: str, found: Found) -> list[str]:
    """Look in other ways, and name those that do not agree with a read."""
    stat = _or_error(partial(store.stat_block, key))
    there = not isinstance(stat, Exception)
    out = bytearray(len(found) if isinstance(found, bytes) else 0 if not there else stat.nbytes)
    read = _or_error(partial(store.read_block_into, key, out))
    error: type[Exception] = kvio.BlockNotFoundError if found is None else kvio.CorruptBlockError
    if isinstance(found, bytes):
        same = {"stat_block": there and stat.nbytes == len(found), "into": bytes(out) == found}
    else:  # an intact trailer may stand behind bytes that are torn
        known = found == TORN and there
        same = {"stat_block": known or isinstance(stat, error), "into": isinstance(read, error)}
    same["contains"] = store.contains(key) == there
    return [f"{name} disagrees: {stat!r}, {read!r}" for name, agrees in same.items() if not agrees]


def _or_error(call: Callable[[], Any]) -> Any:
    """Return the outcome of a check, or that a block is missing or torn."""
    try:
        return call()
    except (kvio.BlockNotFoundError, kvio.CorruptBlockError) as exc:
        return exc


def _say(found: Found) -> str:
    return str(found) if found is None or found == TORN else f"{len(found)} bytes"


def _read(store: kvio.Store, key: str) -> Found:
    try:
        return bytes(store.read_block(key))
    except kvio.BlockNotFoundError:
        return None
    except kvio.CorruptBlockError:
        return TORN


def _peek(root: Path, key: str, layout: str) -> Found:
    try:
        return faultlab.peek(root, key, layout=layout)
    except (AssertionError, struct.error):
        return TORN


def _strangers(root: Path, scenario: Scenario, promises: Promises) -> list[str]:
    """Name the files beside blocks that are none."""
    files = {faultlab.file_of(root, key, layout=scenario.layout) for key in promises.keys}
    return sorted(
        entry.name
        for directory in {path.parent for path in files}
        if directory.is_dir()
        for entry in os.scandir(directory)
        if entry.is_file(follow_symlinks=False) and Path(entry.path) not in files
    )


def _sweep(store: kvio.Store, older_than_s: float | None) -> None:
    """Let kvio take what dead writers left."""
    if older_than_s is None:
        store.sweep()
    else:
        store.sweep(older_than_s=older_than_s)


def _check_shared(root: Path, promises: Promises, verdicts: Verdicts) -> None:
    for key in promises.keys:
        path = root / key
        found = _read_shared(path)
        judge(found, key, promises, verdicts, tearable=False)
        if isinstance(found, bytes) and path.read_bytes()[: len(found)] != found:
            verdicts.bad("wrong", f"{key!r}: the file system has other bytes")
        trouble = _give_up(path)
        if trouble:
            verdicts.bad("left", f"beside {key!r}: {trouble}")
        if _read_shared(path) != found:
            verdicts.bad("lost", f"{key!r} changed when what was left beside it was removed")
    strangers = {path.name for path in root.iterdir() if path.is_file()} - set(promises.keys)
    if strangers:
        verdicts.bad("left", ", ".join(sorted(strangers)))


def _read_shared(path: Path) -> Found:
    if path.name in PLAIN_FILES:  # no index: the file is the payload
        return path.read_bytes() if path.exists() else None
    try:
        with kvio.SharedFile.open(path) as file:
            out = bytearray(file.size)
            file.pread_into(out)
            return bytes(out)
    except kvio.BlockNotFoundError:
        return None
    except kvio.CorruptBlockError:
        return TORN


def _give_up(path: Path) -> str:
    """Remove what an unsealed file left, by the public interface; say what is in the way."""
    mark = f".{path.name}.kvio-"
    if not any(name.startswith(mark) for name in os.listdir(path.parent)):
        return ""
    try:
        with kvio.SharedFile.recover(path) as file:
            if not repr(file).endswith(" sealed>"):
                file.abort()
    except kvio.KvioError as exc:
        left = [name for name in os.listdir(path.parent) if name.startswith(mark)]
        return f"{type(exc).__name__}: {exc} ({', '.join(left)})" if left else ""
    return ""
