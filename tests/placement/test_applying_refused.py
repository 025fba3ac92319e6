"""Slots where the kernel refuses: containers that forbid policies, and every call that may fail."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress

import pytest

from kvio._native import numa
from kvio.errors import ConfigError
from kvio.placement.applying import Applied, applied, pin, place_memory, verify
from kvio.placement.plan import Memory, Slot
from tests.placement.test_applying import policies
from tests.posix.children import Refusal, in_child, need_seccomp, refuse

FORBIDDEN = [errno.EPERM, errno.ENOSYS, errno.EACCES]
POLICY_CALLS = ("set_mempolicy", "get_mempolicy", "mbind")


def forbid(calls: Iterable[str], error: int) -> None:
    """Let calls fail for the rest of this process, as a container's filter does."""
    need_seccomp()
    refuse([Refusal(call, 0, 0, 0, True, error) for call in calls])


def one_cpu() -> tuple[int, ...]:
    """Name one CPU on which this process may run."""
    return (min(os.sched_getaffinity(0)),)


@pytest.mark.parametrize("error", FORBIDDEN)
@pytest.mark.parametrize("memory", ["local", "bind", "interleave"])
def test_where_policies_are_forbidden_the_cpus_hold_and_the_outcome_says_so(
    memory: Memory, error: int
) -> None:
    """A real seccomp filter, as containers have it, costs the policy and nothing else."""

    def contained() -> str:
        forbid(POLICY_CALLS, error)
        with applied(Slot(one_cpu(), 0), memory) as outcome:
            assert os.sched_getaffinity(0) == set(outcome.cpus) == set(one_cpu())
        assert outcome.policy is None
        return str(outcome.degraded)

    code = errno.errorcode[error]
    assert in_child(contained) == f"memory policies are forbidden here ({code})"


def test_a_policy_that_cannot_be_given_back_is_not_set() -> None:
    """Where the kernel does not report the old policy, the new one is done without."""

    def contained() -> str:
        forbid(["get_mempolicy"], errno.EPERM)
        with applied(Slot(one_cpu(), 0), "bind") as outcome:
            assert policies() == {"default"}
        return str(outcome.degraded)

    assert in_child(contained) == "memory policies are forbidden here (EPERM)"


def test_where_affinity_is_forbidden_the_policy_holds() -> None:
    """The thread stays on the CPUs it had, and the outcome claims none."""

    def contained() -> str:
        before = os.sched_getaffinity(0)
        forbid(["sched_setaffinity"], errno.EPERM)
        outcome = pin(Slot(one_cpu(), 0), "bind")
        assert os.sched_getaffinity(0) == before
        assert (outcome.cpus, outcome.policy) == ((), "bind:0")
        return str(outcome.degraded)

    assert in_child(contained) == "the CPUs of threads are forbidden here (EPERM)"


def test_memory_stays_where_policies_are_forbidden() -> None:
    """Memory without its policy can be used as any other."""

    def contained() -> str:
        forbid(["mbind"], errno.EPERM)
        with mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory) as view:
            outcome = place_memory(view, Slot(one_cpu(), 0), "bind")
            view[0] = 1
        assert outcome.policy is None
        return str(outcome.degraded)

    assert in_child(contained) == "memory policies are forbidden here (EPERM)"


def test_a_thread_that_nobody_may_ask_about_is_not_ok() -> None:
    """Where the kernel does not report a mask, the thread is not said to be in its place."""

    def contained() -> str:
        thread = threading.get_native_id()
        forbid(["sched_getaffinity"], errno.EPERM)
        seen = verify(Slot((0,), 0))
        assert not seen.ok
        return seen.unknown[0].removeprefix(f"thread {thread}: ")

    assert in_child(contained) == "[Errno 1] Operation not permitted"


def test_pages_that_nobody_may_ask_about_are_not_ok() -> None:
    """What could not be verified is unknown, never in its place."""

    def contained() -> str:
        forbid(["move_pages"], errno.EPERM)
        with mmap.mmap(-1, mmap.PAGESIZE) as memory, memoryview(memory) as view:
            view[0] = 1
            seen = verify(Slot((0,), 0), "bind", threads=(), buffers=[view])
        assert not seen.ok
        assert seen.pages == {}
        return seen.unknown[0]

    assert in_child(contained) == "buffer 0: [Errno 1] Operation not permitted"


class FakeKernel:
    """A machine with CPUs 0-3, nodes 0 and 1, one thread, and a call that fails."""

    def __init__(self, *, fails_at: int = 0, error: int = 0, on: Sequence[int] = ()) -> None:
        self.cpus = {0, 1, 2, 3}
        self.policy: tuple[int, tuple[int, ...]] = (numa.PREFERRED, (1,))
        self.pages = list(on)
        self.calls = 0
        self.fails_at = fails_at
        self.error = error

    def _call(self) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError(self.error, os.strerror(self.error))

    def get_affinity(self, thread: int) -> set[int]:
        assert thread == 0
        self._call()
        return set(self.cpus)

    def set_affinity(self, cpus: Iterable[int]) -> None:
        self._call()
        self.cpus = set(cpus)

    def get_policy(self) -> tuple[int, tuple[int, ...]]:
        self._call()
        return self.policy

    def set_policy(self, mode: int, nodes: Sequence[int]) -> None:
        self._call()
        self.policy = mode, tuple(nodes)

    def bind_pages(self, view: memoryview, mode: int, nodes: Sequence[int]) -> None:
        self._call()
        raise NotImplementedError((len(view), mode, nodes))

    def page_nodes(self, view: memoryview) -> list[int]:
        assert len(view)
        self._call()
        return list(self.pages)

    def memory_nodes(self) -> tuple[int, ...]:
        self._call()
        return 0, 1

    @property
    def state(self) -> tuple[set[int], tuple[int, tuple[int, ...]]]:
        """What a thread of it is under."""
        return self.cpus, self.policy


