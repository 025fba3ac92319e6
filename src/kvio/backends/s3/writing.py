"""Write objects: resolve conflicts with existing blocks and verify what was stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from kvio.abc import RunAll
from kvio.backends.s3 import body
from kvio.backends.s3.client import Objects
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options
from kvio.backends.s3.probing import Server
from kvio.backends.s3.reading import Reader
from kvio.backends.s3.retries import RetryPolicy
from kvio.errors import (
    BlockExistsError,
    BlockNotFoundError,
    CorruptBlockError,
    KvioError,
    TransientStorageError,
)
from kvio.types import BlockStat, Cancellation, IfExists, IOMode, KiB, Level, Parts, Receipt

#: From this size on, checking for an existing block costs less than sending it in vain.
_CHECK_FIRST_NBYTES: Final = 256 * KiB
_HOW: Final = ("one request", "several parts")


class Upload(NamedTuple):
    """A block to be sent.

    Attributes:
        parts: the payload and the trailer.
        nbytes: length of the payload.
        checksum: CRC32C of the payload, or None.
        crc32c: CRC32C of the whole object, or None.
    """

    key: str
    parts: list[memoryview]
    nbytes: int
    checksum: int | None
    crc32c: int | None
    trailer: bytes

    @property
    def stored_nbytes(self) -> int:
        """Return the length of the object."""
        return self.nbytes + len(self.trailer)


class Writer:
    """Writes the blocks of one store."""

    def __init__(
        self,
        options: S3Options,
        request: RetryPolicy,
        reader: Reader,
        server: Server,
        run_all: RunAll,
    ) -> None:
        self._options = options
        self._request = request
        self._reader = reader
        self._server = server
        self._run_all = run_all
        self._level = Level(options.durability)
        self._durable = self._level is Level.DURABLE
        self._expect_existing = False

    def write(
        self,
        objects: Objects,
        key: str,
        parts: Parts,
        *,
        if_exists: IfExists,
        conditional: bool,
        cancel: Cancellation | None = None,
    ) -> Receipt:
        """Store a block; *conditional*: send If-None-Match, so only one writer of a key succeeds.

        Raises:
            KvioError: the block was not stored, or whether it was is unknown.
        """
        upload = self._prepare(key, parts, sent=objects.traits.checks_upload == "crc32c")
        if if_exists == "keep":
            return self._write_keep(objects, upload, conditional, cancel)
        if if_exists == "error":
            return self._write_new(objects, upload, conditional, cancel)
        return self._send(objects, upload, if_none_match=False, cancel=cancel)

    def _write_new(
        self,
        objects: Objects,
        upload: Upload,
        conditional: bool,  # noqa: FBT001  # private, a few lines away
        cancel: Cancellation | None,
    ) -> Receipt:
        exists = BlockExistsError(f"block {upload.key!r} exists", key=upload.key)
        several = upload.stored_nbytes > self._options.part_bytes
        if (several or not conditional) and self._reader.exists(objects, upload.key, cancel):
            raise exists  # a multipart upload would send the condition only after all the parts
        try:
            return self._send(objects, upload, if_none_match=conditional, cancel=cancel)
        except TransientStorageError:
            # A server may refuse the condition and close before it has taken the body.
            if conditional and self._holds_another(objects, upload, cancel):
                raise exists from None
            raise

    def _holds_another(self, objects: Objects, upload: Upload, cancel: Cancellation | None) -> bool:
        """Return whether a key has a block that is certainly not this one, which may be there."""
        try:
            found = self._reader.stat(objects, upload.key, cancel)
        except KvioError:
            return False
        return found.nbytes != upload.nbytes or (
            None not in (found.checksum, upload.checksum) and found.checksum != upload.checksum
        )

    def _write_keep(
        self,
        objects: Objects,
        upload: Upload,
        conditional: bool,  # noqa: FBT001  # private, a few lines away
        cancel: Cancellation | None,
    ) -> Receipt:
        check_first = (
            not conditional or self._expect_existing or upload.nbytes >= _CHECK_FIRST_NBYTES
        )
        if not check_first:
            try:
                return self._send(
                    objects, upload, if_none_match=True, retry_ambiguous=True, cancel=cancel
                )
            except BlockExistsError:
                self._expect_existing = True
        for if_none_match in (conditional, False):
            existing = self._existing(objects, upload.key, cancel)
            if existing is not None and existing.nbytes == upload.nbytes:
                return self._kept(upload.key, existing)
            self._expect_existing = False
            try:
                # A multipart upload would send the condition only after all the parts.
                one = upload.stored_nbytes <= self._options.part_bytes
                new = if_none_match and existing is None and one
                return self._send(
                    objects, upload, if_none_match=new, retry_ambiguous=True, cancel=cancel
                )
            except BlockExistsError:
                continue  # another writer was faster: check its block, replace it if corrupt
        raise AssertionError("unreachable")

    def _prepare(self, key: str, parts: Parts, *, sent: bool) -> Upload:
        """Return the upload with its trailer; *sent*: compute the checksum of the whole object."""
        checksum = body.crc32c(parts) if self._options.checksum == "crc32c" else None
        nbytes = body.total_bytes(parts)
        trailer = b""
        if self._options.layout == "block":
            trailer = body.make(self._options.namespace, key, nbytes, checksum)
        whole = [*parts, memoryview(trailer)] if trailer else list(parts)
        crc = None
        if sent and checksum is not None:
            crc = body.crc32c([memoryview(trailer)], checksum)
        return Upload(key, whole, nbytes, checksum, crc, trailer)

    def _send(
        self,
        objects: Objects,
        upload: Upload,
        *,
        if_none_match: bool,
        retry_ambiguous: bool = False,
        cancel: Cancellation | None,
    ) -> Receipt:
        """Put an object; *retry_ambiguous*: send again what may have been stored already."""
        name = self._reader.name(upload.key)
        several = upload.stored_nbytes > self._options.part_bytes
        put = partial(
            objects.put,
            name,
            upload.parts,
            crc32c=upload.crc32c,
            if_none_match=if_none_match,
            run_all=self._run_all,
        )
        if several or self._durable:
            read_back = self._durable and not self._is_checked_by_server(objects, upload)
            put = partial(self._put_and_verify, put, objects, name, upload, read_back=read_back)
        self._request(
            put,
            "write",
            key=upload.key,
            cancel=cancel,
            once_only=if_none_match and not retry_ambiguous,
        )
        return Receipt(
            upload.key,
            upload.nbytes,
            upload.checksum,
            self._level,
            IOMode.MULTIPART if several else IOMode.PUT,
            _HOW[several],
            existed=False,
        )

    def _is_checked_by_server(self, objects: Objects, upload: Upload) -> bool:
        """Return whether the server refuses this body if it was changed on its way."""
        by_hash = objects.traits.checks_upload == "sha256" and self._options.signs_payload
        return by_hash or (upload.crc32c is not None and self._server.checks_bodies(objects))

    def _put_and_verify(
        self,
        put: Callable[[], None],
        objects: Objects,
        name: str,
        upload: Upload,
        *,
        read_back: bool,
    ) -> None:
        """Send an object, then read its end, or with *read_back* all of it, and compare.

        Raises:
            RequestFailed: the stored object differs from what was sent; it has been deleted.
        """
        put()
        try:
            if read_back:
                good = self._read_back(objects, name, upload)
            elif upload.stored_nbytes > self._options.part_bytes:
                good = self._is_complete(objects, name, upload)
            else:
                return
        except BlockNotFoundError:
            raise RequestFailed(ErrorKind.MANGLED, "the server stored nothing") from None
        if not good:
            objects.delete(name)
            raise RequestFailed(ErrorKind.MANGLED, "the stored object differs from what was sent")

    def _is_complete(self, objects: Objects, name: str, upload: Upload) -> bool:
        if not upload.trailer:
            head = self._request(lambda: objects.head(name), "check the write of", key=upload.key)
            return head.nbytes == upload.stored_nbytes
        end, got = self._request(
            lambda: objects.get_tail(name, body.NBYTES), "check the write of", key=upload.key
        )
        if end == upload.trailer:
            return got.total == upload.stored_nbytes
        return self._is_other_block(end, got.total, upload.key)

    def _read_back(self, objects: Objects, name: str, upload: Upload) -> bool:
        if not self._is_complete(objects, name, upload):
            return False
        room = memoryview(bytearray(min(upload.stored_nbytes, self._options.part_bytes)))
        crc = 0
        for start, stop in body.ranges(upload.stored_nbytes, self._options.part_bytes):
            piece = room[: stop - start]
            got = self._request(
                partial(objects.get_into, name, [piece], start, stop),
                "check the write of",
                key=upload.key,
            )
            crc = body.crc32c([piece[: got.nbytes]], crc)
        return crc == body.crc32c(upload.parts)

    def _is_other_block(self, end: bytes, total: int, key: str) -> bool:
        """Return whether another writer has stored a valid block of this key meanwhile."""
        try:
            body.parse(end, total=total, namespace=self._options.namespace, key=key)
        except CorruptBlockError:
            return False
        return True

    def _existing(
        self, objects: Objects, key: str, cancel: Cancellation | None
    ) -> BlockStat | None:
        """Return the existing block of a key, with length -1 if it is corrupt."""
        try:
            return self._reader.stat(objects, key, cancel)
        except BlockNotFoundError:
            return None
        except CorruptBlockError:
            return BlockStat(key, -1, None, 0, None)

    def _kept(self, key: str, existing: BlockStat) -> Receipt:
        self._expect_existing = True
        reason = "there was an intact block of this length"
        level = self._level
        return Receipt(
            key, existing.nbytes, existing.checksum, level, IOMode.PUT, reason, existed=True
        )
