"""The buckets, their objects and their uploads; every change of one bucket under its lock."""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from benchmarks.s3mem import checksums
from benchmarks.s3mem.errors import S3Error
from benchmarks.s3mem.memory import Block, Zeros
from benchmarks.s3mem.wire import date

Piece: TypeAlias = Block | Zeros

LEAST_PART_BYTES: Final = 5 << 20
MOST_PARTS: Final = 10_000
_LONGEST_KEY_BYTES: Final = 1024
_BUCKET_NAME: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One version of one object; *head* is the part of a response's head that it fixes."""

    pieces: tuple[Piece, ...]
    nbytes: int
    etag: str
    modified: float
    head: str
    checksums: dict[str, str]

    def views(self, start: int, stop: int) -> list[memoryview]:
        """Return the bytes from *start* to *stop*, as they lie."""
        if len(self.pieces) == 1:
            view = self.pieces[0].view
            return [view if stop - start == len(view) else view[start:stop]]
        views, at = [], 0
        for piece in self.pieces:
            first, last = max(start - at, 0), min(stop - at, len(piece))
            if first < last:
                views.append(piece.view[first:last])
            at += len(piece)
        return views


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an upload, as it was received."""

    piece: Piece
    etag: str
    modified: float


@dataclass(slots=True)
class Upload:
    """A multipart upload that has not been completed."""

    key: str
    headers: str
    started: float
    parts: dict[int, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conditions:
    """What must hold of the standing object for a write to happen."""

    if_match: str | None = None
    if_none_match: str | None = None

    def check(self, standing: StoredObject | None) -> None:
        """Raise the refusal that S3 has for a condition that does not hold."""
        if self.if_none_match is not None:
            if self.if_none_match != "*":
                raise S3Error("NotImplemented", "If-None-Match of a write must be *.")
            if standing is not None:
                raise S3Error("PreconditionFailed")
        if self.if_match is not None:
            if standing is None:
                raise S3Error("NoSuchKey")
            if not matches(self.if_match, standing.etag):
                raise S3Error("PreconditionFailed")


def matches(condition: str, etag: str) -> bool:
    """Return whether an entity tag is among those of an If-Match or If-None-Match."""
    return condition == "*" or etag in (tag.strip().strip('"') for tag in condition.split(","))


class Bucket:
    """One bucket; thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.created = time.time()
        self.lock = threading.Lock()
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, Upload] = {}
        self._keys: list[str] | None = []

    def get(self, key: str) -> StoredObject:
        """Return an object."""
        found = self.objects.get(key)
        if found is None:
            raise S3Error("NoSuchKey")
        return found

    def put(self, key: str, stored: StoredObject, conditions: Conditions) -> None:
        """Store an object if the conditions hold."""
        with self.lock:
            standing = self.objects.get(key)
            conditions.check(standing)
            self._keep(key, stored, is_new=standing is None)

    def delete(self, key: str, conditions: Conditions = Conditions()) -> None:
        """Delete an object; one that is not there is no error."""
        with self.lock:
            if conditions.if_match is not None:
                conditions.check(self.objects.get(key))
            if self.objects.pop(key, None) is not None:
                self._keys = None

    def keys(self) -> list[str]:
        """Return the keys in the order of their UTF-8; the list is not to be changed."""
        with self.lock:
            if self._keys is None:
                self._keys = sorted(self.objects)
            return self._keys

    def upload(self, upload_id: str, key: str) -> Upload:
        """Return an upload that goes on."""
        found = self.uploads.get(upload_id)
        if found is None or found.key != key:
            raise S3Error("NoSuchUpload")
        return found

    def complete(
        self, upload_id: str, key: str, stored: StoredObject, conditions: Conditions
    ) -> None:
        """Make an upload an object if it still goes on and the conditions hold."""
        with self.lock:
            self.upload(upload_id, key)
            standing = self.objects.get(key)
            conditions.check(standing)
            del self.uploads[upload_id]
            self._keep(key, stored, is_new=standing is None)

    def _keep(self, key: str, stored: StoredObject, *, is_new: bool) -> None:
        self.objects[key] = stored
        if is_new:
            self._keys = None


