"""The ranks of a communicator as the writers of a shared file.

Every rank takes part in the same exchanges in the same order, also after an error: the others
would wait for ever for a rank that leaves early.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Protocol, TypeVar

from kvio import errors
from kvio.errors import ConfigError, KvioError, RankFailedError, UnsupportedError
from kvio.sharedfile.opening import boot_id

T = TypeVar("T")
#: Characters of a message, or of a key, that are sent to other ranks.
_TEXT_MOST: Final = 2000


class Ranks(Protocol):
    """The part of a communicator that is used; those of mpi4py have it."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """The number of processes."""

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Return what every rank passes, in order."""


def ranks_of(comm: Any) -> Ranks:
    """Return the ranks of an mpi4py communicator or of a process group of torch.distributed.

    Raises:
        ConfigError: it is neither.
        UnsupportedError: the process group has no backend for the CPU.
    """
    if callable(getattr(comm, "rank", None)) and callable(getattr(comm, "size", None)):
        return _TorchRanks(comm)
    if not all(hasattr(comm, name) for name in ("rank", "size", "allgather")):
        raise ConfigError(
            f"{comm!r:.100} is neither a communicator of mpi4py nor a process group of "
            "torch.distributed that this process is in"
        )
    ranks: Ranks = comm
    return ranks


class _TorchRanks:
    """The ranks of a process group."""

    def __init__(self, group: Any) -> None:
        from torch import distributed

        # "cpu:gloo,cuda:nccl": objects are sent as tensors, by the backend of a device.
        if "cpu:" not in distributed.get_backend_config(group):
            raise UnsupportedError(
                "this process group has no backend for the CPU "
                f"({distributed.get_backend_config(group)}): pass one that has, "
                "such as torch.distributed.new_group(backend='gloo')"
            )
        self.rank, self.size = int(group.rank()), int(group.size())
        self._group, self._gather = group, distributed.all_gather_object

    def allgather(self, sendobj: Any, /) -> list[Any]:
        """Return what every rank passes, in order."""
        found = [None] * self.size
        self._gather(found, sendobj, group=self._group)
        return found


def on_first(
    ranks: Ranks,
    make: Callable[[], T],
    join: Callable[[], T],
    leave: Callable[[T], None],
    undo: Callable[[T], None],
) -> T:
    """Run *make* on rank 0, then *join* on the others; if one rank fails, all ranks raise.

    Then the others call *leave* with their handles, and rank 0 calls *undo*. The rank that failed
    raises its own error, and each other rank that of the first one that failed.

    Raises:
        UnsupportedError: the ranks are not all on one machine.
        KvioError: the error of another rank; the message begins with that rank.
        RankFailedError: another rank raised an exception that is not a `KvioError`.
    """
    opened: list[T] = []
    signals = _HeldSignals()
    try:
        try:
            signals.hold()
            _check_one_machine(_exchange(ranks, signals, _machine), ranks.rank)
            _exchange(ranks, signals, lambda: opened.append(make()) if ranks.rank == 0 else None)
            _exchange(ranks, signals, lambda: opened.append(join()) if ranks.rank != 0 else None)
        finally:
            signals.release()
        signals.deliver()
    except BaseException as error:
        for mine in opened:
            try:
                (undo if ranks.rank == 0 else leave)(mine)
            except KvioError as exc:
                error.add_note(f"closing the handle of this rank failed, too: {exc}")
        raise
    return opened[0]


def _exchange(ranks: Ranks, signals: _HeldSignals, step: Callable[[], object]) -> list[Any]:
    """Run a step and return its results on all ranks; if it fails on one, all raise."""
    answer: object = None
    error: BaseException | None = None
    try:
        answer = step()
        signals.deliver()
    except BaseException as exc:  # noqa: BLE001  # the other ranks wait for it
        error = exc
    failure = None if error is None else _for_others(error, ranks.rank)
    found = ranks.allgather((answer, failure))
    if error is not None:
        error.add_note(f"raised by rank {ranks.rank} of {ranks.size}")
        raise error
    for _, failure in found:
        if failure is not None:
            raise failure
    return [answer for answer, _ in found]


def _for_others(error: BaseException, rank: int) -> KvioError:
    """Make the error that other ranks raise: bounded, and of classes that every rank knows."""
    if not isinstance(error, KvioError) or type(error).__module__ != errors.__name__:
        text = "".join(traceback.format_exception_only(error)).strip()
        message = f"rank {rank} failed, so no rank has the file: {text:.{_TEXT_MOST}}"
        return RankFailedError(message, rank=rank)
    reduced: Any = error.__reduce__()
    copy: KvioError = reduced[0](*reduced[1])  # without what a caller may have attached to it
    copy.args = (f"rank {rank}: {error!s:.{_TEXT_MOST}}",)
    for name, value in vars(copy).items():
        if isinstance(value, str):
            setattr(copy, name, f"{value:.{_TEXT_MOST}}")
    return copy


def _machine() -> tuple[str, str]:
    """Return values that differ between machines."""
    return boot_id().hex(), os.uname().nodename


def _check_one_machine(machines: list[tuple[str, str]], rank: int) -> None:
    here = machines.count(machines[rank])
    if here != len(machines):
        raise UnsupportedError(
            f"{len(machines)} ranks, {here} of them on this machine: writers of a shared file "
            "share memory and must be on one machine; split the communicator by machine"
        )


class _HeldSignals:
    """Delays the handlers of signals while the ranks exchange messages.

    A handler that raises (Ctrl-C does) would end the exchange on this rank alone, and the others
    would wait for ever. Python runs handlers on the main thread only, so only it delays them.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._held: set[int] = set()
        self._came: list[tuple[int, FrameType | None]] = []

    def hold(self) -> None:
        """Collect signals from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                self._held.add(number)
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))

    def deliver(self) -> None:
        """Call the handlers of the signals that arrived."""
        while self._came:
            number, frame = self._came.pop(0)
            self._handlers[number](number, frame)

    def release(self) -> None:
        """Restore the handlers."""
        try:
            for number in tuple(self._held):
                signal.signal(number, self._handlers[number])
                self._held.discard(number)
        finally:
            if self._held:  # a handler that was restored has raised
                self.release()
