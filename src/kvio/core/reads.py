"""Read one block: into the caller's memory, a private copy, or new memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvio.abc import Backend
from kvio.core import buffers
from kvio.core.buffers import Data
from kvio.errors import BlockSizeError
from kvio.types import Cancellation, MiB, check_key

#: How often a block may be replaced by a larger one while it is read. Each time the buffer is
#: doubled, so only a block that grows more than a hundredfold meanwhile is never read.
_ATTEMPTS = 8
#: A range of at most this length is read without asking for the block's length first.
SMALL_RANGE_NBYTES = 16 * MiB


def target(key: str, out: Data, offset: int, nbytes: int | None) -> list[memoryview]:
    """Check the arguments of a read, before any I/O, and return flat views of *out*.

    Raises:
        InvalidKeyError: the key is not valid.
        BlockSizeError: *out* cannot be read into, or is too small for the range.
    """
    check_key(key)
    parts = buffers.as_parts(out, writable=True)
    if offset or nbytes is not None:
        check_range(offset, nbytes)
        room = buffers.total_bytes(parts)
        if nbytes is not None and nbytes > room:
            raise BlockSizeError(f"nbytes={nbytes}, but the buffer has {room} bytes", key=key)
    return parts


def check_range(offset: int, nbytes: int | None) -> None:
    """Check a range.

    Raises:
        BlockSizeError: it is negative.
    """
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise BlockSizeError(f"offset={offset} and nbytes={nbytes} must not be negative")


class ReadsInto(Protocol):
    """What reads a block into memory: a backend, or a tier in front of one."""

    def read_block_into(
        self,
        key: str,
        parts: list[memoryview],
        *,
        offset: int,
        nbytes: int | None,
        cancel: Cancellation | None,
    ) -> int:
        """Fill the parts from a block and return the count."""


def into(
    backend: ReadsInto,
    key: str,
    parts: list[memoryview],
    offset: int,
    nbytes: int | None,
    *,
    private: bool,
) -> tuple[Callable[[Cancellation | None], Any], Callable[[Any], int] | None]:
    """Return a function that reads a block into *parts*, and one that delivers its result.

    *private*: the first fills new memory and the second copies it, so that a call that timed out
    never touches the caller's memory.
    """

    def work(cancel: Cancellation | None) -> int:
        return backend.read_block_into(key, parts, offset=offset, nbytes=nbytes, cancel=cancel)

    def private_work(cancel: Cancellation | None) -> memoryview:
        view = buffers.aligned(buffers.total_bytes(parts))
        got = backend.read_block_into(key, [view], offset=offset, nbytes=nbytes, cancel=cancel)
        return view[:got]

    def deliver(view: memoryview) -> int:
        buffers.scatter(view, parts)
        return len(view)

    return (private_work, deliver) if private else (work, None)


def read_fresh(
    backend: Backend, key: str, offset: int, nbytes: int | None, cancel: Cancellation | None
) -> memoryview:
    """Read a block, or a range, into memory allocated for its size."""
    whole = not offset and nbytes is None
    found = backend.read_block(key, cancel=cancel) if whole else None
    if found is not None:
        return found
    if nbytes is not None and nbytes <= SMALL_RANGE_NBYTES:
        view = buffers.aligned(nbytes)
        got = backend.read_block_into(key, [view], offset=offset, nbytes=nbytes, cancel=cancel)
        return buffers.trimmed(view, got)
    room = 0
    for _ in range(_ATTEMPTS):
        size = backend.stat_block(key, cancel=cancel).nbytes
        if offset > size:
            text = f"offset {offset} lies beyond block {key!r} of {size} bytes"
            raise BlockSizeError(text, key=key)
        room = max(size - offset, 2 * room)
        if whole:
            found = _read_whole(backend, key, room, cancel)
        else:
            found = _read_range(backend, key, room, offset, nbytes, cancel)
        if found is not None:
            return found
    text = f"block {key!r} was replaced by a larger one {_ATTEMPTS} times while it was read"
    raise BlockSizeError(text, key=key)


def _read_whole(
    backend: Backend, key: str, room: int, cancel: Cancellation | None
) -> memoryview | None:
    """Read a block of at most *room* bytes; None: it is larger."""
    view = buffers.aligned(room)
    try:
        return buffers.trimmed(view, backend.read_block_into(key, [view], cancel=cancel))
    except BlockSizeError:
        return None


def _read_range(
    backend: Backend,
    key: str,
    room: int,
    offset: int,
    nbytes: int | None,
    cancel: Cancellation | None,
) -> memoryview | None:
    """Read *nbytes* from *offset* on, or all if that is at most *room*; None: there is more."""
    most = room + 1 if nbytes is None else min(nbytes, room + 1)
    view = buffers.aligned(most)
    got = backend.read_block_into(key, [view], offset=offset, nbytes=most, cancel=cancel)
    return None if got > room and got != nbytes else buffers.trimmed(view, got)
