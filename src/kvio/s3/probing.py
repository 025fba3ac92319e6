"""What a server really does, whatever it says: found out with one small object."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvio.errors import BlockExistsError, KvioError
from kvio.s3 import body
from kvio.s3.asking import Asking, run_in_turn
from kvio.s3.conditions import Condition, Refused
from kvio.s3.objects import Objects
from kvio.s3.options import S3Options
from kvio.types import Finding

_PROBE: Final = ".kvio-probe-"
_DATA: Final = bytes(range(256))


class Conditions:
    """Whether conditional writes can be relied on; found out once, when it is first needed."""

    def __init__(self, options: S3Options, ask: Asking) -> None:
        self._probe = Probe(options, ask)
        self._lock = threading.Lock()
        self._known: bool | None = {"trust": True, "off": False}.get(options.conditional)

    def hold(self, objects: Objects) -> bool:
        """Tell whether the server refuses a second conditional write of one name."""
        if not objects.traits.conditional:
            return False
        with self._lock:
            if self._known is None:
                self._known = self._probe.refuses_second(objects)
            return self._known


class Probe:
    """Tries things out below the prefix of a store, and removes what it made."""

    def __init__(self, options: S3Options, ask: Asking) -> None:
        self._options = options
        self._ask = ask

    def refuses_second(self, objects: Objects) -> bool:
        """Write one name twice on condition that it is new."""
        with self._object(objects) as name:
            try:
                self._put(objects, name, only_new=True)
                self._put(objects, name, only_new=True)
            except BlockExistsError:
                return True
            except KvioError:
                return False  # it refuses the header, or us: then nothing is promised
        return False

    def findings(self, objects: Objects) -> Iterator[Finding]:
        """Say what the server does with conditions, checksums, ranges and ends of objects."""
        yield _told(
            "If-None-Match",
            objects.traits.conditional and self.refuses_second(objects),
            "The server decides which of several writers of a key was first.",
            "Of two writers both may succeed; keep and error look first, then write.",
        )
        if objects.traits.checks_upload == "crc32c":
            yield _told(
                "body checksums",
                self._refuses_wrong_checksum(objects),
                "A body that changed on its way is refused by the server.",
                "A body that changes on its way is stored; reading it finds out.",
            )
        yield _told(
            "ranges",
            self._answers_range(objects),
            "Large blocks are read in ranges side by side.",
            "Parts of a block cannot be read.",
        )
        yield Finding(
            "connection",
            "TLS" if self._options.tls else "plain http",
            self._options.tls or None,
            "Bodies are hashed for their signature."
            if self._options.signs_payload
            else "Bodies are not hashed twice: their signature covers the headers.",
        )

    def _refuses_wrong_checksum(self, objects: Objects) -> bool:
        wrong = body.crc32c([memoryview(_DATA)]) ^ 1
        with self._object(objects) as name:
            try:
                objects.put(
                    name,
                    [memoryview(_DATA)],
                    crc32c=wrong,
                    only_new=False,
                    run_all=run_in_turn,
                )
            except Refused as refused:
                return refused.condition is Condition.MANGLED
        return False

    def _answers_range(self, objects: Objects) -> bool:
        room = memoryview(bytearray(16))
        with self._object(objects) as name:
            self._put(objects, name, only_new=False)
            try:
                self._ask(lambda: objects.get_into(name, [room], 16, 32), "read a range")
            except KvioError:
                return False
        return bytes(room) == _DATA[16:32]

    def _put(self, objects: Objects, name: str, *, only_new: bool) -> None:
        def put() -> None:
            data = [memoryview(_DATA)]
            objects.put(name, data, crc32c=None, only_new=only_new, run_all=run_in_turn)

        self._ask(put, "probe the server", once_only=only_new)

    @contextmanager
    def _object(self, objects: Objects) -> Iterator[str]:
        name = f"{self._options.name_prefix}{_PROBE}{secrets.token_hex(16)}"
        try:
            yield name
        finally:
            self._ask(lambda: objects.delete(name), "remove the probe")


def _told(name: str, good: bool, meaning: str, otherwise: str) -> Finding:  # noqa: FBT001
    answer = "honoured" if good else "not honoured"
    return Finding(name, answer, good, meaning if good else otherwise)
