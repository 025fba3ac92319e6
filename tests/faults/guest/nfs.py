"""In the guest: kvio on NFS, where a full server is reported late, by fsync or by close.

    python -m tests.faults.guest.nfs LIAR CASE…

The server is the guest itself, its export a small ext4. *LIAR*: a library of tests/faults/full,
compiled. A line of JSON for each case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

import kvio
from tests.faults.full import liar, story
from tests.faults.guest import inside
from tests.posix import faultlab, mounts

_SERVED: Final = Path("/mnt/served")
_MOUNTED: Final = Path("/mnt/nfs")
_LEAVE_BYTES: Final = 3 << 20
_HUGE_BYTES: Final = 6 << 20
_SLACK_BYTES: Final = 8192
_LONGEST_S: Final = 60.0
_EXPORT: Final = "rw,no_root_squash,fsid=0,insecure,sync,no_subtree_check"


def serve() -> None:
    """Export the first disk over NFSv4.2, and mount it."""
    inside.load("nfsd", "nfsv4")
    inside.mount(inside.device(0), str(_SERVED), "ext4")
    inside.mount("none", "/var/lib/nfs", "tmpfs")
    Path("/var/lib/nfs/v4recovery").mkdir()
    for name in ("etab", "rmtab"):
        Path("/var/lib/nfs", name).touch()
    inside.mount("nfsd", "/proc/fs/nfsd", "nfsd")
    inside.run("ip", "link", "set", "lo", "up")
    inside.run("exportfs", "-o", _EXPORT, f"127.0.0.1:{_SERVED}")
    inside.run("rpc.mountd", "-N", "2", "-N", "3")
    inside.run("rpc.nfsd", "-N", "3", "-U", "4")
    Path("/proc/fs/nfsd/v4_end_grace").write_text("Y\n")
    inside.mount("127.0.0.1:/", str(_MOUNTED), "nfs4", "vers=4.2")


def begin(name: str) -> tuple[Path, Path]:
    """Make a root, and fill the server until little is left; as it is mounted, and as it is."""
    for directory in (_SERVED / "filler", *_SERVED.glob("root-*")):
        subprocess.run(["rm", "-rf", str(directory)], check=True)
    (_SERVED / f"root-{name}").mkdir(mode=0o700)
    mounts.free_bytes(_SERVED)
    info = os.statvfs(_SERVED)
    with open(_SERVED / "filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, info.f_bavail * info.f_frsize - _LEAVE_BYTES)
    return _MOUNTED / f"root-{name}", _SERVED / f"root-{name}"


def settled(server: Path) -> None:
    """Wait until neither client nor server keeps anything that was removed.

    The client keeps a file for bytes it still means to write, up to half a minute after it was
    reported that there is no room; the server one that it has open.
    """
    deadline = time.monotonic() + _LONGEST_S
    while kept := list(server.rglob(".nfs*")) or nameless_bytes() > _SLACK_BYTES:
        mounts.free_bytes(_MOUNTED)  # a sync makes the client try
        reported = f"kept: {kept}; open here: {faultlab.open_descriptors()}"
        assert time.monotonic() < deadline, reported


def nameless_bytes() -> int:
    """Return how many bytes the server has in use that no name accounts for."""
    info = os.statvfs(_SERVED)
    named = sum(path.lstat().st_blocks for path in _SERVED.rglob("*")) * 512
    return (info.f_blocks - info.f_bfree) * info.f_frsize - named - _nameless_at_first()


@cache
def _nameless_at_first() -> int:
    info = os.statvfs(_SERVED)
    return (info.f_blocks - info.f_bfree) * info.f_frsize - sum(
        path.lstat().st_blocks * 512 for path in _SERVED.rglob("*")
    )


def room(server: Path) -> int:
    """Return how much room the server has, when all that was removed is gone."""
    settled(server)
    return mounts.free_bytes(_SERVED)


def blocks(way: str) -> int:
    """Run a story of blocks; judge it where the server has them."""
    client, server = begin(way)
    with story.NFS_WAYS[way].open(client) as store:
        reported = story.report(store, _HUGE_BYTES, lambda: room(server), _SLACK_BYTES)
    settled(server)
    layout = story.NFS_WAYS[way].layout
    story.judge(reported, server, layout=layout, numbers=("ENOSPC",))
    assert reported["lost room"] <= _SLACK_BYTES, reported["lost room"]
    return len(reported["stored"])


def late() -> str:
    """Write past what the server has without kvio, and report which call says so: it is late."""
    client, _ = begin("late")
    fd = os.open(client / "f", os.O_CREAT | os.O_WRONLY, 0o600)
    for call, work in (
        ("write", lambda: [os.write(fd, bytes(1 << 20)) for _ in range(6)]),
        ("close", lambda: os.close(fd)),
    ):
        try:
            work()
        except OSError:
            return call
    return "nothing"


def lying(way: str, variant: str, library: str) -> bool:
    """Run a story in a process that takes no heed of late errors; was it caught?"""
    client, server = begin(f"{way}-{variant}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.full.story", str(client), way, str(_HUGE_BYTES)],
        env={**os.environ, **liar.environment(Path(library), variant)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    settled(server)
    try:
        story.judge(json.loads(done.stdout), server, numbers=("ENOSPC",))
    except AssertionError:
        return True
    return False


def shared_file(*, preallocate: bool) -> int:
    """Make a shared file that the server has no room for: none stands, the room comes back."""
    client, server = begin("shared")
    before = mounts.free_bytes(_SERVED)
    error: kvio.KvioError | None = None
    try:
        with kvio.SharedFile.create(
            client / "f", _HUGE_BYTES, preallocate=preallocate, durability="visible"
        ) as file:
            file.pwrite(story.content("f", _HUGE_BYTES), 0)
            file.seal()
    except kvio.KvioError as exc:
        error = exc
    assert story.error_reported(error)[:2] == ["StorageFullError", "ENOSPC"], repr(error)
    settled(server)
    left = [(path.name, path.stat().st_size) for path in server.iterdir()]
    assert not left, f"{left}: {error!r}"
    assert before - room(server) <= _SLACK_BYTES
    return 0


def staged() -> int:
    """Drain a tier to a server that fills up; what failed is kept, and stored later."""
    client, server = begin("staged")
    keys = [f"k{number}" for number in range(30)]
    with (
        story.NFS_WAYS["nfs-durable"].open(client) as store,
        kvio.stage(store, "16MiB", retries=0) as tier,
    ):
        receipts = {k: tier.write_block(k, story.content(k, story.BLOCK)) for k in keys}
        failed: set[Any] = set()
        try:
            tier.barrier()
        except kvio.StorageFullError:
            failed = {receipt.key for receipt in tier.failed}
        assert 0 < len(failed) < len(keys), failed
        for key, receipt in receipts.items():
            assert (receipt.receipt is None) == (key in failed)
            assert bytes(tier.read_block(key)) == story.content(key, story.BLOCK)
        (_SERVED / "filler").unlink()
        tier.retry_failed()
        tier.barrier()
    for key in keys:
        assert faultlab.peek(server, key) == story.content(key, story.BLOCK)
    return len(keys)


#: What is tried, by name; each ends with a count of receipts.
CASES: Final[dict[str, Callable[[], Any]]] = {
    "late": late,
    **{way: partial(blocks, way) for way in story.NFS_WAYS},
    "shared file": partial(shared_file, preallocate=True),
    "shared file, hole": partial(shared_file, preallocate=False),
    "staged": staged,
}
#: Broken stores, which must be caught.
LIARS: Final = {"sync_is_fine": "nfs-durable", "close_is_fine": "nfs-visible"}


def work(line: inside.Line) -> None:
    """Serve, and try the cases that are asked for."""
    library, *names = sys.argv[1:]
    cases: dict[str, Callable[[], Any]] = {
        **CASES,
        **{v: partial(lying, way, v, library) for v, way in LIARS.items()},
    }
    serve()
    _nameless_at_first()
    inside.observe(line, {name: cases[name] for name in names})


if __name__ == "__main__":
    inside.main(work)
