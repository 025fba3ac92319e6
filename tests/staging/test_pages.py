"""Pages of staging memory, as the system sees them: taken, advised, shared and given back."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvio
from kvio import ConfigError, MiB, OutOfMemoryError
from kvio.core.buffers import ram_bytes
from kvio.staging import host
from kvio.staging.allocator import Span
from kvio.staging.host import HostMemory
from kvio.staging.memory import StagingMemory

from .daemon.daemons import until
from .device_promises import noise

PAGE = 4096


def address_of(view: memoryview) -> int:
    """Return the address of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def smaps_of(address: int) -> dict[str, str]:
    """Read what the system says of the mapping at an address."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            start, end = (int(part, 16) for part in name.split("-"))
            inside = start <= address < end
        elif inside:
            found[name.rstrip(":")] = value.strip()
    return found


def resident_bytes(memory: StagingMemory) -> int:
    """Count the bytes of a memory that are in RAM, by the system's own account."""
    libc = ctypes.CDLL(None, use_errno=True)
    count = 0
    for view in memory.views([Span(0, memory.capacity_bytes)]):
        present = (ctypes.c_ubyte * (len(view) // mmap.PAGESIZE))()
        address = ctypes.c_void_p(address_of(view))
        assert libc.mincore(address, ctypes.c_size_t(len(view)), present) == 0
        count += sum(flag & 1 for flag in present)
    return count * mmap.PAGESIZE


def rss_bytes() -> int:
    """Count the bytes of this process that are in RAM."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * mmap.PAGESIZE


@pytest.fixture(params=["private", "shared"])
def memory(request: pytest.FixtureRequest) -> Iterator[HostMemory]:
    """Yield 1 MiB of host memory of each kind."""
    memory = HostMemory(MiB, shared=request.param == "shared")
    yield memory
    memory.close()


def test_direct_io_takes_views_as_they_are(memory: HostMemory, real_disk: Path) -> None:
    """The kernel writes and reads the pages past its page cache."""
    spans = [Span(5 * PAGE, 2 * PAGE), Span(PAGE, PAGE)]
    data = noise(3 * PAGE)
    memory.fill(spans, [memoryview(data)], checksum=False)
    fd = os.open(real_disk / "block", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        assert os.writev(fd, memory.views(spans)) == len(data)
        memory.fill(spans, [memoryview(bytes(len(data)))], checksum=False)
        assert os.preadv(fd, memory.views(spans), 0) == len(data)
    finally:
        os.close(fd)

    assert b"".join(memory.views(spans)) == data
    assert (real_disk / "block").read_bytes() == data


def test_released_pages_go_back_to_the_system() -> None:
    """RSS falls by what was released, and what stays in use keeps its bytes."""
    memory = HostMemory(64 * MiB, populate=True)
    data = noise(MiB)
    memory.fill([Span(0, MiB)], [memoryview(data)], checksum=False)
    full = rss_bytes()
    assert resident_bytes(memory) == 64 * MiB

    memory.release([Span(MiB, 31 * MiB), Span(32 * MiB, 32 * MiB)])

    assert resident_bytes(memory) == MiB
    assert full - rss_bytes() > 60 * MiB
    assert b"".join(memory.views([Span(0, MiB)])) == data


def test_released_pages_of_shared_memory_are_holes() -> None:
    """The file of shared memory keeps its length and loses its pages."""
    memory = HostMemory(MiB, shared=True, populate=True)
    assert memory.fd is not None
    assert os.fstat(memory.fd).st_blocks * 512 == MiB

    memory.release([Span(PAGE, MiB - 2 * PAGE)])

    assert os.fstat(memory.fd).st_blocks * 512 == 2 * PAGE
    assert os.fstat(memory.fd).st_size == MiB


def test_released_pages_can_be_filled_again(memory: HostMemory) -> None:
    """After a release the same spans take and give bytes as before."""
    spans = [Span(0, 8 * PAGE)]
    memory.fill(spans, [memoryview(noise(8 * PAGE))], checksum=False)
    memory.release([Span(2 * PAGE, 4 * PAGE)])
    (view,) = memory.views(spans)
    assert view[: 2 * PAGE] == noise(8 * PAGE)[: 2 * PAGE]
    assert not any(view[2 * PAGE : 6 * PAGE])

    memory.fill(spans, [memoryview(noise(8 * PAGE, 2))], checksum=False)

    assert view == noise(8 * PAGE, 2)


def test_untouched_memory_costs_none() -> None:
    """Opened memory is not in RAM before it is used, unless it is populated."""
    lazy = HostMemory(64 * MiB, huge_pages=False)
    assert resident_bytes(lazy) == 0

    lazy.fill([Span(0, 3)], [memoryview(b"abc")], checksum=False)

    assert resident_bytes(lazy) == PAGE


def populated_bytes(nbytes: int) -> int:
    """Count what the thread that populates a memory has allocated when it ends."""
    memory = HostMemory(nbytes, populate=None)
    assert memory._populating is not None
    memory._populating.wait()
    found = resident_bytes(memory)
    memory.close()
    return found


def test_memory_is_populated_meanwhile() -> None:
    """By a thread that ends when all pages are there."""
    assert populated_bytes(64 * MiB) == 64 * MiB


def test_populating_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops as soon as less than a 16th of the RAM would be free."""
    reserve = ram_bytes() // 16
    left = [reserve + 64 * MiB, reserve + 33 * MiB, reserve + 31 * MiB]
    monkeypatch.setattr(host, "free_bytes", lambda: left.pop(0))

    assert populated_bytes(128 * MiB) == 64 * MiB


def test_what_is_released_is_not_populated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the thread was about to do."""
    waits, goes_on = threading.Event(), threading.Event()

    def free() -> int:
        waits.set()
        goes_on.wait()
        return 1 << 62

    monkeypatch.setattr(host, "free_bytes", free)
    memory = HostMemory(MiB, populate=None)
    assert waits.wait(60)
    releasing = threading.Thread(target=memory.release, args=([Span(0, MiB)],))
    releasing.start()
    goes_on.set()
    releasing.join()

    assert memory._populating is not None
    assert not memory._populating._thread.is_alive()
    assert resident_bytes(memory) == 0
    memory.close()


def test_closing_ends_the_thread_that_populates(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the step it is at, and not after the last one."""
    waits, goes_on = threading.Event(), threading.Event()
    steps: list[int] = []

    def free() -> int:
        steps.append(len(steps))
        waits.set()
        goes_on.wait()
        return 1 << 62

    monkeypatch.setattr(host, "free_bytes", free)
    monkeypatch.setattr(host, "STEP_BYTES", PAGE)
    memory = HostMemory(MiB, populate=None)
    populating = memory._populating
    assert populating is not None
    assert waits.wait(60)
    closing = threading.Thread(target=memory.close)
    closing.start()
    until(lambda: populating._ending)
    goes_on.set()
    closing.join()

    assert not populating._thread.is_alive()
    assert steps == [0]


@pytest.mark.parametrize(("populate", "nbytes"), [(None, 8 * MiB), (False, 0)])
def test_a_tier_populates_unless_it_is_told_not_to(
    populate: bool | None,  # noqa: FBT001
    nbytes: int,
) -> None:
    """And is open meanwhile."""
    with kvio.open_store("memory") as store, kvio.stage(store, 8 * MiB, populate=populate) as tier:
        engine = tier._engine
        memory = engine.memory
        assert isinstance(memory, HostMemory)
        if memory._populating is not None:
            memory._populating.wait()

        assert resident_bytes(memory) == nbytes


@pytest.mark.parametrize("huge_pages", [True, False])
def test_huge_pages_are_asked_for(huge_pages: bool) -> None:  # noqa: FBT001
    """The mapping carries the advice, or not, as the option says."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no transparent huge pages")
    memory = HostMemory(8 * MiB, huge_pages=huge_pages)
    (view,) = memory.views([Span(0, PAGE)])

    assert ("hg" in smaps_of(address_of(view))["VmFlags"].split()) == huge_pages


def test_the_numa_node_is_the_kernels() -> None:
    """The policy of the mapping names the node that was asked for."""
    try:
        memory = HostMemory(8 * PAGE, numa_node=0)
    except ConfigError as exc:
        if not isinstance(exc.__cause__, OSError) or exc.__cause__.errno == errno.EINVAL:
            raise
        pytest.skip(f"mbind(2) is not to be had here: {exc}")
    (view,) = memory.views([Span(0, PAGE)])
    view[0] = 1

    lines = Path("/proc/self/numa_maps").read_text(encoding="ascii").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{address_of(view):x} ")]
    assert line.split()[1] == "bind:0"


@pytest.mark.parametrize("node", [1023, 1024, -1, 1 << 40])
def test_an_impossible_numa_node_is_an_error(node: int) -> None:
    """A node that the kernel does not have is refused with its number, never ignored."""
    with pytest.raises(ConfigError, match=f"NUMA node {node}"):
        HostMemory(PAGE, numa_node=node)


def test_another_process_sees_shared_memory() -> None:
    """What is filled here is in the file that a caller may hand to others."""
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 2 * PAGE)
        memory = HostMemory(2 * PAGE, fd=fd)
        memory.fill([Span(PAGE, 5)], [memoryview(b"hello")], checksum=False)
        memory.close()

        assert os.pread(fd, 5, PAGE) == b"hello"
        with pytest.raises(ConfigError, match="shorter"):
            HostMemory(3 * PAGE, fd=fd)
    finally:
        os.close(fd)


def test_shared_memory_of_our_own_cannot_be_cut_short() -> None:
    """Nobody who has the file can take the pages away under a reader."""
    memory = HostMemory(2 * PAGE, shared=True)
    assert memory.fd is not None

    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, PAGE)
    assert fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    fd = memory.fd
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_sees_zeros_in_private_memory() -> None:
    """A child neither reads the parent's staged bytes nor makes the parent copy its pages."""
    memory = HostMemory(PAGE)
    memory.fill([Span(0, 4)], [memoryview(b"mine")], checksum=False)
    (view,) = memory.views([Span(0, 4)])

    child = os.fork()
    if not child:
        os._exit(0 if view == bytes(4) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(view) == b"mine"


def test_closed_memory_is_freed() -> None:
    """With no view left, the mapping is gone."""
    memory = HostMemory(64 * MiB, populate=True)
    full = rss_bytes()

    memory.close()

    assert full - rss_bytes() > 60 * MiB


def test_too_much_is_an_error_of_storage() -> None:
    """Memory that the system has not is refused when it is opened."""
    with pytest.raises(OutOfMemoryError, match="no memory for 70368744177664 bytes"):
        HostMemory(1 << 46)
