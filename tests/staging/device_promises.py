"""What staging memory promises on every torch device; a class for each kind gives the hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import google_crc32c
import numpy as np
import pytest

from kvio import BlockSizeError, ConfigError, KiB, StoreClosedError, UnsupportedError
from kvio.core.buffers import total_bytes
from kvio.staging.allocator import Span
from kvio.staging.device import DeviceMemory
from kvio.staging.memory import flat_parts, open_memory

PAGE = 4096
CAPACITY = 256 * KiB
#: Three spans, the second across the end of a segment of the memory under test.
SPANS = (Span(8 * PAGE, 2 * PAGE), Span(14 * PAGE, 5 * PAGE), Span(40 * PAGE, 1001))
NBYTES = 7 * PAGE + 1001


def noise(nbytes: int, seed: int = 1) -> bytes:
    """Return bytes that are the same every time."""
    return np.random.default_rng(seed).bytes(nbytes)


def room(*sizes: int) -> list[memoryview]:
    """Make buffers to fetch to."""
    return [memoryview(bytearray(b"\xaa" * size)) for size in sizes]


class DevicePromises:
    """Runs on a device with segments of 64 KiB and a ring of 32 KiB."""

    where: str

    def tensor_of(self, data: bytes, dtype: str = "uint8") -> Any:
        """Put bytes on the device."""
        raise NotImplementedError

    def overwrite(self, tensor: Any) -> None:
        """Queue work on the current stream that changes every byte of a tensor."""
        raise NotImplementedError

    @pytest.fixture
    def memory(self) -> Iterator[DeviceMemory]:
        memory = DeviceMemory(self.where, CAPACITY, segment_bytes=64 * KiB, ring_bytes=32 * KiB)
        yield memory
        memory.close()

    def mixed(self, data: bytes) -> list[Any]:
        """Split bytes into parts on the host and on the device, of odd lengths."""
        tensor = self.tensor_of(data[10_000:10_402], "bfloat16")
        return [data[:9999], self.tensor_of(data[9999:10_000]), tensor, b"", data[10_402:]]

    def test_bytes_come_back_as_they_went_in(self, memory: DeviceMemory) -> None:
        """Host parts and tensors fill spans in order, and are lent and fetched as one block."""
        data = noise(NBYTES)
        parts = flat_parts(self.mixed(data))
        assert total_bytes(parts) == NBYTES

        filled = memory.fill(SPANS, parts, checksum=True)

        assert filled.crc32c is None
        with memory.lend(SPANS) as lent:
            assert b"".join(lent) == data
        out = room(5, 0, NBYTES - 5)
        assert memory.fetch(SPANS, out) == NBYTES
        assert b"".join(out) == data

    def test_host_bytes_are_summed_when_they_go_in(self, memory: DeviceMemory) -> None:
        """Data that comes from the host has its checksum at once, if it was asked for."""
        data = noise(NBYTES)

        assert memory.fill(SPANS, [memoryview(data)], checksum=True).crc32c == (
            google_crc32c.value(data)
        )
        assert memory.fill(SPANS, [memoryview(data)], checksum=False).crc32c is None

    def test_host_memory_may_change_when_fill_returned(self, memory: DeviceMemory) -> None:
        """A buffer of the host is reused at once, and the staged bytes are the old ones."""
        data = bytearray(noise(NBYTES))
        memory.fill(SPANS, [memoryview(data)], checksum=False)
        data[:] = bytes(NBYTES)

        (out,) = room(NBYTES)
        memory.fetch(SPANS, [out])
        assert out == noise(NBYTES)

    def test_a_tensor_may_change_in_stream_order(self, memory: DeviceMemory) -> None:
        """Work queued on the source after fill returned does not reach the staged bytes."""
        for turn in range(8):
            tensor = self.tensor_of(noise(NBYTES, turn))
            memory.fill(SPANS, flat_parts(tensor), checksum=False)
            self.overwrite(tensor)

            (out,) = room(NBYTES)
            memory.fetch(SPANS, [out])
            assert out == noise(NBYTES, turn)

    def test_what_made_a_tensor_is_waited_for(self, memory: DeviceMemory) -> None:
        """Work queued on the source before fill is done before its bytes are taken."""
        for _ in range(8):
            tensor = self.tensor_of(bytes(NBYTES))
            self.overwrite(tensor)
            memory.fill(SPANS, flat_parts(tensor), checksum=False)

            (out,) = room(NBYTES)
            memory.fetch(SPANS, [out])
            assert set(out) == {0xFF}

    @pytest.mark.parametrize("start", [0, 1, 2 * PAGE, 2 * PAGE + 8191, NBYTES - 1, NBYTES])
    def test_any_range_can_be_fetched(self, memory: DeviceMemory, start: int) -> None:
        """A fetch gives what a slice would, and leaves the rest of the buffers alone."""
        data = noise(NBYTES)
        memory.fill(SPANS, [memoryview(data)], checksum=False)
        out = room(100, 9000)

        count = memory.fetch(SPANS, out, start)

        assert b"".join(out) == data[start : start + 9100] + b"\xaa" * (9100 - count)

    def test_the_processor_gets_no_view(self, memory: DeviceMemory) -> None:
        """Views of a device's bytes are refused, not made of something else."""
        with pytest.raises(UnsupportedError, match="no views"):
            memory.views(SPANS)

    def test_released_segments_go_and_come_back(self, memory: DeviceMemory) -> None:
        """Memory is given back segment by segment, when no page of one is left, and had again."""
        kept = [Span(0, PAGE)]
        memory.fill(kept, [memoryview(noise(PAGE))], checksum=False)
        memory.release([Span(PAGE, 10 * PAGE)])
        memory.release([Span(11 * PAGE, 30 * PAGE)])
        assert [slab is None for slab in memory._slabs] == [False, True, False, False]

        memory.fill(SPANS, [memoryview(noise(NBYTES, 2))], checksum=False)

        assert not any(slab is None for slab in memory._slabs)
        (out,) = room(NBYTES)
        memory.fetch(SPANS, [out])
        assert out == noise(NBYTES, 2)
        memory.fetch(kept, [out[:PAGE]])
        assert out[:PAGE] == noise(PAGE)
        memory.release([Span(20 * PAGE, 12 * PAGE)])
        assert memory._slabs[1] is not None, "a page of it is in use again"

    def test_the_ring_is_bounded_and_waited_for(self, memory: DeviceMemory) -> None:
        """Lent memory stays within its bound; the one too many gets it when one is given back."""
        spans = [[Span(n * 4 * PAGE, 4 * PAGE)] for n in range(8)]
        for n, own in enumerate(spans):
            memory.fill(own, [memoryview(noise(4 * PAGE, n))], checksum=False)
        seen: list[bool] = []

        def drain(numbers: Sequence[int]) -> None:
            for n in numbers:
                with memory.lend(spans[n]) as lent:
                    assert memory._ring.lent_bytes <= 32 * KiB
                    seen.append(b"".join(lent) == noise(4 * PAGE, n))

        threads = [threading.Thread(target=drain, args=(range(n, 8, 4),)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert seen == [True] * 8
        assert memory._ring.lent_bytes == 0

    def test_a_lent_block_may_be_larger_than_the_ring(self, memory: DeviceMemory) -> None:
        """A block beyond the bound is lent whole, when nothing else is."""
        spans = [Span(0, 60 * PAGE - 3)]
        data = noise(60 * PAGE - 3)
        memory.fill(spans, [memoryview(data)], checksum=False)

        with memory.lend(spans) as lent:
            assert b"".join(lent) == data

    def test_what_a_call_that_hangs_looks_at_is_not_lent_again(self, memory: DeviceMemory) -> None:
        """It sees the bytes that it was given, whatever else goes through the ring meanwhile."""
        spans = [[Span(n * 4 * PAGE, 4 * PAGE)] for n in range(9)]
        for n, own in enumerate(spans):
            memory.fill(own, [memoryview(noise(4 * PAGE, n))], checksum=False)
        hanging = [True]
        with memory.lend(spans[0]) as lent:
            memory.quarantine(lent, lambda: hanging[0])
        for n in range(1, 9):
            with memory.lend(spans[n], timeout=60) as other:
                assert b"".join(other) == noise(4 * PAGE, n)

        assert b"".join(lent) == noise(4 * PAGE, 0)
        assert memory._ring.lent_bytes == 4 * PAGE
        hanging[0] = False
        with memory.lend(spans[1]):
            assert memory._ring.lent_bytes == 4 * PAGE

    def test_closed_memory_refuses(self, memory: DeviceMemory) -> None:
        """No call works after close, and close may be called again."""
        memory.close()
        memory.close()

        with pytest.raises(StoreClosedError):
            memory.fill(SPANS, [memoryview(bytes(NBYTES))], checksum=False)
        with pytest.raises(StoreClosedError):
            memory.fetch(SPANS, room(NBYTES))

    def test_data_of_another_length_is_refused(self, memory: DeviceMemory) -> None:
        """Spans are filled whole, or not touched."""
        with pytest.raises(BlockSizeError, match="1 bytes of data"):
            memory.fill(SPANS, flat_parts(self.tensor_of(b"x")), checksum=False)

    def test_host_memory_takes_tensors_of_the_device(self) -> None:
        """Staging in host memory copies a device's tensors once, and sums what arrived."""
        host = open_memory("host", CAPACITY)
        data = noise(NBYTES)

        filled = host.fill(SPANS, flat_parts(self.mixed(data)), checksum=True)

        assert filled.crc32c == google_crc32c.value(data)
        assert b"".join(host.views(SPANS)) == data

    def test_options_of_host_memory_are_refused(self) -> None:
        """A device is not silently opened without the node or the file that was asked for."""
        with pytest.raises(ConfigError, match="for host memory"):
            open_memory(self.where, CAPACITY, numa_node=0)
        with pytest.raises(ConfigError, match="at least 4096"):
            open_memory(self.where, 5)
