"""Arrays of operations: made from columns, run by one C call, answered in columns.

No view of the callers' memory outlives a call: cffi's ``from_buffer`` objects must never meet the
garbage collector, which clears a memoryview that is still exported (seen as a crash in cffi 2.1
under CPython 3.11).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from kvio._native import (
    NULL,
    LeafTable,
    ffi,
    from_buffer,
    lib,
    new,
    read_fast,
)
from kvio._native.signals import raised, reraise

_OPS: Final[Any] = ffi.typeof("kvio_op[]")
_PARTS: Final[Any] = ffi.typeof("kvio_part[]")
_ROWS: Final[Any] = ffi.typeof("int64_t[]")
_ANSWERS: Final = int(lib.KVIO_ANSWERS)


class Answer(NamedTuple):
    """The answer of one operation; see ``kvio_op``."""

    status: int
    site: int
    crc: int
    flags: int
    existed: int
    mode_taken: int
    done: int
    block_nbytes: int
    file_nbytes: int
    mtime_ns: int


class Ops:
    """Operations on blocks; the callers' memory is used only inside the ``with`` block.

    *names* are keys, which *leaf_table* hashes, or file names in the directories *dirs*, each a
    ``kvio_dir *`` or NULL. *modes* has one for each, or one for all.
    """

    __slots__ = ("_keep", "_views", "count", "flags", "ops")

    def __init__(
        self,
        names: Sequence[str],
        parts: Sequence[Sequence[memoryview]],
        sizes: Sequence[int],
        modes: Sequence[int],
        *,
        leaf_table: LeafTable | None,
        dirs: Sequence[Any] = (),
        offset: int = 0,
        flags: int = 0,
    ) -> None:
        self.count = len(names)
        self.flags = flags
        self.ops = new(_OPS, self.count)
        counts = list(map(len, parts))
        flat = list(chain.from_iterable(parts))
        lengths = sizes
        many: tuple[Any, Any] = (NULL, NULL)
        if counts.count(1) != self.count:
            lengths, many = list(map(len, flat)), (counts, sizes)
        c_parts = new(_PARTS, len(flat) or 1)
        text = bytearray("\0".join(names), "ascii")
        text.append(0)
        c_text = from_buffer(text)
        self._keep = (c_parts, c_text, dirs)
        self._views = list(map(from_buffer, flat))
        lib.kvio_fill_ops(
            self.ops, self.count, NULL if leaf_table is None else leaf_table.cdata, dirs or NULL,
            c_text, modes, len(modes), *many, c_parts, len(flat), self._views, lengths, offset,
            flags,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._views.clear()

    def acquire(self, start: int, stop: int) -> int:
        """Acquire directories from *start* on; the first operation whose is not open, or *stop*."""
        return start + int(lib.kvio_acquire_dirs(self.ops + start, stop - start))

    def release(self, start: int, stop: int) -> None:
        """Release the directories of some operations."""
        lib.kvio_release_dirs(self.ops + start, stop - start)

    def set_directory(self, index: int, fd: int, kept: Any = NULL) -> None:
        """Set the directory of an operation, or the -errno of opening it.

        *kept*: the ``kvio_dir *`` that was acquired for it; NULL: the caller closes *fd*.
        """
        op = self.ops[index]
        op.dir, op.dirfd = kept, fd

    def run(self, function: Any, call: Any, start: int, stop: int) -> int:
        """Run *function* over some operations and return how many succeeded."""
        good = int(function(call, self.ops + start, stop - start))
        if raised:
            reraise()
        return good

    def begin_again(self, index: int) -> None:
        """Reset one operation, but not that its existing block was found corrupt."""
        op = self.ops[index]
        op.flags, op.site = self.flags | (op.flags & lib.KVIO_OP_UNFIT), 0
        op.status = -errno.ECANCELED  # until it is tried

    def leaf(self, index: int) -> int:
        """Return the number of the directory of a key's hash."""
        return int(self.ops[index].key_hash[0])

    def sum_up(self, start: int = 0, stop: int | None = None) -> Any:
        """Return the ``kvio_summary`` of all operations, or of some."""
        summary = new("kvio_summary *")
        last = self.count if stop is None else stop
        lib.kvio_sum_up(self.ops + start, last - start, summary)
        return summary

    def leading(self) -> int:
        """Return the number of operations from the front that succeeded."""
        return int(lib.kvio_leading(self.ops, self.count))

    def checksums(self) -> list[int]:
        """Return the checksum of every block."""
        crcs = new("uint32_t[]", self.count)
        lib.kvio_get_crcs(self.ops, self.count, crcs)
        return list(ffi.unpack(crcs, self.count))

    def answers(self) -> list[Answer]:
        """Return the answers of all operations."""
        rows = new(_ROWS, self.count * _ANSWERS)
        lib.kvio_get_answers(self.ops, self.count, rows)
        numbers = ffi.unpack(rows, self.count * _ANSWERS)
        if self.count == 1:
            return [Answer._make(numbers)]
        return list(map(Answer._make, zip(*[iter(numbers)] * _ANSWERS, strict=True)))


