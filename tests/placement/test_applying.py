"""Slots as real threads of this machine have them: what is set, what is left alone, given back."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from kvio import _native
from kvio._native import numa
from kvio.errors import ConfigError
from kvio.filesystem.sysfs import parse_cpulist
from kvio.placement.applying import Applied, applied, pin, place_memory, verify
from kvio.placement.plan import Slot

Result = TypeVar("Result")
#: No machine has them: kernels are built for 8192 CPUs and 1024 nodes at most.
NO_CPU, NO_NODE = 9999, 1022
PAGE = mmap.PAGESIZE


def on_a_thread(work: Callable[[], Result]) -> Result:
    """Run *work* on a thread of its own, so that no test moves another's."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


def mask() -> tuple[int, ...]:
    """Read from /proc where the calling thread may run."""
    with open("/proc/thread-self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return parse_cpulist(fields["Cpus_allowed_list"])


def policies() -> set[str]:
    """Read from /proc the policy of memory that the calling thread gets now."""
    memory = mmap.mmap(-1, 1 << 16)
    memory[0] = 1
    return {policy_of(memoryview(memory))}


def policy_of(view: memoryview) -> str:
    """Read from /proc the policy of memory."""
    address = _native.address_of(view)
    with open("/proc/thread-self/numa_maps") as maps:
        rows = [line.split()[:2] for line in maps]
    return max((int(start, 16), policy) for start, policy in rows if int(start, 16) <= address)[1]


def state() -> tuple[tuple[int, ...], set[str]]:
    """Read where the thread may run and where its memory comes from."""
    return mask(), policies()


@pytest.fixture
def cpus() -> tuple[int, int]:
    """Name two CPUs on which this process may run."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    return allowed[0], allowed[1]


@pytest.fixture
def node() -> int:
    """Name a node with memory."""
    if not os.path.exists("/proc/self/numa_maps"):
        pytest.skip("needs a kernel with CONFIG_NUMA")
    with open("/sys/devices/system/node/has_memory") as nodes:
        return parse_cpulist(nodes.read())[0]


def test_a_thread_is_on_its_slot_inside_the_block_and_where_it_was_after(
    cpus: tuple[int, int],
) -> None:
    """The mask of the block is the slot's, and the one before comes back."""

    def work() -> list[tuple[int, ...]]:
        seen = [mask()]
        with applied(Slot((cpus[1],), None)) as outcome:
            seen += [mask(), outcome.cpus]
        return [*seen, mask()]

    before, inside, reported, after = on_a_thread(work)

    assert (inside, reported) == ((cpus[1],), (cpus[1],))
    assert before == after
    assert len(before) > 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_is_raised_inside_mask_and_policy_come_back(
    cpus: tuple[int, int], node: int, error: type[BaseException]
) -> None:
    """An exception passes through, and the thread is as it was before the block."""

    def raise_inside() -> None:
        with applied(Slot((cpus[0],), node), "bind"):
            assert state() == ((cpus[0],), {f"bind:{node}"})
            raise error

    def work() -> bool:
        before = state()
        with pytest.raises(error):
            raise_inside()
        return state() == before

    assert on_a_thread(work)


def test_blocks_nest(cpus: tuple[int, int]) -> None:
    """An inner block may leave the outer's slot, and the outer's is what comes back."""

    def work() -> list[tuple[int, ...]]:
        with applied(Slot((cpus[0],), None)):
            with applied(Slot((cpus[1],), None)):
                inner = mask()
            return [inner, mask()]

    assert on_a_thread(work) == [(cpus[1],), (cpus[0],)]


def test_a_slot_is_one_threads_alone(cpus: tuple[int, int]) -> None:
    """Threads that run beside the block, the main one too, keep their masks."""
    inside, looked = threading.Event(), threading.Event()

    def placed() -> tuple[int, ...]:
        with applied(Slot((cpus[0],), None)):
            inside.set()
            assert looked.wait(60)
            return mask()

    def beside() -> tuple[int, ...]:
        assert inside.wait(60)
        try:
            return mask()
        finally:
            looked.set()

    before = mask()
    with ThreadPoolExecutor(2) as two:
        masks = [two.submit(placed), two.submit(beside)]
        assert [future.result() for future in masks] == [(cpus[0],), before]
    assert mask() == before


def test_threads_that_come_and_go_side_by_side_keep_to_their_own_slots(
    cpus: tuple[int, int], node: int
) -> None:
    """Four threads in and out of blocks at once see what they asked for, and then what they had."""
    together = threading.Barrier(4)

    def work(cpu: int) -> bool:
        together.wait(60)
        before, right = state(), True
        for _ in range(15):
            with applied(Slot((cpu,), node), "bind"):
                right &= state() == ((cpu,), {f"bind:{node}"})
            right &= state() == before
        return right

    with ThreadPoolExecutor(4) as four:
        assert list(four.map(work, [*cpus, *cpus])) == [True] * 4


@pytest.mark.parametrize("memory", ["local", "bind", "interleave"])
def test_new_memory_follows_the_policy_inside_the_block_alone(
    cpus: tuple[int, int], node: int, memory: str
) -> None:
    """The kernel's list of mappings has the policy's name, and then the old one again."""

    def work() -> tuple[set[str], str | None, set[str]]:
        with applied(Slot(cpus, node), memory) as outcome:  # type: ignore[arg-type]
            inside = policies()
        return inside, outcome.policy, policies()

    before = policies()
    inside, reported, after = on_a_thread(work)

    assert {name.partition(":")[0] for name in inside} == {memory}
    assert inside == {reported}
    assert after == before


def test_a_policy_that_was_set_before_comes_back_with_its_nodes(
    cpus: tuple[int, int], node: int
) -> None:
    """A caller under a policy of its own has it again after the block."""

    def work() -> tuple[tuple[int, tuple[int, ...]], set[str]]:
        numa.set_memory_policy(numa.INTERLEAVE, (node,))
        with applied(Slot(cpus, node), "bind"):
            pass
        return numa.get_memory_policy(), policies()

    assert on_a_thread(work) == ((numa.INTERLEAVE, (node,)), {f"interleave:{node}"})


def test_without_memory_the_policy_is_left_alone(cpus: tuple[int, int], node: int) -> None:
    """Placing a thread's CPUs says nothing about its memory."""

    def work() -> tuple[set[str], Applied]:
        numa.set_memory_policy(numa.BIND, (node,))
        with applied(Slot((cpus[0],), node)) as outcome:
            return policies(), outcome

    assert on_a_thread(work) == ({f"bind:{node}"}, Applied((cpus[0],)))


def test_cpus_that_are_not_here_are_done_without_and_named(cpus: tuple[int, int]) -> None:
    """What is left of the slot holds, and the outcome says what is missing."""
    outcome = on_a_thread(lambda: pin(Slot((cpus[0], NO_CPU), None)))

    assert outcome.cpus == (cpus[0],)
    assert outcome.degraded is not None
    assert f"CPUs {NO_CPU} are offline" in outcome.degraded


@pytest.mark.parametrize("wanted", [(), (NO_CPU,), (NO_CPU, NO_CPU + 1), (-1,), (1 << 40,)])
@pytest.mark.parametrize("how", [pin, lambda slot, memory: applied(slot, memory).__enter__()])
def test_a_slot_without_one_cpu_that_is_here_is_refused_and_nothing_changed(
    wanted: tuple[int, ...], how: Callable[..., object]
) -> None:
    """No thread is left half placed: mask and policy are as before."""

    def work() -> bool:
        before = state()
        with pytest.raises(ConfigError, match="CPU"):
            how(Slot(wanted, None), "local")
        return state() == before

    assert on_a_thread(work)


@pytest.mark.parametrize("how", [pin, lambda slot, memory: applied(slot, memory).__enter__()])
def test_a_node_that_is_not_here_is_refused_and_nothing_changed(
    cpus: tuple[int, int], how: Callable[..., object]
) -> None:
    """The CPUs, which were there, are given back."""

    def work() -> bool:
        before = state()
        with pytest.raises(ConfigError, match=f"none for this process on nodes {NO_NODE}"):
            how(Slot((cpus[0],), NO_NODE), "bind")
        return state() == before

    assert on_a_thread(work)


def test_memory_is_one_of_three_words(cpus: tuple[int, int]) -> None:
    """Another word is refused with those there are, and nothing is changed."""

    def work() -> bool:
        before = state()
        with pytest.raises(ConfigError, match="'near' is none of local, bind, interleave"):
            pin(Slot((cpus[0],), 0), "near")  # type: ignore[arg-type]
        return state() == before

    assert on_a_thread(work)


def test_nothing_is_bound_to_an_unknown_node(cpus: tuple[int, int]) -> None:
    """Unknown is not node 0: the CPUs hold, the policy stays, and the outcome says so."""

    def work() -> tuple[Applied, bool]:
        before = policies()
        outcome = pin(Slot((cpus[0],), None), "bind")
        return outcome, policies() == before

    outcome, same = on_a_thread(work)

    assert outcome == Applied((cpus[0],), None, "the slot's node is unknown")
    assert same


def test_a_pinned_thread_stays(cpus: tuple[int, int], node: int) -> None:
    """Mask and policy outlast the call, and threads started later inherit them."""

    def work() -> list[tuple[tuple[int, ...], set[str]]]:
        assert pin(Slot((cpus[1],), node), "bind").degraded is None
        return [state(), on_a_thread(state)]

    assert on_a_thread(work) == [((cpus[1],), {f"bind:{node}"})] * 2


def test_memory_has_a_policy_of_its_own(node: int) -> None:
    """The mapping's policy is the kernel's too, and no other mapping's."""
    with mmap.mmap(-1, 64 * PAGE) as memory:
        view = memoryview(memory)
        outcome = place_memory(view, Slot((0,), node), "bind")
        own = policy_of(view)
        view.release()

    assert outcome == Applied((), f"bind:{node}", None)
    assert (own, policies()) == (f"bind:{node}", {"default"})


def test_memory_that_is_not_page_aligned_or_on_no_node_is_refused(node: int) -> None:
    """The complaint names both causes, as the kernel does not distinguish them."""
    with mmap.mmap(-1, 4 * PAGE) as memory, memoryview(memory) as view:
        with view[1:] as askew, pytest.raises(ConfigError, match="not page-aligned"):
            place_memory(askew, Slot((0,), node), "bind")
        with pytest.raises(ConfigError, match=f"nodes {NO_NODE}"):
            place_memory(view, Slot((0,), NO_NODE), "bind")


def test_a_thread_outside_its_slot_is_found(cpus: tuple[int, int]) -> None:
    """A thread in place is ok; the same thread asked for another slot is not, and is named."""

    def work() -> tuple[int, list[bool], tuple[str, ...]]:
        pin(Slot((cpus[0],), None))
        here, wide, there = (verify(Slot(c, None)) for c in ((cpus[0],), cpus, (cpus[1],)))
        return threading.get_native_id(), [here.ok, wide.ok, there.ok], there.misplaced

    thread, ok, misplaced = on_a_thread(work)

    assert ok == [True, True, False]
    assert misplaced == (f"thread {thread} may run on CPUs {cpus[0]}, not in its slot",)


def test_a_thread_that_has_ended_is_not_in_its_place(cpus: tuple[int, int]) -> None:
    """Nothing runs where a dead thread should."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    seen = verify(Slot(cpus, None), threads=[gone.pid])

    assert (seen.ok, seen.misplaced) == (False, (f"thread {gone.pid} has ended",))


def test_another_thread_is_asked_about_by_its_kernel_id(cpus: tuple[int, int]) -> None:
    """The caller of verify need not be the thread."""
    ready, done = threading.Event(), threading.Event()
    slot = Slot((cpus[1],), None)

    def placed() -> None:
        pin(slot)
        ready.set()
        assert done.wait(60)

    thread = threading.Thread(target=placed)
    thread.start()
    assert ready.wait(60)
    number = thread.native_id
    assert number is not None
    seen = [verify(slot, threads=[number]), verify(Slot((cpus[0],), None), threads=[number])]
    done.set()
    thread.join()

    assert [one.ok for one in seen] == [True, False]


def test_pages_are_counted_where_they_lie(node: int) -> None:
    """Pages touched under the policy are in place; those that nobody touched are no fault."""
    slot = Slot(tuple(os.sched_getaffinity(0)), node)
    with mmap.mmap(-1, 64 * PAGE) as memory, memoryview(memory) as view:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        place_memory(view, slot, "bind")
        for page in range(20):
            memory[page * PAGE] = 1
        seen = verify(slot, "bind", buffers=[view])
        elsewhere = verify(Slot(slot.cpus, node + 1), "bind", buffers=[view])

    assert (seen.ok, seen.pages, seen.untouched_pages) == (True, {node: 20}, 44)
    assert elsewhere.misplaced == (
        f"buffer 0: 20 of 20 pages are on node {node}, not on {node + 1}",
    )


def test_nodes_that_the_kernel_does_not_tell_are_an_error() -> None:
    """With nowhere to write the answer to: what was there before is not taken for it."""
    null = _native.ffi.NULL
    assert _native.lib.kvio_page_nodes(null, 1, PAGE, null) == -errno.EFAULT
