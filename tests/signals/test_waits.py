"""A signal ends a wait for what was queued, and the wait may be begun again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

import kvio
from kvio.core.executor import Executor
from tests.posix.gate import GateBackend, backend_of, install
from tests.signals.programs import Traced
from tests.staging.engines import local

LONG_S = 60.0


class StopError(TimeoutError):
    """What the handler raises: a class that no wait may take for its own timeout."""


def _stop(*_: object) -> NoReturn:
    raise StopError


@contextmanager
def interrupted(waits: Callable[[], object]) -> Iterator[None]:
    """Have another process send a signal once *waits* is true; its handler's exception comes."""
    kill = ["sh", "-c", f"kill -USR1 {os.getpid()}"]

    def watch() -> None:
        while not waits():
            pass
        subprocess.run(kill, check=True)

    before = signal.signal(signal.SIGUSR1, _stop)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(StopError):
            yield
    finally:
        watcher.join(LONG_S)
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[kvio.Store]:
    """A store whose writes of ``stuck`` keys wait at a gate."""
    install(tmp_path, monkeypatch)
    with kvio.open_store("gate", io_threads=1) as store:
        yield store
        backend_of(store).gate.set()


def someone_waits(condition: object) -> bool:
    """Return whether a thread waits for a condition."""
    return bool(condition._waiters)  # type: ignore[attr-defined]


def test_a_wait_for_other_threads_cancels_what_they_do() -> None:
    """Tasks of `run_all` that others run are asked to end, and are waited for."""
    executor = Executor(threads=2, max_queued_bytes=1)
    begun, cancelled, ended = threading.Event(), threading.Event(), threading.Event()
    main = threading.get_ident()

    def task() -> None:
        if threading.get_ident() == main:
            assert begun.wait(LONG_S)
            return
        begun.set()
        assert cancelled.wait(LONG_S)
        ended.set()

    def waits() -> bool:
        frames = traceback.extract_stack(sys._current_frames()[main])
        return any(frame.name == "_wait_for_all" for frame in frames)

    with interrupted(waits):
        executor.run_all([task, task], cancel=cancelled.set)
    assert ended.is_set()
    assert executor.close(timeout=LONG_S)


def test_a_store_whose_close_was_interrupted_can_be_closed_again(store: kvio.Store) -> None:
    """Nothing that was submitted is lost, and the second close waits for it."""
    backend: GateBackend = backend_of(store)
    futures = [store.submit_write(key, b"data") for key in ("stuck", "k1", "k2")]
    with interrupted(lambda: someone_waits(store._calls.executor._room)):
        store.close()
    assert not any(future.done() for future in futures)
    assert backend.busy_at_close is None
    with pytest.raises(kvio.StoreClosedError):
        store.write_block("late", b"data")
    backend.gate.set()
    store.close()

    assert all(future.result(0) for future in futures)
    assert backend.busy_at_close == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda store, _tier, _receipt: store.flush(),
        lambda store, _tier, _receipt: store.write_block("stuck-too", b"data", timeout=LONG_S),
        lambda _store, tier, _receipt: tier.barrier(),
        lambda _store, tier, _receipt: tier.delete_block("stuck"),
        lambda _store, _tier, receipt: receipt.wait(),
    ],
    ids=["flush", "timed", "barrier", "delete", "receipt"],
)
def test_a_signal_that_another_thread_got_ends_a_wait(
    store: kvio.Store, wait: Callable[[kvio.Store, kvio.StagingTier, kvio.StagedReceipt], object]
) -> None:
    """The main thread notices by itself: nothing wakes it."""
    future = store.submit_write("stuck-first", b"data")
    main, frames = threading.get_ident(), sys._current_frames

    def get_signal() -> None:
        while all(f.name != "_in_slices" for f in traceback.extract_stack(frames()[main])):
            pass
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    with kvio.stage(store, "1MiB") as tier:
        receipt = tier.write_block("stuck", b"data")
        for _ in range(2):
            assert backend_of(store).entered.acquire(timeout=LONG_S)
        before = signal.signal(signal.SIGUSR1, _stop)
        other = threading.Thread(target=get_signal)
        other.start()
        try:
            with pytest.raises(StopError):
                wait(store, tier, receipt)
        finally:
            other.join(LONG_S)
            signal.signal(signal.SIGUSR1, before)
        assert not future.done()
        backend_of(store).gate.set()
    assert future.result(LONG_S).key == "stuck-first"


def test_a_tier_whose_close_was_interrupted_stays_open(store: kvio.Store) -> None:
    """It takes another write, and the next close stores everything."""
    tier = kvio.stage(store, "1MiB")
    receipts = [tier.write_block(key, b"data") for key in ("stuck", "k1", "k2")]
    with interrupted(lambda: local(tier).ledger.progress.goal):
        tier.close()
    receipts.append(tier.write_block("again", b"data"))
    backend_of(store).gate.set()
    tier.close()

    assert all(receipt.receipt for receipt in receipts)
    assert set(store.list_keys()) == {"stuck", "k1", "k2", "again"}


@pytest.mark.slow
def test_a_shared_file_whose_close_was_interrupted_writes_no_more(
    real_disk: Path, tmp_path: Path
) -> None:
    """Queued writes of an unfinished file are dropped; those under way end first."""
    traced = Traced(tmp_path / "log", "pwritev2:delay_exit=30000")
    facts = traced.run(
        """
data = bytes(1 << 20)
file = kvio.SharedFile.create(f"{root}/file", 240 << 20, io_threads=1)
futures = [file.submit_pwrite(data, n << 20) for n in range(240)]
send_when(lambda: futures[5].done())
try:
    file.close()
except Stop:
    report(cancelled=sum(future.cancelled() for future in futures))
""",
        real_disk,
    )

    assert facts["cancelled"] > 0
    assert traced.calls("pwritev2") <= 241 - facts["cancelled"]


SEALED_TWICE = """
try:
    file = kvio.SharedFile.create(f"{root}/file", 1 << 20, durability="durable")
except kvio.UnsupportedError as exc:
    report(unsupported=str(exc))
    sys.exit()
file.pwrite(bytes(1 << 20), 0)
for _ in range(2):
    try:
        suspected = file._shared.must_reread
        file.seal()
        break
    except Stop:
        pass
file.close()
report(suspected=suspected, size=os.path.getsize(f"{root}/file"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", [0, 1])
def test_a_sync_whose_error_a_handler_hid_is_not_trusted(
    real_disk: Path, tmp_path: Path, last: int
) -> None:
    """The next seal reads all of the file again: the kernel reports an error once."""
    plain = Traced(tmp_path / "plain", "fdatasync:delay_exit=1")
    (real_disk / "plain").mkdir()
    facts = plain.run(SEALED_TWICE, real_disk / "plain")
    if "unsupported" in facts:
        pytest.skip(facts["unsupported"])
    assert not facts["suspected"]
    nth = plain.calls("fdatasync") - last
    traced = Traced(tmp_path / "log", f"fdatasync:error=EIO:signal=USR1:when={nth}")
    facts = traced.run(SEALED_TWICE, real_disk)

    assert facts["suspected"]
    assert facts["size"] > 1 << 20
