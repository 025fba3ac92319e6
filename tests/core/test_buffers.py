"""Callers' memory: what is taken as it is, what is refused, and who keeps what alive."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio._native import address_of
from kvio.core import buffers
from kvio.errors import BlockSizeError
from kvio.types import KiB, MiB

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128"),
    *("<f8", "S5", "U3", "V7", "datetime64[ns]", "timedelta64[s]", "i4,f8"),
)


def joined(data: Any) -> bytes:
    """Copy what `as_parts` makes of *data*."""
    return b"".join(buffers.as_parts(data))


def address(view: memoryview) -> int:
    """Return the address of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_buffers_are_taken_as_they_are(tmp_path: Path) -> None:
    """Everything with the buffer protocol gives its bytes, flat and in order."""
    file = tmp_path / "file"
    file.write_bytes(b"mapped!!")
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 8) as mapped:
        assert joined(mapped) == b"mapped!!"
        gc.collect()
    assert joined(b"bytes") == b"bytes"
    assert joined(bytearray(b"array")) == b"array"
    assert joined(memoryview(b"abcdef")[2:4]) == b"cd"
    assert joined(memoryview(b"abcdef").cast("B", (2, 3))) == b"abcdef"
    assert joined(array.array("d", [1.0, 2.0])) == array.array("d", [1.0, 2.0]).tobytes()
    assert joined((ctypes.c_int * 3)(1, 2, 3)) == np.array([1, 2, 3], np.intc).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_dtype(dtype: str) -> None:
    """A C-contiguous numpy array of any dtype and shape gives its bytes, without a copy."""
    for shape in ((4,), (2, 3), (1, 1, 5), ()):
        whole = np.zeros(shape, dtype)
        if whole.nbytes:
            whole.reshape(-1).view(np.uint8)[:] = 7

        [part] = buffers.as_parts(whole, writable=True)

        assert (part.ndim, part.format, bytes(part)) == (1, "B", whole.tobytes())
        assert part.nbytes == 0 or address(part) == whole.ctypes.data


def test_arrays_of_bfloat16_and_small_floats() -> None:
    """Dtypes that the buffer protocol has no letter for are taken as well."""
    types = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"):
        whole = np.arange(6).astype(getattr(types, name)).reshape(2, 3)

        [part] = buffers.as_parts(whole, writable=True)

        assert bytes(part) == whole.tobytes()
        assert address(part) == whole.ctypes.data
        with pytest.raises(BlockSizeError):
            buffers.as_parts(whole[:, ::2])
        whole.flags.writeable = False
        with pytest.raises(BlockSizeError):
            buffers.as_parts(whole, writable=True)


@pytest.mark.parametrize(
    "empty",
    [
        b"",
        bytearray(),
        np.empty(0),
        np.empty((3, 0, 2)),
        np.empty((0, 4))[:, ::2],
        array.array("i"),
    ],
    ids=repr,
)
def test_empty_buffers_are_empty_parts(empty: Any) -> None:
    """Nothing, in any shape, is no bytes."""
    assert joined(empty) == b""
    assert joined([empty, b"some", empty]) == b"some"


def test_sequences_are_lists_of_pieces() -> None:
    """A list or tuple gives one part an item, in order; no other iterable is guessed at."""
    assert [*map(bytes, buffers.as_parts([b"a", bytearray(b"bc"), b""]))] == [b"a", b"bc", b""]
    assert [bytes(part) for part in buffers.as_parts((b"a", np.array([98], np.uint8)))] == [
        b"a",
        b"b",
    ]
    assert buffers.as_parts([]) == []
    for wrong in ("text", 5, None, iter([b"a"]), {b"a"}, [[b"nested"]], ["text"], object()):
        with pytest.raises(TypeError):
            buffers.as_parts(wrong)


@pytest.mark.parametrize(
    "gaps",
    [
        np.zeros((4, 4))[:, ::2],
        np.zeros((4, 4))[::2],
        np.zeros((4, 6)).T,
        np.zeros(8)[::-1],
        np.asfortranarray(np.zeros((3, 4))),
        memoryview(bytearray(9))[::3],
        np.broadcast_to(np.zeros(1), (3,)),
    ],
    ids=["columns", "rows", "transposed", "reversed", "fortran", "memoryview", "broadcast"],
)
def test_what_is_not_contiguous_is_refused(gaps: Any) -> None:
    """Memory with gaps or in another order would need a copy: BlockSizeError says so."""
    with pytest.raises(BlockSizeError, match="contiguous"):
        buffers.as_parts(gaps)
    with pytest.raises(BlockSizeError, match="contiguous"):
        buffers.as_parts([b"fine", gaps])


