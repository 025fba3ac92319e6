"""Writing objects: who was first, what stood there, and whether it arrived whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from kvio.abc import RunAll
from kvio.errors import BlockExistsError, BlockNotFoundError, CorruptBlockError
from kvio.s3 import body, trailers
from kvio.s3.asking import Asking
from kvio.s3.conditions import Condition, Refused
from kvio.s3.objects import Objects
from kvio.s3.options import S3Options
from kvio.s3.reading import Reader
from kvio.types import BlockStat, Cancellation, IfExists, IOMode, KiB, Level, Parts, Receipt

#: From here on asking whether a block stands there costs less than sending it in vain.
_LOOK_FIRST_NBYTES: Final = 256 * KiB
_HOW: Final = ("one request", "several parts")


class Sending(NamedTuple):
    """One block on its way.

    Attributes:
        parts: what the object will hold, its trailer too.
        nbytes: of the payload.
        checksum: CRC32C of the payload, or None.
        crc32c: of the whole object, or None.
    """

    key: str
    parts: list[memoryview]
    nbytes: int
    checksum: int | None
    crc32c: int | None
    trailer: bytes

    @property
    def stored_nbytes(self) -> int:
        """How long the object will be."""
        return self.nbytes + len(self.trailer)


class Writer:
    """Writes the blocks of one store."""

    def __init__(self, options: S3Options, ask: Asking, reader: Reader, run_all: RunAll) -> None:
        self._options = options
        self._ask = ask
        self._reader = reader
        self._run_all = run_all
        self._level = Level(options.durability)
        self._durable = self._level is Level.DURABLE
        self._expect_standing = False

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
        """Store a block; *conditional*: the server decides who is first.

        Raises:
            KvioError: it was not stored, or nobody can tell.
        """
        sending = self._prepare(key, parts, sent=objects.traits.checks_upload == "crc32c")
        if if_exists == "keep":
            return self._write_keeping(objects, sending, conditional, cancel)
        strict = if_exists == "error"
        if strict and not conditional and self._reader.exists(objects, key, cancel):
            raise BlockExistsError(f"block {key!r} exists", key=key)
        return self._send(objects, sending, only_new=strict and conditional, cancel=cancel)

    def _write_keeping(
        self,
        objects: Objects,
        sending: Sending,
        conditional: bool,  # noqa: FBT001  # private, a few lines away
        cancel: Cancellation | None,
    ) -> Receipt:
        look = not conditional or self._expect_standing or sending.nbytes >= _LOOK_FIRST_NBYTES
        if not look:
            try:
                return self._send(objects, sending, only_new=True, again=True, cancel=cancel)
            except BlockExistsError:
                self._expect_standing = True
        for only_new in (conditional, False):
            standing = self._standing(objects, sending.key, cancel)
            if standing is not None and standing.nbytes == sending.nbytes:
                return self._kept(sending.key, standing)
            self._expect_standing = False
            try:
                # For parts the question would come when all of them are there: too late to help.
                one = sending.stored_nbytes <= self._options.part_bytes
                new = only_new and standing is None and one
                return self._send(objects, sending, only_new=new, again=True, cancel=cancel)
            except BlockExistsError:
                continue  # it came between; the second time it is judged and, if broken, replaced
        raise AssertionError("unreachable")

    def _prepare(self, key: str, parts: Parts, *, sent: bool) -> Sending:
        """Make the trailer; *sent*: the server is told the checksum of the whole."""
        checksum = body.crc32c(parts) if self._options.checksum == "crc32c" else None
        nbytes = body.total_bytes(parts)
        trailer = b""
        if self._options.layout == "block":
            trailer = trailers.make(self._options.namespace, key, nbytes, checksum)
        whole = [*parts, memoryview(trailer)] if trailer else list(parts)
        crc = None
        if sent and checksum is not None:
            crc = body.crc32c([memoryview(trailer)], checksum)
        return Sending(key, whole, nbytes, checksum, crc, trailer)

    def _send(
        self,
        objects: Objects,
        sending: Sending,
        *,
        only_new: bool,
        again: bool = False,
        cancel: Cancellation | None,
    ) -> Receipt:
        """Put an object; *again*: what may have been stored already may be sent again."""
        name = self._reader.name(sending.key)
        several = sending.stored_nbytes > self._options.part_bytes
        put = partial(
            objects.put,
            name,
            sending.parts,
            crc32c=sending.crc32c,
            only_new=only_new,
            run_all=self._run_all,
        )
        if several or self._durable:
            put = partial(self._put_and_confirm, put, objects, name, sending)
        self._ask(
            put,
            "write",
            key=sending.key,
            cancel=cancel,
            once_only=only_new and not again,
        )
        return Receipt(
            sending.key,
            sending.nbytes,
            sending.checksum,
            self._level,
            IOMode.MULTIPART if several else IOMode.PUT,
            _HOW[several],
            existed=False,
        )

    def _put_and_confirm(
        self, put: Callable[[], None], objects: Objects, name: str, sending: Sending
    ) -> None:
        """Look at what was stored in parts, and at durable blocks that no server has checked.

        Raises:
            Refused: it is not what was sent; nothing broken is left.
        """
        put()
        by_hash = objects.traits.checks_upload == "sha256" and self._options.signs_payload
        unchecked = sending.crc32c is None and not by_hash
        try:
            if self._durable and unchecked:
                good = self._read_back(objects, name, sending)
            elif sending.stored_nbytes > self._options.part_bytes:
                good = self._looks_whole(objects, name, sending)
            else:
                return
        except BlockNotFoundError:
            raise Refused(Condition.MANGLED, "nothing was stored") from None
        if not good:
            objects.delete(name)
            raise Refused(Condition.MANGLED, "what was stored is not what was sent")

    def _looks_whole(self, objects: Objects, name: str, sending: Sending) -> bool:
        if not sending.trailer:
            head = self._ask(lambda: objects.head(name), "check the write of", key=sending.key)
            return head.nbytes == sending.stored_nbytes
        end, got = self._ask(
            lambda: objects.get_tail(name, trailers.NBYTES), "check the write of", key=sending.key
        )
        if end == sending.trailer:
            return got.total == sending.stored_nbytes
        return self._is_another(end, got.total, sending.key)

    def _read_back(self, objects: Objects, name: str, sending: Sending) -> bool:
        if not self._looks_whole(objects, name, sending):
            return False
        room = memoryview(bytearray(min(sending.stored_nbytes, self._options.part_bytes)))
        crc = 0
        for start, stop in body.ranges(sending.stored_nbytes, self._options.part_bytes):
            piece = room[: stop - start]
            got = self._ask(
                partial(objects.get_into, name, [piece], start, stop),
                "check the write of",
                key=sending.key,
            )
            crc = body.crc32c([piece[: got.nbytes]], crc)
        return crc == body.crc32c(sending.parts)

    def _is_another(self, end: bytes, total: int, key: str) -> bool:
        """Tell whether another writer's good block stands there by now."""
        try:
            trailers.judge(end, total=total, namespace=self._options.namespace, key=key)
        except CorruptBlockError:
            return False
        return True

    def _standing(
        self, objects: Objects, key: str, cancel: Cancellation | None
    ) -> BlockStat | None:
        """Describe what stands under a key, as a block of impossible length where it is broken."""
        try:
            return self._reader.stat(objects, key, cancel)
        except BlockNotFoundError:
            return None
        except CorruptBlockError:
            return BlockStat(key, -1, None, 0, None)

    def _kept(self, key: str, standing: BlockStat) -> Receipt:
        self._expect_standing = True
        reason = "an intact block of this length stood there"
        level = self._level
        return Receipt(
            key, standing.nbytes, standing.checksum, level, IOMode.PUT, reason, existed=True
        )
