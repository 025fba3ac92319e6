"""Reading one block: into the caller's memory, private memory, or fresh memory."""

from __future__ import annotations

from collections.abc import Callable

from kvio import buffers
from kvio.abc import Backend
from kvio.buffers import Data
from kvio.errors import BlockSizeError
from kvio.types import Cancellation, MiB, check_key

#: How often a block may be replaced by a larger one while it is being read.
_RETRIES = 8
#: A range of so many bytes is read without asking how many there are.
_SURELY_ALLOCATED_NBYTES = 16 * MiB


def target(key: str, out: Data, offset: int, nbytes: int | None) -> list[memoryview]:
    """Check what is asked for, before any I/O; flat views of *out*.

    Raises:
        InvalidKeyError: the key breaks the rules.
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
    """Refuse a negative range with `BlockSizeError`."""
    if offset < 0 or (nbytes is not None and nbytes < 0):
        raise BlockSizeError(f"offset={offset} and nbytes={nbytes} must not be negative")


def into(
    backend: Backend,
    key: str,
    parts: list[memoryview],
    offset: int,
    nbytes: int | None,
    *,
    private: bool,
) -> tuple[Callable[[Cancellation | None], int], Callable[[int], int] | None]:
    """Make the work that reads a block into *parts*, and what delivers it.

    *private*: the work fills memory of its own and delivering copies, so that work nobody waits
    for any more never touches the caller's memory.
    """
    targets = [buffers.aligned(buffers.total_bytes(parts))] if private else parts

    def work(cancel: Cancellation | None) -> int:
        return backend.read_block_into(key, targets, offset=offset, nbytes=nbytes, cancel=cancel)

    def deliver(got: int) -> int:
        buffers.scatter(targets[0][:got], parts)
        return got

    return work, deliver if private else None


def read_fresh(
    backend: Backend, key: str, offset: int, nbytes: int | None, cancel: Cancellation | None
) -> memoryview:
    """Read a block, or a range, into memory allocated for its size."""
    if not offset and nbytes is None:
        whole = backend.read_block(key, cancel=cancel)
        if whole is not None:
            return whole
    if nbytes is not None and nbytes <= _SURELY_ALLOCATED_NBYTES:
        view = buffers.aligned(nbytes)
        got = backend.read_block_into(key, [view], offset=offset, nbytes=nbytes, cancel=cancel)
        return buffers.trimmed(view, got)
    for _ in range(_RETRIES):
        size = backend.stat_block(key, cancel=cancel).nbytes
        if offset > size:
            text = f"offset {offset} lies beyond block {key!r} of {size} bytes"
            raise BlockSizeError(text, key=key)
        wanted = size - offset if nbytes is None else min(nbytes, size - offset)
        view = buffers.aligned(wanted)
        try:
            got = backend.read_block_into(
                key, [view], offset=offset, nbytes=None if nbytes is None else wanted, cancel=cancel
            )
        except BlockSizeError:
            continue  # replaced by a larger block since the stat
        return view[:got]
    raise BlockSizeError(f"block {key!r} changed its size {_RETRIES} times while read", key=key)
