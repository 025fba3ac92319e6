"""Memory whose bytes do not stand for themselves is refused at every door; all else is kept."""

from __future__ import annotations

import asyncio
import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import kvio
from kvio.core import buffers

OTHER_ORDER = ">" if sys.byteorder == "little" else "<"


class WithObject(ctypes.Structure):
    """A structure of ctypes that says what is in it."""

    _fields_ = (("number", ctypes.c_int), ("object", ctypes.py_object))


class Packed(ctypes.Structure):
    """One that calls itself plain bytes, whatever is in it."""

    _pack_ = 1
    _fields_ = (("small", ctypes.c_uint8), ("object", ctypes.py_object))


class Either(ctypes.Union):
    """And so does a union."""

    _fields_ = (("number", ctypes.c_uint64), ("object", ctypes.py_object))


_SWAPPED = ctypes.BigEndianStructure if sys.byteorder == "little" else ctypes.LittleEndianStructure
#: A structure of numbers in the other byte order.
Swapped: Any = type("Swapped", (_SWAPPED,), {"_fields_": (("number", ctypes.c_int),)})


def array_of(dtype: Any, shape: Any = 2) -> np.ndarray[Any, Any]:
    """Make a zeroed array, which may be of objects."""
    return np.zeros(shape, np.dtype(dtype))


