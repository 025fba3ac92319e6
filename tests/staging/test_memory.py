"""Staging memory in host memory: bytes come and go whole, and summed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio import BlockSizeError, ConfigError, MiB, OutOfMemoryError, StoreClosedError
from kvio.staging.allocator import Extents, Span
from kvio.staging.host import HostMemory, cut_spans, pairs
from kvio.staging.memory import flat_parts, open_memory
from tests.limited import at_most

from .device_promises import noise
from .test_pages import address_of

PAGE = 4096


def scattered(extents: Extents, nbytes: int) -> tuple[Span, ...]:
    """Take pages of which every second one was free."""
    pages = [extents.take(1) for _ in range(2 * -(-nbytes // PAGE))]
    for spans in pages[::2]:
        assert spans is not None
        extents.give(spans)
    rest = extents.take(extents.free_bytes - len(pages) // 2 * PAGE)
    spans = extents.take(nbytes)
    assert spans is not None
    assert rest is not None
    assert len(spans) == -(-nbytes // PAGE)
    return spans


@pytest.fixture(params=["private", "shared"])
def memory(request: pytest.FixtureRequest) -> Iterator[HostMemory]:
    """Yield 1 MiB of host memory of each kind."""
    memory = HostMemory(MiB, shared=request.param == "shared")
    yield memory
    memory.close()


@given(
    sizes=st.lists(st.integers(0, 3 * PAGE), max_size=6),
    checksum=st.booleans(),
    scatter=st.booleans(),
    seed=st.integers(0, 9),
)
def test_bytes_come_back_as_they_went_in(
    sizes: list[int],
    checksum: bool,  # noqa: FBT001
    scatter: bool,  # noqa: FBT001
    seed: int,
) -> None:
    """Any parts of odd sizes fill any spans, with the checksum of their bytes in order."""
    memory = HostMemory(256 * PAGE)
    extents = Extents(memory.capacity_bytes)
    parts = [memoryview(noise(size, seed + n)) for n, size in enumerate(sizes)]
    whole = b"".join(parts)
    spans = scattered(extents, len(whole)) if scatter and whole else extents.take(len(whole))
    assert spans is not None

    filled = memory.fill(spans, parts, checksum=checksum)

    assert b"".join(memory.views(spans)) == whole
    assert filled.crc32c == (google_crc32c.value(whole) if checksum else None)
    assert filled.ready is None


@pytest.mark.parametrize("nbytes", [1, 63, 64, 255, 256, 257, 511, 4095, 65_537, MiB - 1, MiB])
def test_the_checksum_is_right_at_every_length(memory: HostMemory, nbytes: int) -> None:
    """Below, at and beyond the block of the instructions the sum is that of another library."""
    data = noise(nbytes)
    for shift in (0, 1, 31):
        if nbytes > shift:
            spans = (Span(0, nbytes - shift),)
            filled = memory.fill(spans, [memoryview(data)[shift:]], checksum=True)

            assert filled.crc32c == google_crc32c.value(data[shift:])
            assert b"".join(memory.views(spans)) == data[shift:]


def test_bytes_beside_the_spans_stay(memory: HostMemory) -> None:
    """A fill writes its own bytes and not one more."""
    (everything,) = memory.views([Span(0, memory.capacity_bytes)])
    everything[:] = b"\xee" * len(everything)

    memory.fill([Span(PAGE, 100), Span(3 * PAGE, 7)], [memoryview(bytes(107))], checksum=True)

    wanted = bytearray(b"\xee" * len(everything))
    wanted[PAGE : PAGE + 100] = bytes(100)
    wanted[3 * PAGE : 3 * PAGE + 7] = bytes(7)
    assert everything == wanted


@pytest.mark.parametrize("nbytes", [99, 101, 0])
def test_data_of_another_length_is_refused(memory: HostMemory, nbytes: int) -> None:
    """Spans are filled whole, or not touched."""
    memory.fill([Span(0, 100)], [memoryview(b"a" * 100)], checksum=False)

    with pytest.raises(BlockSizeError, match=f"{nbytes} bytes of data for 100"):
        memory.fill([Span(0, 100)], [memoryview(bytes(nbytes))], checksum=False)
    assert bytes(memory.views([Span(0, 100)])[0]) == b"a" * 100


@given(
    lengths=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=4),
    outs=st.lists(st.integers(0, 2 * PAGE), max_size=4),
    start=st.integers(0, 12 * PAGE),
)
def test_any_range_can_be_fetched(lengths: list[int], outs: list[int], start: int) -> None:
    """A fetch gives what a slice of the bytes would, over any spans into any buffers."""
    memory = HostMemory(64 * PAGE)
    data = noise(sum(lengths))
    spans = [Span(n * 3 * PAGE, length) for n, length in enumerate(reversed(lengths))]
    memory.fill(spans, [memoryview(data)], checksum=False)
    out = [memoryview(bytearray(b"\xaa" * size)) for size in outs]

    count = memory.fetch(spans, out, start)

    wanted = data[start : start + sum(outs)]
    assert count == len(wanted)
    assert b"".join(out) == wanted + b"\xaa" * (sum(outs) - count)


def test_views_are_the_memory_itself(memory: HostMemory) -> None:
    """A view shows what is filled later: nothing was copied to make it."""
    first, second = memory.views([Span(0, 5), Span(PAGE, PAGE)])

    memory.fill([Span(0, 5)], [memoryview(b"later")], checksum=False)

    assert bytes(first) == b"later"
    assert address_of(second) == address_of(first) + PAGE
    with memory.lend([Span(0, 5)]) as (lent,):
        assert address_of(lent) == address_of(first)


def test_capacity_is_whole_pages_and_no_more() -> None:
    """Bytes beyond the last whole page are not given out."""
    memory = HostMemory(3 * PAGE + 4095)

    assert memory.capacity_bytes == 3 * PAGE
    assert sum(map(len, memory.views([Span(0, 4 * PAGE)]))) == 3 * PAGE


def test_closed_memory_refuses_and_its_views_live_on(memory: HostMemory) -> None:
    """No call works after close; a view that was given out still shows its bytes."""
    spans = [Span(0, 4)]
    memory.fill(spans, [memoryview(b"kept")], checksum=False)
    (view,) = memory.views(spans)

    memory.close()
    memory.close()

    assert bytes(view) == b"kept"
    with pytest.raises(StoreClosedError):
        memory.views(spans)
    with pytest.raises(StoreClosedError):
        memory.fill(spans, [memoryview(b"late")], checksum=False)
    with pytest.raises(StoreClosedError):
        memory.fetch(spans, [memoryview(bytearray(4))])


def test_threads_fill_and_fetch_side_by_side(memory: HostMemory) -> None:
    """Two threads that fill their own spans, and read the other's, never see a wrong byte."""
    spans = ([Span(0, 100_001)], [Span(128 * PAGE, 100_001)])
    texts = [[noise(100_001, seed) for seed in (2 * who, 2 * who + 1)] for who in (0, 1)]
    done: list[int] = []
    begin = threading.Barrier(2)

    def play(who: int) -> None:
        out = memoryview(bytearray(100_001))
        begin.wait()
        for turn in range(200):
            text = texts[who][turn % 2]
            filled = memory.fill(spans[who], [memoryview(text)], checksum=True)
            assert filled.crc32c == google_crc32c.value(text)
            assert memory.fetch(spans[who], [out]) == len(text)
            assert out == text
        done.append(who)

    threads = [threading.Thread(target=play, args=(who,)) for who in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [0, 1]


def test_a_copy_lets_other_threads_run() -> None:
    """While a fill is under way another thread looks at its spans: the copy has not the GIL."""
    memory = HostMemory(64 * MiB, populate=True)
    (view,) = memory.views([Span(0, 64 * MiB)])
    data = [memoryview(b"\x01" * len(view))]

    def sees_it_half_done() -> bool:
        view[0] = view[-1] = 0
        thread = threading.Thread(
            target=memory.fill, args=([Span(0, len(view))], data), kwargs={"checksum": True}
        )
        thread.start()
        while not view[0]:
            pass
        half_done = not view[-1]
        thread.join()
        return half_done

    # With the GIL held over the copy, both ends would always change together.
    assert any(sees_it_half_done() for _ in range(100))


def test_data_is_flattened_where_it_lies() -> None:
    """Buffers of any shape become flat bytes over the same memory."""
    array = np.arange(6, dtype="<u2").reshape(2, 3)

    parts = flat_parts([array, b"xy", bytearray(b"z")])

    assert b"".join(parts) == array.tobytes() + b"xyz"
    assert address_of(parts[0]) == array.ctypes.data
    with pytest.raises(TypeError, match="neither"):
        flat_parts([3])


@given(st.lists(st.integers(0, 5), max_size=5), st.lists(st.integers(0, 5), max_size=5))
def test_pieces_of_two_lists_have_equal_lengths(left: Sequence[int], right: Sequence[int]) -> None:
    """Pairs cover both lists from the front, in order, as far as the shorter goes."""
    a = [memoryview(noise(size, 1)) for size in left]
    b = [memoryview(noise(size, 2)) for size in right]

    found = list(pairs(a, b))

    shorter = min(sum(left), sum(right))
    assert all(len(to) == len(part) > 0 for to, part in found)
    assert b"".join(to for to, _ in found) == b"".join(a)[:shorter]
    assert b"".join(part for _, part in found) == b"".join(b)[:shorter]


def test_a_cut_of_spans_skips_and_ends_in_the_middle() -> None:
    """A range of what spans hold together names the pages it lies in."""
    spans = [Span(0, 10), Span(PAGE, 10), Span(5 * PAGE, 10)]

    assert cut_spans(spans, 5, 17) == [Span(5, 5), Span(PAGE, 10), Span(5 * PAGE, 2)]
    assert cut_spans(spans, 30, 1) == []
    assert cut_spans(spans, 20, 99) == [Span(5 * PAGE, 10)]


def test_open_memory_knows_host() -> None:
    """The name ``host`` gives host memory with the options it was asked for."""
    memory = open_memory("host", MiB, shared=True)

    assert (memory.kind, memory.capacity_bytes) == ("host", MiB)


@pytest.mark.parametrize("nbytes", [0, 4095])
def test_less_than_a_page_is_refused(nbytes: int) -> None:
    """There is no staging memory without a page."""
    with pytest.raises(ConfigError, match="at least 4096"):
        open_memory("host", nbytes)


@pytest.mark.parametrize("option", [{"fd": 0}, {"shared": True}, {"numa_node": 0}], ids=str)
def test_options_of_host_memory_are_refused_for_a_device(option: dict[str, Any]) -> None:
    """Before anything is asked of the device."""
    with pytest.raises(ConfigError, match="are for host memory, not for 'cuda:0'"):
        open_memory("cuda:0", MiB, **option)


def test_memory_that_the_system_refuses_is_an_error_with_its_size() -> None:
    """More than any address space has."""
    with pytest.raises(OutOfMemoryError) as caught:
        open_memory("host", 1 << 60)

    assert caught.value.nbytes == 1 << 60


def test_memory_that_cannot_be_mapped_is_an_error_with_its_size() -> None:
    """The machine has it, this process may not."""
    with at_most(8 * MiB), pytest.raises(OutOfMemoryError, match="staging memory") as caught:
        open_memory("host", 64 * MiB)

    assert caught.value.nbytes == 64 * MiB
