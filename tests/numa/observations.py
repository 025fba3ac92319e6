"""What is looked at in the guest, in an order in which nothing disturbs what comes later.

Where it can be, it is looked at twice: by kvio, and in the kernel's files without kvio.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Final, TypeVar

from kvio import aligned_buffer
from kvio._native import numa
from kvio.errors import ConfigError
from kvio.placement import Memory, Placement, Slot, Topology
from kvio.placement.applying import Verification, applied, pin, place_memory, verify

Result = TypeVar("Result")
PAGE: Final = mmap.PAGESIZE
PAGES: Final = 64
BLOCK: Final = "/disk/block"
NODES: Final = "/sys/devices/system/node"
CPU_3: Final = "/sys/devices/system/cpu/cpu3/online"
GROUPS: Final = "/sys/fs/cgroup"


def text(path: str) -> str:
    """Read a file of the kernel's."""
    with open(path) as file:
        return file.read().strip()


def write(path: str, value: str) -> None:
    """Write into a file of the kernel's."""
    with open(path, "w") as file:
        file.write(value)


def on_a_thread(work: Callable[[], Result]) -> Result:
    """Run *work* on a thread of its own, which takes mask and policy with it when it ends."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result()


@contextmanager
def fresh_memory() -> Iterator[memoryview]:
    """Map memory that nobody has touched, in small pages."""
    with mmap.mmap(-1, PAGES * PAGE) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        with memoryview(memory) as view:
            yield view


def touch(view: memoryview) -> None:
    """Write into every page."""
    for at in range(0, len(view), PAGE):
        view[at] = 1


def mapped(view: memoryview) -> dict[str, int]:
    """Count the pages of memory by node, as the kernel's list of mappings has them."""
    start = f"{ctypes.addressof(ctypes.c_char.from_buffer(view)):08x} "
    [line] = [line for line in text("/proc/self/numa_maps").splitlines() if line.startswith(start)]
    return {node: int(count) for node, count in re.findall(r" N(\d+)=(\d+)", line)}


def state() -> list[Any]:
    """Look at the calling thread's mask and policies without kvio."""
    with open("/proc/thread-self/numa_maps") as maps:
        policies = {line.split()[1] for line in maps}
    [mask] = re.findall(r"Cpus_allowed_list:\s*(\S+)", text("/proc/thread-self/status"))
    return [mask, sorted(policies)]


def reported(seen: Verification) -> dict[str, Any]:
    """Show what was verified."""
    return {"ok": seen.ok, "misplaced": seen.misplaced, "unknown": seen.unknown}


def machine() -> dict[str, Any]:
    """Look at what the kernel says of the machine."""
    return {
        "online": text(f"{NODES}/online"),
        "cpus": [text(f"{NODES}/node{node}/cpulist") for node in (0, 1)],
        "distances": [text(f"{NODES}/node{node}/distance") for node in (0, 1)],
        "disk": text("/sys/class/nvme/nvme0/numa_node"),
        "disk_at": os.path.realpath("/sys/class/block/nvme0n1p1"),
        "block": text(BLOCK),
        "kernel": os.uname().release,
    }


def topology() -> dict[str, Any]:
    """Look at the machine as kvio does."""
    seen = Topology.from_system()
    return {
        "nodes": seen.nodes,
        "memory_nodes": seen.memory_nodes,
        "distances": [seen.distance(0, other) for other in (0, 1)],
        "cpus": seen.cpus,
        "numa": [[group.number, group.cpus] for group in seen.numa],
        "packages": [group.cpus for group in seen.packages],
        "remarks": seen.remarks,
    }


def paths() -> dict[str, Any]:
    """Look for the nodes of a file, its folder and its devices on the disk, and of memory."""
    seen = Topology.from_system()
    places = (BLOCK, "/disk", "/disk/none/yet", "/dev/nvme0n1p1", "/dev/nvme0n1", "/", "/proc")
    return {path: seen.node_of_path(path) for path in places}


