"""A device of torch that exists only in Python: its bytes are out of the host's reach.

Copies are queued on streams and done as late as may be, in an order that is drawn: whoever reads
too early, or forgets to make a stream wait, sees old bytes. One such device a process, so this is
imported in a process of its own.
"""

# ruff: noqa: ARG001, ARG002  # signatures are torch's

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "kvdev"


class Device:
    """What the device did, and what it shall do wrong."""

    def __init__(self) -> None:
        self.draw = random.Random(1)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []
        self.copied: Counter[str] = Counter()  # bytes by direction
        self.fail_when_done: set[str] = set()  # directions of copies that fail when they are done
        self.fail_when_queued: set[str] = set()
        self.room_bytes: int | None = None

    def step(self) -> None:
        """Do one thing at the head of some stream that waits for nothing."""
        ready = [stream for stream in self.streams if stream.can_go_on()]
        assert ready, "the streams wait for each other"
        stream = self.draw.choice(ready)
        stream.queue.popleft()()
        stream.done += 1


class Stream:
    """A queue of work; an event is a place in it."""

    def __init__(self, device: object = None) -> None:
        self.queue: deque[Any] = deque()
        self.done = 0
        self.recorded = 0
        self.failures: dict[int, str] = {}
        state.streams.append(self)

    def can_go_on(self) -> bool:
        while self.queue and isinstance(self.queue[0], Event):
            if not self.queue[0].reached():
                return False
            self.queue.popleft()
            self.done += 1
        return bool(self.queue)

    def record_event(self) -> Event:
        with state.lock:
            since, self.recorded = self.recorded, self.done + len(self.queue)
            return Event(self, since, self.recorded)

    def wait_event(self, event: Event) -> None:
        with state.lock:
            self.queue.append(event)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """Reached when the work queued before it is done; fails if that since the last event did."""

    def __init__(self, stream: Stream, since: int, place: int) -> None:
        self.stream = stream
        self.since = since
        self.place = place

    def reached(self) -> bool:
        if self.stream.done < self.place:
            self.stream.can_go_on()  # past what it waits for
        return self.stream.done >= self.place

    def query(self) -> bool:
        with state.lock:
            return self.reached()

    def synchronize(self) -> None:
        with state.lock:
            while not self.reached():
                state.step()
            lost = [self.stream.failures.get(at) for at in range(self.since, self.place)]
        for failure in filter(None, lost):
            raise RuntimeError(failure)


class Module:
    """``torch.kvdev``."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        self._local = threading.local()

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: object = None) -> Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = default_stream
        stream: Stream = self._local.stream
        return stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        yield
        self._local.stream = before


class Tensor(torch.Tensor):  # type: ignore[misc]  # Any where torch is not installed
    """A tensor without an address; *raw* is what only the device's copies touch."""

    raw: Any

    @classmethod
    def over(cls, raw: Any, size: Any, dtype: torch.dtype) -> Self:
        tensor = torch._C._acc.create_empty_tensor(size, dtype)
        tensor.__class__ = cls
        tensor.raw = raw
        return tensor  # type: ignore[no-any-return]


state = Device()
default_stream = Stream()
module = Module()
_setup_privateuseone_for_python_backend(NAME, backend_module=module)


def implements(name: str) -> Callable[[Any], Any]:
    """Register an operator of the device."""
    return torch.library.impl(f"aten::{name}", "privateuseone")  # type: ignore[no-any-return]


@implements("empty.memory_format")
def _empty(size: Any, dtype: Any = None, **_: object) -> Tensor:
    nbytes = int(np.prod(size)) * (dtype or torch.get_default_dtype()).itemsize
    if state.room_bytes is not None and nbytes > state.room_bytes:
        raise RuntimeError("kvdev out of memory")
    raw = np.zeros(nbytes, np.uint8)
    with state.lock:  # memory may come with work of its last owner, queued on the current stream
        module.current_stream().queue.append(lambda: raw.fill(0xEE))
    return Tensor.over(raw, size, dtype or torch.get_default_dtype())


@implements("empty_strided")
def _empty_strided(size: Any, stride: Any, dtype: Any = None, **_: object) -> Tensor:
    return _empty(size, dtype)  # type: ignore[no-any-return]


@implements("slice.Tensor")
def _slice(tensor: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    width = tensor.dtype.itemsize
    start, end, _ = slice(start, end).indices(tensor.shape[0])
    return Tensor.over(tensor.raw[start * width : end * width], (end - start,), tensor.dtype)


@implements("view")
def _view(tensor: Tensor, size: Any) -> Tensor:
    return Tensor.over(tensor.raw, [tensor.numel()], tensor.dtype)


# Above autograd, which would give the view a tensor object of its own.
@torch.library.impl("aten::view.dtype", "AutogradPrivateUse1")  # type: ignore[untyped-decorator]
def _view_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return Tensor.over(tensor.raw, [len(tensor.raw) // dtype.itemsize], dtype)


@implements("detach")
def _detach(tensor: Tensor) -> Tensor:
    return Tensor.over(tensor.raw, tensor.shape, tensor.dtype)


def _bytes_of(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, Tensor):
        return tensor.raw
    return tensor.view(-1).view(torch.uint8).numpy()


@implements("_copy_from")
def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> Any:  # noqa: FBT001
    way = "".join("d" if isinstance(side, Tensor) else "h" for side in (source, to))
    stream = module.current_stream()
    if way in state.fail_when_queued:
        raise RuntimeError(f"kvdev refused a copy {way}")

    def copy() -> None:
        if way in state.fail_when_done:
            stream.failures[stream.done] = f"kvdev lost a copy {way}"
            return
        state.copied[way] += len(_bytes_of(source))
        _bytes_of(to)[:] = _bytes_of(source)

    with state.lock:
        stream.queue.append(copy)
    if not non_blocking:
        stream.record_event().synchronize()
    return to


def tensor_of(data: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Put bytes on the device, outside of all counts and queues."""
    raw = np.frombuffer(data, np.uint8).copy()
    return Tensor.over(raw, [len(data) // dtype.itemsize], dtype)


def settle() -> None:
    """Let the device do everything that is queued."""
    with state.lock:
        while any(stream.can_go_on() for stream in state.streams):
            state.step()
