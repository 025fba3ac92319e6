"""What is done to a file system before its power is cut: durable writes, noted in the disk's log.

A mark ``begin`` stands in the log before each call and a mark ``done`` behind its receipt, so that
every cut knows what had been promised.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import kvio
from kvio import KiB, MiB
from kvio.filesystem import probe
from tests.faults.sizes import size

#: A version of a block; None: none, after a deletion.
Version: TypeAlias = "int | None"
Pair: TypeAlias = "tuple[str, Version]"
Body: TypeAlias = "Callable[[Work], None]"

#: Set in the environment of a run that takes every file system for one with a journal.
ASSUME_JOURNAL: Final = "KVIO_TEST_ASSUME_JOURNAL"
#: The directory of the stores and of the shared files, below the mount point.
ROOT: Final = "store"
_SIZES: Final = (0, 1, 300, 4096, 5000, 12 * KiB, 64 * KiB - 64, 64 * KiB + 17, 150 * KiB)
#: All of the campaign asks for more disks that differ than a short run has.
_MORE: Final = size(1, 2)
#: Few directories: what is looked for in each state is quickly found, and batches share syncs.
_LEAVES: Final = ("3", "9", "c")
_SHARED_SIZES: Final = (70_001, 0, 130_007)
_SHARED: Final = ("shared0", "shared1", "shared2")
#: Of these, files without an index.
PLAIN_FILES: Final = ("shared1",)


@lru_cache(maxsize=512)
def content(key: str, version: int) -> bytes:
    """Return the bytes of a version of a block, the same in every process."""
    source = random.Random(f"{key} {version}")
    if key.startswith("shared"):
        return source.randbytes(sum(_SHARED_SIZES))
    nbytes = source.choice(_SIZES)
    if key.startswith("big"):
        nbytes = 2 * MiB + 4097 * version
    return source.randbytes(nbytes)


def names(count: int, prefix: str = "k") -> list[str]:
    """Return keys whose blocks lie in few directories."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        key = f"{prefix}{number}"
        first = hashlib.blake2b(f"\0{key}".encode(), digest_size=16).hexdigest()[:2]
        if first[0] == "5" and first[1] in _LEAVES:
            found.append(key)
        number += 1
    return found


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to write.

    Attributes:
        body: what is done.
        backend, layout, publish: of the store.
        tearable: some writes are only ``visible``: a cut may tear them, and a read must say so.
        shared: shared files, no blocks.
    """

    body: Body
    backend: str = "posix-tmpfile"
    layout: Literal["block", "plain"] = "block"
    publish: str = "auto"
    tearable: bool = False
    shared: bool = False

    def open(self, mountpoint: str, durability: Literal["durable", "visible"]) -> kvio.Store:
        """Open the store of the scenario."""
        return kvio.open_store(
            self.backend,
            root=f"{mountpoint}/{ROOT}",
            durability=durability,
            layout=self.layout,
            options={"publish": self.publish, "create": True, "segment_bytes": 64 * KiB},
        )


class Work:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, mountpoint: str, mark_path: str, seed: int) -> None:
        self.scenario, self.mountpoint = scenario, mountpoint
        self.random = random.Random(seed)
        self._marks = os.open(mark_path, os.O_WRONLY)

    def open(self, durability: Literal["durable", "visible"] = "durable") -> kvio.Store:
        """Open the store."""
        return self.scenario.open(self.mountpoint, durability)

    def report(self, what: Literal["begin", "done"], pairs: Iterable[Pair]) -> None:
        """Write a mark into the disk's log."""
        text = json.dumps({what: [list(pair) for pair in pairs]}).encode()
        assert os.write(self._marks, text) == len(text)

    def write(self, store: kvio.Store, key: str, version: int, **options: Any) -> None:
        """Write a block; its receipt is reported if it says durable."""
        self.report("begin", [(key, version)])
        receipt = store.write_block(key, content(key, version), **options)
        if receipt.level == "durable":
            self.report("done", [(key, version)])

    def move(self, store: kvio.Store, key: str, version: int, path: Path, **options: Any) -> None:
        """Write a file and make it a block by a move; its receipt is reported if it says durable.

        Nothing syncs the file before: the receipt alone promises its bytes.
        """
        path.write_bytes(content(key, version))
        self.report("begin", [(key, version)])
        receipt = store.write_file(key, path, move=True, **options)
        assert not path.exists()
        if receipt.level == "durable":
            self.report("done", [(key, version)])

    def delete(self, store: kvio.Store, key: str) -> None:
        """Delete a block that stands."""
        self.report("begin", [(key, None)])
        assert store.delete_block(key)
        self.report("done", [(key, None)])

    def delete_many(self, store: kvio.Store, keys: Sequence[str]) -> None:
        """Delete a batch of blocks that stand."""
        pairs: list[Pair] = [(key, None) for key in keys]
        self.report("begin", pairs)
        assert all(one.ok for one in store.delete_blocks(keys))
        self.report("done", pairs)

    def write_many(self, store: kvio.Store, pairs: Sequence[tuple[str, int]], **how: Any) -> None:
        """Write a batch."""
        self.report("begin", pairs)
        results = store.write_blocks([(key, content(key, v)) for key, v in pairs], **how)
        assert all(one.ok and one.receipt and one.receipt.level == "durable" for one in results)
        self.report("done", pairs)


