"""Runs in a process of its own (test_device.py): the promises on a device out of reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvio import BlockSizeError, StorageError, TransientStorageError, UnsupportedError
from kvio.staging.allocator import Span
from kvio.staging.device import DeviceMemory
from kvio.staging.memory import flat_parts, open_memory

from . import kvdev
from .device_promises import CAPACITY, NBYTES, PAGE, SPANS, DevicePromises, noise, room


@pytest.fixture(autouse=True, params=range(5))
def fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let the device forget what it did, and draw another order."""
    kvdev.settle()
    kvdev.state.draw.seed(request.param)
    kvdev.state.copied.clear()
    yield
    kvdev.state.fail_when_done.clear()
    kvdev.state.fail_when_queued.clear()
    kvdev.state.room_bytes = None


class TestKvdev(DevicePromises):
    where = kvdev.NAME

    def tensor_of(self, data: bytes, dtype: str = "uint8") -> Any:
        return kvdev.tensor_of(data, getattr(torch, dtype))

    def overwrite(self, tensor: Any) -> None:
        tensor.copy_(kvdev.tensor_of(b"\xff" * NBYTES), non_blocking=True)

    def test_the_device_is_out_of_reach(self, memory: DeviceMemory) -> None:
        """No host code gets at the bytes of this device, so the promises are kept by copies."""
        (slab, *_) = memory._slabs
        with pytest.raises(TypeError):
            slab.numpy()
        assert slab.data_ptr() == 0

    def test_every_byte_crosses_once(self, memory: DeviceMemory) -> None:
        """A staged tensor costs one copy on the device and one to the host, and no other."""
        memory.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES))), checksum=True)
        with memory.lend(SPANS) as lent:
            assert b"".join(lent) == noise(NBYTES)
        assert kvdev.state.copied == {"dd": NBYTES, "dh": NBYTES}

        memory.fill(SPANS, [memoryview(noise(NBYTES))], checksum=True)
        memory.fetch(SPANS, room(NBYTES - 7), 7)
        assert kvdev.state.copied == {"dd": NBYTES, "hd": NBYTES, "dh": 2 * NBYTES - 7}

    def test_fill_does_not_wait_for_the_device(self, memory: DeviceMemory) -> None:
        """A tensor is accepted when its copy is queued; its fence reports when it is done."""
        filled = memory.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES))), checksum=False)

        assert not kvdev.state.copied
        assert filled.ready is not None
        assert not filled.ready.done()
        filled.ready.wait()
        assert filled.ready.done()
        assert kvdev.state.copied == {"dd": NBYTES}

    def test_a_copy_that_is_lost_on_the_way_in_fails_its_block(self, memory: DeviceMemory) -> None:
        """Bytes that never arrived are never lent or fetched, however often one asks."""
        other = [Span(50 * PAGE, PAGE)]
        memory.fill(other, flat_parts(kvdev.tensor_of(noise(PAGE))), checksum=False)
        kvdev.settle()
        kvdev.state.fail_when_done.add("dd")
        filled = memory.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES))), checksum=False)
        kvdev.settle()
        kvdev.state.fail_when_done.clear()

        assert filled.ready is not None
        with pytest.raises(StorageError, match="lost a copy dd"):
            filled.ready.wait()
        for _ in range(2):
            with pytest.raises(StorageError, match="lost a copy dd"), memory.lend(SPANS):
                pytest.fail("lent what never arrived")
            with pytest.raises(StorageError, match="lost a copy dd"):
                memory.fetch(SPANS, room(1), NBYTES - 1)
        assert "dh" not in kvdev.state.copied
        assert memory._ring.lent_bytes == 0
        assert memory.fetch(other, room(PAGE)) == PAGE

    def test_spans_of_a_failed_block_serve_another(self, memory: DeviceMemory) -> None:
        """A failure is that of the block and not of the memory it lay in."""
        kvdev.state.fail_when_done.add("dd")
        memory.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES))), checksum=False)
        kvdev.settle()
        kvdev.state.fail_when_done.clear()

        memory.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES, 2))), checksum=False)

        with memory.lend(SPANS) as lent:
            assert b"".join(lent) == noise(NBYTES, 2)

    def test_a_fill_of_part_of_a_span_is_waited_for(self, memory: DeviceMemory) -> None:
        """Bytes that came to the middle of a span are there when the whole of it is read."""
        span = Span(8 * PAGE, 4 * PAGE)
        for turn in range(4):
            data = noise(4 * PAGE, turn)
            memory.fill([span], [memoryview(data)], checksum=False)
            part = memory.fill(
                [Span(9 * PAGE, 100)], flat_parts(kvdev.tensor_of(bytes(100))), checksum=False
            )
            with memory.lend([span]) as lent:
                assert part.ready is not None
                assert part.ready.done(), "nobody waited for it"
                assert b"".join(lent) == data[:PAGE] + bytes(100) + data[PAGE + 100 :]

    def test_a_lost_copy_to_part_of_a_span_fails_the_span(self, memory: DeviceMemory) -> None:
        """And what is filled over it later is good again, wherever that begins."""
        span = Span(8 * PAGE, 4 * PAGE)
        memory.fill([span], [memoryview(noise(4 * PAGE))], checksum=False)
        kvdev.state.fail_when_done.add("dd")
        memory.fill([Span(9 * PAGE, 9)], flat_parts(kvdev.tensor_of(bytes(9))), checksum=False)
        kvdev.settle()
        kvdev.state.fail_when_done.clear()
        with pytest.raises(StorageError, match="lost a copy dd"), memory.lend([span]):
            pytest.fail("lent what never arrived")
        with pytest.raises(StorageError, match="lost a copy dd"):
            memory.fetch([Span(8 * PAGE, 3 * PAGE)], room(1))

        other = Span(9 * PAGE, 2 * PAGE)
        memory.fill([other], [memoryview(noise(2 * PAGE, 2))], checksum=False)

        with memory.lend([span]) as lent:
            assert b"".join(lent)[PAGE : 3 * PAGE] == noise(2 * PAGE, 2)

    @pytest.mark.parametrize("way", ["dd", "hd"])
    def test_a_copy_that_is_refused_fails_the_fill(self, memory: DeviceMemory, way: str) -> None:
        """What the device will not even begin is an error of the write itself."""
        kvdev.state.fail_when_queued.add(way)
        data = kvdev.tensor_of(noise(NBYTES)) if way == "dd" else noise(NBYTES)

        with pytest.raises(StorageError, match=f"copy to kvdev:0: kvdev refused a copy {way}"):
            memory.fill(SPANS, flat_parts(data), checksum=False)

    @pytest.mark.parametrize("when", ["fail_when_queued", "fail_when_done"])
    def test_a_failed_copy_out_can_be_done_again(self, memory: DeviceMemory, when: str) -> None:
        """The bytes stay on the device: the next attempt gives them."""
        memory.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES))), checksum=False)
        getattr(kvdev.state, when).add("dh")
        with pytest.raises(StorageError, match="copy from kvdev:0"), memory.lend(SPANS):
            pytest.fail("lent what never arrived")
        getattr(kvdev.state, when).clear()

        with memory.lend(SPANS) as lent:
            assert b"".join(lent) == noise(NBYTES)
        assert memory._ring.lent_bytes == 0

    def test_a_failed_copy_fails_host_memory_too(self) -> None:
        """A tensor that cannot be copied to staging memory of the host is an error of storage."""
        host = open_memory("host", CAPACITY)
        kvdev.state.fail_when_done.add("dh")

        with pytest.raises(StorageError, match="copy from kvdev:0: kvdev lost"):
            host.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES))), checksum=True)

    def test_memory_that_is_gone_to_others_is_worth_a_retry(self, memory: DeviceMemory) -> None:
        """What was given back and is not to be had again fails the fill alone."""
        memory.release([Span(0, CAPACITY)])
        kvdev.state.room_bytes = 0
        with pytest.raises(TransientStorageError, match="out of memory"):
            memory.fill(SPANS, [memoryview(noise(NBYTES))], checksum=False)
        kvdev.state.room_bytes = None

        memory.fill(SPANS, [memoryview(noise(NBYTES))], checksum=False)

        (out,) = room(NBYTES)
        assert memory.fetch(SPANS, [out]) == NBYTES
        assert out == noise(NBYTES)

    def test_too_small_a_device_is_an_error_when_opened(self) -> None:
        """The capacity is had when the memory is opened, or it is not opened."""
        kvdev.state.room_bytes = CAPACITY - 1

        with pytest.raises(TransientStorageError, match="out of memory"):
            open_memory(kvdev.NAME, CAPACITY)

    def test_a_slab_is_not_let_go_under_a_copy(self, memory: DeviceMemory) -> None:
        """A copy that nobody waited for is done before its memory goes back."""
        memory.fill(SPANS, flat_parts(kvdev.tensor_of(noise(NBYTES))), checksum=False)

        memory.release([Span(0, CAPACITY)])

        assert kvdev.state.copied == {"dd": NBYTES}

    def test_a_tensor_with_gaps_is_refused(self) -> None:
        """Only contiguous tensors have their bytes in a row."""

        class Strided(kvdev.Tensor):
            def is_contiguous(self) -> bool:
                return False

        with pytest.raises(BlockSizeError, match="not contiguous"):
            flat_parts([b"host", Strided.over(None, (2, 2), torch.uint8)])

    def test_a_device_that_is_not_there_is_refused(self) -> None:
        """The second of one device is not the first."""
        with pytest.raises(UnsupportedError, match="1 are there"):
            open_memory(f"{kvdev.NAME}:1", CAPACITY)
