"""Test what a server supports, with one small object."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from kvio.backends.s3 import body
from kvio.backends.s3.client import Objects
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options
from kvio.backends.s3.retries import RetryPolicy, run_sequentially
from kvio.errors import BlockExistsError, KvioError
from kvio.types import Finding

_PROBE: Final = ".kvio-probe-"
_DATA: Final = bytes(range(256))


class ConditionalWrites:
    """Finds out once, on first use, whether the server supports conditional writes."""

    def __init__(self, options: S3Options, request: RetryPolicy) -> None:
        self._probe = Probe(options, request)
        self._lock = threading.Lock()
        self._known: bool | None = {"trust": True, "off": False}.get(options.conditional)

    def honoured(self, objects: Objects) -> bool:
        """Return whether the server refuses a second conditional write of one name."""
        if not objects.traits.conditional:
            return False
        with self._lock:
            if self._known is None:
                self._known = self._probe.refuses_second(objects)
            return self._known


class Probe:
    """Tests the server with temporary objects below the store's prefix."""

    def __init__(self, options: S3Options, request: RetryPolicy) -> None:
        self._options = options
        self._request = request

    def refuses_second(self, objects: Objects) -> bool:
        """Write one name twice with If-None-Match; return whether the second write failed."""
        with self._object(objects) as name:
            try:
                self._put(objects, name, if_none_match=True)
                self._put(objects, name, if_none_match=True)
            except BlockExistsError:
                return True
            except KvioError:
                return False  # the server rejects the header or the request
        return False

    def findings(self, objects: Objects) -> Iterator[Finding]:
        """Yield findings about conditional writes, checksums, ranges and the connection."""
        yield _finding(
            "If-None-Match",
            objects.traits.conditional and self.refuses_second(objects),
            "Of several writers of a new key exactly one succeeds.",
            "Two writers of a key may both succeed; keep and error check, then write.",
        )
        if objects.traits.checks_upload == "crc32c":
            yield _finding(
                "body checksums",
                self._refuses_wrong_checksum(objects),
                "The server refuses a body that was changed on its way.",
                "The server stores a body that was changed on its way; a read detects it.",
            )
        yield _finding(
            "ranges",
            self._answers_range(objects),
            "Large blocks are read as parallel ranges.",
            "Parts of a block cannot be read.",
        )
        yield Finding(
            "connection",
            "TLS" if self._options.tls else "plain http",
            self._options.tls or None,
            "The signature includes a SHA-256 of the body."
            if self._options.signs_payload
            else "The signature covers the headers only, so bodies are not hashed for it.",
        )

    def _refuses_wrong_checksum(self, objects: Objects) -> bool:
        wrong = body.crc32c([memoryview(_DATA)]) ^ 1
        with self._object(objects) as name:
            try:
                objects.put(
                    name,
                    [memoryview(_DATA)],
                    crc32c=wrong,
                    if_none_match=False,
                    run_all=run_sequentially,
                )
            except RequestFailed as failed:
                return failed.kind is ErrorKind.MANGLED
        return False

    def _answers_range(self, objects: Objects) -> bool:
        room = memoryview(bytearray(16))
        with self._object(objects) as name:
            self._put(objects, name, if_none_match=False)
            try:
                self._request(lambda: objects.get_into(name, [room], 16, 32), "read a range")
            except KvioError:
                return False
        return bytes(room) == _DATA[16:32]

    def _put(self, objects: Objects, name: str, *, if_none_match: bool) -> None:
        def put() -> None:
            data = [memoryview(_DATA)]
            objects.put(
                name, data, crc32c=None, if_none_match=if_none_match, run_all=run_sequentially
            )

        self._request(put, "probe the server", once_only=if_none_match)

    @contextmanager
    def _object(self, objects: Objects) -> Iterator[str]:
        name = f"{self._options.name_prefix}{_PROBE}{secrets.token_hex(16)}"
        try:
            yield name
        finally:
            self._request(lambda: objects.delete(name), "remove the probe")


def _finding(name: str, good: bool, meaning: str, otherwise: str) -> Finding:  # noqa: FBT001
    answer = "honoured" if good else "not honoured"
    return Finding(name, answer, good, meaning if good else otherwise)
