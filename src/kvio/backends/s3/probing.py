"""Test what a server supports, with one small object."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from kvio.backends.s3 import body
from kvio.backends.s3.client import Objects
from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options
from kvio.backends.s3.retries import RetryPolicy, run_sequentially
from kvio.core import threads
from kvio.errors import BlockExistsError, KvioError
from kvio.types import Finding

_PROBE: Final = ".kvio-probe-"
_DATA: Final = bytes(range(256))
#: Writers of one name at once, and names. The first name's writers open connections first.
_RACERS: Final = 8
_RACES: Final = 3


class Server:
    """What a server is known to do; each answer is found out once, on first use."""

    def __init__(self, options: S3Options, request: RetryPolicy) -> None:
        self._probe = Probe(options, request)
        self._lock = threading.Lock()
        self._conditions: bool | None = {"trust": True, "off": False}.get(options.conditional)
        self._races = self._conditions
        self._checksums: bool | None = None

    def honours_conditions(self, objects: Objects) -> bool:
        """Return whether the server refuses a second conditional write of one name."""
        if not objects.traits.conditional:
            return False
        with self._lock:
            if self._conditions is None:
                self._conditions = self._probe.refuses_second(objects)
            return self._conditions

    def lets_one_win(self, objects: Objects) -> bool:
        """Return whether of several conditional writes of one name at once one succeeds."""
        if not self.honours_conditions(objects):
            return False
        with self._lock:
            if self._races is None:
                self._races = self._probe.lets_one_win(objects)
            return self._races

    def checks_bodies(self, objects: Objects) -> bool:
        """Return whether the server refuses a body that does not match its CRC32C."""
        with self._lock:
            if self._checksums is None:
                self._checksums = self._probe.refuses_wrong_checksum(objects)
            return self._checksums


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

    def lets_one_win(self, objects: Objects) -> bool:
        """Write one name from several threads at once; return whether one succeeded, each time."""
        return all(self._winners(objects) == 1 for _ in range(_RACES))

    def _winners(self, objects: Objects) -> int:
        won: list[bool] = []
        go = threading.Event()
        with self._object(objects) as name:

            def race() -> None:
                go.wait()
                with suppress(KvioError):
                    self._put(objects, name, if_none_match=True)
                    won.append(True)

            racers = [
                threading.Thread(target=race, name="kvio-probe", daemon=True)
                for _ in range(_RACERS)
            ]
            started = []
            try:
                for racer in racers:
                    threads.start(racer)
                    started.append(racer)
            finally:
                go.set()
                for racer in started:
                    threads.join(racer)
        return len(won)

    def findings(self, objects: Objects) -> Iterator[Finding]:
        """Yield findings about conditional writes, checksums, ranges and the connection."""
        sent = objects.traits.conditional
        refuses = sent and self.refuses_second(objects)
        yield _finding(
            "If-None-Match",
            refuses,
            "The server refuses a key that is there.",
            "Two writers of a key may both succeed; keep and error check, then write.",
        )
        if refuses:
            yield _finding(
                "If-None-Match at once",
                self.lets_one_win(objects),
                f"Of {_RACERS} writers of a new key at once exactly one succeeded.",
                f"Of {_RACERS} writers of a new key at once several succeeded.",
            )
        if objects.traits.checks_upload == "crc32c":
            yield _finding(
                "body checksums",
                self.refuses_wrong_checksum(objects),
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

    def refuses_wrong_checksum(self, objects: Objects) -> bool:
        """Write with a wrong CRC32C; return whether the server refused it."""
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
