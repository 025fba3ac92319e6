"""Test what a server supports, with one small object."""

from __future__ import annotations

import errno
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

from kvio.backends.s3 import body
from kvio.backends.s3.client import Objects
from kvio.backends.s3.errors import PASSING, ErrorKind, RequestFailed
from kvio.backends.s3.options import S3Options
from kvio.backends.s3.retries import RetryPolicy, run_sequentially
from kvio.core import threads
from kvio.errors import (
    AccessDeniedError,
    BlockExistsError,
    KvioError,
    StorageFullError,
    StorageTimeoutError,
    TransientStorageError,
)
from kvio.types import Finding

_PROBE: Final = ".kvio-probe-"
_DATA: Final = bytes(range(256))
#: Errors that say nothing about what was tried.
_OPEN: Final = (ErrorKind.TIMEOUT, ErrorKind.DENIED, ErrorKind.FULL, ErrorKind.CONFLICT)
#: How long an answer that could not be found is not looked for again.
_PAUSE_S: Final = 5.0
#: Fresh names, where transient errors leave an answer open.
_ATTEMPTS: Final = 3
#: Writers of one name at once, and names. The first name's writers open connections first.
_RACERS: Final = 8
_RACES: Final = 3


class _Answer:
    """An answer that is found out once, by the first who asks; others wait for it.

    While it cannot be found it is None, and looked for again after a pause.
    """

    def __init__(self, *, known: bool | None = None) -> None:
        self._known = known
        self._again_at = 0.0
        self._lock = threading.Lock()

    def get(self, find: Callable[[], bool | None]) -> bool | None:
        """Return the answer."""
        if self._known is None:
            with self._lock:
                if self._known is None and time.monotonic() >= self._again_at:
                    self._known = find()
                    self._again_at = time.monotonic() + _PAUSE_S
        return self._known


class Server:
    """What a server is known to do; each answer is found out once, on first use."""

    def __init__(self, options: S3Options, request: RetryPolicy) -> None:
        self._probe = Probe(options, request)
        trusted = {"trust": True, "off": False}.get(options.conditional)
        self._conditions = _Answer(known=trusted)
        self._races = _Answer(known=trusted)
        self._checksums = _Answer()

    def honours_conditions(self, objects: Objects) -> bool | None:
        """Return whether the server refuses a second conditional write of one name, if known."""
        if not objects.traits.conditional:
            return False
        return self._conditions.get(partial(self._probe.refuses_second, objects))

    def lets_one_win(self, objects: Objects) -> bool:
        """Return whether of several conditional writes of one name at once one succeeds."""
        if not self.honours_conditions(objects):
            return False
        return self._races.get(partial(self._probe.lets_one_win, objects)) or False

    def checks_bodies(self, objects: Objects) -> bool:
        """Return whether the server refuses a body that does not match its CRC32C."""
        return self._checksums.get(partial(self._probe.refuses_wrong_checksum, objects)) or False


class Probe:
    """Tests the server with temporary objects below the store's prefix."""

    def __init__(self, options: S3Options, request: RetryPolicy) -> None:
        self._options = options
        self._request = request

    def refuses_second(self, objects: Objects) -> bool | None:
        """Write one name twice with If-None-Match; return whether the second write failed.

        None: an error leaves it open.
        """
        for _ in range(_ATTEMPTS):
            with self._object(objects) as name:
                try:
                    self._put(objects, name, if_none_match=True)
                    self._put(objects, name, if_none_match=True)
                except BlockExistsError:
                    return True
                except TransientStorageError as exc:
                    if exc.errno == errno.EHOSTUNREACH:
                        return None
                    continue
                except (StorageTimeoutError, StorageFullError, AccessDeniedError):
                    return None
                except KvioError:
                    return False  # the server rejects the header or the request
            return False
        return None

    def lets_one_win(self, objects: Objects) -> bool | None:
        """Write one name from several threads at once; return whether one succeeded, each time.

        None: transient errors leave it open.
        """
        for _ in range(_RACES):
            won, unclear = self._race(objects)
            if won != 1:
                return None if unclear and not won else False
        return True

    def _race(self, objects: Objects) -> tuple[int, int]:
        """Return how many of the writers of one name succeeded, and how many do not know."""
        outcomes: list[bool | None] = []
        go = threading.Event()
        with self._object(objects) as name:

            def race() -> None:
                go.wait()
                try:
                    self._put(objects, name, if_none_match=True)
                    outcomes.append(True)
                except BlockExistsError:
                    outcomes.append(False)
                except KvioError:
                    outcomes.append(None)

            racers = [
                threading.Thread(target=race, name="kvio-probe", daemon=True)
                for _ in range(_RACERS)
            ]
            started = []
            try:
                for racer in racers:
                    threads.start(racer)
                    started.append(racer)
            except TransientStorageError:  # no more threads
                outcomes.append(None)
            finally:
                go.set()
                for racer in started:
                    threads.join(racer)
        return outcomes.count(True), outcomes.count(None)

    def findings(self, objects: Objects) -> Iterator[Finding]:
        """Yield findings about conditional writes, checksums, ranges and the connection."""
        sent = objects.traits.conditional
        refuses = bool(sent and self.refuses_second(objects))
        yield _finding(
            "If-None-Match",
            refuses,
            "The server refuses a key that is there.",
            "Two writers of a key may both succeed; keep and error check, then write.",
        )
        if refuses:
            yield _finding(
                "If-None-Match at once",
                bool(self.lets_one_win(objects)),
                f"Of {_RACERS} writers of a new key at once exactly one succeeded.",
                f"Of {_RACERS} writers of a new key at once several succeeded.",
            )
        if objects.traits.checks_upload == "crc32c":
            yield _finding(
                "body checksums",
                bool(self.refuses_wrong_checksum(objects)),
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

    def refuses_wrong_checksum(self, objects: Objects) -> bool | None:
        """Write with a wrong CRC32C; return whether the server refused it.

        None: an error leaves it open.
        """
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
                if failed.kind is ErrorKind.MANGLED:
                    return True
                return None if failed.kind in (*PASSING, *_OPEN) else False
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

        self._request(put, "probe the server", once_only=if_none_match, patient=False)

    @contextmanager
    def _object(self, objects: Objects) -> Iterator[str]:
        name = f"{self._options.name_prefix}{_PROBE}{secrets.token_hex(16)}"
        try:
            yield name
        finally:
            with suppress(KvioError):  # the right to write does not need that to delete
                self._request(lambda: objects.delete(name), "remove the probe", patient=False)


def _finding(name: str, good: bool, meaning: str, otherwise: str) -> Finding:  # noqa: FBT001
    answer = "honoured" if good else "not honoured"
    return Finding(name, answer, good, meaning if good else otherwise)
