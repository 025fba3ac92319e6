"""A process that writes to a disk which fails, heals, and is read anew; it reports what it found.

    python -m tests.faults.blocks.failing DIRECTORY SERVER KIND ERRNO CASE...

Writes one line of JSON for each case: see `Outcome`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import pytest

import kvio
from kvio import KiB
from kvio.url import OptionValue
from tests.faults.blocks import disk, kernel
from tests.faults.blocks.log import Kind, read_log
from tests.posix import faultlab

_KEY: Final = "block"
#: In every sector of what is to fail: only writes of these bytes do, not those of the journal.
_MARKER: Final = "BYTES-THAT-FAIL!"
FAILING: Final = _MARKER.encode() * (64 * KiB // len(_MARKER))
_STANDING: Final = faultlab.pattern(3, 5000)
_ALWAYS: Final = -1
Case: TypeAlias = "Callable[[Bench, Outcome], None]"


@dataclass(slots=True)
class Outcome:
    """What became of one write, or seal.

    Attributes:
        receipt: its level, if there was one.
        error, errno: the error's type and number, if there was one.
        found: what the disk has under the key when it is read anew: ``new``, ``old``, ``none``
            or ``torn``.
        again: the same for the next write of the key, with the disk healed; empty: there was none.
        failures: how many writes or flushes failed.
    """

    receipt: str = ""
    error: str = ""
    errno: int = 0
    found: str = ""
    again: str = ""
    failures: int = 0


class Bench:
    """A disk, the number of the error that it fails with, and how a store is opened on it."""

    def __init__(self, faulty: disk.Disk, number: int) -> None:
        self.disk, self.number = faulty, number
        self.root = Path(faulty.root, "store")
        self.backend, self.publish = "posix-tmpfile", "auto"
        self.layout: Literal["block", "plain"] = "block"

    def open(self, durability: Literal["visible", "durable"] = "durable") -> kvio.Store:
        """Open a store, a durable one if nothing else is asked for."""
        options: dict[str, OptionValue] = {"create": True}
        options |= {"publish": self.publish, "layout": self.layout}
        return kvio.open_store(self.backend, root=self.root, durability=durability, options=options)

    def fail(self, count: int) -> None:
        """Let so many writes of the marked bytes fail."""
        self.disk.send(f"fail {self.number} {count} {_MARKER}")

    def heal(self) -> None:
        """Let the disk work again."""
        self.disk.send("heal")

    def failures(self) -> int:
        """Count what failed so far."""
        failed = (Kind.FAILED_WRITE, Kind.FAILED_FLUSH)
        return sum(record.kind in failed for record in read_log(self.disk.log))

    def read(self, key: str) -> str:
        """Return what is on the disk, read anew by kvio and without it: both must be the same."""
        self.disk.remount()
        try:
            peeked = _named(faultlab.peek(self.root, key, layout=self.layout))
        except AssertionError:
            peeked = "torn"
        with self.open() as store:
            try:
                found = _named(bytes(store.read_block(key)))
            except kvio.BlockNotFoundError:
                found = "none"
            except kvio.CorruptBlockError:
                found = "torn"
        assert found == peeked, f"kvio says {found}, the disk has {peeked}"
        return found


def _named(data: bytes | None) -> str:
    if data is None:
        return "none"
    return {FAILING: "new", _STANDING: "old"}.get(data, "torn")


def _attempt(outcome: Outcome, write: Callable[[], kvio.Receipt]) -> None:
    try:
        outcome.receipt = str(write().level)
    except kvio.StorageError as exc:
        outcome.error, outcome.errno = type(exc).__name__, exc.errno or 0


def _write_again(bench: Bench, outcome: Outcome) -> None:
    with bench.open() as store:
        receipt = store.write_block(_KEY, FAILING, if_exists="replace")
    assert receipt.level == "durable"
    outcome.again = bench.read(_KEY)


def _write(count: int) -> Case:
    """Write a block while so many writes of its bytes fail; then again, with the disk healed."""

    def run(bench: Bench, outcome: Outcome) -> None:
        with bench.open() as store:
            bench.fail(count)
            _attempt(outcome, lambda: store.write_block(_KEY, FAILING))
            bench.heal()
        outcome.found = bench.read(_KEY)
        _write_again(bench, outcome)

    return run


def _through(backend: str, publish: str, case: Case) -> Case:
    """Do the same through another backend or form of publishing."""

    def run(bench: Bench, outcome: Outcome) -> None:
        bench.backend, bench.publish = backend, publish
        case(bench, outcome)

    return run


def _replace(bench: Bench, outcome: Outcome) -> None:
    """A block that stands stays while its successor fails."""
    with bench.open() as store:
        store.write_block(_KEY, _STANDING)
        bench.fail(_ALWAYS)
        _attempt(outcome, lambda: store.write_block(_KEY, FAILING, if_exists="replace"))
        bench.heal()
    outcome.found = bench.read(_KEY)
    _write_again(bench, outcome)


def _batch(bench: Bench, outcome: Outcome) -> None:
    """Of a batch, the blocks whose bytes failed have no receipt, and the others have theirs."""
    others = {f"other{n}": faultlab.pattern(n, 9000) for n in range(5)}
    with bench.open() as store:
        bench.fail(_ALWAYS)
        results = {one.key: one for one in store.write_blocks([*others.items(), (_KEY, FAILING)])}
        bench.heal()
    failed = results.pop(_KEY)
    outcome.receipt = str(failed.receipt.level) if failed.receipt else ""
    outcome.error = type(failed.error).__name__ if failed.error else ""
    outcome.errno = getattr(failed.error, "errno", 0)
    outcome.found = bench.read(_KEY)
    for key, data in others.items():
        assert results[key].ok, f"{key}: {results[key].error}"
        assert faultlab.peek(bench.root, key) == data
    _write_again(bench, outcome)


def _flush(bench: Bench, outcome: Outcome) -> None:
    """The disk's own cache cannot be flushed: the journal, too, is lost."""
    with bench.open() as store:
        bench.disk.send(f"flush {bench.number}")
        _attempt(outcome, lambda: store.write_block(_KEY, FAILING))
        bench.heal()
    outcome.found = bench.read(_KEY)
    _write_again(bench, outcome)


