"""Read and validate objects: whole, as parallel ranges, in part, or only the trailer."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

from kvio.abc import RawBlock, RunAll
from kvio.backends.s3 import body
from kvio.backends.s3.client import UNKNOWN, GetResult, Head, Objects
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options
from kvio.backends.s3.retries import RetryPolicy
from kvio.core.buffers import aligned, trimmed
from kvio.errors import (
    BlockNotFoundError,
    BlockSizeError,
    CorruptBlockError,
    OutOfMemoryError,
    TransientStorageError,
)
from kvio.types import BlockStat, Cancellation, Parts

T = TypeVar("T")

#: Attempts while the object is replaced between the requests of one read.
_ATTEMPTS: Final = 4
#: One byte behind the caller's buffer detects an object that is too long. Its value is not used.
_EXTRA_BYTE: Final = memoryview(bytearray(1))


class Reader:
    """Reads and validates the blocks of one store."""

    def __init__(self, options: S3Options, request: RetryPolicy, run_all: RunAll) -> None:
        self._options = options
        self._request = request
        self._run_all = run_all
        self._guess_nbytes = 0

    def name(self, key: str) -> str:
        """Return the name of the object that holds a key."""
        return self._options.name_prefix + key

    def stat(self, objects: Objects, key: str, cancel: Cancellation | None = None) -> BlockStat:
        """Return a block's description from its trailer, or from its length if layout=plain.

        Raises:
            KvioError: there is no such block, or its trailer is invalid.
        """
        return self._stat_and_head(objects, key, cancel)[0]

    def _stat_and_head(
        self, objects: Objects, key: str, cancel: Cancellation | None
    ) -> tuple[BlockStat, Head]:
        """Return a block's description and the metadata of the object it was read from."""
        if self._options.layout == "plain":
            head = self.head(objects, key, cancel)
            return BlockStat(key, head.nbytes, None, head.nbytes, head.mtime_ns), head

        def read() -> tuple[BlockStat, Head]:
            get = partial(objects.get_tail, self.name(key), body.NBYTES)
            end, got = self._request(get, "stat", key=key, cancel=cancel)
            trailer = body.parse(end, total=got.total, namespace=self._options.namespace, key=key)
            stat = BlockStat(key, trailer.nbytes, trailer.checksum, got.total, got.mtime_ns)
            return stat, Head(got.total, None, got.etag)

        return self._again_if_corrupt(read, cancel)

    def _again_if_corrupt(self, read: Callable[[], T], cancel: Cancellation | None) -> T:
        """Read; once more where the bytes are wrong, because they may have changed on the way."""
        try:
            return read()
        except CorruptBlockError:
            if (cancel is not None and cancel.requested) or not self._request.allows_another():
                raise
        return read()

    def whole(
        self, objects: Objects, key: str, out: Parts, cancel: Cancellation | None = None
    ) -> int:
        """Read a whole block into *out*, validate it, and return its length.

        Raises:
            KvioError: there is no such block, it does not fit, or it is corrupt.
        """
        if self._options.layout == "plain":
            got = self._fetch(objects, key, [*out, _EXTRA_BYTE], cancel)
            nbytes, room = got.nbytes, body.total_bytes(out)
            if got.total > room:
                raise _too_large(key, got.total, room)
        else:
            target = [*out, memoryview(bytearray(body.NBYTES))]
            nbytes = self._again_if_corrupt(
                lambda: self._check(
                    objects, key, out, target, self._fetch(objects, key, target, cancel)
                ),
                cancel,
            )
        self._guess_nbytes = max(nbytes, self._guess_nbytes * 15 // 16)
        return nbytes

    def read_new(
        self, objects: Objects, key: str, cancel: Cancellation | None = None
    ) -> memoryview | None:
        """Read a whole block into a new buffer whose size is guessed from earlier blocks.

        Return None if there is no guess or it is too small: the caller must ask for the length.
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
        """Read at most *nbytes* bytes from *start* into *out*; validate only the trailer.

        Raises:
            KvioError: there is no such block, its trailer is invalid, or it ends before *start*.
        """
        target = body.cut(out, 0, nbytes)
        if self._options.layout == "plain" and body.total_bytes(target) <= self._options.part_bytes:
            return self._one_range(objects, key, target, start, cancel)
        for _ in range(_ATTEMPTS):
            stat, head = self._stat_and_head(objects, key, cancel)
            if start > stat.nbytes:
                raise BlockSizeError(f"offset {start} lies beyond block {key!r}", key=key)
            wanted = body.cut(target, 0, stat.nbytes - start)
            if self._get_ranges(objects, key, wanted, start, head, cancel):
                return body.total_bytes(wanted)
        raise replaced_error(key)

    def nbytes(self, objects: Objects, key: str, cancel: Cancellation | None = None) -> int:
        """Return a block's length; validate its trailer."""
        return self.stat(objects, key, cancel).nbytes

    def scrub(self, objects: Objects, key: str, cancel: Cancellation | None = None) -> int:
        """Read and validate a whole block and return its length."""
        return self._again_if_corrupt(lambda: self._scrub_once(objects, key, cancel), cancel)

    def _scrub_once(self, objects: Objects, key: str, cancel: Cancellation | None) -> int:
        for _ in range(_ATTEMPTS):
            stat, head = self._stat_and_head(objects, key, cancel)
            crc = self._checksum(objects, key, stat.nbytes, head, cancel)
            if crc is None:
                continue
            if stat.checksum not in (None, crc):
                text = f"block {key!r} is corrupt: the payload's checksum is wrong"
                raise CorruptBlockError(text, key=key)
            return stat.nbytes
        raise replaced_error(key)

    def _checksum(
        self, objects: Objects, key: str, nbytes: int, head: Head, cancel: Cancellation | None
    ) -> int | None:
        """Return the checksum of a payload, or None if the object was replaced meanwhile."""
        room = memoryview(bytearray(min(nbytes, self._options.part_bytes)))
        crc = 0
        for start, stop in body.ranges(nbytes, self._options.part_bytes):
            piece = room[: stop - start]
            if not self._get_ranges(objects, key, [piece], start, head, cancel):
                return None
            crc = body.crc32c([piece], crc)
        return crc

    def fill(self, objects: Objects, key: str, out: memoryview, start: int, head: Head) -> bool:
        """Read an object's bytes from *start* into *out*; return False if it is not *head* now."""
        return self._get_ranges(objects, key, [out], start, head, None)

    def head(self, objects: Objects, key: str, cancel: Cancellation | None) -> Head:
        """Return the metadata of the object that holds a key."""
        return self._request(lambda: objects.head(self.name(key)), "stat", key=key, cancel=cancel)

    def exists(self, objects: Objects, key: str, cancel: Cancellation | None) -> bool:
        """Return whether the object exists; its content is not checked."""
        try:
            self.head(objects, key, cancel)
        except BlockNotFoundError:
            return False
        return True

    def _fetch(
        self, objects: Objects, key: str, target: Parts, cancel: Cancellation | None
    ) -> GetResult:
        """Read an object from its beginning, as far as it fits."""
        room = body.total_bytes(target)
        if room <= self._options.part_bytes + body.NBYTES:
            get = partial(objects.get_into, self.name(key), target, 0, None)
            return self._request(get, "read", key=key, cancel=cancel)
        for _ in range(_ATTEMPTS):
            head = self.head(objects, key, cancel)
            wanted = body.cut(target, 0, head.nbytes)
            if self._get_ranges(objects, key, wanted, 0, head, cancel):
                return GetResult(body.total_bytes(wanted), head.nbytes, head.etag)
        raise replaced_error(key)

    def _one_range(
        self, objects: Objects, key: str, target: Parts, start: int, cancel: Cancellation | None
    ) -> int:
        stop = start + body.total_bytes(target)
        if stop > start:
            try:
                get = partial(
                    objects.get_into, self.name(key), target, start, stop, with_metadata=False
                )
                return self._request(get, "read", key=key, cancel=cancel).nbytes
            except BlockSizeError:
                pass  # *start* is at or beyond the end
        if start > self.head(objects, key, cancel).nbytes:
            raise BlockSizeError(f"offset {start} lies beyond block {key!r}", key=key)
        return 0

    def _get_ranges(
        self,
        objects: Objects,
        key: str,
        target: Parts,
        start: int,
        head: Head,
        cancel: Cancellation | None,
    ) -> bool:
        """Read parallel ranges into *target*; return False unless all are of the object *head*."""

        def get(first: int, last: int) -> GetResult:
            pieces = body.cut(target, first, last)
            got = objects.get_into(self.name(key), pieces, start + first, start + last)
            same = got.etag is not None and is_same_object(head, got.total, got.etag)
            if got.nbytes != last - first and (same or unchanged()):
                raise RequestFailed(
                    ErrorKind.LOST, f"received {got.nbytes} of {last - first} bytes"
                )
            return got

        def unchanged() -> bool:
            now = self.head(objects, key, cancel)
            return is_same_object(head, now.nbytes, now.etag) and head.mtime_ns in (
                None,
                now.mtime_ns,
            )

        step = self._options.part_bytes
        tasks = [
            partial(self._request, partial(get, first, last), "read", key=key, cancel=cancel)
            for first, last in body.ranges(body.total_bytes(target), step)
        ]
        try:
            results = self._run_all(tasks) if len(tasks) > 1 else [task() for task in tasks]
        except BlockSizeError:  # a range is beyond the end: was the object replaced?
            if unchanged():
                raise
            return False
        if any(got.total == UNKNOWN for got in results):  # the library returns no metadata
            return unchanged()
        return all(is_same_object(head, got.total, got.etag) for got in results)

    def _check(self, objects: Objects, key: str, out: Parts, target: Parts, got: GetResult) -> int:
        room = body.total_bytes(out)
        if got.total > got.nbytes:  # the block is larger than the buffer, or corrupt
            raise _too_large(key, self.stat(objects, key).nbytes, room)
        end = body.join(body.cut(target, max(0, got.nbytes - body.NBYTES), got.nbytes))
        trailer = body.parse(end, total=got.total, namespace=self._options.namespace, key=key)
        if trailer.nbytes > room:
            raise _too_large(key, trailer.nbytes, room)
        if self._options.verify == "full":
            body.check_payload(trailer, body.cut(target, 0, trailer.nbytes), key)
        return trailer.nbytes


def is_same_object(head: Head, nbytes: int, etag: str | None) -> bool:
    """Return whether this length and ETag, if known, are those of *head*."""
    return nbytes == head.nbytes and (None in (etag, head.etag) or etag == head.etag)


def replaced_error(key: str) -> TransientStorageError:
    """Return the error for a block that was replaced during every attempt to read it."""
    text = f"block {key!r} was replaced {_ATTEMPTS} times while it was read: retry"
    return TransientStorageError(text, errno=errno.EBUSY, key=key)


def _too_large(key: str, nbytes: int, room: int) -> BlockSizeError:
    return BlockSizeError(f"block {key!r} has {nbytes} bytes, the buffer only {room}", key=key)


# --------------------------------------------------------------------------------------------------
# Read an object's raw bytes, for a block that is checked or quarantined.


class RawObject(RawBlock):
    """One version of an object; the bucket may also hold objects that are not blocks."""

    placed = False

    def __init__(self, reader: Reader, objects: Objects, key: str) -> None:
        self._reader = reader
        self._objects = objects
        self._key = key
        self._head: Head = reader.head(objects, key, None)
        self.nbytes = self._head.nbytes

    def read_into(self, out: memoryview, offset: int) -> None:
        """Read a range of the object into *out*; fail if the object was replaced."""
        if len(out) and not self._reader.fill(self._objects, self._key, out, offset, self._head):
            raise replaced_error(self._key)

    def is_current(self) -> bool:
        """Return whether the server still has the object with the same ETag and time."""
        if not self._reader.exists(self._objects, self._key, None):
            return False
        now = self._reader.head(self._objects, self._key, None)
        same = is_same_object(self._head, now.nbytes, now.etag)
        return same and now.mtime_ns == self._head.mtime_ns
