"""Read an object's raw bytes, for a block that is checked or quarantined."""

from __future__ import annotations

from kvio.abc import RawBlock
from kvio.s3.objects import Head, Objects
from kvio.s3.reading import Reader, is_same_object, replaced_error


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
