"""Receipts of staged writes: the level that was reached, errors, and ways to wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from typing import Any, Final, TypeAlias

from kvio.core import threads
from kvio.core.threads import Future
from kvio.errors import (
    BlockError,
    ConfigError,
    StorageError,
    StorageTimeoutError,
    TierNotDrainedError,
    UnsupportedError,
)
from kvio.types import IOMode, Level, Receipt

_FIRST_DELAY_S: Final = 0.01
_LONGEST_DELAY_S: Final = 2.0
_NAMED: Final = 20


def is_retryable(error: BaseException) -> bool:
    """Return whether the same write, with a new inode or request, may succeed later."""
    return isinstance(error, StorageError)


def delay_s(attempts: int) -> float:
    """Return the delay after so many failed attempts, in seconds: 10 ms, doubled each time."""
    return float(min(_LONGEST_DELAY_S, _FIRST_DELAY_S * 2 ** (attempts - 1)))


def name_keys(keys: Sequence[str]) -> str:
    """Return keys for a message; of many only the first, and the number."""
    shown = ", ".join(map(repr, keys[:_NAMED]))
    return shown if len(keys) <= _NAMED else f"{shown}, … ({len(keys)} in all)"


def combine(failed: Sequence[StagedReceipt]) -> BaseException:
    """Return one error for several: of the type of the first, with every key in its message."""
    first = failed[0].error
    keys = list(dict.fromkeys(receipt.key for receipt in failed))
    message = (
        f"{len(keys)} staged block(s) failed, see retry_failed() and discard(): "
        f"{', '.join(map(repr, keys))}; first: {first}"
    )
    if isinstance(first, TierNotDrainedError):
        return TierNotDrainedError(message, keys=tuple(keys))
    if isinstance(first, StorageError):
        return type(first)(message, errno=first.errno, key=keys[0], backend=first.backend)
    if isinstance(first, BlockError):
        return type(first)(message, key=keys[0])
    return StorageError(message, key=keys[0])


def not_drained(keys: Sequence[str], why: str) -> TierNotDrainedError:
    """Return the error for staged blocks that the store lacks."""
    text = f"{len(keys)} staged block(s) are not stored ({why}): {', '.join(map(repr, keys))}"
    return TierNotDrainedError(text, keys=tuple(keys))


#: A future with its result or exception, to be resolved without locks.
Ending: TypeAlias = tuple["Future[Receipt]", "Receipt | None", "BaseException | None"]

_FORKED = "a staging tier cannot be used in a forked child: its memory and threads are the parent's"


class TierState:
    """The state that a tier and its receipts share.

    Attributes:
        lock: guards the state of the tier and its receipts.
        best: the level that the store reaches.
        ask: called without the lock when a caller waits for a write with this sequence number.
        forked: this is a forked child of the tier's process.
    """

    def __init__(self, best: Level) -> None:
        self.lock = threading.RLock()
        self.best = best
        self.ask: Callable[[int], None] = _ignore
        self.forked = False

    def check_fork(self) -> None:
        """Raise `UnsupportedError` in a forked child."""
        if self.forked:
            raise UnsupportedError(_FORKED)

    def check_level(self, level: Level | str | None) -> Level:
        """Return a level by its name; None means the best.

        Raises:
            ConfigError: there is no such level.
            UnsupportedError: the store does not reach it.
        """
        try:
            wanted = self.best if level is None else Level(level)
        except ValueError:
            raise ConfigError(f"level must be one of {[*map(str, Level)]}, not {level!r}") from None
        if wanted > self.best:
            raise UnsupportedError(
                f"level {wanted.value!r} was asked for, but the store reaches {self.best.value!r}: "
                "open it with durability='durable' if its storage can"
            )
        return wanted


class StagedReceipt:
    """The receipt of a staged write; dropping it cancels nothing.

    Attributes:
        key: the block's name.
        nbytes: payload length in bytes.
        checksum: CRC32C of the payload, or None where none was computed.
        sequence: the number of this write among all of its tier, from 1.
    """

    __slots__ = (
        *("key", "nbytes", "checksum", "sequence", "_tier_state", "_receipt", "_error", "_future"),
        *("_absorbed", "_ended", "_retried", "__weakref__"),
    )

    def __init__(
        self, tier_state: TierState, key: str, nbytes: int, checksum: int | None, sequence: int
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.checksum = checksum
        self.sequence = sequence
        self._tier_state = tier_state
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
        """The level that the write has reached."""
        receipt = self._receipt
        return Level.ACCEPTED if receipt is None else receipt.level

    @property
    def error(self) -> BaseException | None:
        """The error of a write that failed for good, else None.

        A write that is retried after that keeps its last error until it is stored.
        """
        return self._error

    @property
    def receipt(self) -> Receipt | None:
        """The store's receipt, or that of the write that absorbed this one; None until then."""
        return self._receipt

    @property
    def done(self) -> bool:
        """True if the write is stored, or has failed for good and is not being retried."""
        return self._ended

    @property
    def absorbed(self) -> bool:
        """True if a later write or deletion of the key replaced this one before it was stored."""
        return self._absorbed

    def wait(self, level: Level | str | None = None, timeout: float | None = None) -> Receipt:
        """Wait until the write has reached a level, by default the best of the store.

        Raises:
            UnsupportedError: the store does not reach it; raised at once.
            BlockNotFoundError: the block was deleted before it was stored.
            StorageTimeoutError: it was not reached before the deadline; the write goes on.
            Exception: the error of a write that failed.
        """
        wanted = self._tier_state.check_level(level)
        if wanted is Level.ACCEPTED and self._receipt is None:
            return self._accepted()
        future = self.as_future()
        if not future.done() and not threads.wait([future], timeout):
            text = f"block {self.key!r} was not {wanted.value} before the deadline"
            raise StorageTimeoutError(text, key=self.key)
        receipt = future.result()
        if receipt.level < wanted:
            text = f"the store reached {receipt.level.value!r} for block {self.key!r}"
            raise UnsupportedError(f"{text}, not {wanted.value!r}")
        return receipt

    def __await__(self) -> Generator[Any, None, Receipt]:
        import asyncio  # imported late: it would double the time of `import kvio`

        return asyncio.wrap_future(self.as_future()).__await__()

    def add_done_callback(self, call: Callable[[StagedReceipt], object]) -> None:
        """Call a function with this receipt when it is done, at once if it is already.

        It runs on a drain thread, so it must not wait for the tier. By then another thread may be
        retrying a failed write: the receipt is not done any more, and still has its error.
        """
        self.as_future().add_done_callback(lambda _: call(self))

    def as_future(self) -> Future[Receipt]:
        """Return a future of the store's receipt; it cannot be cancelled."""
        ended, receipt, error = self._ended, self._receipt, self._error
        if not ended or (receipt is None and error is None):
            self._tier_state.check_fork()
            self._tier_state.ask(self.sequence)
            with self._tier_state.lock:
                if not self._ended:
                    self._future = self._future or _running()
                    return self._future
                receipt, error = self._receipt, self._error
        future = _running()
        resolve([(future, receipt, error)])
        return future

    def as_torch_future(self) -> Any:
        """Return a ``torch.futures.Future`` of the store's receipt."""
        import torch

        promised = torch.futures.Future()
        self.as_future().add_done_callback(lambda future: _hand_over(future, promised))
        return promised

    def _accepted(self) -> Receipt:
        reason = "copied to staging memory"
        return Receipt(
            self.key, self.nbytes, self.checksum, Level.ACCEPTED, IOMode.MEMORY, reason, False
        )


