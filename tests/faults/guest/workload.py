"""In the guest: write blocks for ever, by every way to publish one, and tell each receipt.

    python -m tests.faults.guest.workload CUT FILE-SYSTEM…

The first argument numbers the lives of the machine, so that keys are new in each. Then come the
disks, each by its file system. A line to the host is ``DISK PLACE KEY VERSION``: it is durable, or
so it says.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import kvio
from tests.faults.guest import disks, inside
from tests.faults.guest.content import content

#: Each store keeps its 256 directories open.
_DESCRIPTORS: Final = 16384
#: Nothing is written back but what is synced: a disk's driver may be as lazy as that.
_LAZY: Final = {
    "dirty_writeback_centisecs": "0",
    "dirty_background_ratio": "80",
    "dirty_ratio": "90",
}
_BATCH: Final = 10
_REPLACED: Final = 5


@dataclass(frozen=True, slots=True)
class Place:
    """One store on each disk.

    Attributes:
        durable: it promises durability; the other reports receipts that promise nothing.
    """

    name: str
    backend: str
    durable: bool = True
    layout: str = "block"
    publish: str = "auto"

    def open(self, root: str) -> kvio.Store:
        """Open its store below the root of a disk."""
        return kvio.open_store(
            self.backend,
            root=f"{root}/{self.name}",
            durability="durable" if self.durable else "visible",
            options={
                "create": True,
                "layout": self.layout,
                "publish": self.publish,
                "segment_bytes": 64 << 10,
                "chunk_bytes": 64 << 10,
            },
        )

    def key(self, name: str) -> str:
        """Return a key; without fan-out directories it makes some of its own."""
        return f"{name}/deep/{name}" if self.layout == "plain" else name


PLACES: Final = (
    Place("tmpfile", "posix-tmpfile"),
    Place("direct", "posix-direct"),
    Place("renamed", "posix-tmpfile", publish="rename"),
    Place("plain", "posix-direct", layout="plain"),
    Place("control", "posix-tmpfile", durable=False),
)
#: Not a store, but a directory of shared files.
SHARED: Final = "shared"
#: The lanes that every disk must have reported before its machine is cut.
LANES: Final = frozenset((*(place.name for place in PLACES), SHARED))


def new(place: Place, store: kvio.Store, cut: int) -> Iterator[tuple[str, int]]:
    """Write one new block after the other."""
    for number in itertools.count():
        key = place.key(f"n{cut}-{number}")
        store.write_block(key, content(place.name, key, 0))
        yield key, 0


def replaced(place: Place, store: kvio.Store, cut: int) -> Iterator[tuple[str, int]]:
    """Write a few blocks again and again."""
    for number in itertools.count():
        key, version = place.key(f"r{cut}-{number % _REPLACED}"), number // _REPLACED
        store.write_block(key, content(place.name, key, version), if_exists="replace")
        yield key, version


def batches(place: Place, store: kvio.Store, cut: int) -> Iterator[tuple[str, int]]:
    """Write several blocks a call, new ones and one that is replaced."""
    for number in itertools.count():
        names = [(place.key(f"b{cut}-{number}-{i}"), 0) for i in range(_BATCH)]
        names.append((place.key(f"b{cut}"), number))
        items = [(key, content(place.name, key, version)) for key, version in names]
        for result, reported in zip(
            store.write_blocks(items, if_exists="replace"), names, strict=True
        ):
            if result.error is not None:
                raise result.error
            yield reported


def shared(directory: str, cut: int) -> Iterator[tuple[str, int]]:
    """Make one shared file after the other, by two writers each."""
    os.makedirs(directory, exist_ok=True)
    for number in itertools.count():
        key = f"s{cut}-{number}"
        data = content(SHARED, key, 0)
        with kvio.SharedFile.create(f"{directory}/{key}", len(data), writers=2) as file:
            halves = [extent for rank in (0, 1) for extent in file.domain(rank)]
            writes = [
                file.submit_pwrite(data[at : at + nbytes], at) for at, nbytes in halves if nbytes
            ]
            for write in writes:
                write.result()
            receipt = file.seal()
        assert receipt.level == "durable"
        yield key, 0


def work(line: inside.Line) -> None:
    """Mount the disks and write on all of them at once."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    for name, value in _LAZY.items():
        Path("/proc/sys/vm", name).write_text(value)
    ended = threading.Event()
    begun = [
        partial(_tell, line, f"{name} {place}", written)
        for number, name in enumerate(sys.argv[2:])
        for place, written in lanes(_root(number, name), int(sys.argv[1]))
    ]
    for lane in begun:
        _start(lane, ended)
    ended.wait()


def _root(number: int, name: str) -> str:
    return inside.mount(inside.device(number), f"/mnt/{name}", disks.type_of(name))


def lanes(root: str, cut: int) -> Iterator[tuple[str, Iterator[tuple[str, int]]]]:
    """Yield everything that writes on one disk."""
    yield SHARED, shared(f"{root}/{SHARED}", cut)
    for place in PLACES:
        store = place.open(root)
        for verb in (new, replaced, batches) if place.durable else (new, replaced):
            yield place.name, verb(place, store, cut)


def _tell(line: inside.Line, where: str, written: Iterator[tuple[str, int]]) -> None:
    for key, version in written:
        line.report(f"{where} {key} {version}")


def _start(lane: Callable[[], None], ended: threading.Event) -> None:
    """Run a lane on its own thread; one that ends, ends the machine."""

    def run() -> None:
        try:
            lane()
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()


if __name__ == "__main__":
    inside.main(work)
