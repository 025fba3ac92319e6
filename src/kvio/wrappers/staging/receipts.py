"""Receipts of staged writes: what was promised, whether it was kept, and ways to wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent import futures
from typing import Any, TypeAlias

from kvio import threads
from kvio.errors import ConfigError, StorageTimeoutError, UnsupportedError
from kvio.threads import Future
from kvio.types import IOMode, Level, Receipt

#: A future and how it ends, to be resolved when no lock is held.
Ending: TypeAlias = tuple["Future[Receipt]", "Receipt | None", "BaseException | None"]

_FORKED = "a staging tier does not cross a fork: its memory and threads are the parent's"


class Gate:
    """What a tier and its receipts share.

    Attributes:
        lock: guards everything that is staged and promised.
        best: the level that the store gives.
        ask: called without the lock when somebody waits for a write with this sequence number.
        forked: this is a child of the process that staged.
    """

    def __init__(self, best: Level) -> None:
        self.lock = threading.RLock()
        self.best = best
        self.ask: Callable[[int], None] = _nobody
        self.forked = False

    def check_fork(self) -> None:
        """Refuse to go on in a child process with `UnsupportedError`."""
        if self.forked:
            raise UnsupportedError(_FORKED)

    def check_level(self, level: Level | str | None) -> Level:
        """Give the level that is meant; None means the best.

        Raises:
            ConfigError: there is no such level.
            UnsupportedError: the store gives less.
        """
        try:
            wanted = self.best if level is None else Level(level)
        except ValueError:
            raise ConfigError(f"level must be one of {[*map(str, Level)]}, not {level!r}") from None
        if wanted > self.best:
            raise UnsupportedError(
                f"level {wanted.value!r} was asked for, but the store gives {self.best.value!r}: "
                "open it with durability='durable' where its medium can"
            )
        return wanted


class StagedReceipt:
    """What a staged write promises, and what became of it; dropping it cancels nothing.

    Attributes:
        key: the block's name.
        nbytes: payload length in bytes.
        checksum: CRC32C of the payload, or None where none was computed.
        sequence: the number of this write among all of its tier, from 1.
    """

    __slots__ = (
        *("key", "nbytes", "checksum", "sequence", "_gate", "_receipt", "_error", "_future"),
        *("_absorbed", "_ended", "_retried", "__weakref__"),
    )

    def __init__(
        self, gate: Gate, key: str, *, nbytes: int, checksum: int | None, sequence: int
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.checksum = checksum
        self.sequence = sequence
        self._gate = gate
        self._receipt: Receipt | None = None
        self._error: BaseException | None = None
        self._future: Future[Receipt] | None = None
        self._absorbed = False
        self._ended = False
        self._retried = 0

    def __repr__(self) -> str:
        state = self.level if self._error is None else type(self._error).__name__
        return f"<StagedReceipt {self.key!r} #{self.sequence} {self.nbytes} bytes {state}>"

    @property
    def level(self) -> Level:
        """How safe the write is now."""
        receipt = self._receipt
        return Level.ACCEPTED if receipt is None else receipt.level

    @property
    def error(self) -> BaseException | None:
        """Why the write failed for good; None if it did not.

        A write that is driven again keeps its last error until it is stored.
        """
        return self._error

    @property
    def receipt(self) -> Receipt | None:
        """The store's receipt, once it is there: of the write that absorbed this one, if any."""
        return self._receipt

    @property
    def done(self) -> bool:
        """The write is stored, or has failed for good and is not driven again."""
        return self._ended

    @property
    def absorbed(self) -> bool:
        """A later write or deletion of the key took this one's place before it was stored."""
        return self._absorbed

    def wait(self, level: Level | str | None = None, timeout: float | None = None) -> Receipt:
        """Wait until the write has reached a level, by default the best the store gives.

        Raises:
            UnsupportedError: the store gives less, at once.
            BlockNotFoundError: the block was deleted before it was stored.
            StorageTimeoutError: the level was not reached in time; the write goes on.
            Exception: why the write failed.
        """
        wanted = self._gate.check_level(level)
        if wanted is Level.ACCEPTED and self._receipt is None:
            return self._accepted()
        future = self.as_future()
        if not future.done() and not threads.wait([future], timeout):
            text = f"block {self.key!r} was not {wanted.value} before the deadline"
            raise StorageTimeoutError(text, key=self.key)
        receipt = future.result()
        if receipt.level < wanted:
            text = f"the store gave {receipt.level.value!r} for block {self.key!r}"
            raise UnsupportedError(f"{text}, not {wanted.value!r}")
        return receipt

    def __await__(self) -> Generator[Any, None, Receipt]:
        import asyncio  # late: half the time `import kvio` would take

        return asyncio.wrap_future(self.as_future()).__await__()

    def add_done_callback(self, call: Callable[[StagedReceipt], object]) -> None:
        """Call with this receipt once it is done, at once if it is.

        On a thread that drains: a call that waits for the tier may wait for ever. Somebody may
        have driven a failed write again by then: it is not done any more, and has its error still.
        """
        self.as_future().add_done_callback(lambda _: call(self))

    def as_future(self) -> Future[Receipt]:
        """Give a future of the store's receipt; it cannot be cancelled."""
        ended, receipt, error = self._ended, self._receipt, self._error
        if not ended or (receipt is None and error is None):
            self._gate.check_fork()
            self._gate.ask(self.sequence)
            with self._gate.lock:
                if not self._ended:
                    self._future = self._future or _running()
                    return self._future
                receipt, error = self._receipt, self._error
        future = _running()
        resolve([(future, receipt, error)])
        return future

    def as_torch_future(self) -> Any:
        """Give a ``torch.futures.Future`` of the store's receipt."""
        import torch  # whoever asks has it

        promised = torch.futures.Future()
        self.as_future().add_done_callback(lambda future: _hand_over(future, promised))
        return promised

    def _accepted(self) -> Receipt:
        reason = "copied to staging memory"
        return Receipt(
            self.key, self.nbytes, self.checksum, Level.ACCEPTED, IOMode.MEMORY, reason, False
        )


