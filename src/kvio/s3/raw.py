"""The object of a block as it is, while it is decided what becomes of it."""

from __future__ import annotations

from kvio.abc import RawBlock
from kvio.s3.objects import Head, Objects
from kvio.s3.reading import Reader, is_object, replaced


class RawObject(RawBlock):
    """One object, as long as it stands; others may lie between the blocks of a bucket."""

    placed = False

    def __init__(self, reader: Reader, objects: Objects, key: str) -> None:
        self._reader = reader
        self._objects = objects
        self._key = key
        self._head: Head = reader.head(objects, key, None)
        self.nbytes = self._head.nbytes

    def read_into(self, out: memoryview, offset: int) -> None:
        """Fill *out* by ranges of the object, as long as it is the same."""
        if len(out) and not self._reader.fill(self._objects, self._key, out, offset, self._head):
            raise replaced(self._key)

    def is_current(self) -> bool:
        """Ask the server; an object of the same ETag is the same."""
        if not self._reader.exists(self._objects, self._key, None):
            return False
        now = self._reader.head(self._objects, self._key, None)
        same = is_object(self._head, now.nbytes, now.etag)
        return same and now.mtime_ns == self._head.mtime_ns