def _delete(bench: Bench, outcome: Outcome) -> None:
    """A deletion that the disk did not flush is not promised; the block may be back."""
    with bench.open() as store:
        store.write_block(_KEY, _STANDING)
        bench.disk.send(f"flush {bench.number}")
        try:
            outcome.receipt = f"deleted {store.delete_block(_KEY)}"
        except kvio.StorageError as exc:
            outcome.error, outcome.errno = type(exc).__name__, exc.errno or 0
        bench.heal()
    outcome.found = bench.read(_KEY)
    _write_again(bench, outcome)


def _shared(bench: Bench, outcome: Outcome) -> None:
    """Nobody has all bytes of a shared file in hand: after an error it is never sealed."""
    bench.root.mkdir(mode=0o700)
    path = bench.root / "file"
    file = kvio.SharedFile.create(path, len(FAILING), mode="buffered")
    file.pwrite(FAILING, 0)
    bench.fail(1)
    _attempt(outcome, file.seal)
    bench.heal()
    if not outcome.receipt:
        for _ in range(2):
            with pytest.raises(kvio.KvioError):
                file.seal()
        assert not path.exists()
        file.abort()
    file.close()
    bench.disk.remount()
    outcome.found = _read_shared(path)
    if outcome.receipt:
        return
    assert os.listdir(bench.root) == []
    with kvio.SharedFile.create(path, len(FAILING), mode="buffered") as file:
        file.pwrite(FAILING, 0)
        assert file.seal().level == "durable"
    bench.disk.remount()
    outcome.again = _read_shared(path)


def _read_shared(path: Path) -> str:
    try:
        with kvio.SharedFile.open(path) as file:
            out = bytearray(file.size)
            file.pread_into(out)
    except kvio.BlockNotFoundError:
        return "none"
    except kvio.CorruptBlockError:
        return "torn"
    return _named(bytes(out))


