"""The reads and writes of a client, with memory and staged bytes of the daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from kvio import _native, buffers
from kvio.buffers import Data
from kvio.errors import ConfigError, CorruptBlockError, KvioError
from kvio.store import Store
from kvio.types import BlockResult, IfExists, Parts, check_keys, status_of
from kvio.wrappers.staging.daemon import messages as say
from kvio.wrappers.staging.daemon.book import Book
from kvio.wrappers.staging.daemon.lines import Line, Lines
from kvio.wrappers.staging.draining import cut
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.host import HostMemory
from kvio.wrappers.staging.pending import Entry
from kvio.wrappers.staging.pieces import flat_parts
from kvio.wrappers.staging.progress import deadline_of, left
from kvio.wrappers.staging.reading import StagedReads
from kvio.wrappers.staging.receipts import OpenReceipt, StagedReceipt
from kvio.wrappers.staging.writing import StagedWrites, WhenFull


class DaemonReads(StagedReads):
    """Reads of staged bytes, which the daemon pins while they are copied."""

    def __init__(self, lines: Lines, book: Book, memory: HostMemory, store: Store) -> None:
        self._lines = lines
        self._book = book
        self._memory = memory
        self._store = store

    @contextmanager
    def _pinned(self, key: str, consistency: str) -> Iterator[Entry | None]:
        if consistency not in ("tier", "backend"):
            raise ConfigError(f"consistency must be 'tier' or 'backend', not {consistency!r}")
        if consistency == "backend":
            yield None
            return
        with self.pinned(key) as entry:
            yield entry

    @contextmanager
    def pinned(self, key: str, *, lasting: bool = False) -> Iterator[Entry | None]:
        """Keep a staged block where it is while the context lasts; None: it is not staged.

        *lasting*: for as long as a file is open. Nobody waits for room that such a one keeps.
        """
        with self._lines.line() as line:
            answer = line.ask(say.Pin(key, lasting))
            if isinstance(answer, say.Pinned):
                entry = self._entry(line, key, answer)
                try:
                    yield entry
                finally:
                    line.release(answer.ticket)
                return
        yield None

    def _entry(self, line: Line, key: str, pinned: say.Pinned) -> Entry:
        one = OpenReceipt(
            self._book.gate,
            key,
            nbytes=pinned.nbytes,
            checksum=pinned.checksum,
            sequence=pinned.sequence,
        )
        memory = cast("HostMemory", self._memory)
        entry = Entry(one, line.spans_of(pinned, memory), if_exists="replace")
        entry.written_ns = pinned.written_ns
        return entry

    def _fetch(self, entry: Entry, parts: Parts, offset: int, nbytes: int | None) -> int:
        """Copy as the tier does; a whole block is verified: other clients can write here."""
        size, room = entry.nbytes, buffers.total_bytes(parts)
        if offset or room < size or (nbytes is not None and nbytes < size):
            return super()._fetch(entry, parts, offset, nbytes)
        whole = next(cut(parts, [size]))
        crc = _native.copy_parts(whole, self._memory.views(entry.spans), checksum=True)
        if crc != entry.receipt.checksum:
            text = f"block {entry.key!r} is corrupt in staging memory"
            raise CorruptBlockError(text, key=entry.key)
        return size

    def read_batch(
        self, items: Iterable[tuple[str, Data]], *, timeout: float | None
    ) -> list[BlockResult]:
        """Read as `Store.read_blocks_into` does."""
        wanted = [(key, buffers.as_parts(out, writable=True)) for key, out in items]
        check_keys([key for key, _ in wanted])
        staged = [self._read_staged(key, parts) for key, parts in wanted]
        rest = [item for item, done in zip(wanted, staged, strict=True) if done is None]
        asked = iter(self._store.read_blocks_into(rest, timeout=timeout) if rest else ())
        return [next(asked) if done is None else done for done in staged]

    def _read_staged(self, key: str, parts: Parts) -> BlockResult | None:
        try:
            with self._pinned(key, "tier") as entry:
                return None if entry is None else self._read_one(entry, parts)
        except CorruptBlockError as exc:
            return BlockResult(key, status_of(exc), 0, exc)

    def count_leading(self, keys: Iterable[str], *, timeout: float | None) -> int:
        """Count as `Store.count_leading` does, in one call of the store."""
        wanted = list(keys)
        check_keys(wanted)
        staged: set[str] = set()
        for at in range(0, len(wanted), say.MAX_KEYS):
            answer = self._lines.ask(say.Present(tuple(wanted[at : at + say.MAX_KEYS])))
            staged.update(cast("say.Keys", answer).keys)
        unstaged = [at for at, key in enumerate(wanted) if key not in staged]
        if not unstaged:
            return len(wanted)
        there = self._store.count_leading([wanted[at] for at in unstaged], timeout=timeout)
        return unstaged[there] if there < len(unstaged) else len(wanted)

    def list(self, prefix: str, *, consistency: str) -> Iterator[str]:
        """List as `Store.list_keys` does, staged keys first."""
        staged = set() if consistency == "backend" else set(self._staged_keys(prefix))
        yield from staged
        for key in self._store.list_keys(prefix):
            if key not in staged:
                yield key

    def _staged_keys(self, prefix: str) -> Iterator[str]:
        after = ""
        while True:
            page = cast("say.Keys", self._lines.ask(say.List(prefix, after)))
            yield from page.keys
            if not page.more:
                return
            after = page.keys[-1]


class DaemonWrites(StagedWrites):
    """Writes whose bytes this process copies into memory of the daemon."""

    def __init__(
        self, lines: Lines, book: Book, memory: HostMemory, store: Store, *, when_full: WhenFull
    ) -> None:
        self._lines = lines
        self._book = book
        self._memory: HostMemory = memory
        self._store = store
        self._when_full = when_full
        self._checksum = True

    def write(
        self, key: str, data: Data, *, if_exists: IfExists, timeout: float | None
    ) -> StagedReceipt:
        """Stage a block, keep a staged one, or write to the store."""
        deadline, parts = deadline_of(timeout), flat_parts(data)
        nbytes = buffers.total_bytes(parts)
        if if_exists == "error":
            self.look(key, deadline)
        damaged = self._store._damaged  # noqa: SLF001  # the daemon's store has not read them
        if damaged.keys:
            if_exists = self._store._choose_keep(key, nbytes, if_exists, left(deadline))  # noqa: SLF001
        with self._book.writing():
            with self._lines.line() as line:
                limit = say.microseconds(left(deadline))
                question = say.Reserve(key, nbytes, if_exists, self._when_full, limit)
                answer = line.ask(question, timeout=left(deadline))
                if isinstance(answer, say.Through):
                    return self._pass_through(line, key, parts, nbytes, if_exists, deadline)
                if isinstance(answer, say.Grant):
                    spans = line.spans_of(answer, self._memory)
                    crc = self._memory.fill(spans, parts, checksum=True).crc32c
                    assert crc is not None, "host memory sums what arrives"
                    answer = line.ask(say.Commit(answer.ticket, crc), timeout=left(deadline))
            if damaged.keys:
                damaged.forget(key)
            return self._taken(key, nbytes, answer)

    def _is_staged(self, key: str) -> bool:
        return bool(cast("say.Keys", self._lines.ask(say.Present((key,)))).keys)

    def take_for_file(self, nbytes: int, deadline: float | None) -> Sequence[Span] | None:  # noqa: ARG002
        """Return None: files collect their bytes elsewhere."""
        return None

    def _taken(self, key: str, nbytes: int, answer: say.Message) -> StagedReceipt:
        taken = cast("say.Accepted", answer)
        return self._book.accept(key, nbytes, checksum=taken.checksum, sequence=taken.sequence)

    def _pass_through(
        self,
        line: Line,
        key: str,
        parts: Sequence[Any],
        nbytes: int,
        if_exists: IfExists,
        deadline: float | None,
    ) -> StagedReceipt:
        """Write to the store while the daemon blocks its drains of the key."""
        question = say.Fence(key, nbytes, if_exists, say.microseconds(left(deadline)))
        answer = line.ask(question, timeout=left(deadline))
        if not isinstance(answer, say.Fenced):
            return self._taken(key, nbytes, answer)
        try:
            receipt = self._store.write_block(
                key,
                [part if isinstance(part, memoryview) else part.cpu() for part in parts],
                if_exists="replace" if answer.staged else if_exists,
                timeout=left(deadline),
            )
        except KvioError:
            line.release(answer.ticket)
            raise
        wrote = say.Wrote(answer.ticket, receipt.checksum, receipt.level)
        taken = cast("say.Accepted", line.ask(wrote, timeout=left(deadline)))
        return self._book.wrote_through(receipt, taken.sequence)

    def delete(self, key: str, *, timeout: float | None) -> bool:
        """Remove a block from the tier and the store, after a running drain."""
        before = self._book.open_numbers(key)
        question = say.Delete(key, say.microseconds(timeout))
        answer = self._lines.ask(question, timeout=timeout)
        self._book.wait_ended(before)
        return bool(cast("say.Done", answer).value)
