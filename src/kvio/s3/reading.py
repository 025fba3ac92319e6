"""Reading objects: whole, in ranges side by side, by a part, or only the end."""

from __future__ import annotations

import errno
from functools import partial
from typing import Final

from kvio.abc import RunAll
from kvio.buffers import aligned, trimmed
from kvio.errors import (
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    OutOfMemoryError,
    TransientStorageError,
)
from kvio.s3 import body, trailers
from kvio.s3.asking import Asking
from kvio.s3.conditions import Condition, Refused
from kvio.s3.objects import UNKNOWN, Got, Head, Objects
from kvio.s3.options import S3Options
from kvio.types import BlockStat, Cancellation, Parts

#: How often an object may be replaced while its end and its ranges are read.
_ATTEMPTS: Final = 4
#: A byte behind the caller's memory shows what is too long for it; nobody reads what is there.
_ONE_MORE: Final = memoryview(bytearray(1))


class Reader:
    """Reads and judges the blocks of one store."""

    def __init__(self, options: S3Options, ask: Asking, run_all: RunAll) -> None:
        self._options = options
        self._ask = ask
        self._run_all = run_all
        self._guess_nbytes = 0

    def name(self, key: str) -> str:
        """Say which object holds a key."""
        return self._options.name_prefix + key

    def stat(self, objects: Objects, key: str, cancel: Cancellation | None = None) -> BlockStat:
        """Describe a block by its end, or by its length where it has no trailer.

        Raises:
            KvioError: there is none, or its end is not one.
        """
        return self._look(objects, key, cancel)[0]

    def _look(
        self, objects: Objects, key: str, cancel: Cancellation | None
    ) -> tuple[BlockStat, Head]:
        """Describe a block, and the object that this is true of."""
        if self._options.layout == "plain":
            head = self.head(objects, key, cancel)
            return BlockStat(key, head.nbytes, None, head.nbytes, head.mtime_ns), head
        end, got = self._ask(
            lambda: objects.get_tail(self.name(key), trailers.NBYTES),
            "look at",
            key=key,
            cancel=cancel,
        )
        trailer = trailers.judge(end, total=got.total, namespace=self._options.namespace, key=key)
        stat = BlockStat(key, trailer.nbytes, trailer.checksum, got.total, got.mtime_ns)
        return stat, Head(got.total, None, got.etag)

    def whole(
        self, objects: Objects, key: str, out: Parts, cancel: Cancellation | None = None
    ) -> int:
        """Fill *out* with a whole block, check it, and return its length.

        Raises:
            KvioError: there is none, it does not fit, or it is not as it was written.
        """
        if self._options.layout == "plain":
            got = self._fetch(objects, key, [*out, _ONE_MORE], cancel)
            nbytes, room = got.nbytes, body.total_bytes(out)
            if got.total > room:
                raise _too_large(key, got.total, room)
        else:
            target = [*out, memoryview(bytearray(trailers.NBYTES))]
            got = self._fetch(objects, key, target, cancel)
            nbytes = self._check(objects, key, out, target, got)
        self._guess_nbytes = max(nbytes, self._guess_nbytes * 15 // 16)
        return nbytes

    def fresh(
        self, objects: Objects, key: str, cancel: Cancellation | None = None
    ) -> memoryview | None:
        """Read a whole block into fresh memory, guessing from the last ones how long it is.

        None where the guess is too small: then its length has to be asked for.
        """
        if not self._guess_nbytes:
            return None
        room = self._guess_nbytes * 5 // 4
        try:
            view = aligned(room)
            got = self.whole(objects, key, [view], cancel)
        except (BlockSizeError, OutOfMemoryError):
            self._guess_nbytes = 0
            return None
        return trimmed(view, got)

    def part(
        self,
        objects: Objects,
        key: str,
        out: Parts,
        start: int,
        nbytes: int,
        cancel: Cancellation | None = None,
    ) -> int:
        """Fill *out* with at most *nbytes* bytes from *start*; of the rest only the end is checked.

        Raises:
            KvioError: there is no block, its end is not one, or it ends before *start*.
        """
        target = body.cut(out, 0, nbytes)
        if self._options.layout == "plain" and body.total_bytes(target) <= self._options.part_bytes:
            return self._one_range(objects, key, target, start, cancel)
        for _ in range(_ATTEMPTS):
            stat, head = self._look(objects, key, cancel)
            if start > stat.nbytes:
                raise BlockSizeError(f"offset {start} lies beyond block {key!r}", key=key)
            wanted = body.cut(target, 0, stat.nbytes - start)
            if self._in_ranges(objects, key, wanted, start, head, cancel):
                return body.total_bytes(wanted)
        raise replaced(key)

    def nbytes(self, objects: Objects, key: str, cancel: Cancellation | None = None) -> int:
        """Give a block's length; its end is checked."""
        return self.stat(objects, key, cancel).nbytes

    def scrub(self, objects: Objects, key: str, cancel: Cancellation | None = None) -> int:
        """Check a block to its last byte and return its length; nothing is delivered."""
        for _ in range(_ATTEMPTS):
            stat, head = self._look(objects, key, cancel)
            crc = self._sum(objects, key, stat.nbytes, head, cancel)
            if crc is None:
                continue
            if stat.checksum not in (None, crc):
                text = f"block {key!r} is corrupt: the payload's checksum is wrong"
                raise CorruptBlockError(text, key=key)
            return stat.nbytes
        raise replaced(key)

    def _sum(
        self, objects: Objects, key: str, nbytes: int, head: Head, cancel: Cancellation | None
    ) -> int | None:
        """Give the checksum of a payload; None: the object was replaced meanwhile."""
        room = memoryview(bytearray(min(nbytes, self._options.part_bytes)))
        crc = 0
        for start, stop in body.ranges(nbytes, self._options.part_bytes):
            piece = room[: stop - start]
            if not self._in_ranges(objects, key, [piece], start, head, cancel):
                return None
            crc = body.crc32c([piece], crc)
        return crc

    def fill(self, objects: Objects, key: str, out: memoryview, start: int, head: Head) -> bool:
        """Fill *out* with an object's bytes from *start*; False: it is not that of *head* now."""
        return self._in_ranges(objects, key, [out], start, head, None)

    def head(self, objects: Objects, key: str, cancel: Cancellation | None) -> Head:
        """Ask for the length of the object that holds a key."""
        return self._ask(lambda: objects.head(self.name(key)), "look at", key=key, cancel=cancel)

    def exists(self, objects: Objects, key: str, cancel: Cancellation | None) -> bool:
        """Tell whether there is an object, whatever is in it."""
        try:
            self.head(objects, key, cancel)
        except BlockNotFoundError:
            return False
        return True

    def _fetch(self, objects: Objects, key: str, target: Parts, cancel: Cancellation | None) -> Got:
        """Get an object from its beginning, as far as it fits."""
        room = body.total_bytes(target)
        if room <= self._options.part_bytes + trailers.NBYTES:
            get = partial(objects.get_into, self.name(key), target, 0, None)
            return self._ask(get, "read", key=key, cancel=cancel)
        for _ in range(_ATTEMPTS):
            head = self.head(objects, key, cancel)
            wanted = body.cut(target, 0, head.nbytes)
            if self._in_ranges(objects, key, wanted, 0, head, cancel):
                return Got(body.total_bytes(wanted), head.nbytes, head.etag)
        raise replaced(key)

    def _one_range(
        self, objects: Objects, key: str, target: Parts, start: int, cancel: Cancellation | None
    ) -> int:
        stop = start + body.total_bytes(target)
        if stop > start:
            try:
                get = partial(
                    objects.get_into, self.name(key), target, start, stop, described=False
                )
                return self._ask(get, "read", key=key, cancel=cancel).nbytes
            except BlockSizeError:
                pass  # at the end, or beyond it
        if start > self.head(objects, key, cancel).nbytes:
            raise BlockSizeError(f"offset {start} lies beyond block {key!r}", key=key)
        return 0

    def _in_ranges(
        self,
        objects: Objects,
        key: str,
        target: Parts,
        start: int,
        head: Head,
        cancel: Cancellation | None,
    ) -> bool:
        """Fill *target* by ranges side by side; False: not all were those of the object *head*."""

        def get(first: int, last: int) -> Got:
            pieces = body.cut(target, first, last)
            got = objects.get_into(self.name(key), pieces, start + first, start + last)
            told = got.etag is not None and is_object(head, got.total, got.etag)
            if got.nbytes != last - first and (told or stands()):
                raise Refused(Condition.LOST, f"{got.nbytes} of {last - first} bytes came")
            return got

        def stands() -> bool:
            now = self.head(objects, key, cancel)
            return is_object(head, now.nbytes, now.etag) and head.mtime_ns in (None, now.mtime_ns)

        step = self._options.part_bytes
        tasks = [
            partial(self._ask, partial(get, first, last), "read", key=key, cancel=cancel)
            for first, last in body.ranges(body.total_bytes(target), step)
        ]
        try:
            answers = self._run_all(tasks) if len(tasks) > 1 else [task() for task in tasks]
        except BlockSizeError:  # a range lies beyond the end
            if stands():
                raise
            return False
        if any(got.total == UNKNOWN for got in answers):  # the library tells nothing of an object
            return stands()
        return all(is_object(head, got.total, got.etag) for got in answers)

    def _check(self, objects: Objects, key: str, out: Parts, target: Parts, got: Got) -> int:
        room = body.total_bytes(out)
        if got.total > got.nbytes:  # longer than expected: a larger block, or a broken one
            raise _too_large(key, self.stat(objects, key).nbytes, room)
        end = body.join(body.cut(target, max(0, got.nbytes - trailers.NBYTES), got.nbytes))
        trailer = trailers.judge(end, total=got.total, namespace=self._options.namespace, key=key)
        if trailer.nbytes > room:
            raise _too_large(key, trailer.nbytes, room)
        if self._options.verify == "full":
            trailers.check_payload(trailer, body.cut(target, 0, trailer.nbytes), key)
        return trailer.nbytes


def is_object(head: Head, nbytes: int, etag: str | None) -> bool:
    """Tell whether an object of this length and ETag, where known, is the one of *head*."""
    return nbytes == head.nbytes and (None in (etag, head.etag) or etag == head.etag)


def replaced(key: str) -> TransientStorageError:
    """Make the error of a block that never stood still."""
    text = f"block {key!r} was replaced {_ATTEMPTS} times while it was read: ask again"
    return TransientStorageError(text, errno=errno.EBUSY, key=key)


def _too_large(key: str, nbytes: int, room: int) -> BlockSizeError:
    return BlockSizeError(f"block {key!r} has {nbytes} bytes, the buffer {room}", key=key)