class OpenReceipt(StagedReceipt):
    """A receipt as its tier sees it; every method wants the tier's lock."""

    __slots__ = ()

    @property
    def retried(self) -> int:
        """How often the write was driven again after it had failed for good."""
        return self._retried

    def settle(self, receipt: Receipt | None, error: BaseException | None) -> list[Ending]:
        """Note how the write ended; what is returned is to be resolved without the lock."""
        self._receipt, self._error, self._ended = receipt, error, True
        future, self._future = self._future, None
        return [] if future is None else [(future, receipt, error)]

    def reopen(self) -> None:
        """Note that the write is driven again; its error stays until it is stored.

        Without one it would look stored to whoever asks for the error alone, as callbacks do.
        """
        self._ended = False
        self._retried += 1

    def note_absorbed(self) -> None:
        """Note that a later write or deletion took this one's place."""
        self._absorbed = True


def resolve(endings: list[Ending]) -> None:
    """Hand outcomes to the futures that wait for them, and run their callbacks."""
    for future, receipt, error in endings:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(receipt)  # type: ignore[arg-type]  # one of the two is there


class Resolving:
    """Who resolves futures right now: whoever ends things waits for the others.

    Args:
        lock: guards what the futures stand for.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._ended = threads.Condition(lock)
        self._threads: list[threading.Thread] = []

    def begin_locked(self) -> None:
        """Note, with the lock, that this thread has taken endings and will `resolve` them."""
        self._threads.append(threading.current_thread())

    def resolve(self, endings: list[Ending]) -> None:
        """Resolve what was taken, without the lock."""
        try:
            resolve(endings)
        finally:
            with self._lock:
                self._threads.remove(threading.current_thread())
                self._ended.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until no other thread does; False if it was not in time."""
        me = threading.current_thread()
        with self._lock:
            return threads.wait_for(
                self._ended, lambda: all(t is me for t in self._threads), timeout
            )


def _running() -> Future[Receipt]:
    """Give a future that can no longer be cancelled."""
    future: Future[Receipt] = Future()
    future.set_running_or_notify_cancel()
    return future


def _hand_over(future: futures.Future[Receipt], promised: Any) -> None:
    error = future.exception()
    if error is not None:
        promised.set_exception(error)
    else:
        promised.set_result(future.result())


def _nobody(sequence: int) -> None:
    """Wait for no tier."""