def _staged(bench: Bench, outcome: Outcome) -> None:
    """A tier whose retries ended keeps the bytes, and retries them when it is asked to."""
    with bench.open() as store, kvio.stage(store, "4MiB", retries=0) as tier:
        bench.fail(_ALWAYS)
        receipt = tier.write_block(_KEY, FAILING)
        _attempt(outcome, lambda: receipt.wait("durable", timeout=60))
        bench.heal()
        if not outcome.receipt:
            assert [one.key for one in tier.failed] == [_KEY]
            assert tier.read_block(_KEY) == FAILING
            (again,) = tier.retry_failed()
            assert again.wait("durable", timeout=60).level == "durable"
            assert tier.failed == []
    outcome.again = bench.read(_KEY)


def _staged_once(bench: Bench, outcome: Outcome) -> None:
    """A tier makes a failed drain again by itself."""
    with bench.open() as store, kvio.stage(store, "4MiB") as tier:
        bench.fail(3)
        receipt = tier.write_block(_KEY, FAILING)
        _attempt(outcome, lambda: receipt.wait("durable", timeout=60))
        bench.heal()
    outcome.found = bench.read(_KEY)


def _hasty(bench: Bench) -> None:
    """Store the block without a sync: its bytes are in the page cache alone.

    The disk fails before: somebody else's sync of the machine may come at any time.
    """
    bench.fail(_ALWAYS)
    with bench.open("visible") as store:
        store.write_block(_KEY, FAILING)


def _kept(bench: Bench, outcome: Outcome) -> None:
    """A block that could not be made durable is not kept by the next write, healed or not."""
    _hasty(bench)
    with bench.open() as store:
        _attempt(outcome, lambda: store.write_block(_KEY, FAILING))
        bench.heal()
        assert store.write_block(_KEY, FAILING).level == "durable"
    outcome.again = bench.read(_KEY)


def _kept_batch(bench: Bench, outcome: Outcome) -> None:
    """Nor by the next batch, of another store."""
    _hasty(bench)
    with bench.open() as store:
        (result,) = store.write_blocks([(_KEY, FAILING)])
        bench.heal()
    outcome.error, outcome.errno = type(result.error).__name__, getattr(result.error, "errno", 0)
    with bench.open() as store:
        (result,) = store.write_blocks([(_KEY, FAILING)])
    assert result.ok
    outcome.again = bench.read(_KEY)


def _kept_reported(bench: Bench, outcome: Outcome) -> None:
    """Another process got the error of the disk: the kernel does not report it twice."""
    _hasty(bench)
    fd = os.open(faultlab.file_of(bench.root, _KEY, layout=bench.layout), os.O_RDONLY)
    with pytest.raises(OSError):
        os.fsync(fd)
    os.close(fd)
    bench.heal()
    with bench.open() as store:
        _attempt(outcome, lambda: store.write_block(_KEY, FAILING))
    outcome.found = bench.read(_KEY)


def _plain(case: Case) -> Case:
    """Do the same with blocks that have no checksum."""

    def run(bench: Bench, outcome: Outcome) -> None:
        bench.layout = "plain"
        case(bench, outcome)

    return run


#: By name: what fails, and while what is done. All but the last two leave the file system alive.
CASES: Final[dict[str, Case]] = {
    "once": _write(1),
    "always": _write(_ALWAYS),
    "direct-once": _through("posix-direct", "auto", _write(1)),
    "direct-always": _through("posix-direct", "auto", _write(_ALWAYS)),
    "named-once": _through("posix-tmpfile", "rename", _write(1)),
    "named-always": _through("posix-tmpfile", "rename", _write(_ALWAYS)),
    "replace": _replace,
    "named-replace": _through("posix-tmpfile", "rename", _replace),
    "batch": _batch,
    "shared": _shared,
    "kept": _kept,
    "kept-batch": _kept_batch,
    "kept-reported": _kept_reported,
    "kept-plain": _plain(_kept),
    "kept-reported-plain": _plain(_kept_reported),
    "staged": _staged,
    "staged-once": _staged_once,
    "flush": _flush,
    "delete": _delete,
}


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    work, server, kind, number, *names = arguments
    kernel.own_namespace()
    kernel.mount("none", work, "tmpfs", "size=1g,mode=700")
    for name in names:
        image = f"{work}/image"
        disk.make(kind, image)
        with disk.Disk(kind, image, work, server) as faulty:
            bench, outcome = Bench(faulty, int(number)), Outcome()
            CASES[name](bench, outcome)
            outcome.failures = bench.failures()
        print(json.dumps({"case": name, **asdict(outcome)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
