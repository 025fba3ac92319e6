"""The division of a shared file among its writers: pure arithmetic, the same in every process.

The file is cut into *stripes*, each with one writer: one a writer in order (contiguous), or pieces
of one size dealt out in turn (round-robin). A stripe is cut into *cells*, the pieces whose
checksums are kept. Cells lie on file blocks, so that only the edges of domains can cut a block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from kvio.errors import ConfigError

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
