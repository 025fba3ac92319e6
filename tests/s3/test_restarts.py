"""A server that restarts is outlasted, and one that is gone is not asked for ever."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import pytest

import kvio
from tests.s3.failing import BUCKET, SMALL, retries_made
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import open_s3

#: s3dlio knows one server in a process.
LIBRARIES: Final = ("s3+boto3", "s3+minio", "s3+obstore", "s3+torch")
#: What the number of retries alone allows.
RETRIES: Final = 2


class ServerAt(FaultyServer):
    """Listens on the port of one that has gone, with its objects."""

    def __init__(self, port: int, before: FaultyServer) -> None:
        super().__init__()
        self._listener.close()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._buckets = before._buckets


def wait_until(ready: Callable[[], bool], work: Future[Any]) -> None:
    """Look again and again, as long as the work goes on."""
    pause, deadline = threading.Event(), time.monotonic() + 60
    while not ready() and not work.done() and time.monotonic() < deadline:
        pause.wait(0.02)


@pytest.mark.parametrize("operation", ["write", "read", "list"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_restart_is_outlasted(library: str, operation: str) -> None:
    """A call that meets a server which is gone goes on when it is back."""
    calls: dict[str, Callable[[kvio.Store], object]] = {
        "write": lambda store: store.write_block("new", SMALL, if_exists="replace").nbytes,
        "read": lambda store: store.read_block("old") == SMALL,
        "list": lambda store: list(store.list_keys()) == ["old"],
    }
    first = FaultyServer()
    options = {"retries": RETRIES, "retry_s": 60.0, "conditional": "off"}
    with ThreadPoolExecutor(1) as pool:
        with first:
            store = open_s3(library, first.endpoint, BUCKET, prefix="p", options=options)
            store.write_block("old", SMALL)
        before = retries_made(store)
        work = pool.submit(calls[operation], store)
        wait_until(lambda: retries_made(store) > before + RETRIES, work)
        assert not work.done()
        with ServerAt(int(first.url.rpartition(":")[2]), first):
            assert work.result(60)
            assert retries_made(store) > before + RETRIES
            store.close()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_server_that_stays_away_is_an_error_in_time(library: str) -> None:
    """After ``retry_s`` at the earliest, and soon after it; opening is not so patient."""
    with FaultyServer() as server:
        options = {"retries": 1, "retry_s": 1.0, "conditional": "off"}
        store = open_s3(library, server.endpoint, BUCKET, prefix="p", options=options)
    begun = time.monotonic()
    with pytest.raises(kvio.TransientStorageError):
        store.read_block("key")
    took = time.monotonic() - begun
    store.close()

    assert took >= 1.0
    options["retry_s"] = 1000.0
    with pytest.raises(kvio.TransientStorageError):
        open_s3(library, server.endpoint, BUCKET, prefix="q", options=options)


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_retries_there_is_no_patience(library: str, faulty: FaultyServer) -> None:
    """``retries=0`` means none, whatever ``retry_s`` says."""
    options = {"retries": 0, "retry_s": 1000.0, "conditional": "off"}
    with open_s3(library, faulty.endpoint, BUCKET, prefix="p", options=options) as store:
        with pytest.raises(kvio.TransientStorageError):
            store.stat_block("e500/key")

        assert retries_made(store) == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_batch_does_not_wait_for_each_of_its_blocks(library: str) -> None:
    """Patience that was in vain once is not had again, until a request succeeds."""
    first = FaultyServer()
    options = {"retries": 1, "retry_s": 1.0, "conditional": "off"}
    with first:
        store = open_s3(library, first.endpoint, BUCKET, prefix="p", options=options)
        store.write_block("key", SMALL)
    for patient in (True, False):
        before = retries_made(store)
        with pytest.raises(kvio.TransientStorageError):
            store.read_block("key")
        assert (retries_made(store) - before > 1) == patient
    with ServerAt(int(first.url.rpartition(":")[2]), first):
        assert store.read_block("key") == SMALL
    before = retries_made(store)
    with pytest.raises(kvio.TransientStorageError):
        store.read_block("key")
    assert retries_made(store) - before > 1
    store.close()