ADDRESSES: dict[str, Any] = {
    "object": np.array([{}], dtype=object),
    "no dimensions": np.array({}, dtype=object),
    "empty": array_of(object, 0),
    "field": array_of([("number", "i4"), ("it", object)]),
    "subarray": array_of([("number", "i4"), ("them", object, (2,))]),
    "nested": array_of([("outer", [("inner", [("it", object)])])]),
    "behind a zero byte": array_of([("\0", "i4"), ("it", object)]),
    "a field of no letter": array_of([("when", "M8[s]"), ("it", object)]),
    "element": array_of([("number", "i4"), ("it", object)])[0],
    "memoryview": np.array([{}], dtype=object).data,
    "ctypes objects": (ctypes.py_object * 2)(),
    "ctypes structure": (WithObject * 2)(),
    "ctypes packed": (Packed * 2)(),
    "ctypes packed, one": Packed(),
    "ctypes union": (Either * 2)(),
    "ctypes pointers": (ctypes.c_void_p * 2)(),
    "ctypes strings": (ctypes.c_char_p * 2)(),
    "ctypes wide strings": (ctypes.c_wchar_p * 2)(),
    "ctypes typed pointers": (ctypes.POINTER(ctypes.c_int) * 2)(),
    "ctypes functions": (ctypes.CFUNCTYPE(None) * 2)(),
}
SWAPPED: dict[str, Any] = {
    "number": array_of(f"{OTHER_ORDER}f4"),
    "text": array_of(f"{OTHER_ORDER}U7"),
    "time": array_of(f"{OTHER_ORDER}M8[s]"),
    "field": array_of([("mine", "f8"), ("theirs", f"{OTHER_ORDER}f8")]),
    "subarray": array_of([("theirs", f"{OTHER_ORDER}i2", (3,))]),
    "behind a zero byte": array_of([("\0", "i4"), ("theirs", f"{OTHER_ORDER}i2")]),
    "subarray beside a time": array_of([("when", "M8[s]"), ("theirs", f"{OTHER_ORDER}i2", (3,))]),
    "ctypes": (Swapped * 2)(),
}
PLAIN: dict[str, Any] = {
    "names that look like formats": array_of(
        [("O", "i4"), ("P", "f8"), (">", "u1"), ("z&X", "i2")]
    ),
    "bytes": array_of("V7"),
    "complex": array_of("complex128"),
    "longest complex": array_of("clongdouble"),
    "padded": array_of(np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "one byte each": array_of(f"{OTHER_ORDER}i1"),
    "ctypes": (ctypes.c_long * 3)(1, 2, 3),
    "ctypes text": (ctypes.c_wchar * 3)("a", "b", "c"),
}


def parameters(cases: dict[str, Any]) -> list[Any]:
    """Make a test parameter a case."""
    return [pytest.param(value, id=name) for name, value in cases.items()]


@pytest.mark.parametrize("memory", parameters(ADDRESSES))
def test_addresses_are_refused(memory: Any) -> None:
    """Objects and pointers, at any depth, cannot be stored, read into, or be a piece of a block."""
    for data in (memory, [b"fine", memory]):
        with pytest.raises(TypeError, match=r"addresses"):
            buffers.as_parts(data)
        with pytest.raises(TypeError, match=r"addresses"):
            buffers.as_parts(memory, writable=True)
    with pytest.raises(TypeError, match=r"addresses"):
        buffers.flatten([b"fine", memory])


@pytest.mark.parametrize("memory", parameters(SWAPPED))
def test_the_other_byte_order_is_refused(memory: Any) -> None:
    """Numbers that a reader on this machine would take for others cannot be stored or read into."""
    for writable in (False, True):
        with pytest.raises(TypeError, match=r"byte order.*newbyteorder"):
            buffers.as_parts(memory, writable=writable)


def test_the_error_names_the_dtype_and_what_it_advises_works() -> None:
    """The sentence says which dtype it is about, and its conversion makes the array storable."""
    array = np.arange(3, dtype=f"{OTHER_ORDER}i4")
    with pytest.raises(TypeError, match=re.escape(f"dtype {OTHER_ORDER}i4")):
        buffers.as_parts(array)
    converted = array.astype(array.dtype.newbyteorder("="))
    packed = (Packed * 3)()

    assert bytes(buffers.as_parts(converted)[0]) == np.arange(3, dtype="i4").tobytes()
    assert len(buffers.as_parts(memoryview(packed).cast("B"))[0]) == ctypes.sizeof(packed)


@pytest.mark.parametrize("memory", parameters(PLAIN))
def test_what_only_looks_like_it_is_taken(memory: Any) -> None:
    """Names of fields, padding, and one byte an item have no order and hold no addresses."""
    assert b"".join(buffers.as_parts(memory, writable=True)) == bytes(memory)


def dtypes() -> st.SearchStrategy[np.dtype[Any]]:
    """Draw dtypes of every kind and byte order, structures and subarrays, some with objects."""
    leaves = npst.scalar_dtypes() | st.sampled_from([np.dtype(object), np.dtype("V7")])
    return npst.nested_dtypes(leaves, max_leaves=6, max_itemsize=200)


@pytest.fixture(scope="module", params=["memory", "posix-tmpfile", "hybrid"])
def store(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[kvio.Store]:
    """Open a store once for all examples."""
    root = None if request.param == "memory" else tmp_path_factory.mktemp("store")
    with kvio.open_store(request.param, root=root) as opened:
        yield opened


@given(data=st.data(), dtype=dtypes(), shape=npst.array_shapes(min_dims=0, min_side=0, max_side=3))
def test_an_array_is_refused_or_comes_back(
    store: kvio.Store, data: st.DataObject, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    """Of every array the write is refused, and then for a reason, or its bytes are read back."""
    array = np.zeros(shape, dtype)
    if not dtype.hasobject and array.nbytes:
        drawn = data.draw(st.binary(min_size=array.nbytes, max_size=array.nbytes))
        array = np.frombuffer(drawn, np.uint8).view(array.dtype).reshape(array.shape).copy()
    try:
        receipt = store.write_block("array", array, if_exists="replace")
    except TypeError:
        assert dtype.hasobject or dtype.newbyteorder("=") != dtype
        with pytest.raises(TypeError):
            store.read_block_into("array", array)
        return

    out = np.zeros_like(array)
    assert not dtype.hasobject
    assert dtype.newbyteorder("=") == dtype
    assert receipt.nbytes == array.nbytes
    assert bytes(store.read_block("array")) == array.tobytes()
    assert store.read_block_into("array", out) == array.nbytes
    assert out.tobytes() == array.tobytes()


# Every door


class Doors:
    """A store, a tier over another one, and a shared file, each with something to read."""

    def __init__(self, root: Path) -> None:
        self.store = kvio.open_store("hybrid", root=root)
        self.behind = kvio.open_store("memory")
        self.tier = kvio.stage(self.behind, capacity="1MiB")
        self.path = root / "shared"
        self.file = kvio.SharedFile.create(self.path, 4096)
        for one in (self.store, self.behind):
            one.write_block("there", bytes(64))

    def close(self) -> None:
        """Close them all; nothing was written that would have to be stored."""
        self.tier.close()
        self.behind.close()
        self.store.close()
        self.file.abort()

    def write_to_file(self, memory: Any) -> None:
        """Write to a file of the tier, which the error then drops."""
        with self.tier.open("block", "wb") as file:
            file.write(memory)

    def read_from_file(self, memory: Any) -> None:
        """Read from a file of the tier, through its buffer."""
        with self.tier.open("there", "rb") as file:
            file.readinto(memory)

    def read_from_file_once(self, memory: Any) -> None:
        """Read from a file of the tier by one read of its store at most."""
        with self.tier.open("there", "rb") as file:
            file.readinto1(memory)

    def read_from_raw_file(self, memory: Any) -> None:
        """Read from a file of the tier past its buffer."""
        with self.tier.open("there", "rb") as file:
            file.raw.readinto(memory)

    def write_in_a_task(self, memory: Any) -> None:
        """Write through the store's asynchronous half."""
        asyncio.run(kvio.AsyncStore(self.store).write_block("block", memory))


DOORS: dict[str, Callable[[Doors, Any], object]] = {
    "write_block": lambda d, m: d.store.write_block("block", m),
    "write_block, with a timeout": lambda d, m: d.store.write_block("block", m, timeout=60),
    "write_blocks": lambda d, m: d.store.write_blocks([("first", b"fine"), ("block", m)]),
    "submit_write": lambda d, m: d.store.submit_write("block", m),
    "AsyncStore.write_block": Doors.write_in_a_task,
    "read_block_into": lambda d, m: d.store.read_block_into("there", m),
    "read_block_into, a range": lambda d, m: d.store.read_block_into("there", m, nbytes=8),
    "read_blocks_into": lambda d, m: d.store.read_blocks_into([("there", m)]),
    "submit_read_into": lambda d, m: d.store.submit_read_into("there", m),
    "tier.write_block": lambda d, m: d.tier.write_block("block", m),
    "tier.write_blocks": lambda d, m: d.tier.write_blocks([("block", m)]),
    "tier.read_block_into": lambda d, m: d.tier.read_block_into("there", m),
    "tier.read_blocks_into": lambda d, m: d.tier.read_blocks_into([("there", m)]),
    "tier file, write": Doors.write_to_file,
    "tier file, readinto": Doors.read_from_file,
    "tier file, readinto1": Doors.read_from_file_once,
    "tier file, raw": Doors.read_from_raw_file,
    "SharedFile.pwrite": lambda d, m: d.file.pwrite(m, 0),
    "SharedFile.submit_pwrite": lambda d, m: d.file.submit_pwrite(m, 0),
}


@pytest.fixture
def doors(tmp_path: Path) -> Iterator[Doors]:
    """Open everything that takes memory."""
    tmp_path.chmod(0o700)
    opened = Doors(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("memory", parameters({**ADDRESSES, **SWAPPED}))
def test_every_door_refuses_it(doors: Doors, memory: Any) -> None:
    """No call that takes memory takes such memory; nothing is stored, and objects stay as were."""
    objects = repr(memory.tolist()) if isinstance(memory, np.ndarray) else None
    for door, call in DOORS.items():
        try:
            call(doors, memory)
        except TypeError:
            continue
        pytest.fail(f"{door} took it")
    doors.tier.barrier()

    assert list(doors.store.list_keys()) == list(doors.behind.list_keys()) == ["there"]
    assert objects is None or repr(memory.tolist()) == objects


def test_reading_a_shared_file_refuses_it(doors: Doors) -> None:
    """A published shared file is not read into objects."""
    path = doors.path.with_name("other")
    with kvio.SharedFile.create(path, 64) as file:
        file.pwrite(bytes(64), 0)
        file.seal()
    with kvio.SharedFile.open(path) as file:
        for memory in (*ADDRESSES.values(), *SWAPPED.values()):
            with pytest.raises(TypeError):
                file.pread_into(memory, 0)


# DLPack


class _DLTensor(ctypes.Structure):
    """As the DLPack header lays it out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Exported:
    """Eight bytes, exported as elements of a type that is drawn."""

    def __init__(self, code: int, bits: int, lanes: int) -> None:
        self.bytes = (ctypes.c_uint8 * 8)(*b"eight by")
        self.shape = (ctypes.c_int64 * 1)(8 * 8 // (bits * lanes or 64))
        address = ctypes.addressof(self.bytes)
        shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        self.tensor = _DLTensor(address, 1, 0, 1, code, bits, lanes, shape, None, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Name the CPU."""
        return 1, 0

    def __dlpack__(self) -> object:
        """Wrap the structure in a capsule that frees nothing."""
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


def test_tensors_of_opaque_handles_or_of_no_bits_are_refused() -> None:
    """Of what DLPack can describe, handles and elements without bits have no bytes to store."""
    with pytest.raises(TypeError, match="addresses"):
        buffers.as_parts(Exported(3, 64, 1))
    for bits, lanes in ((0, 1), (8, 0), (0, 0)):
        with pytest.raises(TypeError, match="bits"):
            buffers.as_parts(Exported(2, bits, lanes))
    for code, bits, lanes in ((0, 64, 1), (2, 16, 2), (4, 16, 1), (6, 8, 1), (17, 4, 2)):
        exported = Exported(code, bits, lanes)
        assert bytes(buffers.as_parts(exported)[0]) == b"eight by"
