"""Pinned staging memory against a stand-in for CUDA that keeps account of what is registered."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvio import KiB, MiB, StorageError, UnsupportedError
from kvio.staging.allocator import Span
from kvio.staging.device import SEGMENT_BYTES, PinnedMemory
from kvio.staging.memory import open_memory

from .device_promises import noise
from .test_pages import address_of, resident_bytes

PAGE = 4096
NBYTES = 2 * SEGMENT_BYTES + 8 * PAGE  # the last segment is a short one


class Cuda:
    """Registers ranges of host memory, as the CUDA runtime does, and refuses what it would."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.available = True
        self.fail_at: int | None = None
        self.touched = False

    def is_available(self) -> bool:
        return self.available

    def cudart(self) -> Cuda:
        self.touched = True
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        if len(self.registered) == self.fail_at:
            return 2  # cudaErrorMemoryAllocation
        for start, length in self.registered.items():
            if address < start + length and start < address + nbytes:
                return 712  # cudaErrorHostMemoryAlreadyRegistered
        assert flags == 1, "for every device"
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0 if self.registered.pop(address, 0) else 713  # cudaErrorHostMemoryNotRegistered


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """Let a torch with such a CUDA be installed."""
    cuda = Cuda()
    torch = SimpleNamespace(cuda=cuda, Tensor=type("Tensor", (), {}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    yield cuda
    assert cuda.registered == {}, "memory that is gone is still registered"


def test_all_of_it_is_registered_until_it_is_closed(cuda: Cuda) -> None:
    """Every byte is pinned from open to close, in pieces that can be given back alone."""
    memory = open_memory("pinned", NBYTES)

    assert memory.kind == "pinned"
    starts = [address_of(view) for view in memory.views([Span(0, NBYTES)])]
    assert list(cuda.registered) == starts
    assert list(cuda.registered.values()) == [SEGMENT_BYTES, SEGMENT_BYTES, 8 * PAGE]
    memory.close()
    memory.close()


def test_views_do_not_cross_what_is_registered(cuda: Cuda) -> None:
    """CUDA copies within one registered range at a time, and so views are cut there."""
    memory = open_memory("pinned", NBYTES)
    span = Span(SEGMENT_BYTES - PAGE, SEGMENT_BYTES + 2 * PAGE)

    views = memory.views([span])

    assert [len(view) for view in views] == [PAGE, SEGMENT_BYTES, PAGE]
    data = noise(span.nbytes)
    memory.fill([span], [memoryview(data)], checksum=True)
    assert b"".join(views) == data
    memory.close()
    assert not cuda.registered


def test_a_segment_out_of_use_is_unpinned_and_given_back(cuda: Cuda) -> None:
    """Pages go back to the system when none of their segment is in use, and are pinned anew."""
    memory = open_memory("pinned", NBYTES, populate=True)
    second = Span(SEGMENT_BYTES, SEGMENT_BYTES)
    before = dict(cuda.registered)

    memory.release([Span(second.offset, SEGMENT_BYTES - PAGE)])
    assert cuda.registered == before
    assert resident_bytes(memory) == NBYTES
    memory.release([Span(second.offset + SEGMENT_BYTES - PAGE, PAGE)])

    assert list(cuda.registered.values()) == [SEGMENT_BYTES, 8 * PAGE]
    assert resident_bytes(memory) == NBYTES - SEGMENT_BYTES
    memory.fill([Span(second.offset + PAGE, 3)], [memoryview(b"new")], checksum=False)
    assert cuda.registered == before
    memory.close()


def test_views_keep_their_bytes_when_it_is_closed(cuda: Cuda) -> None:
    """A call that hangs and still looks at them writes nothing else."""
    memory = open_memory("pinned", NBYTES)
    memory.fill([Span(PAGE, 4)], [memoryview(b"kept")], checksum=False)
    (view,) = memory.views([Span(PAGE, 4)])

    memory.close()

    assert bytes(view) == b"kept"
    assert not cuda.registered


def test_what_cuda_refuses_is_an_error_and_leaves_nothing(cuda: Cuda) -> None:
    """A machine that will pin a part of it pins none of it."""
    cuda.fail_at = 1

    with pytest.raises(StorageError, match="register staging memory with CUDA: error 2"):
        PinnedMemory(NBYTES)


def test_memory_that_nobody_closed_is_unpinned(cuda: Cuda) -> None:
    """CUDA never trusts that memory is pinned which another mapping may have taken over."""
    memory = open_memory("pinned", NBYTES)
    assert cuda.registered

    del memory
    gc.collect()

    assert not cuda.registered


def test_cuda_is_not_touched_where_it_is_not_available(cuda: Cuda) -> None:
    """Without a device nothing but the question whether there is one is asked of CUDA."""
    cuda.available = False

    with pytest.raises(UnsupportedError, match="no CUDA device"):
        open_memory("pinned", 64 * KiB)
    assert not cuda.touched


def test_pinned_memory_takes_the_options_of_host_memory(cuda: Cuda) -> None:
    """Pinned memory may be shared with another process, as host memory is."""
    memory = open_memory("pinned", MiB, shared=True, huge_pages=False, populate=True)
    assert isinstance(memory, PinnedMemory)
    assert memory.fd is not None
    memory.fill([Span(0, 3)], [memoryview(b"all")], checksum=False)

    with open(memory.fd, "rb", closefd=False) as file:
        assert file.read(3) == b"all"
    memory.close()
    assert not cuda.registered
