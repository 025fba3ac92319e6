"""Blocks to arrays: exact, never a pickle, and named when they are damaged."""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio.connectors.dlio import decoding

ARRAY = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)


def _npz(**arrays: Any) -> memoryview:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return memoryview(out.getvalue())


def _npy(array: Any) -> memoryview:
    out = io.BytesIO()
    np.save(out, array)
    return memoryview(out.getvalue())


@pytest.mark.parametrize("name", ["npz", "npy"])
def test_numpy_files_decode_to_what_was_saved(name: str) -> None:
    """Sample i is the i-th of the last axis, as DLIO's readers have it."""
    block = _npz(x=ARRAY, y=[0]) if name == "npz" else _npy(ARRAY)
    array = decoding.decode(name, block, key="a")

    assert np.array_equal(array, ARRAY)
    assert np.array_equal(decoding.sample(name, array, 3, key="a"), ARRAY[:, :, 3])


def test_a_compressed_file_decodes_too() -> None:
    """``compression: zip`` is a choice of the workload."""
    out = io.BytesIO()
    np.savez_compressed(out, x=ARRAY)

    assert np.array_equal(decoding.decode("npz", out.getbuffer(), key="a"), ARRAY)


@pytest.mark.parametrize("name", ["npz", "npy"])
def test_a_pickle_is_never_loaded(name: str) -> None:
    """An object array would run what its author likes."""
    objects = np.array([{}], dtype=object)
    block = _npz(x=objects) if name == "npz" else _npy(objects)

    with pytest.raises(kvio.CorruptBlockError, match="allow_pickle"):
        decoding.decode(name, block, key="a/b")


@pytest.mark.parametrize("name", ["npz", "npy"])
@pytest.mark.parametrize("kept", [0, 3, 60, 150])
def test_a_short_block_is_named(name: str, kept: int) -> None:
    """A truncated sample says which it is, and its format."""
    block = _npz(x=ARRAY) if name == "npz" else _npy(ARRAY)

    with pytest.raises(kvio.CorruptBlockError, match=rf"'a/b' is no {name} sample") as caught:
        decoding.decode(name, block[:kept], key="a/b")
    assert caught.value.key == "a/b"


def test_a_header_as_python_2_wrote_it_is_read_or_refused() -> None:
    """Numpy warns of one that it mends; where warnings are errors, the block is named."""
    text = b"{'descr': '|u1', 'fortran_order': False, 'shape': (0L,)}"
    block = memoryview(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert decoding.decode("npy", block, key="k").shape == (0,)
        warnings.simplefilter("error")
        with pytest.raises(kvio.CorruptBlockError, match="'k'"):
            decoding.decode("npy", block, key="k")


def test_a_flipped_bit_is_found() -> None:
    """The checksum inside an .npz file is checked."""
    damaged = bytearray(_npz(x=ARRAY))
    damaged[damaged.index(bytes(ARRAY)) + 5] ^= 1

    with pytest.raises(kvio.CorruptBlockError, match="CRC"):
        decoding.decode("npz", memoryview(damaged), key="a")


@given(place=st.integers(0, len(_npz(x=ARRAY)) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_changes_no_sample_unsaid(place: int, bit: int) -> None:
    """Whichever bit of a block is wrong: the array is right, or the block is named."""
    damaged = bytearray(_npz(x=ARRAY))
    damaged[place] ^= 1 << bit

    try:
        found = decoding.decode("npz", memoryview(damaged), key="a/b")
    except kvio.CorruptBlockError as exc:
        said = exc.key
    else:
        said = "a/b" if np.array_equal(found, ARRAY) else None
    assert said == "a/b"


def test_a_file_without_the_array_is_damaged() -> None:
    """DLIO's samples are under ``x``."""
    with pytest.raises(kvio.CorruptBlockError):
        decoding.decode("npz", _npz(z=ARRAY), key="a")


@pytest.mark.parametrize("name", ["jpeg", "png"])
def test_images_decode_to_pixels(name: str) -> None:
    """And what is no image is named."""
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    out = io.BytesIO()
    pillow.fromarray(ARRAY[0]).save(out, format=name)

    assert decoding.decode(name, out.getbuffer(), key="a").shape == (3, 4)
    with pytest.raises(kvio.CorruptBlockError, match="'a'"):
        decoding.decode(name, memoryview(b"not an image"), key="a")
    with pytest.raises(kvio.CorruptBlockError, match="'a'"):
        decoding.decode(name, out.getbuffer()[: out.tell() // 2], key="a")


@pytest.mark.parametrize("name", ["npz", "npy", "tfrecord"])
def test_a_block_with_too_few_samples_is_named(name: str) -> None:
    """What is asked for beyond the last sample is damage, not an index error of a library."""
    with pytest.raises(kvio.CorruptBlockError, match="'a/b' has no sample 9") as caught:
        decoding.sample(name, ARRAY, 9, key="a/b")
    assert caught.value.key == "a/b"


def test_a_format_that_is_not_read_is_refused_by_name() -> None:
    """With the formats that are."""
    with pytest.raises(kvio.UnsupportedError, match=r"npz.*tfrecord.*not synthetic"):
        decoding.check_format("synthetic")


def test_several_datasets_of_records_are_one_array() -> None:
    """Some releases write records_0, records_1, ... : an axis after that of the sample."""
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    file = io.BytesIO()
    with h5py.File(file, "w") as made:
        for number in range(3):
            made[f"records_{number}"] = np.full((4, 2), number)
    array = decoding.decode("hdf5", file.getbuffer(), key="k")

    assert array.shape == (4, 3, 2)
    assert array[:, 1].tolist() == [[1, 1]] * 4


def test_an_hdf5_file_without_records_is_damaged() -> None:
    """And named, like every other."""
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    file = io.BytesIO()
    with h5py.File(file, "w") as made:
        made["other"] = np.zeros(3)
    with pytest.raises(kvio.CorruptBlockError, match=r"'k'.*records"):
        decoding.decode("hdf5", file.getbuffer(), key="k")


@pytest.mark.parametrize("text", [b"1,2\n3,4\n", b",0,1\n0,1,2\n1,3,4\n"])
def test_rows_of_a_csv_are_counted_with_and_without_a_header(text: bytes) -> None:
    """Two rows in either: releases differ in whether they write a header."""
    pytest.importorskip("pandas", reason="needs pandas")
    assert len(decoding.decode("csv", memoryview(text), key="k")) == 2
