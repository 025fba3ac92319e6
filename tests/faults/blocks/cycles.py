"""Cycles of mounting, writing, stopping, mounting again and checking, on one loop device."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self

import kvio
from kvio import KiB
from tests.faults.blocks import disk, kernel
from tests.faults.blocks.checks import Promises, Verdicts, check
from tests.faults.blocks.log import Image
from tests.faults.blocks.workload import ROOT, Scenario
from tests.posix import faultlab


def _nothing(_: object) -> None:
    """A scenario's body that is not run."""


#: Ways to write, drawn at random for each cycle.
WAYS: Final = {
    "tmpfile": Scenario(_nothing),
    "direct": Scenario(_nothing, backend="posix-direct"),
    "hybrid": Scenario(_nothing, backend="hybrid"),
    "named": Scenario(_nothing, publish="rename"),
    "plain": Scenario(_nothing, layout="plain"),
    "staged": Scenario(_nothing),
    "shared": Scenario(_nothing, shared=True),
}


@dataclass(slots=True)
class Cycle:
    """What happens in one mount: what was begun and promised, and when the stop came.

    Attributes:
        mountpoint: where the file system is.
        scenario: how stores are opened.
        is_down: reports whether the stop has come.
        on_begin: called when an operation begins.
        events: marks, as in the log of a disk.
        lies: promises that began after the stop.
        untyped: errors after it that are none of kvio's.
    """

    mountpoint: str
    scenario: Scenario
    is_down: Callable[[], bool]
    on_begin: Callable[[], None]
    events: list[dict[str, Any]] = field(default_factory=list)
    lies: list[str] = field(default_factory=list)
    untyped: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, key: str, version: int | None) -> bool:
        """Note that an operation begins; whether that is after the stop."""
        with self.lock:
            self.events.append({"begin": [(key, version)]})
            self.on_begin()
        return self.is_down()

    def done(self, key: str, version: int | None) -> None:
        """Note a promise."""
        with self.lock:
            self.events.append({"done": [(key, version)]})

    def attempt(self, key: str, version: int | None, call: Callable[[], object]) -> bool:
        """Do something that is durable when it returns; whether the file system was down before.

        What begins after the stop must fail with a typed error.
        """
        late = self.begin(key, version)
        try:
            if call() is False:  # there was nothing to delete: that promises nothing
                return late
        except kvio.StorageError:
            return late
        self.done(key, version)
        if late:
            self.lies.append(f"{key!r} version {version} was promised after the stop")
        return late

    def attempt_all(self, keys: Sequence[str], call: Callable[[], list[kvio.BlockResult]]) -> None:
        """Write version 0 of keys in a batch; each has a receipt or a typed error."""
        late = self.is_down()
        for key in keys:
            self.begin(key, 0)
        for key, result in zip(keys, call(), strict=True):
            if not result.ok:
                assert isinstance(result.error, kvio.StorageError), result.error
                continue
            self.done(key, 0)
            if late:
                self.lies.append(f"{key!r} of a batch was promised after the stop")

    def ask(self, name: str, call: Callable[[], object]) -> None:
        """Ask for something that may be known from memory, or fail with a typed error."""
        try:
            call()
        except kvio.KvioError:
            pass
        except OSError as exc:
            self.untyped.append(f"{name} raised {exc!r}")


class Cycles:
    """A disk, made anew for each cycle, and what was found in all of them.

    Attributes:
        root: where it is mounted.
        verdicts: what was found.
    """

    def __init__(self, kind: str, work: str) -> None:
        self._kind, self.root, self._image = kind, f"{work}/root", f"{work}/image"
        self.verdicts = Verdicts()

    def __enter__(self) -> Self:
        os.makedirs(self.root, exist_ok=True)
        with ExitStack() as stack:
            self._fd = os.open(self._image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
            stack.callback(os.close, self._fd)
            # kvio refuses to be durable on memory where it can be seen: an image without a name,
            # on tmpfs because that is fast, cannot.
            os.unlink(self._image)
            self._image = f"/proc/{os.getpid()}/fd/{self._fd}"
            disk.make(self._kind, self._image)
            self._loop, self._device = kernel.attach(self._image)
            stack.callback(os.close, self._loop)
            self._bases = {layout: self._begin_with(layout) for layout in ("block", "plain")}
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _begin_with(self, layout: str) -> Image:
        """Make the disk that cycles begin with: a store without blocks."""
        disk.make(self._kind, self._image)
        kernel.forget_buffers(self._loop)
        disk.mount(self._kind, self._device, self.root)
        options = {"create": True, "segment_bytes": 64 * KiB}
        kvio.open_store(
            "posix-tmpfile",
            root=f"{self.root}/{ROOT}",
            durability="durable",
            layout=layout,  # type: ignore[arg-type]
            options=options,
        ).close()
        kernel.unmount(self.root)
        kernel.forget_buffers(self._loop)
        return Image.of_file(self._image)

    def run(self, cycle: Cycle, body: Callable[[Cycle], None], where: str) -> None:
        """Do one: *body* stops the file system; *where* is for messages."""
        self._bases[cycle.scenario.layout].write_to(self._fd)
        kernel.forget_buffers(self._loop)
        disk.mount(self._kind, self._device, self.root)
        try:
            body(cycle)
        except BaseException:
            kernel.unmount(self.root, detach=True)
            raise
        assert not self._still_open(), f"open, with all closed: {self._still_open()} ({where})"
        kernel.unmount(self.root)
        kernel.forget_buffers(self._loop)
        self._check(cycle, where)

    def _still_open(self) -> list[str]:
        """List descriptors of ours below the mount: they would keep it."""
        targets = faultlab.open_descriptors().values()
        return [target for target in targets if target.startswith(f"{self.root}/")]

    def _check(self, cycle: Cycle, where: str) -> None:
        promises, before = Promises(), len(self.verdicts.examples)
        for event in cycle.events:
            promises.learn(event)
        for lie in cycle.lies:
            self.verdicts.bad("lost", lie)
        for error in cycle.untyped:
            self.verdicts.bad("untyped", error)
        disk.mount(self._kind, self._device, self.root)
        try:
            check(self.root, cycle.scenario, promises, self.verdicts, sweep_older_s=0.0)
        finally:
            kernel.unmount(self.root)
        self.verdicts.states += 1
        self.verdicts.receipts += promises.receipts
        for at in range(before, len(self.verdicts.examples)):
            self.verdicts.examples[at] += f" ({where})"