def slots() -> dict[str, Any]:
    """Ask for slots near the disk, and without that wish."""
    seen = Topology.from_system()
    near = f"path:{BLOCK}"
    wishes = {
        "near": Placement(near=near, memory="bind"),
        "anywhere": Placement(memory="bind"),
        "near_by_node": Placement(map_by="numa", near=near, memory="bind"),
        "spread": Placement(map_by="socket", order="spread", memory="local"),
        "interleave": Placement(memory="interleave"),
    }
    places = {name: wish.slots(seen, 2) for name, wish in wishes.items()}
    shown = {name: [[s.cpus, s.node] for s in found] for name, found in places.items()}
    return {**shown, "why": wishes["near"].explain(seen, 2)}


def _touched(slot: Slot, memory: Memory) -> dict[str, Any]:
    with applied(slot, memory) as outcome, fresh_memory() as view:
        touch(view)
        return {
            "outcome": asdict(outcome),
            "asked": dict(Counter(map(str, numa.page_nodes(view)))),
            "mapped": mapped(view),
            "state": state(),
            "verified": reported(verify(slot, memory, buffers=[view])),
        }


def _touch_at(slot: Slot, memory: Memory | None, view: memoryview) -> None:
    pin(slot, memory)
    touch(view)


def threads_memory() -> dict[str, Any]:
    """Touch memory under each policy, on processors of one node with the memory of another too."""
    cases: dict[str, tuple[Slot, Memory]] = {
        "bind 1 from 0": (Slot((0, 1), 1), "bind"),
        "bind 0 from 1": (Slot((2, 3), 0), "bind"),
        "local 0": (Slot((0, 1), 0), "local"),
        "local 1": (Slot((3,), 1), "local"),
        "interleave": (Slot((2,), None), "interleave"),
    }
    return {name: on_a_thread(partial(_touched, *case)) for name, case in cases.items()}


def placed_memory() -> dict[str, Any]:
    """Set a memory policy of its own, and let threads of both nodes touch it."""
    seen: dict[str, Any] = {}
    words: tuple[Memory, ...] = ("bind", "interleave")
    for memory in words:
        with fresh_memory() as view:
            outcome = place_memory(view, Slot((2, 3), 1), memory)
            half = len(view) // 2
            for cpu, part in ((0, view[:half]), (3, view[half:])):
                on_a_thread(partial(_touch_at, Slot((cpu,), None), None, part))
                part.release()
            nodes = numa.page_nodes(view)
            seen[memory] = {"policy": outcome.policy, "pages": nodes, "mapped": mapped(view)}
    return seen


def buffers() -> dict[str, Any]:
    """Take a buffer from kvio on processors of node 0, with the memory of either node."""

    def work(node: int) -> dict[str, int]:
        pin(Slot((0, 1), node), "bind")
        view = aligned_buffer(1 << 20)
        touch(view)
        return dict(Counter(map(str, numa.page_nodes(view))))

    return {str(node): on_a_thread(partial(work, node)) for node in (0, 1)}


def page_cache() -> dict[str, Any]:
    """Write files on processors of node 0, with the memory of either node, and map them."""

    def work(node: int) -> None:
        pin(Slot((0, 1), node), "bind")
        with open(f"/disk/written-{node}", "wb", buffering=0) as file:
            file.write(bytes(PAGES * PAGE))

    seen = {}
    for node in (0, 1):
        on_a_thread(partial(work, node))
        with (
            open(f"/disk/written-{node}", "r+b") as file,
            mmap.mmap(file.fileno(), PAGES * PAGE) as memory,
            memoryview(memory) as view,
        ):
            bytes(view)
            seen[str(node)] = dict(Counter(map(str, numa.page_nodes(view))))
    return seen


