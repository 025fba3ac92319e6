"""Calls in detachable threads: results, exceptions, timeouts and abandoned calls."""

from __future__ import annotations

import gc
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest

from kvio.backends.s3.errors import ErrorKind, RequestFailed
from kvio.backends.s3.timeouts import DetachableThreads
from tests.s3.libraries import LIBRARIES, open_s3
from tests.s3.servers import Endpoint

LONG_S = 60.0


def live_threads() -> set[threading.Thread]:
    """Return the live threads."""
    return set(threading.enumerate())


@pytest.fixture
def threads() -> Iterator[DetachableThreads]:
    """Threads with a long timeout."""
    made = DetachableThreads(LONG_S)
    yield made
    made.close()


def test_the_result_of_the_other_thread_is_returned(threads: DetachableThreads) -> None:
    """The call runs in another thread, and its result is returned."""
    assert threads.run(threading.get_ident) != threading.get_ident()


def test_an_exception_is_raised_in_the_calling_thread(threads: DetachableThreads) -> None:
    """The same exception is raised, also a BaseException; the next call is not affected."""
    for error in (KeyError("a"), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)) as caught:
            threads.run(fail)
        assert caught.value is error
    assert threads.run(lambda: 7) == 7


def test_calls_one_after_the_other_share_a_thread(threads: DetachableThreads) -> None:
    """No thread is started while one is idle."""
    assert len({threads.run(threading.get_ident) for _ in range(50)}) == 1


def test_callers_do_not_wait_for_each_other(threads: DetachableThreads) -> None:
    """Calls of eight threads run at the same time."""
    together = threading.Barrier(8, timeout=LONG_S)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: threads.run(together.wait), range(8)))


def test_results_are_never_mixed_up(threads: DetachableThreads) -> None:
    """With many calls in many threads each caller gets its own result."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: threads.run(lambda: n), range(2000)))
    assert answers == list(range(2000))


def test_a_call_that_times_out_is_abandoned_with_its_thread() -> None:
    """The caller gets an error, another thread runs the next call, and the first ends with its."""
    threads, end, idents = DetachableThreads(0.05), threading.Event(), []
    before = live_threads()

    def hang() -> None:
        idents.append(threading.get_ident())
        end.wait(LONG_S)

    with pytest.raises(RequestFailed) as caught:
        threads.run(hang)
    assert caught.value.kind is ErrorKind.TIMEOUT
    (stuck,) = live_threads() - before
    threads._timeout_s = LONG_S
    assert threads.run(lambda: threading.get_ident() not in idents)
    threads.close()
    end.set()
    stuck.join(LONG_S)
    assert not stuck.is_alive()


def test_closing_ends_the_threads() -> None:
    """Idle threads end at once, a busy one after its call."""
    threads, begun, end = DetachableThreads(LONG_S), threading.Event(), threading.Event()
    before = live_threads()

    def slow() -> int:
        begun.set()
        end.wait(LONG_S)
        return 5

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(threads.run, slow)
        begun.wait(LONG_S)
        threads.run(int)
        threads.close()
        end.set()
        assert answer.result(LONG_S) == 5
    for thread in live_threads() - before:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_no_reference_to_a_call_is_kept(threads: DetachableThreads) -> None:
    """The call, its result and its exception, which refer to the caller's buffers, are freed."""

    class Thing:
        pass

    def fail(thing: Thing) -> None:
        raise ValueError(thing)

    def give(thing: Thing) -> Thing:
        return thing

    kept = []
    for make in (give, fail):
        thing = Thing()
        kept.append(weakref.ref(thing))
        with suppress(ValueError):
            threads.run(partial(make, thing))
        del thing
        threads.run(int)  # the thread is behind that call by now
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_ctrl_c_interrupts_a_waiting_caller() -> None:
    """An interrupt ends the wait, and the call's thread is abandoned."""
    threads, end = DetachableThreads(LONG_S), threading.Event()
    before = live_threads()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        end.wait(LONG_S)

    try:
        with pytest.raises(KeyboardInterrupt):
            threads.run(interrupt)
    finally:
        signal.signal(signal.SIGINT, previous)
        end.set()
    for thread in live_threads() - before:
        thread.join(LONG_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_a_timeout_calls_run_in_the_calling_thread(
    library: str, s3_endpoint: Endpoint, s3_bucket: str
) -> None:
    """Every library supports ``request_timeout_s=inf``, and kvio starts no thread."""
    before = live_threads()
    options = {"request_timeout_s": math.inf}
    with open_s3(library, s3_endpoint, s3_bucket, options=options) as store:
        store.write_block("a/b", b"0123456789")
        out = bytearray(4)
        assert bytes(store.read_block("a/b")) == b"0123456789"
        assert store.read_block_into("a/b", out, offset=3, nbytes=4) == 4
        assert (bytes(out), list(store.list_keys())) == (b"3456", ["a/b"])
        names = {thread.name for thread in live_threads() - before}
    assert "kvio-io" not in names


def test_a_program_exits_after_its_abandoned_calls() -> None:
    """Exit waits a short time, because native code must not return during shutdown."""
    program = """
import sys, threading
from kvio.backends.s3.timeouts import DetachableThreads
from kvio.backends.s3.errors import RequestFailed

printed = threading.Event()

def slow():
    printed.wait()
    threading.Event().wait(0.3)
    print("back", flush=True)

try:
    DetachableThreads(0.01).run(slow)
except RequestFailed:
    print("abandoned", flush=True)
    printed.set()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=True)
    assert ended.stdout.split("\n")[:2] == ["abandoned", "back"]