def test_read_only_memory_is_refused_for_reading_into() -> None:
    """What cannot be written to is fine as a source and refused as a target."""
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    for source in (b"bytes", memoryview(b"bytes"), memoryview(bytearray(3)).toreadonly(), frozen):
        assert joined(source) == bytes(source)
        with pytest.raises(BlockSizeError, match="read-only"):
            buffers.as_parts(source, writable=True)
        with pytest.raises(BlockSizeError, match="read-only"):
            buffers.as_parts([bytearray(2), source], writable=True)


@given(data=st.binary(max_size=300), lengths=st.lists(st.integers(0, 80), max_size=12))
def test_scatter_fills_parts_in_order(data: bytes, lengths: list[int]) -> None:
    """Scattered bytes are the data as far as there is room, and nothing else changes."""
    parts = [memoryview(bytearray(b"\xff" * length)) for length in lengths]
    room = sum(lengths)

    buffers.scatter(memoryview(data), parts)

    filled = b"".join(parts)
    assert filled[: len(data)] == data[:room]
    assert set(filled[len(data) :]) <= {0xFF}
    assert buffers.total_bytes(parts) == room


@pytest.mark.parametrize("alignment", [16, 512, 4096, 65536])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 1 << 20])
def test_aligned_memory_is_aligned(nbytes: int, alignment: int) -> None:
    """`aligned` gives as many writable bytes as asked for, at a multiple of the alignment."""
    view = buffers.aligned(nbytes, alignment)

    assert (len(view), view.readonly, view.format) == (nbytes, False, "B")
    if nbytes:
        view[:] = b"\x55" * nbytes
        assert address(view) % alignment == 0
        assert bytes(view[-1:]) == b"\x55"


def test_aligned_memory_lives_as_long_as_its_views() -> None:
    """A slice of a slice keeps the memory when every other view is gone."""
    view = buffers.aligned(1 << 16)
    view[:] = b"\x11" * (1 << 16)
    last = view[4096:][:10]
    del view
    gc.collect()
    others = [buffers.aligned(1 << 16) for _ in range(8)]
    buffers.scatter(memoryview(b"\x22" * (8 << 16)), others)

    assert bytes(last) == b"\x11" * 10


def test_aligned_memory_is_given_back() -> None:
    """Allocating and dropping far more than the machine has does not fill its memory."""
    for _ in range(2000):
        view = buffers.aligned(1 << 30)
        view[:1] = b"x"
        del view


def test_impossible_sizes_are_refused() -> None:
    """More memory than there is, or a negative amount, raises instead of crashing."""
    with pytest.raises(MemoryError):
        buffers.aligned(1 << 62)
    with pytest.raises((OverflowError, ValueError, MemoryError)):
        buffers.aligned(-1)


def test_a_pool_hands_out_each_buffer_once() -> None:
    """Buffers that are out are different memory; one that was given back is used again."""
    pool = buffers.BouncePool(8192, limit=1)
    first, second = pool.take(), pool.take()
    places = {first.cdata, second.cdata}
    pool.give(first)
    pool.give(second)

    assert len(places) == 2
    assert pool.take().cdata in places
    assert first.nbytes == len(first.view()) == 8192


# Tensors that have no buffer protocol and speak DLPack


class Tensor:
    """An array that can be reached by DLPack alone, as a torch tensor can."""

    def __init__(self, values: Any, *, device: int = 1, refuse: Exception | None = None) -> None:
        self.values = values
        self._device = device
        self._refuse = refuse

    def __dlpack_device__(self) -> tuple[int, int]:
        """Name the device: 1 is the CPU."""
        return self._device, 0

    def __dlpack__(self, **options: Any) -> object:
        """Export the array's memory."""
        if self._refuse is not None:
            raise self._refuse
        return self.values.__dlpack__(**options)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "int64", "complex128"])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (1, 4, 1), ()])
def test_tensors_are_taken_by_address(dtype: str, shape: tuple[int, ...]) -> None:
    """A CPU tensor's bytes are viewed where they are, writable, in C order."""
    values = np.ones(shape, dtype)

    [part] = buffers.as_parts(Tensor(values), writable=True)
    part[:] = bytes(len(part))

    assert (part.ndim, part.format, len(part)) == (1, "B", values.nbytes)
    assert not values.any()


