"""Bar 3: direct I/O against fio and the C loop, and from memory that is not aligned.

All contenders use memory of the same kind (see `plain_buffer`), one buffer a thread as fio does,
with the same bytes in all so that concurrent reads may share them; what `kvio.aligned_buffer`
(huge pages) gains over it is shown beside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Final

import kvio
from benchmarks import fio
from benchmarks.blockloop import DIRECT, BlockLoop
from benchmarks.ground import plain_buffer, same_bytes, seeded_buffer
from benchmarks.measure import Bench, Contender, MiB, Row, rate_bar, size_text

SIZES: Final = (MiB, 4 * MiB, 16 * MiB)
DEPTHS: Final = (1, 4)
_SHIFT: Final = 576
_BAR = "3 direct"
_OURS, _UNALIGNED, _CHECKED = "kvio", "kvio, unaligned", "kvio, checksum on"
_HUGE = "kvio, aligned_buffer"
_LOOP, _FIO = "C loop", "fio"


class _Direct:
    """The contenders at one size and depth."""

    def __init__(
        self, bench: Bench, size: int, depth: int, plain: kvio.Store, checked: kvio.Store
    ) -> None:
        self.ground, self.size, self.depth = bench.ground, size, depth
        self.plain, self.checked = plain, checked
        self.count = max(depth, bench.count(64 * MiB // size) // depth * depth)
        self.nbytes = self.count * size
        self.loop = BlockLoop(bench.ground.root, link_by_proc="proc" in plain.capabilities.publish)
        self.data = self._spread([plain_buffer(size) for _ in range(depth)])
        shifted = [plain_buffer(size, misaligned_by=_SHIFT) for _ in range(depth)]
        self.shifted = self._spread(shifted)
        self.huge = self._spread([seeded_buffer(size) for _ in range(depth)])
        self.fio_directory = bench.ground.root / "fio"
        self.fio_directory.mkdir(exist_ok=True)

    def _spread(self, buffers: list[memoryview]) -> list[memoryview]:
        """Give every block a buffer, the same bytes in each."""
        for buffer in buffers[1:]:
            buffer[:] = buffers[0]
        return list(itertools.islice(itertools.cycle(buffers), self.count))

    def writers(self) -> dict[str, Contender]:
        contenders: dict[str, Contender] = {
            _OURS: lambda: self._write(self.plain, self.data),
            _UNALIGNED: lambda: self._write(self.plain, self.shifted),
            _CHECKED: lambda: self._write(self.checked, self.data),
            _HUGE: lambda: self._write(self.plain, self.huge),
            _LOOP: self._loop_write,
        }
        return contenders | ({_FIO: self._fio_write} if fio.is_there() else {})

    def readers(self) -> dict[str, Contender]:
        keys = self.ground.keys(self.count)
        for key, block in zip(keys, self.data, strict=True):
            self.checked.write_block(key, block)
        out = self._spread([plain_buffer(self.size) for _ in range(self.depth)])
        blocks = self.loop.prepare(keys, out)
        contenders: dict[str, Contender] = {
            _OURS: lambda: self._read(self.plain, keys, out),
            _UNALIGNED: lambda: self._read(self.plain, keys, self.shifted),
            _CHECKED: lambda: self._read(self.checked, keys, out),
            _HUGE: lambda: self._read(self.plain, keys, self.huge),
            _LOOP: lambda: self.loop.read(blocks, threads=self.depth, flags=DIRECT),
        }
        return contenders | ({_FIO: self._fio_reader()} if fio.is_there() else {})

    def _write(self, store: kvio.Store, data: Sequence[memoryview]) -> float:
        keys = self.ground.keys(self.count)
        start = perf_counter()
        if self.depth == 1:
            for key, block in zip(keys, data, strict=True):
                store.write_block(key, block)
        else:
            _check(store.write_blocks(zip(keys, data, strict=True)))
        seconds = perf_counter() - start
        self.ground.retire(keys)
        return seconds

    def _read(self, store: kvio.Store, keys: Sequence[str], out: Sequence[memoryview]) -> float:
        start = perf_counter()
        if self.depth == 1:
            for key, block in zip(keys, out, strict=True):
                store.read_block_into(key, block)
        else:
            _check(store.read_blocks_into(zip(keys, out, strict=True)))
        seconds = perf_counter() - start
        same_bytes(out[:1], self.data[:1])
        return seconds

    def _loop_write(self) -> float:
        keys = self.ground.keys(self.count)
        blocks = self.loop.prepare(keys, self.data)
        seconds = self.loop.write(blocks, threads=self.depth, flags=DIRECT)
        self.ground.retire(keys)
        return seconds

    def _fio(self, name: str, verb: fio.Verb) -> float:
        return fio.run(
            self.fio_directory, name, verb, size=self.size, count=self.count, depth=self.depth
        )

    def _fio_write(self) -> float:
        name = self.ground.keys(1)[0].replace("/", "-")
        seconds = self._fio(name, "write")
        fio.retire(self.fio_directory, name)
        return seconds

    def _fio_reader(self) -> Contender:
        name = self.ground.keys(1)[0].replace("/", "-")
        self._fio(name, "write")
        return lambda: self._fio(name, "read")


def run(bench: Bench) -> Iterator[Row]:
    """Write and read blocks with O_DIRECT, one at a time and four at once."""
    for depth, size in itertools.product(DEPTHS, SIZES):
        ground = bench.ground
        plain = ground.store("posix-direct", checksum="none", verify="length", io_threads=depth)
        checked = ground.store("posix-direct", io_threads=depth)
        contest = _Direct(bench, size, depth, plain, checked)
        for verb in ("write", "read"):
            samples = bench.interleave(contest.writers() if verb == "write" else contest.readers())
            yield from _rows(f"{verb}, {size_text(size)}, depth {depth}", contest.nbytes, samples)
        contest.loop.close()


def _rows(what: str, nbytes: int, samples: dict[str, list[float]]) -> Iterator[Row]:
    if _FIO in samples:
        yield rate_bar(_BAR, what, samples, (_OURS, _FIO), nbytes=nbytes, at_least=0.95)
    yield rate_bar(_BAR, what, samples, (_OURS, _LOOP), nbytes=nbytes, at_least=0.95)
    yield rate_bar(_BAR, what, samples, (_UNALIGNED, _OURS), nbytes=nbytes, at_least=0.90)
    yield rate_bar(_BAR, what, samples, (_CHECKED, _OURS), nbytes=nbytes, at_least=None)
    yield rate_bar(_BAR, what, samples, (_HUGE, _OURS), nbytes=nbytes, at_least=None)


def _check(results: Sequence[kvio.BlockResult]) -> None:
    for result in results:
        if result.error is not None:
            raise result.error