def misplaced_memory() -> dict[str, Any]:
    """Touch memory at node 0, and ask whether it is at node 1, and spread."""
    with fresh_memory() as view:
        on_a_thread(partial(_touch_at, Slot((0,), 0), "bind", view))
        seen = [
            verify(Slot((2, 3), 1), "bind", threads=(), buffers=[view]),
            verify(Slot((2, 3), None), "interleave", threads=(), buffers=[view]),
            verify(Slot((0, 1), 0), "bind", threads=(), buffers=[view]),
        ]
        return {"seen": [reported(one) for one in seen], "pages": [dict(one.pages) for one in seen]}


def restored() -> dict[str, Any]:
    """Place a thread that has a policy for a block that ends well, and one that does not."""

    def work() -> dict[str, Any]:
        pin(Slot((1, 2), 0), "bind")
        seen = {"before": state()}
        with applied(Slot((3,), 1), "interleave"):
            seen["inside"] = state()
        seen["after"] = state()
        try:
            with applied(Slot((0,), 1), "bind"):
                seen["inside_too"] = state()
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            seen["after_error"] = state()
        return seen

    return {"main": state(), **on_a_thread(work), "main_after": state()}


def other_threads() -> dict[str, Any]:
    """Place four threads at once, and ask about them all from outside."""
    places = Placement(order="spread", memory="local").slots(Topology.from_system(), 4)
    ready, done = threading.Barrier(5), threading.Event()

    def live(slot: Slot) -> None:
        pin(slot, "local")
        ready.wait(60)
        done.wait(60)

    threads = [threading.Thread(target=live, args=(slot,)) for slot in places]
    for thread in threads:
        thread.start()
    ready.wait(60)
    numbers = [thread.native_id or -1 for thread in threads]
    masks = [sorted(os.sched_getaffinity(number)) for number in numbers]
    ok = [verify(slot, threads=[n]).ok for slot, n in zip(places, numbers, strict=True)]
    swapped = [verify(slot, threads=[n]).ok for slot, n in zip(places, numbers[::-1], strict=True)]
    done.set()
    for thread in threads:
        thread.join()
    return {"masks": masks, "ok": ok, "swapped": swapped}


def offline() -> dict[str, Any]:
    """Switch processor 3 off, and ask for it."""
    write(CPU_3, "0")
    try:
        seen = on_a_thread(partial(pin, Slot((2, 3), 1), "bind"))
        return {
            "some": asdict(seen),
            "none": _refused(Slot((3,), 1)),
            "topology": _cpus_and_nodes(),
        }
    finally:
        write(CPU_3, "1")


def cpuset() -> dict[str, Any]:
    """Live in a cpuset of processors 1 and 2 and node 0, and ask for more."""
    write(f"{GROUPS}/cgroup.subtree_control", "+cpuset")
    small = f"{GROUPS}/small"
    os.mkdir(small)
    write(f"{small}/cpuset.cpus", "1-2")
    write(f"{small}/cpuset.mems", "0")
    write(f"{small}/cgroup.procs", str(os.getpid()))
    try:
        seen = on_a_thread(partial(pin, Slot((2, 3), 0), "bind"))
        return {
            "topology": on_a_thread(_cpus_and_nodes),
            "some": asdict(seen),
            "spread": on_a_thread(partial(_touched, Slot((1, 2), None), "interleave")),
            "no_cpu": _refused(Slot((0,), 0)),
            "no_node": _refused(Slot((2,), 1)),
        }
    finally:
        write(f"{GROUPS}/cgroup.procs", str(os.getpid()))


def _cpus_and_nodes() -> dict[str, Any]:
    seen = Topology.from_system()
    return {"cpus": seen.cpus, "memory_nodes": seen.memory_nodes}


def _refused(slot: Slot) -> dict[str, Any]:
    def work() -> dict[str, Any]:
        before = state()
        try:
            pin(slot, "bind")
        except ConfigError as exc:
            return {"why": str(exc), "as_before": state() == before}
        return {"why": None, "as_before": state() == before}

    return on_a_thread(work)


ALL: Final[tuple[Callable[[], Any], ...]] = (
    machine, topology, paths, slots, threads_memory, placed_memory, buffers, page_cache,
    misplaced_memory, restored, other_threads, offline, cpuset,
)  # fmt: skip
