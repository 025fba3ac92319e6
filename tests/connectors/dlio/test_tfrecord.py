"""TFRecord files: both checksums of a record verified, and what TensorFlow makes of them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from kvio.connectors.dlio import decoding

IMAGES = [bytes(range(200)), b"", b"\0" * 300]
FILE = b"".join(
    decoding.framed(decoding.example({"image": image, "size": number}))
    for number, image in enumerate(IMAGES)
)


def _masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _decode(content: bytes) -> list[bytes]:
    arrays = decoding.decode("tfrecord", memoryview(content), key="a/b")
    return [array.tobytes() for array in arrays]


def test_a_frame_is_a_length_and_bytes_and_a_checksum_of_each() -> None:
    """Byte for byte, with the checksums of another implementation."""
    length = struct.pack("<Q", 3)

    assert decoding.framed(b"abc") == length + _masked(length) + b"abc" + _masked(b"abc")


def test_the_images_are_found() -> None:
    """In the order of the records, whatever stands beside them."""
    assert _decode(FILE) == IMAGES


@pytest.mark.parametrize("record", [b"", b"text", b"\x0a\x80", b"\xff" * 20, b"\x0a\x03\x0a\x09x"])
def test_a_record_without_an_image_is_its_bytes(record: bytes) -> None:
    """Other records than DLIO's are samples too."""
    assert _decode(decoding.framed(record)) == [record]


@given(place=st.integers(0, len(FILE) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_named(place: int, bit: int) -> None:
    """Every byte of a file is under a checksum."""
    damaged = bytearray(FILE)
    damaged[place] ^= 1 << bit

    with pytest.raises(kvio.CorruptBlockError, match=r"'a/b' is no tfrecord sample") as caught:
        _decode(bytes(damaged))
    assert caught.value.key == "a/b"


@given(kept=st.integers(0, len(FILE) - 1))
def test_a_truncated_file_is_damaged_or_has_too_few_samples(kept: int) -> None:
    """Cut between two records it is whole, but the sample that is asked for is not there."""
    with pytest.raises(kvio.CorruptBlockError, match="'a/b'"):
        decoding.sample(
            "tfrecord",
            decoding.decode("tfrecord", memoryview(FILE)[:kept], key="a/b"),
            len(IMAGES) - 1,
            key="a/b",
        )


@given(record=st.binary(max_size=60))
def test_no_bytes_make_the_parser_fail(record: bytes) -> None:
    """A record with the right checksum is a sample, whatever is in it."""
    found = decoding.image_of(memoryview(record))

    assert bytes(found) in record


@given(image=st.binary(max_size=400), size=st.integers(-(2**63), 2**63 - 1))
def test_an_image_survives(image: bytes, size: int) -> None:
    """What an example is made of is found in it."""
    orders: list[dict[str, bytes | int]] = [
        {"image": image, "size": size},
        {"size": size, "image": image},
    ]
    for features in orders:
        assert bytes(decoding.image_of(memoryview(decoding.example(features)))) == image


@pytest.fixture
def tensorflow() -> Any:
    """Return the real TensorFlow, where it is installed."""
    found = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    if "stand_ins" in (found.__file__ or ""):
        pytest.skip("TensorFlow is not installed")
    return found


@pytest.mark.slow
def test_tensorflow_reads_what_is_written_here(tensorflow: Any, tmp_path: Path) -> None:
    """The framing and the messages are TensorFlow's."""
    path = tmp_path / "a.tfrecord"
    path.write_bytes(FILE)

    for number, record in enumerate(tensorflow.data.TFRecordDataset(str(path))):
        features = tensorflow.train.Example.FromString(record.numpy()).features.feature
        assert features["image"].bytes_list.value[0] == IMAGES[number]
        assert features["size"].int64_list.value[0] == number


@pytest.mark.slow
def test_what_tensorflow_writes_is_read_here(tensorflow: Any, tmp_path: Path) -> None:
    """Its own examples, features in whatever order it likes."""
    path = tmp_path / "a.tfrecord"
    with tensorflow.io.TFRecordWriter(str(path)) as writer:
        for image in IMAGES:
            feature = {
                "image": tensorflow.train.Feature(
                    bytes_list=tensorflow.train.BytesList(value=[image])
                ),
                "size": tensorflow.train.Feature(int64_list=tensorflow.train.Int64List(value=[-1])),
            }
            features = tensorflow.train.Features(feature=feature)
            writer.write(tensorflow.train.Example(features=features).SerializeToString())

    assert _decode(path.read_bytes()) == IMAGES
    assert np.frombuffer(path.read_bytes(), dtype=np.uint8).size > sum(map(len, IMAGES))


@pytest.mark.parametrize("missing", [1, 3, 4, 5, 8])
def test_a_file_that_ends_within_its_last_checksum_says_so(missing: int) -> None:
    """It is named as cut, wherever within a record it is."""
    with pytest.raises(kvio.CorruptBlockError, match="ends within the record"):
        _decode(FILE[:-missing])


@pytest.mark.parametrize("number", [0, 1, 127, 128, 2**31, 2**62, -1])
def test_a_number_of_numpy_is_written_like_an_int(number: int) -> None:
    """DLIO's sizes are np.int64, which must not overflow on the way."""
    assert decoding.example({"size": np.int64(number)}) == decoding.example({"size": number})
