"""The division of a shared file among its writers, and of a write: pure arithmetic."""

from __future__ import annotations

import fcntl
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from kvio.errors import ConfigError

#: From xfs_fs.h: the geometry of a mounted file system, version 1.
_XFS_IOC_FSGEOMETRY_V1: Final = 0x80705864
_XFS_MAGIC: Final = 0x58465342
_GEOMETRY: Final = struct.Struct("=8I4Q16s2IiIIII4x")


def stripe_bytes(dirfd: int, fs_magic: int) -> int:
    """Return the stripe unit of a directory's file system in bytes; 0: it reports none.

    XFS reports the value of ``mkfs.xfs -d su=`` or of the device. ext4 does not report it.
    """
    if fs_magic != _XFS_MAGIC:
        return 0
    try:
        geometry = fcntl.ioctl(dirfd, _XFS_IOC_FSGEOMETRY_V1, bytes(_GEOMETRY.size))
    except OSError:
        return 0
    fields = _GEOMETRY.unpack(geometry)
    block, unit = fields[0], fields[13]
    return int(block * unit)


# --------------------------------------------------------------------------------------------------
# The division of a shared file among its writers: pure arithmetic, the same in every process.
#
# The file is cut into *stripes*, each with one writer: one a writer in order (contiguous), or
# pieces of one size dealt out in turn (round-robin). A stripe is cut into *cells*, the pieces
# whose checksums are kept. Cells lie on file blocks, so that only the edges of domains can cut a
# block.


MAX_WRITERS: Final = 1 << 16
MAX_BYTES: Final = 1 << 60
MAX_ALIGN: Final = 1 << 16


class Extent(NamedTuple):
    """A piece of a file: its offset and length in bytes."""

    offset: int
    nbytes: int


class Missing(NamedTuple):
    """A cell that its writer has not completed."""

    rank: int
    offset: int
    nbytes: int


class Stripe(NamedTuple):
    """A piece of a file with one writer.

    Its cells are numbered on from *first_cell* and begin at *origin*, the file block of *start*.
    """

    rank: int
    start: int
    end: int
    origin: int
    first_cell: int


