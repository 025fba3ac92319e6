"""Apply slots: set a thread's CPUs and memory policy, restore them, and check them in the kernel.

What cannot be had is reported in one of two ways. A slot of which nothing is here (no CPU that
may be used, a node without memory) is a `ConfigError`, and nothing is changed. What the machine
has but withholds is done without, and the outcome says so: CPUs outside a smaller cpuset or
offline, memory policies that a container forbids, an unknown node.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvio._native import numa
from kvio.errors import ConfigError, KvioError
from kvio.filesystem.sysfs import format_cpulist, parse_cpulist
from kvio.placement.plan import Memory, Placement, Slot
from kvio.placement.topology import Topology

_MODES: Final = {"local": numa.LOCAL, "bind": numa.BIND, "interleave": numa.INTERLEAVE}
_NAMES: Final = {
    numa.DEFAULT: "default",
    numa.PREFERRED: "prefer",
    numa.BIND: "bind",
    numa.INTERLEAVE: "interleave",
    numa.LOCAL: "local",
}
#: Policies may be forbidden: seccomp filters of containers answer so.
_FORBIDDEN: Final = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
#: With fewer pages a node it may be chance that interleaving has missed one.
_ENOUGH_PAGES: Final = 16
#: Never touched, or only read so far: move_pages(2).
_NO_PAGE: Final = (-errno.ENOENT, -errno.EFAULT)


class Kernel(Protocol):
    """The calls that placement makes; each raises the OSError of the system call.

    A thread is named by its kernel id, 0 being the caller; only the caller's own policy can be
    seen or set.
    """

    def get_affinity(self, thread: int) -> set[int]: ...  # noqa: D102
    def set_affinity(self, cpus: Iterable[int]) -> None: ...  # noqa: D102
    def get_policy(self) -> tuple[int, tuple[int, ...]]: ...  # noqa: D102
    def set_policy(self, mode: int, nodes: Sequence[int]) -> None: ...  # noqa: D102
    def bind_pages(self, view: memoryview, mode: int, nodes: Sequence[int]) -> None: ...  # noqa: D102
    def page_nodes(self, view: memoryview) -> list[int]: ...  # noqa: D102
    def memory_nodes(self) -> tuple[int, ...]:
        """Return the nodes with memory that this thread may use."""


class _Linux:
    """The kernel under this process."""

    def get_affinity(self, thread: int) -> set[int]:
        return os.sched_getaffinity(thread)

    def set_affinity(self, cpus: Iterable[int]) -> None:
        os.sched_setaffinity(0, cpus)

    def get_policy(self) -> tuple[int, tuple[int, ...]]:
        return numa.get_memory_policy()

    def set_policy(self, mode: int, nodes: Sequence[int]) -> None:
        numa.set_memory_policy(mode, nodes)

    def bind_pages(self, view: memoryview, mode: int, nodes: Sequence[int]) -> None:
        numa.bind_memory(view, mode, nodes)

    def page_nodes(self, view: memoryview) -> list[int]:
        return numa.page_nodes(view, mmap.PAGESIZE)

    def memory_nodes(self) -> tuple[int, ...]:
        with open("/proc/thread-self/status", encoding="ascii") as status:
            fields = dict(line.split(":", 1) for line in status)
        with open("/sys/devices/system/node/has_memory", encoding="ascii") as nodes:
            having = parse_cpulist(nodes.read())
        return tuple(sorted({*parse_cpulist(fields["Mems_allowed_list"])} & {*having}))


LINUX: Final[Kernel] = _Linux()


@dataclass(frozen=True, slots=True)
class Applied:
    """The CPUs and memory policy of a thread or a piece of memory, as the kernel reports them.

    Attributes:
        cpus: where the thread may run; none where no thread was placed.
        policy: of its new pages, as fio would say it (``"bind:1"``, ``"interleave:0-1"``,
            ``"local"``); None: left as it was.
        degraded: what could not be had, and why; None: nothing is missing.
    """

    cpus: tuple[int, ...]
    policy: str | None = None
    degraded: str | None = None


@contextmanager
def applied(
    slot: Slot, memory: Memory | None = None, *, kernel: Kernel = LINUX
) -> Iterator[Applied]:
    """Run a block on a slot's CPUs, its new memory as *memory* says; both are as before after it.

    Of the calling thread alone: others keep their masks, though threads started inside inherit
    this one's. The block must be left by the thread that entered it. What was allocated inside
    stays where it is. ``memory=None`` leaves the memory policy alone.

    Raises:
        ConfigError: nothing of the slot is here; the thread is as it was.
        OSError: the kernel failed, or would not take the old mask or policy back.
    """
    with ExitStack() as undo:
        yield _place_thread(slot, memory, kernel, undo)


def pin(slot: Slot, memory: Memory | None = None, *, kernel: Kernel = LINUX) -> Applied:
    """Keep the calling thread on a slot for the rest of its life, its new memory as *memory* says.

    Threads that it starts later inherit both.

    Raises:
        ConfigError: nothing of the slot is here; the thread is as it was.
        OSError: the kernel failed; the thread is as it was.
    """
    with ExitStack() as undo:
        outcome = _place_thread(slot, memory, kernel, undo)
        undo.pop_all()
    return outcome


def place_memory(
    view: memoryview, slot: Slot, memory: Memory, *, kernel: Kernel = LINUX
) -> Applied:
    """Let untouched pages of a page-aligned view come from where *memory* says, for all threads.

    Pages that were touched before stay where they are. What is set holds for the memory itself,
    not for a thread, until it is unmapped.

    Raises:
        ConfigError: the node has no memory for this process, or the view is not page-aligned.
        OSError: the kernel failed.
    """
    try:
        mode, nodes = _policy(slot, memory, kernel)
        none = f"none for this process on nodes {format_cpulist(nodes)}"
        with _refused(f"memory={memory!r}: {none}, or the view is not page-aligned"):
            kernel.bind_pages(view, mode, nodes)
    except _WithheldError as exc:
        return Applied((), None, str(exc))
    return Applied((), _name(mode, nodes))


@dataclass(frozen=True, slots=True)
class Verification:
    """What the kernel said about threads and pages.

    Attributes:
        misplaced: what is not where it should be, a line each.
        unknown: threads and pages that could not be checked, a line each.
        pages: how many pages lie on each node.
        untouched_pages: how many are on none, not being written yet, or swapped out.
    """

    misplaced: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    pages: dict[int, int] = field(default_factory=dict)
    untouched_pages: int = 0

    @property
    def ok(self) -> bool:
        """True if all threads and pages were found, and each is on its slot."""
        return not self.misplaced and not self.unknown


def verify(
    slot: Slot,
    memory: Memory | None = None,
    *,
    threads: Iterable[int] = (0,),
    buffers: Iterable[memoryview] = (),
    kernel: Kernel = LINUX,
) -> Verification:
    """Ask the kernel whether threads and pages are where a slot and a policy want them.

    A thread is in its place if it may run on no CPU outside the slot. Pages are, under ``"local"``
    and ``"bind"``, if they lie on the slot's node; under ``"interleave"`` if every node has some.
    Untouched pages are counted, and are no fault.

    Args:
        slot: the place.
        memory: the policy that the buffers were touched under; None: their nodes are counted only.
        threads: kernel thread ids (`threading.get_native_id`); 0 is the caller.
        buffers: page-aligned views.
        kernel: who is asked.
    """
    asked = _Findings(slot, memory, kernel)
    for thread in threads:
        asked.look_at_thread(thread)
    for index, view in enumerate(buffers):
        asked.look_at_pages(f"buffer {index}", view)
    nodes = dict(sorted(asked.pages.items()))
    return Verification(tuple(asked.misplaced), tuple(asked.unknown), nodes, asked.untouched)


class _WithheldError(Exception):
    """The machine lacks CPUs or memory of the slot; the message says which and why."""


def _place_thread(slot: Slot, memory: Memory | None, kernel: Kernel, undo: ExitStack) -> Applied:
    missing: list[str] = []
    policy = None
    try:
        cpus = _set_cpus(slot, kernel, undo)
        if lost := sorted(set(slot.cpus) - cpus):
            missing.append(
                f"CPUs {format_cpulist(lost)} are offline or outside this process's cpuset"
            )
    except _WithheldError as exc:
        cpus = set()
        missing.append(str(exc))
    if memory is not None:
        try:
            policy = _set_policy(slot, memory, kernel, undo)
        except _WithheldError as exc:
            missing.append(str(exc))
    return Applied(tuple(sorted(cpus)), policy, "; ".join(missing) or None)


def _set_cpus(slot: Slot, kernel: Kernel, undo: ExitStack) -> set[int]:
    if not slot.cpus:
        raise ConfigError("a slot without CPUs has no place for a thread")
    with _forbidden("the CPUs of threads"):
        before = kernel.get_affinity(0)
        # Registered first: not even Ctrl-C between the two leaves the thread on the slot.
        undo.callback(_restore_cpus, before, kernel)
        try:
            kernel.set_affinity(slot.cpus)
        except (ValueError, OverflowError) as exc:
            raise ConfigError(f"CPUs {format_cpulist(slot.cpus)}: {exc}") from exc
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            here = f"the thread is on {format_cpulist(before)}"
            wanted = f"this process may run on none of the CPUs {format_cpulist(slot.cpus)}"
            raise ConfigError(f"{wanted}; {here}") from exc
        return kernel.get_affinity(0)


def _restore_cpus(before: set[int], kernel: Kernel) -> None:
    if kernel.get_affinity(0) != before:
        kernel.set_affinity(before)


def _set_policy(slot: Slot, memory: Memory, kernel: Kernel, undo: ExitStack) -> str:
    mode, nodes = _policy(slot, memory, kernel)
    with _forbidden("memory policies"):
        before = kernel.get_policy()
        undo.callback(_restore_policy, before, kernel)
        with _refused(f"memory={memory!r}: none for this process on nodes {format_cpulist(nodes)}"):
            kernel.set_policy(mode, nodes)
        return _name(*kernel.get_policy())


def _restore_policy(before: tuple[int, tuple[int, ...]], kernel: Kernel) -> None:
    if kernel.get_policy() != before:
        kernel.set_policy(*before)


def _policy(slot: Slot, memory: Memory, kernel: Kernel) -> tuple[int, tuple[int, ...]]:
    if memory not in _MODES:
        raise ConfigError(f"memory={memory!r} is none of {', '.join(_MODES)}")
    if memory == "local":
        return numa.LOCAL, ()
    if memory == "bind":
        return numa.BIND, (_node(slot),)
    return numa.INTERLEAVE, _memory_nodes(kernel)


def _node(slot: Slot) -> int:
    if slot.node is None:
        raise _WithheldError("the slot's node is unknown")
    return slot.node


def _memory_nodes(kernel: Kernel) -> tuple[int, ...]:
    try:
        return kernel.memory_nodes()
    except (OSError, KeyError, ConfigError) as exc:
        raise _WithheldError(f"the nodes with memory are unknown: {exc}") from exc


@contextmanager
def _refused(reason: str) -> Iterator[None]:
    try:
        with _forbidden("memory policies"):
            yield
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        raise ConfigError(reason) from exc


@contextmanager
def _forbidden(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno not in _FORBIDDEN:
            raise
        code = errno.errorcode[exc.errno]
        raise _WithheldError(f"{what} are forbidden here ({code})") from exc


class _Findings:
    """The places of threads and pages that should be on a slot."""

    def __init__(self, slot: Slot, memory: Memory | None, kernel: Kernel) -> None:
        self.slot = slot
        self.memory = memory
        self.kernel = kernel
        self.misplaced: list[str] = []
        self.unknown: list[str] = []
        self.pages: Counter[int] = Counter()
        self.untouched = 0

    def look_at_thread(self, thread: int) -> None:
        name = f"thread {thread or threading.get_native_id()}"
        try:
            beyond = sorted(self.kernel.get_affinity(thread) - set(self.slot.cpus))
        except ProcessLookupError:
            self.misplaced.append(f"{name} has ended")
        except OSError as exc:
            self.unknown.append(f"{name}: {exc}")
        else:
            if beyond:
                self.misplaced.append(
                    f"{name} may run on CPUs {format_cpulist(beyond)}, not in its slot"
                )

    def look_at_pages(self, name: str, view: memoryview) -> None:
        try:
            found = Counter(self.kernel.page_nodes(view))
        except OSError as exc:
            self.unknown.append(f"{name}: {exc}")
            return
        self.untouched += sum(found.pop(number, 0) for number in _NO_PAGE)
        for number in [number for number in found if number < 0]:
            self.unknown.append(f"{name}: {found.pop(number)} pages: {os.strerror(-number)}")
        self.pages.update(found)
        if self.memory is not None:
            self._compare(name, dict(sorted(found.items())), self.memory)

    def _compare(self, name: str, found: dict[int, int], memory: Memory) -> None:
        try:
            spread = memory == "interleave"
            wanted = _memory_nodes(self.kernel) if spread else (_node(self.slot),)
        except _WithheldError as exc:
            self.unknown.append(f"{name}: {exc}")
            return
        total = sum(found.values())
        for node in found.keys() - set(wanted):
            where = f"{found[node]} of {total} pages are on node {node}"
            self.misplaced.append(f"{name}: {where}, not on {format_cpulist(wanted)}")
        if spread and total >= _ENOUGH_PAGES * len(wanted):
            for node in set(wanted) - found.keys():
                self.misplaced.append(f"{name}: none of {total} pages is on node {node}")


def _name(mode: int, nodes: Sequence[int]) -> str:
    name = _NAMES.get(mode, f"mode {mode}")
    return f"{name}:{format_cpulist(nodes)}" if nodes else name


# --------------------------------------------------------------------------------------------------
# Slots for the threads of a pool.


def thread_placer(placement: Placement, threads: int) -> Callable[[int], None]:
    """Return a function that each thread of a pool calls first, with its number, to set its slot.

    The slots are decided here, once, and tried on the calling thread, which is put back; threads
    beyond *threads* begin again with the first. What the machine withholds is done without and
    warned of: a pool goes on wherever its threads run.

    Raises:
        ConfigError: the placement cannot be on this machine.
    """
    slots = placement.slots(Topology.from_system(), threads)
    withheld = {_try(slot, placement) for slot in slots} - {None}
    for said in sorted(filter(None, withheld)):
        warnings.warn(f"threads are not placed as asked: {said}", stacklevel=2)

    def place(number: int) -> None:
        with suppress(KvioError, OSError):  # it was warned of; the thread runs where it is
            pin(slots[number % len(slots)], placement.memory)

    return place


def memory_node(placement: Placement) -> int | None:
    """Return the node for memory that all threads of a pool use; None: unknown, or not wanted.

    Raises:
        ConfigError: the placement cannot be on this machine.
    """
    return placement.slots(Topology.from_system(), 1)[0].node


def _try(slot: Slot, placement: Placement) -> str | None:
    try:
        with applied(slot, placement.memory) as outcome:
            return outcome.degraded
    except (KvioError, OSError) as exc:
        return str(exc)