class IOCounters:
    """Calls in flight and blocks transferred, counted in C without a lock."""

    __slots__ = ("cdata",)

    def __init__(self) -> None:
        self.cdata = new("kvio_io_counters *")

    @property
    def in_flight(self) -> int:
        """The number of calls in flight."""
        return int(self.cdata.in_flight)

    @property
    def moved(self) -> list[int]:
        """The number of blocks written or read, by mode."""
        return list(self.cdata.moved)

    def enter(self) -> None:
        """Count a call as in flight."""
        lib.kvio_enter(self.cdata)

    def leave(self, ops: Ops | None) -> None:
        """Count a call as ended, and the blocks it transferred."""
        if ops is None:
            lib.kvio_leave(self.cdata, NULL, 0)
        else:
            lib.kvio_leave(self.cdata, ops.ops, ops.count)


class One:
    """What calls of `run_one` for the single blocks of a store share; *address* is a ``kvio_one``.

    Args:
        call: the settings, a ``kvio_call *``, which is updated.
        leaf_table: hashes keys; None: names are file names in directories.
        kind: ``KVIO_WRITE``, ``KVIO_READ`` or ``KVIO_STAT``.
    """

    __slots__ = ("_keep", "address", "call", "cdata")

    def __init__(
        self, call: Any, counters: IOCounters, leaf_table: LeafTable | None, kind: int
    ) -> None:
        self.call = call
        leaves = NULL if leaf_table is None else leaf_table.cdata
        self.cdata = new("kvio_one *", (call, counters.cdata, leaves, kind))
        self._keep = (counters, leaf_table)
        self.address = address(self.cdata)


class FastReads:
    """Reads of whole blocks through the page cache, each by one call of the C core.

    Args:
        one: what they share.
        limit_bytes: buffers of this length and above are left to the caller.
        failed: called with an answer of `run_one`, the key and the length of the buffer where a
            read failed or the handler of a signal raised an exception meanwhile; its result is
            the result of the read.

    Attributes:
        read: reads the block of a key into a buffer, and returns the number of bytes, or None
            without having tried: the arguments are not as simple as that, or reads are refused.
    """

    __slots__ = ("_cdata", "_one", "read")

    def __init__(
        self, one: One, limit_bytes: int, failed: Callable[[Sequence[int], str, int], int | None]
    ) -> None:
        self._one = one
        self._cdata = new("kvio_fast *", (one.cdata[0], limit_bytes))
        self.read: Callable[[str, object], int | None] = partial(
            read_fast, address(self._cdata), failed
        )

    def refuse(self) -> None:
        """Refuse new reads."""
        self._cdata.closed = 1

    @property
    def busy(self) -> bool:
        """Whether reads are in progress."""
        return bool(self._cdata.busy)

    @property
    def counts(self) -> tuple[int, int]:
        """How many blocks were read, and their bytes."""
        return int(self._cdata.blocks), int(self._cdata.bytes)


def address(pointer: Any) -> int:
    """Return the address in a pointer, for `run_one`."""
    return int(ffi.cast("uintptr_t", pointer))