@dataclass(frozen=True)
class Layout:
    """The division of a file of *size* bytes.

    Attributes:
        writers: number of ranks.
        align: file blocks, in bytes: what two writers must not share.
        cell_bytes: checksums are kept for pieces of this length; a multiple of *align*.
        stripe_bytes: round-robin pieces of this length; 0: contiguous.
        sizes: the bytes of each writer's domain where the file is contiguous, else empty.
    """

    size: int
    writers: int
    align: int
    cell_bytes: int
    stripe_bytes: int = 0
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        check_counts(self.size, self.writers)
        if not 1 <= self.align <= MAX_ALIGN:
            raise ConfigError(f"blocks must have 1 to {MAX_ALIGN} bytes, not {self.align}")
        if self.align > self.cell_bytes or self.cell_bytes % self.align:
            raise ConfigError(
                f"cells of {self.cell_bytes} bytes are no multiple of blocks of {self.align}"
            )
        if self.cell_bytes >= 1 << 32:
            raise ConfigError("cells must be shorter than 4 GiB")
        if self.stripe_bytes < 0 or self.stripe_bytes % self.align:
            raise ConfigError(
                f"stripes of {self.stripe_bytes} bytes are no multiple of blocks of {self.align}"
            )
        if self.stripe_bytes and self.sizes:
            raise ConfigError("domains of given sizes lie one after the other: no stripe_bytes")
        if not self.stripe_bytes and (len(self.sizes), sum(self.sizes)) != (
            self.writers,
            self.size,
        ):
            raise ConfigError(
                f"sizes of {len(self.sizes)} domains, {sum(self.sizes)} bytes in all, for "
                f"{self.writers} writers of a file of {self.size}"
            )
        if any(nbytes < 0 for nbytes in self.sizes):
            raise ConfigError("the size of a domain is negative")

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(self.sizes)]

    @cached_property
    def _first_cells(self) -> list[int]:
        pairs = zip(self._starts, self._starts[1:], strict=False)
        return [0, *accumulate(self._cells_between(a, b) for a, b in pairs)]

    def _cells_between(self, start: int, end: int) -> int:
        return -(-(end - self._block(start)) // self.cell_bytes) if end > start else 0

    def _block(self, offset: int) -> int:
        return offset // self.align * self.align

    @property
    def stripes(self) -> int:
        """The number of stripes, with empty ones if the file is contiguous."""
        return -(-self.size // self.stripe_bytes) if self.stripe_bytes else self.writers

    @property
    def cells(self) -> int:
        """The number of cells."""
        if not self.stripe_bytes:
            return self._first_cells[-1]
        last = self.stripe(self.stripes - 1) if self.size else None
        return last.first_cell + self._cells_between(last.start, last.end) if last else 0

    def stripe(self, index: int) -> Stripe:
        """Return a stripe by its number."""
        if self.stripe_bytes:
            start = index * self.stripe_bytes
            end = min(start + self.stripe_bytes, self.size)
            first_cell = index * -(-self.stripe_bytes // self.cell_bytes)
            return Stripe(index % self.writers, start, end, start, first_cell)
        start, end = self._starts[index], self._starts[index + 1]
        return Stripe(index, start, end, self._block(start), self._first_cells[index])

    def stripe_at(self, offset: int) -> Stripe:
        """Return the stripe that contains a byte of the file."""
        if self.stripe_bytes:
            return self.stripe(offset // self.stripe_bytes)
        return self.stripe(bisect_right(self._starts, offset) - 1)

    def stripes_of(self, rank: int) -> Iterator[Stripe]:
        """Yield the stripes of a writer that are not empty, in file order."""
        numbers = range(rank, self.stripes, self.writers) if self.stripe_bytes else (rank,)
        return (stripe for stripe in map(self.stripe, numbers) if stripe.end > stripe.start)

    def check_rank(self, rank: int) -> None:
        """Raise `ConfigError` if there is no such rank."""
        if not 0 <= rank < self.writers:
            raise ConfigError(f"ranks are 0 to {self.writers - 1}, not {rank!r}")

    def domain(self, rank: int) -> tuple[Extent, ...]:
        """Return the extents that a writer writes, in file order.

        Raises:
            ConfigError: there is no such rank.
        """
        self.check_rank(rank)
        return tuple(Extent(s.start, s.end - s.start) for s in self.stripes_of(rank))

    def cells_of(self, stripe: Stripe) -> Iterator[tuple[int, int, int]]:
        """Yield the number, start and end of each cell of a stripe."""
        at, number = stripe.origin, stripe.first_cell
        while stripe.start < stripe.end and at < stripe.end:
            yield number, max(at, stripe.start), min(at + self.cell_bytes, stripe.end)
            at, number = at + self.cell_bytes, number + 1

    def cells_between(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number, start and end of each cell that a range touches, in file order."""
        while start < end:
            stripe = self.stripe_at(start)
            index = (start - stripe.origin) // self.cell_bytes
            first = stripe.origin + index * self.cell_bytes
            last = min(first + self.cell_bytes, stripe.end)
            yield stripe.first_cell + index, max(first, stripe.start), last
            start = last

    def all_cells(self, rank: int | None = None) -> Iterator[tuple[int, int, int, int]]:
        """Yield the rank, number, start and end of every cell, of a rank or of all, in file order.

        Raises:
            ConfigError: there is no such rank.
        """
        if rank is not None:
            self.check_rank(rank)
        stripes = map(self.stripe, range(self.stripes)) if rank is None else self.stripes_of(rank)
        for stripe in stripes:
            for number, start, end in self.cells_of(stripe):
                yield stripe.rank, number, start, end

    @cached_property
    def shared_blocks(self) -> tuple[int, ...]:
        """The numbers of file blocks with bytes of several writers, ascending."""
        inner = self._starts[1:-1] if self.sizes else ()
        cut = {at // self.align for at in inner if at % self.align and at < self.size}
        return tuple(sorted(cut))


def check_counts(size: int, writers: int) -> None:
    """Raise `ConfigError` for impossible sizes and numbers of writers."""
    if not 0 <= size <= MAX_BYTES:
        raise ConfigError(f"size must be 0 to {MAX_BYTES} bytes, not {size}")
    if not 1 <= writers <= MAX_WRITERS:
        raise ConfigError(f"writers must be 1 to {MAX_WRITERS}, not {writers}")


def even_sizes(size: int, writers: int, align: int) -> tuple[int, ...]:
    """Divide a file into domains of whole blocks that differ by one block at most.

    Where there are fewer blocks than writers, the last writers have nothing to write.

    Raises:
        ConfigError: a size or a number of writers that cannot be.
    """
    check_counts(size, writers)
    blocks = -(-size // align)
    most, rest = divmod(blocks, writers)
    sizes = [(most + (rank < rest)) * align for rank in range(writers)]
    last = min(blocks, writers) - 1
    if last >= 0:
        sizes[last] -= blocks * align - size
    return tuple(sizes)


# --------------------------------------------------------------------------------------------------
# Split a write by stripes and by file blocks that it covers in part; pure functions.


class Way(Enum):
    """The way of a piece to the file."""

    STRAIGHT = "as it is"
    MERGED = "a file block that this handle has in part: direct I/O writes whole ones"
    SHARED = "a file block that several writers have bytes in: the sealing process writes it"


class Piece(NamedTuple):
    """A part of a write, inside one stripe, and its way to the file."""

    way: Way
    stripe: Stripe
    start: int
    end: int


def cut(layout: Layout, start: int, end: int, *, direct: bool) -> Iterator[Piece]:
    """Split a write of bytes *start* to *end* into pieces, in file order."""
    while start < end:
        stripe = layout.stripe_at(start)
        stop = min(end, stripe.end)
        yield from _cut_stripe(layout, stripe, start, stop, direct)
        start = stop


def _cut_stripe(
    layout: Layout,
    stripe: Stripe,
    start: int,
    end: int,
    direct: bool,  # noqa: FBT001
) -> Iterator[Piece]:
    for way, a, b in _without_shared(layout, start, end):
        if way is Way.SHARED or not direct:
            yield Piece(way, stripe, a, b)
        else:
            yield from (Piece(*piece) for piece in _edges(layout.align, stripe, a, b))


def _without_shared(layout: Layout, start: int, end: int) -> Iterator[tuple[Way, int, int]]:
    """Split off the blocks with bytes of other writers: at most the first and the last."""
    align, blocks = layout.align, layout.shared_blocks
    first = bisect_left(blocks, start // align)
    while start < end and first < len(blocks) and blocks[first] * align < end:
        block = blocks[first] * align
        if start < block:
            yield Way.STRAIGHT, start, block
        stop = min(block + align, end)
        yield Way.SHARED, max(start, block), stop
        start, first = stop, first + 1
    if start < end:
        yield Way.STRAIGHT, start, end


def _edges(
    align: int, stripe: Stripe, start: int, end: int
) -> Iterator[tuple[Way, Stripe, int, int]]:
    """Split off blocks that are covered in part."""
    head = min(-(-start // align) * align, end)
    tail = max(end // align * align, head)
    if start < head:
        yield Way.MERGED, stripe, start, head
    if head < tail:
        yield Way.STRAIGHT, stripe, head, tail
    if tail < end:
        yield Way.MERGED, stripe, tail, end


def slice_parts(parts: Sequence[memoryview], start: int, end: int) -> list[memoryview]:
    """Return views of bytes *start* to *end* of a gather list."""
    found = []
    for part in parts:
        a, b = max(start, 0), min(end, len(part))
        if a < b:
            found.append(part[a:b])
        start, end = start - len(part), end - len(part)
        if end <= 0:
            break
    return found