class OpenReceipt(StagedReceipt):
    """The tier's side of a receipt; every method needs the tier's lock."""

    __slots__ = ()

    @property
    def retried(self) -> int:
        """The number of retries after the write had failed for good."""
        return self._retried

    def settle(self, receipt: Receipt | None, error: BaseException | None) -> list[Ending]:
        """Record the outcome of the write; the caller resolves the result without the lock."""
        self._receipt, self._error, self._ended = receipt, error, True
        future, self._future = self._future, None
        return [] if future is None else [(future, receipt, error)]

    def reopen(self) -> None:
        """Record that the write is being retried; its error stays until it is stored.

        Without an error it would look stored to callbacks, which check only for the error.
        """
        self._ended = False
        self._retried += 1

    def note_absorbed(self) -> None:
        """Record that a later write or deletion replaced this one."""
        self._absorbed = True


def resolve(endings: list[Ending]) -> None:
    """Resolve futures, and run their callbacks."""
    for future, receipt, error in endings:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(receipt)  # type: ignore[arg-type]  # one of the two is there


class Resolving:
    """The threads that are resolving futures; closing waits for the others.

    Args:
        lock: guards the outcomes of the futures.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._ended = threads.Condition(lock)
        self._threads: list[threading.Thread] = []

    def begin_locked(self) -> None:
        """Record, with the lock, that this thread will `resolve` futures."""
        self._threads.append(threading.current_thread())

    def resolve(self, endings: list[Ending]) -> None:
        """Resolve futures, without the lock."""
        try:
            resolve(endings)
        finally:
            with self._lock:
                self._threads.remove(threading.current_thread())
                self._ended.notify_all()

    def wait(self, timeout: float | None) -> bool:
        """Wait until no other thread resolves futures; False on a timeout."""
        me = threading.current_thread()
        with self._lock:
            return threads.wait_for(
                self._ended, lambda: all(t is me for t in self._threads), timeout
            )


def _running() -> Future[Receipt]:
    """Return a future that cannot be cancelled."""
    future: Future[Receipt] = Future()
    future.set_running_or_notify_cancel()
    return future


def _hand_over(future: futures.Future[Receipt], promised: Any) -> None:
    error = future.exception()
    if error is not None:
        promised.set_exception(error)
    else:
        promised.set_result(future.result())


def _ignore(sequence: int) -> None:
    """Do nothing: there is no tier yet."""
