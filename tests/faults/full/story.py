"""What kvio does on a file system that fills up, reported as plain values.

    python -m tests.faults.full.story ROOT WAY HUGE

A story judges nothing. `judge` holds what was reported against what lies on the disk, read without
kvio; a broken kvio may have reported it.
"""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import kvio
from kvio.url import OptionValue
from tests.posix import faultlab, mounts

#: Blocks that fill the file system, and some that are small; all of them odd.
BLOCK: Final = 200_001
SMALL: Final = 3_001
#: No file system here holds so many of them.
MOST: Final = 60

Room = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to write."""

    backend: str = "posix-tmpfile"
    durability: str = "durable"
    layout: str = "block"
    publish: str = "auto"
    options: dict[str, OptionValue] = field(default_factory=dict)

    def open(self, root: Path, **more: OptionValue) -> kvio.Store:
        """Open a store."""
        options: dict[str, OptionValue] = {
            "durability": self.durability,
            "layout": self.layout,
            "publish": self.publish,
            "segment_bytes": 65536,
            "chunk_bytes": 65536,
        }
        return kvio.open_store(self.backend, root=root, options={**options, **self.options, **more})


WAYS: Final = {
    "tmpfile": Way(durability="visible"),
    "tmpfile-durable": Way(),
    "direct-durable": Way("posix-direct"),
    "renamed": Way(durability="visible", publish="rename"),
    "renamed-durable": Way(publish="rename"),
    "plain-durable": Way(layout="plain"),
}
#: Late errors: what NFS takes it may have to give back; its fsync is trusted because we say so.
NFS_WAYS: Final = {
    "nfs-visible": Way(durability="visible"),
    "nfs-durable": Way(options={"trust_fsync": True}),
    "nfs-direct": Way("posix-direct", options={"trust_fsync": True}),
    "nfs-plain": Way(layout="plain", durability="visible"),
}


def content(key: str, nbytes: int) -> bytes:
    """Return the bytes of a block."""
    return faultlab.pattern(faultlab.crc32c(key.encode()), nbytes)


def error_reported(error: BaseException | None) -> list[Any]:
    """Describe an error: its class, its errno and its key."""
    number = getattr(error, "errno", None)
    name = errno.errorcode.get(number, number) if number else number
    return [type(error).__name__, name, getattr(error, "key", None)]


def attempt(store: kvio.Store, key: str, nbytes: int) -> list[Any]:
    """Write a block; how it failed, or nothing."""
    try:
        store.write_block(key, content(key, nbytes), if_exists="replace")
    except kvio.KvioError as exc:
        return error_reported(exc)
    return []


def report(store: kvio.Store, huge: int, room: Room, slack: int) -> dict[str, Any]:
    """Fill a file system with blocks, go on on a full one, and make some room.

    *slack*: so much of the room, or less, is not waited for when it is lost.
    """
    stored: list[str] = []
    failure: list[Any] = []
    while not failure and len(stored) < MOST:
        key = f"k{len(stored)}"
        failure = attempt(store, key, BLOCK)
        stored += [] if failure else [key]
    reported: dict[str, Any] = {"stored": stored, "failure": failure}
    again = f"k{len(stored)}"
    reported["again"], before = attempt(store, again, huge), room()
    reported["once more"] = attempt(store, again, huge)
    reported["lost room"] = mounts.lost_bytes(before, room, slack)
    reported["replaced"] = attempt(store, stored[0], huge)
    sizes = {f"b{i}": huge if i % 2 else SMALL for i in range(5)}
    reported["gone"], reported["kept"] = stored[1:5], [stored[0], *stored[5:]]
    reported["deleted"] = [result.ok for result in store.delete_blocks(reported["gone"])]
    results = store.write_blocks([(key, content(key, n)) for key, n in sizes.items()])
    reported["batch"] = [
        [one.key, sizes[one.key], one.ok, one.receipt is not None, error_reported(one.error)]
        for one in results
    ]
    room()  # what was removed is gone
    reported["after"] = attempt(store, "after", SMALL)
    return reported


def judge(
    reported: dict[str, Any], root: Path, *, layout: str = "block", numbers: tuple[str, ...]
) -> None:
    """Hold what was reported against the file system; *numbers*: names of errnos that are right."""

    def peek(key: str) -> bytes | None:
        return faultlab.peek(root, key, layout=layout)

    assert 8 <= len(reported["stored"]) < MOST, f"{len(reported['stored'])} blocks fill it"
    failed = f"k{len(reported['stored'])}"
    for name in ("failure", "again", "once more"):
        assert reported[name] in [["StorageFullError", number, failed] for number in numbers]
    assert reported["replaced"][:1] == ["StorageFullError"]
    assert peek(failed) is None
    for key in reported["kept"]:
        assert peek(key) == content(key, BLOCK), key
    assert all(reported["deleted"])
    assert [peek(key) for key in reported["gone"]] == [None] * len(reported["gone"])
    for key, nbytes, ok, receipt, error in reported["batch"]:
        # A small block may find no room while a large one, beside it, is being tried.
        assert ok == receipt <= (nbytes == SMALL), (key, error)
        assert peek(key) == (content(key, nbytes) if ok else None), key
        assert ok or error[0] == "StorageFullError"
    assert reported["after"] == []
    assert peek("after") == content("after", SMALL)
    assert not faultlab.temporaries(root)


def main() -> None:
    """Run the story of a root and print it, in one line of JSON."""
    root, way, huge = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    with {**WAYS, **NFS_WAYS}[way].open(root) as store:
        print(json.dumps(report(store, huge, lambda: mounts.free_bytes(root), slack=huge)))


if __name__ == "__main__":
    main()