def _new(work: Work) -> None:
    with work.open() as store:
        for key in names(20 * _MORE):
            work.write(store, key, 0)


def _replace(work: Work) -> None:
    with work.open() as store:
        for version in range(6 * _MORE):
            for key in names(4):
                work.write(store, key, version, if_exists="replace")


def _moved(work: Work) -> None:
    """Files of this file system become blocks, new ones and in the place of others."""
    keys = ["a", "deep/er/b", "deep/c"] if work.scenario.layout == "plain" else names(4)
    with work.open() as store, store.scratch_dir() as directory:
        for version in range(4 * _MORE):
            for key in keys:
                work.move(store, key, version, directory / "file", if_exists="replace")


def _plain(work: Work) -> None:
    keys = ["a", "deep/er/b", "deep/c", "other/d"]
    with work.open() as store:
        for version in range(4 * size(1, 3)):
            for key in keys:
                work.write(store, key, version, if_exists="replace")


def _big(work: Work) -> None:
    with work.open() as store:
        for version in range(2):
            for key in names(2, "big") + names(4):
                work.write(store, key, version, if_exists="replace")


def _batches(work: Work) -> None:
    with work.open() as store:
        work.write_many(store, [(key, 0) for key in names(14)], if_exists="keep")
        for version in range(1, 4):
            chosen = work.random.sample(names(14), 9)
            work.write_many(store, [(key, version) for key in chosen], if_exists="replace")


def _delete(work: Work) -> None:
    keys = names(8)
    with work.open() as store:
        work.write_many(store, [(key, 0) for key in keys])
        for version in range(1, 1 + 3 * _MORE):
            for key in work.random.sample(keys, 4):
                work.delete(store, key)
                if work.random.random() < 0.6:
                    work.write(store, key, version)
                else:
                    work.write(store, key, version, if_exists="replace")


def _delete_batches(work: Work) -> None:
    keys = names(14)
    with work.open() as store:
        work.write_many(store, [(key, 0) for key in keys])
        for version in range(1, 4):
            gone = work.random.sample(keys, 8)
            work.delete_many(store, gone)
            work.write_many(store, [(key, version) for key in gone])


def _submitted(work: Work) -> None:
    """Many writes under way at a time, each with a receipt of its own."""
    keys = names(12)
    with work.open() as store:
        for version in range(3):
            work.report("begin", [(key, version) for key in keys])
            futures = {
                store.submit_write(key, content(key, version), if_exists="replace"): key
                for key in keys
            }
            for future in as_completed(futures):
                assert future.result().level == "durable"
                work.report("done", [(futures[future], version)])


def _threads(work: Work) -> None:
    def write(keys: Sequence[str]) -> None:
        for version in range(2):
            for key in keys:
                work.write(store, key, version, if_exists="replace")

    with work.open() as store:
        run_threads([partial(write, names(16)[n::8]) for n in range(8)])


def run_threads(calls: Sequence[Callable[[], None]]) -> None:
    """Run calls in threads of their own; the first error of any is raised."""
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as exc:  # noqa: BLE001  # raised below
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _promote(work: Work) -> None:
    """Blocks that others wrote with less care are kept, and made durable."""
    keys = names(12 * _MORE)
    with work.open("visible") as hasty, work.open() as store:
        for key in keys:
            work.write(hasty, key, 0)
        for key in keys:
            work.write(store, key, 0, if_exists="keep")