def test_a_slice_of_a_tensor_begins_where_it_says() -> None:
    """The offset of a contiguous slice is honoured."""
    values = np.arange(20, dtype=np.int32)

    assert joined(Tensor(values[5:9])) == values[5:9].tobytes()
    assert joined(Tensor(values.reshape(4, 5)[2:3, 1:4])) == values[11:14].tobytes()


def test_tensors_without_elements_are_empty() -> None:
    """A tensor with a zero extent is no bytes, whatever its other extents."""
    assert joined(Tensor(np.zeros((3, 0, 2)))) == b""
    assert joined([Tensor(np.zeros(0)), b"some"]) == b"some"


def test_tensors_that_cannot_be_viewed_are_refused_with_a_reason() -> None:
    """Gaps, another device and a refusal to export each say what is wrong."""
    with pytest.raises(BlockSizeError, match="contiguous"):
        buffers.as_parts(Tensor(np.zeros((4, 4))[:, ::2]))
    with pytest.raises(BlockSizeError, match="contiguous"):
        buffers.as_parts(Tensor(np.zeros((4, 5)).T))
    with pytest.raises(BlockSizeError, match="CPU"):
        buffers.as_parts(Tensor(np.zeros(4), device=2))
    for refusal in (BufferError("needs a gradient"), RuntimeError("needs a gradient")):
        with pytest.raises(TypeError, match="needs a gradient"):
            buffers.as_parts(Tensor(np.zeros(4), refuse=refusal))


def test_read_only_tensors_are_refused_for_reading_into() -> None:
    """A tensor over memory that may not be written is no target."""
    values = np.zeros(4)
    values.flags.writeable = False

    with pytest.raises((BlockSizeError, TypeError)):
        buffers.as_parts(Tensor(values), writable=True)


def test_a_tensor_lives_as_long_as_its_view() -> None:
    """The view alone keeps the memory, and lets it go when it goes."""

    class Owner(np.ndarray):  # an array that can be weakly referenced
        pass

    values = np.full(1 << 16, 7, np.uint8).view(Owner)
    alive = weakref.ref(values)
    [part] = buffers.as_parts(Tensor(values))
    del values
    gc.collect()

    assert alive() is not None
    assert bytes(part[:5]) == b"\x07" * 5
    inner = part[10:20]
    del part
    gc.collect()
    assert alive() is not None
    del inner
    gc.collect()
    assert alive() is None


def test_no_reference_to_a_tensor_is_leaked() -> None:
    """Viewing a tensor many times leaves its reference count as it was."""
    values = np.zeros(100)
    before = sys.getrefcount(values)
    for _ in range(1000):
        buffers.as_parts(Tensor(values))
    gc.collect()

    assert sys.getrefcount(values) == before


@pytest.mark.parametrize("backend", ["memory", "posix-tmpfile", "hybrid"])
def test_arrays_and_tensors_go_through_a_store(backend: str, tmp_path: Path) -> None:
    """What was written from arrays is read into arrays, in one list with tensors."""
    root = None if backend == "memory" else tmp_path
    layers = [np.random.default_rng(i).random((3, 50 + i), np.float32) for i in range(4)]
    with kvio.open_store(backend, root=root) as store:
        store.write_block("layers", [layers[0], Tensor(layers[1]), layers[2], Tensor(layers[3])])
        out = [np.empty_like(layer) for layer in layers]

        store.read_block_into("layers", [Tensor(out[0]), out[1], Tensor(out[2]), out[3]])

    assert all(np.array_equal(a, b) for a, b in zip(layers, out, strict=True))


@pytest.mark.torch
def test_torch_tensors_of_every_dtype() -> None:
    """Contiguous CPU tensors of every torch dtype are taken by address, bfloat16 included."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    ):
        tensor = torch.ones((3, 5), dtype=dtype)

        [part] = buffers.as_parts(tensor, writable=True)

        assert len(part) == tensor.nbytes
        assert address(part) == tensor.data_ptr()
        part[:] = bytes(len(part))
        assert not tensor.any()


@pytest.mark.torch
def test_torch_tensors_that_cannot_be_viewed() -> None:
    """A gradient and gaps are refused with a sentence; a slice and an empty tensor are fine."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(TypeError, match="grad"):
        buffers.as_parts(torch.ones(4, requires_grad=True))
    with pytest.raises(BlockSizeError, match="contiguous"):
        buffers.as_parts(torch.ones((4, 4))[:, ::2])
    with pytest.raises(BlockSizeError, match="contiguous"):
        buffers.as_parts(torch.ones((4, 5)).T)

    assert joined(torch.empty((0, 4))) == b""
    assert joined(torch.arange(10, dtype=torch.uint8)[3:6]) == bytes([3, 4, 5])
    assert joined(torch.ones(4, requires_grad=True).detach()) == np.ones(4, "f4").tobytes()