class Buckets:
    """All there is.

    Args:
        etag: ``md5``, the MD5 of a body as S3 has it; or ``cheap``, a number per write, with a
            dash in it so that no client takes it for an MD5.
    """

    def __init__(self, etag: Literal["md5", "cheap"]) -> None:
        self._etag = etag
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._buckets: dict[str, Bucket] = {}

    def names(self) -> list[Bucket]:
        """Return the buckets in the order of their names."""
        with self._lock:
            return [self._buckets[name] for name in sorted(self._buckets)]

    def get(self, name: str) -> Bucket:
        """Return a bucket."""
        found = self._buckets.get(name)
        if found is None:
            raise S3Error("NoSuchBucket")
        return found

    def create(self, name: str) -> None:
        """Make an empty bucket."""
        if not _BUCKET_NAME.fullmatch(name):
            raise S3Error("InvalidBucketName")
        with self._lock:
            if name in self._buckets:
                raise S3Error("BucketAlreadyOwnedByYou")
            self._buckets[name] = Bucket(name)

    def delete(self, name: str) -> None:
        """Delete an empty bucket."""
        with self._lock:
            bucket = self.get(name)
            if bucket.objects:
                raise S3Error("BucketNotEmpty")
            del self._buckets[name]

    def tag(self, piece: Piece) -> str:
        """Return the entity tag of one body."""
        if self._etag == "md5":
            return checksums.hashed("md5", [piece.view]).hex()
        return f"{next(self._numbers):032x}-0"

    def upload_id(self) -> str:
        """Return a name that no upload had."""
        return f"{time.time_ns():x}-{next(self._numbers):x}"

    def joint_tag(self, parts: Sequence[Part]) -> str:
        """Return the entity tag of a body made of parts."""
        if self._etag == "cheap":
            return f"{next(self._numbers):032x}-{len(parts)}"
        digests = b"".join(bytes.fromhex(part.etag) for part in parts)
        return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(parts)}"


def check_key(key: str) -> None:
    """Refuse a key that is too long."""
    if len(key) * 4 > _LONGEST_KEY_BYTES and len(key.encode()) > _LONGEST_KEY_BYTES:
        raise S3Error("KeyTooLongError")


def stored(
    pieces: tuple[Piece, ...], etag: str, headers: str, held: dict[str, str]
) -> StoredObject:
    """Return an object stored now, with the head that its responses will have."""
    modified = time.time()
    head = f'ETag: "{etag}"\r\nLast-Modified: {date(modified)}\r\nAccept-Ranges: bytes\r\n{headers}'
    nbytes = sum(len(piece) for piece in pieces)
    return StoredObject(pieces, nbytes, etag, modified, head, held)


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a listing, in order; the last name goes on where the page ends."""

    objects: list[tuple[str, StoredObject]]
    prefixes: list[str]
    last: str
    is_truncated: bool


def page(bucket: Bucket, *, prefix: str, delimiter: str, after: str, most: int) -> Page:
    """Return up to *most* names that follow *after*, those that share a delimiter rolled up.

    What *after* starts with counts as listed when it is a rolled-up name itself.
    """
    keys = bucket.keys()
    at = max(bisect_left(keys, prefix), bisect_left(keys, after + "\0") if after else 0)
    if _is_rolled_up(after, prefix, delimiter):
        at = max(at, _behind(keys, after, at))
    objects: list[tuple[str, StoredObject]] = []
    prefixes: list[str] = []
    last = after
    while at < len(keys) and keys[at].startswith(prefix):
        if len(objects) + len(prefixes) >= most:
            return Page(objects, prefixes, last, bool(most))
        key = keys[at]
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        if end >= 0:
            last = key[: end + len(delimiter)]
            prefixes.append(last)
            at = _behind(keys, last, at)
            continue
        at += 1
        if (found := bucket.objects.get(key)) is not None:  # it may have been deleted meanwhile
            objects.append((key, found))
            last = key
    return Page(objects, prefixes, last, False)


def _is_rolled_up(name: str, prefix: str, delimiter: str) -> bool:
    if not delimiter or not name.startswith(prefix):
        return False
    return name.find(delimiter, len(prefix)) == len(name) - len(delimiter) >= 0


def _behind(keys: list[str], prefix: str, at: int) -> int:
    """Return where the keys from *at* on no longer start with *prefix*."""
    return bisect_left(keys, True, at, key=lambda key: key > prefix and not key.startswith(prefix))