def _promote_batches(work: Work) -> None:
    """The same in batches, over some that are not there and some that are durable."""
    keys = names(16 * _MORE)
    with work.open("visible") as hasty, work.open() as store:
        work.write_many(store, [(key, 0) for key in keys[:4]])
        for first in range(2, len(keys), 6):
            pairs = [(key, 0) for key in keys[first : first + 8]]
            work.report("begin", pairs)
            for key, version in pairs[:6]:
                hasty.write_block(key, content(key, version))
            work.write_many(store, pairs, if_exists="keep")


def _visible(work: Work) -> None:
    """Nothing is promised but that a torn block is known for one; other writes sync the journal."""
    with work.open("visible") as hasty, work.open() as store:
        for version in range(3 * _MORE):
            for number, key in enumerate(names(12)):
                chosen = store if number % 5 == 4 else hasty
                work.write(chosen, key, version, if_exists="replace")


def _staged(work: Work) -> None:
    with work.open() as store, kvio.stage(store, "4MiB") as tier:
        for version in range(3):
            receipts = []
            for key in names(8):
                work.report("begin", [(key, version)])
                receipts.append(tier.write_block(key, content(key, version), if_exists="replace"))
            if version == 1:
                continue  # absorbed, or drained while the next are staged
            for key, receipt in zip(names(8), receipts, strict=True):
                assert receipt.wait("durable", timeout=60).level == "durable"
                work.report("done", [(key, version)])


def _shared(work: Work) -> None:
    directory = f"{work.mountpoint}/{ROOT}"
    os.mkdir(directory, 0o700)
    parent = os.open(work.mountpoint, os.O_RDONLY)
    os.fsync(parent)  # a directory that the user made is the user's to sync
    os.close(parent)
    for version in range(2 * _MORE):
        for key in _SHARED:
            layout = "plain" if key in PLAIN_FILES else "block"
            work.report("begin", [(key, version)])
            _write_shared(f"{directory}/{key}", content(key, version), layout)
            work.report("done", [(key, version)])


def _write_shared(path: str, data: bytes, layout: str) -> None:
    options = {"sizes": _SHARED_SIZES, "layout": layout, "if_exists": "replace"}
    view = memoryview(data)
    writers = len(_SHARED_SIZES)
    with kvio.SharedFile.create(path, len(data), writers=writers, rank=None, **options) as file:
        for rank in range(file.writers):
            for offset, nbytes in file.domain(rank):
                file.pwrite(view[offset : offset + nbytes], offset)
        assert file.seal().level == "durable"


#: Every way to write that the campaign cuts.
SCENARIOS: Final = {
    "new": Scenario(_new),
    "replace": Scenario(_replace),
    "plain": Scenario(_plain, layout="plain"),
    "moved": Scenario(_moved),
    "plain-moved": Scenario(_moved, layout="plain"),
    "batches": Scenario(_batches),
    "plain-batches": Scenario(_batches, layout="plain"),
    "delete": Scenario(_delete),
    "delete-batches": Scenario(_delete_batches),
    "submitted": Scenario(_submitted),
    "threads": Scenario(_threads),
    "direct": Scenario(_replace, backend="posix-direct"),
    "hybrid": Scenario(_big, backend="hybrid"),
    "named-new": Scenario(_new, publish="rename"),
    "named-replace": Scenario(_replace, publish="rename"),
    "named-batches": Scenario(_batches, publish="rename", backend="posix-direct"),
    "promote": Scenario(_promote, tearable=True),
    "promote-batches": Scenario(_promote_batches, tearable=True),
    "visible": Scenario(_visible, tearable=True),
    "staged": Scenario(_staged),
    "shared": Scenario(_shared, shared=True),
}


def run(name: str, mountpoint: str, mark_path: str, seed: int) -> None:
    """Run a scenario on a mounted file system."""
    if ASSUME_JOURNAL in os.environ:
        probe._is_journaled = lambda holder, journal: True  # noqa: ARG005
    scenario = SCENARIOS[name]
    scenario.body(Work(scenario, mountpoint, mark_path, seed))