@pytest.mark.torch
def test_a_torch_tensor_lives_as_long_as_its_view() -> None:
    """Dropping every name of a tensor leaves its memory to the view, until that goes too."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    storage = torch.full((1 << 16,), 7, dtype=torch.uint8)
    alive = weakref.ref(storage.untyped_storage())
    [part] = buffers.as_parts(storage)
    del storage
    gc.collect()
    torch.zeros(1 << 16, dtype=torch.uint8)

    assert bytes(part[-3:]) == b"\x07\x07\x07"
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.torch
def test_torch_blocks_of_bfloat16_round_trip(tmp_path: Path) -> None:
    """A bfloat16 tensor written through a store is read back into one, bit for bit."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.randn((8, 128), dtype=torch.float32).to(torch.bfloat16)
    out = torch.empty_like(tensor)
    with kvio.open_store("hybrid", root=tmp_path) as store:
        store.write_block("kv", [tensor[:3], tensor[3:]])
        store.read_block_into("kv", out)

    assert torch.equal(out.view(torch.int16), tensor.view(torch.int16))


def test_memory_of_a_block_that_was_freed_is_used_again() -> None:
    """Its pages are there: a read into it pays for no page faults."""
    for nbytes in (256 * KiB, MiB, 8 * MiB):
        first = kvio.aligned_buffer(nbytes)
        address = address_of(first)
        del first
        again = kvio.aligned_buffer(nbytes)
        assert address_of(again) == address
        other = kvio.aligned_buffer(nbytes)
        assert address_of(other) != address, "memory that is in use was handed out"


_KEPT = """
import kvio
def rss():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
before = rss()
blocks = []
for number in range(100):
    block = kvio.aligned_buffer(3 << 20)
    block[::4096] = bytes(len(block[::4096]))
    blocks.append(block)
del block
assert rss() - before > 290 << 20
blocks.clear()
print(rss() - before)
"""


def test_freed_memory_is_kept_within_bounds() -> None:
    """64 MiB of it, and what the interpreter took for itself meanwhile."""
    done = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, check=True)
    kept = int(done.stdout)

    assert 16 * MiB < kept < 80 * MiB


_KEPT_MORE = """
import kvio
def rss():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS"))
def fill():
    blocks = [kvio.aligned_buffer(3 << 20) for _ in range(100)]
    for block in blocks:
        block[::4096] = bytes(len(block[::4096]))
fill()
before = rss()
kvio.keep_freed_memory("256MiB")
fill()
kept = rss() - before
kvio.keep_freed_memory(0)
print(kept, rss() - before)
"""


def test_a_process_says_how_much_freed_memory_is_kept() -> None:
    """At most so much, at once less when it says less, and nothing on request."""
    done = subprocess.run(
        [sys.executable, "-c", _KEPT_MORE], capture_output=True, text=True, check=True
    )
    kept, left = map(int, done.stdout.split())

    assert 90 * MiB < kept < 270 * MiB
    assert left < 16 * MiB


def test_a_block_takes_half_of_the_memory_that_is_kept() -> None:
    """One that is longer is freed; 64 MiB keep 32, 512 MiB keep 256."""
    nbytes = 100 * MiB
    try:
        kvio.keep_freed_memory(512 * MiB)
        first = kvio.aligned_buffer(nbytes)
        address = address_of(first)
        del first
        again = kvio.aligned_buffer(nbytes)
        assert address_of(again) == address
    finally:
        kvio.keep_freed_memory(64 * MiB)


@pytest.mark.parametrize("wrong", [-1, "much"])
def test_memory_to_keep_is_a_size(wrong: int | str) -> None:
    """Anything else is refused, and changes nothing."""
    with pytest.raises(kvio.ConfigError):
        kvio.keep_freed_memory(wrong)