SLOT = Slot((2, 3), 1)
#: How many calls placing a thread takes at most.
CALLS = 7
ERRORS = [*FORBIDDEN, errno.EINVAL, errno.ENOMEM, errno.ESRCH]


def test_as_many_calls_can_fail_as_are_made() -> None:
    """The tests below reach every call, and none too few."""
    kernel = FakeKernel()
    pin(SLOT, "interleave", kernel=kernel)

    assert kernel.calls == CALLS
    assert kernel.state == ({2, 3}, (numa.INTERLEAVE, (0, 1)))


@pytest.mark.parametrize("memory", [None, "local", "bind", "interleave"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("fails_at", range(1, CALLS + 1))
def test_whichever_call_fails_the_thread_is_as_before_after_the_block(
    fails_at: int, error: int, memory: Memory | None
) -> None:
    """Refused, degraded or whole: mask and policy after the block are those before it."""
    kernel = FakeKernel(fails_at=fails_at, error=error)
    before = kernel.state
    with suppress(ConfigError, OSError), applied(SLOT, memory, kernel=kernel) as outcome:
        kernel.fails_at = 0
        assert outcome.degraded or outcome.cpus == SLOT.cpus

    assert kernel.state == before


@pytest.mark.parametrize("memory", [None, "local", "bind", "interleave"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("fails_at", range(1, CALLS + 1))
def test_a_pin_that_raises_leaves_the_thread_as_it_was(
    fails_at: int, error: int, memory: Memory | None
) -> None:
    """Forbidden calls degrade and say so; any other failure undoes what was done before it."""
    kernel = FakeKernel(fails_at=fails_at, error=error)
    before = kernel.state
    outcome: Applied | None = None
    with suppress(ConfigError, OSError):
        outcome = pin(SLOT, memory, kernel=kernel)

    if outcome is None:
        assert error not in FORBIDDEN
        assert kernel.state == before
    elif kernel.calls >= fails_at:
        assert outcome.degraded is not None


def test_an_old_mask_that_is_not_taken_back_is_an_error_and_the_policy_comes_back() -> None:
    """One that cannot be given back is reported, and does not keep the other from coming back."""
    kernel = FakeKernel(error=errno.EINVAL)
    before = kernel.policy
    with pytest.raises(OSError, match="Invalid argument"), applied(SLOT, "bind", kernel=kernel):
        kernel.fails_at = kernel.calls + 4  # after the policy's two and a check at the mask

    assert kernel.policy == before
    assert kernel.cpus == set(SLOT.cpus)


def _pages(*on: int, memory: Memory = "interleave") -> tuple[bool, tuple[str, ...], int]:
    kernel = FakeKernel(on=on)
    seen = verify(SLOT, memory, threads=(), buffers=[memoryview(b" ")], kernel=kernel)
    return seen.ok, seen.misplaced + seen.unknown, seen.untouched_pages


def test_pages_on_another_node_are_found() -> None:
    """Bound and local pages belong to the slot's node, each of them."""
    wrong = (False, ("buffer 0: 1 of 4 pages are on node 0, not on 1",), 0)

    assert _pages(1, 1, 1, 1, memory="bind") == (True, (), 0)
    assert _pages(1, 1, 1, 0, memory="bind") == wrong
    assert _pages(1, 1, 1, 0, memory="local") == wrong


def test_interleaved_pages_are_on_every_node() -> None:
    """All pages on one of two nodes are not interleaved, once they are too many for chance."""
    assert _pages(*[0, 1] * 20) == (True, (), 0)
    assert _pages(*[0] * 40) == (False, ("buffer 0: none of 40 pages is on node 1",), 0)
    assert _pages(0, 0) == (True, (), 0)
    assert _pages(0, 1, 2) == (False, ("buffer 0: 1 of 3 pages are on node 2, not on 0-1",), 0)


def test_pages_without_a_node_are_no_fault_and_errors_are_unknown() -> None:
    """Not there yet, only read so far: untouched. Anything else the kernel says is passed on."""
    assert _pages(-errno.ENOENT, -errno.EFAULT, 1, memory="bind") == (True, (), 2)
    assert _pages(-errno.EBUSY, 1, memory="bind") == (
        False,
        ("buffer 0: 1 pages: Device or resource busy",),
        0,
    )


def test_pages_of_a_slot_without_a_node_are_unknown() -> None:
    """Where the slot's node is unknown, nothing says that pages are in place."""
    kernel = FakeKernel(on=[0])
    place = Slot((0,), None)
    view = memoryview(b" ")
    words: tuple[Memory | None, ...] = ("bind", "local", None)
    seen = [verify(place, word, threads=(), buffers=[view], kernel=kernel).ok for word in words]

    assert seen == [False, False, True]
