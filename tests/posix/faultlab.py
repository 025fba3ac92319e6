"""What the fault tests share: blocks read and checked without kvio's code, leaks counted."""

from __future__ import annotations

import hashlib
import os
import random
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import google_crc32c

import kvio
from kvio._native import Memory
from kvio.backends.posix import PosixBackend
from kvio.backends.posix.engine import Engine
from kvio.core.buffers import BouncePool

TRAILER_BYTES = 64
TEMP_MARK = ".kvio-tmp-"


def pattern(seed: int, nbytes: int) -> bytes:
    """Return the same random bytes for the same seed."""
    return random.Random(seed).randbytes(nbytes)


def unaligned(data: bytes) -> memoryview:
    """Copy bytes to memory that direct I/O cannot take as it is."""
    view = kvio.aligned_buffer(len(data) + 1)[1:]
    view[:] = data
    return view


def aligned(data: bytes) -> memoryview:
    """Copy bytes to memory that direct I/O takes as it is."""
    view = kvio.aligned_buffer(len(data))
    view[:] = data
    return view


def key_hash(key: str, namespace: str = "") -> bytes:
    """Hash a key as docs/format.md says, without kvio's code."""
    return hashlib.blake2b(f"{namespace}\0{key}".encode(), digest_size=16).digest()


def file_of(root: Path, key: str, *, layout: str = "block", namespace: str = "") -> Path:
    """Return which file holds a key."""
    if layout == "plain":
        return root / key
    first = key_hash(key, namespace)[0]
    return root / f"{first >> 4:x}" / f"{first & 15:x}" / key.replace("/", "~")


def crc32c(data: bytes) -> int:
    """Compute CRC32C by a published library."""
    return int(google_crc32c.value(data))


def seal(payload: bytes, key: str, *, padding: int = 0, namespace: str = "") -> bytes:
    """Build a block's file content without kvio's code."""
    head = struct.pack(
        "<8sHHIQ16s20x",
        b"KVIOBLK\n",
        1,
        1,
        crc32c(payload),
        len(payload),
        key_hash(key, namespace),
    )
    return payload + bytes(padding) + head + struct.pack("<I", crc32c(head))


def unseal(content: bytes, key: str, *, namespace: str = "") -> bytes:
    """Return a block's payload after checking every byte of its file."""
    assert len(content) >= TRAILER_BYTES, f"{len(content)} bytes are no block"
    magic, version, flags, crc, nbytes, owner = struct.unpack(
        "<8sHHIQ16s20x", content[-TRAILER_BYTES:-4]
    )
    assert magic == b"KVIOBLK\n"
    assert (version, flags) == (1, 1)
    assert struct.unpack("<I", content[-4:])[0] == crc32c(content[-TRAILER_BYTES:-4])
    assert owner == key_hash(key, namespace)
    payload = content[:nbytes]
    assert len(payload) == nbytes
    assert crc32c(payload) == crc
    assert not any(content[nbytes:-TRAILER_BYTES]), "padding is not zero"
    return payload


@contextmanager
def opened(root: Path, path: Path) -> Iterator[None]:
    """Look, as root can anyway, into directories below *root* that a umask has closed to us."""
    closed: list[tuple[Path, int]] = []
    try:
        for name in reversed([parent for parent in path.parents if parent.is_relative_to(root)]):
            mode = stat.S_IMODE(name.stat().st_mode)
            if mode & 0o500 != 0o500:
                closed.append((name, mode))
                name.chmod(0o700)
        yield
    finally:
        for name, mode in reversed(closed):
            name.chmod(mode)


def peek(root: Path, key: str, *, layout: str = "block", namespace: str = "") -> bytes | None:
    """Return a key's payload as it is on the disk; None where there is no file."""
    path = file_of(root, key, layout=layout, namespace=namespace)
    try:
        with opened(root, path):
            content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return content if layout == "plain" else unseal(content, key, namespace=namespace)


def temporaries(root: Path) -> list[Path]:
    """List named temporaries anywhere below a root."""
    return sorted(p for p in root.rglob("*") if p.name.startswith(TEMP_MARK))


def of_writer(temporary: Path, pid: int) -> Path:
    """Rename a temporary as if another process of this host had made it."""
    host, _, rest = temporary.name.removeprefix(TEMP_MARK).split("-", 2)
    return temporary.rename(temporary.with_name(f"{TEMP_MARK}{host}-{pid}-{rest}"))


def dead_pid() -> int:
    """Return the number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def open_descriptors() -> dict[int, str]:
    """List this process's descriptors and what they refer to, but for sockets.

    kvio's file systems open none, and the S3 libraries that earlier tests used close theirs from
    threads of their own, at any moment.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor that listed the directory
        if target.startswith("socket:"):
            continue
        # An anonymous inode's name differs from one to the next, its meaning does not.
        found[int(name)] = re.sub(r"#\d+", "#", target)
    return found


def posix_backend(store: kvio.Store) -> PosixBackend:
    """Reach into a store for its POSIX backend."""
    backend = store._backend
    assert isinstance(backend, PosixBackend)
    return backend


def engine_of(store: kvio.Store) -> Engine:
    """Reach into a store for its engine."""
    return posix_backend(store)._engine


class CountingPool(BouncePool):
    """A bounce pool that knows how many of its buffers are out."""

    def __init__(self, like: BouncePool) -> None:
        super().__init__(like.nbytes, limit=64)
        self.out = 0

    def take(self) -> Memory:
        """Return a buffer."""
        buffer = super().take()
        self.out += 1
        return buffer

    def give(self, buffer: Memory) -> None:
        """Take a buffer back."""
        self.out -= 1
        super().give(buffer)


def rot(root: Path, key: str) -> bytes:
    """Flip a bit of a block's payload, beneath a sound trailer; return what is stored then."""
    path = file_of(root, key)
    content = bytearray(path.read_bytes())
    content[5] ^= 4
    path.write_bytes(content)
    return bytes(content)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    """Set the process's umask for a while."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Take all descriptors but so many."""
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
