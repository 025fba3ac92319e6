"""The block format: docs/format.md, the Python reference and the C core say the same."""

from __future__ import annotations

import hashlib
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

import kvio
from kvio import _native
from kvio.format import (
    MAX_PADDING_BYTES,
    TRAILER_BYTES,
    Trailer,
    TrailerError,
    key_hash,
    pack_trailer,
    unpack_trailer,
)


class Vector(NamedTuple):
    """A block, where its file lies, and the trailer it must have: magic to checksum by field."""

    namespace: str
    key: str
    payload: bytes
    path: str
    trailer: str


VECTORS = (
    Vector(
        namespace="",
        key="a",
        payload=b"",
        path="8/1/a",
        trailer="4b56494f424c4b0a 0100 0100 00000000 0000000000000000"
        "81b36a4468495f04ff472115cf189272 0000000000000000000000000000000000000000 46148e66",
    ),
    Vector(
        namespace="",
        key="model/layer0",
        payload=b"123456789",
        path="7/8/model~layer0",
        trailer="4b56494f424c4b0a 0100 0100 839206e3 0900000000000000"
        "78264680d5c05962b39cd60776c35006 0000000000000000000000000000000000000000 040b23bb",
    ),
    Vector(
        namespace="tenant-1",
        key="model/layer0",
        payload=b"123456789",
        path="9/1/model~layer0",
        trailer="4b56494f424c4b0a 0100 0100 839206e3 0900000000000000"
        "91cfffe35eccfc578865a058b47f4392 0000000000000000000000000000000000000000 c55e6adc",
    ),
)
DOCUMENT = Path(__file__).parents[1] / "docs" / "format.md"
KEY = "key"
HASH = key_hash("", KEY)


def crc(data: bytes) -> int:
    """Checksum with the published library, not ours."""
    return int(google_crc32c.value(data))


def resealed(trailer: bytes | bytearray) -> bytes:
    """Put the right checksum at the end of a trailer that was changed."""
    return bytes(trailer[:60]) + struct.pack("<I", crc(bytes(trailer[:60])))


def reference(stored: bytes) -> Trailer | None:
    """Read a stored block's trailer with the Python reference; None where it refuses."""
    try:
        return unpack_trailer(
            stored[-TRAILER_BYTES:],
            stored_nbytes=len(stored),
            expected_key_hash=HASH,
            crc32c=crc,
        )
    except TrailerError:
        return None


class Core:
    """The C core's reader, reached through a file under a store's root."""

    def __init__(self, root: Path) -> None:
        self.store = kvio.open_store("posix-tmpfile", root=root)
        self.store.write_block(KEY, b"")
        self.path = root / f"{HASH[0] >> 4:x}" / f"{HASH[0] & 15:x}" / KEY

    def read(self, stored: bytes) -> Trailer | None:
        """Read a stored block's trailer with the C core; None where it refuses."""
        self.path.write_bytes(stored)
        try:
            stat = self.store.stat_block(KEY)
        except kvio.CorruptBlockError:
            return None
        return Trailer(stat.nbytes, stat.checksum, HASH)


@pytest.fixture
def core(tmp_path: Path) -> Any:
    """Yield the C core's reader."""
    reader = Core(tmp_path)
    yield reader
    reader.store.close()


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.namespace}:{vector.key}")
def test_python_writes_the_vectors(vector: Vector) -> None:
    """The Python reference packs each vector and unpacks it again."""
    trailer = Trailer(
        len(vector.payload), crc(vector.payload), key_hash(vector.namespace, vector.key)
    )

    packed = pack_trailer(trailer, crc)

    assert packed == bytes.fromhex(vector.trailer)
    assert trailer == unpack_trailer(
        packed,
        stored_nbytes=len(vector.payload) + TRAILER_BYTES,
        expected_key_hash=trailer.key_hash,
        crc32c=crc,
    )


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector.namespace}:{vector.key}")
def test_the_c_core_writes_the_vectors(vector: Vector, tmp_path: Path) -> None:
    """A POSIX store writes each vector's file, byte for byte, in its place."""
    options = {"namespace": vector.namespace}
    with kvio.open_store("posix-tmpfile", root=tmp_path, options=options) as store:
        store.write_block(vector.key, vector.payload)

    stored = (tmp_path / vector.path).read_bytes()

    assert stored == vector.payload + bytes.fromhex(vector.trailer)


def test_the_document_holds_the_same_vectors() -> None:
    """The table in docs/format.md is the table above."""
    rows = re.findall(
        r"\| `'(.*?)'` \| `(.*?)` \| `b'(.*?)'` \| `([0-9a-f]+)`", DOCUMENT.read_text()
    )

    assert [(n, k, p.encode(), bytes.fromhex(t)) for n, k, p, t in rows] == [
        (v.namespace, v.key, v.payload, bytes.fromhex(v.trailer)) for v in VECTORS
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(max_size=5000), checksum=st.booleans())
def test_both_write_the_same_bytes(tmp_path: Path, payload: bytes, *, checksum: bool) -> None:
    """What the C core writes is the payload and the Python reference's trailer."""
    options = {"checksum": "crc32c" if checksum else "none"}
    trailer = Trailer(len(payload), crc(payload) if checksum else None, HASH)
    with kvio.open_store("posix-tmpfile", root=tmp_path, options=options) as store:
        store.write_block(KEY, payload, if_exists="replace")

    [path] = tmp_path.glob(f"*/*/{KEY}")

    assert path.read_bytes() == payload + pack_trailer(trailer, crc)


def test_every_flipped_bit_is_refused_by_both(core: Core) -> None:
    """No single bit of the 64 bytes can change without both readers refusing."""
    good = b"payload" + pack_trailer(Trailer(7, crc(b"payload"), HASH), crc)
    assert reference(good) == core.read(good) == Trailer(7, crc(b"payload"), HASH)

    for bit in range(8 * TRAILER_BYTES):
        bad = bytearray(good)
        bad[7 + bit // 8] ^= 1 << bit % 8

        assert reference(bytes(bad)) is None, bit
        assert core.read(bytes(bad)) is None, bit


def test_unknown_versions_and_flags_are_refused_by_both(core: Core) -> None:
    """Another version or flag is refused even where the checksum is right."""
    good = pack_trailer(Trailer(0, 0, HASH), crc)
    for at, value in ((8, 0), (8, 2), (8, 0xFFFF), (10, 2), (10, 3), (10, 0x8001)):
        changed = bytearray(good)
        struct.pack_into("<H", changed, at, value)
        stored = resealed(changed)

        with pytest.raises(TrailerError, match="version"):
            unpack_trailer(stored, stored_nbytes=TRAILER_BYTES, expected_key_hash=HASH, crc32c=crc)
        assert core.read(stored) is None


@pytest.mark.parametrize(
    ("nbytes", "padding", "fits"),
    [
        (100, 0, True),
        (100, 1, True),
        (100, MAX_PADDING_BYTES - 1, True),
        (100, MAX_PADDING_BYTES, False),
        (100, -1, False),
        (1 << 63, 0, False),
        ((1 << 64) - 64, 0, False),
        ((1 << 64) - 1, 0, False),
    ],
)
def test_padding_has_its_bounds_in_both(
    core: Core, nbytes: int, padding: int, *, fits: bool
) -> None:
    """A trailer whose length leaves too much or too little room for padding is refused."""
    stored = bytes(min(nbytes + padding, 70_000)) + pack_trailer(Trailer(nbytes, 0, HASH), crc)
    expected = Trailer(nbytes, 0, HASH) if fits else None

    assert reference(stored) == expected
    assert core.read(stored) == expected


def test_another_key_is_refused_by_both(core: Core) -> None:
    """A trailer of another key or namespace is refused, however intact."""
    for namespace, key in (("", "other"), ("tenant", KEY), (KEY, "")):
        stored = pack_trailer(Trailer(0, 0, key_hash(namespace, key)), crc)

        assert reference(stored) is None
        assert core.read(stored) is None


def test_anything_shorter_than_a_trailer_is_refused_by_both(core: Core) -> None:
    """Every file of fewer than 64 bytes is refused."""
    whole = pack_trailer(Trailer(0, 0, HASH), crc)
    for nbytes in range(TRAILER_BYTES):
        assert reference(whole[-nbytes:] if nbytes else b"") is None
        assert core.read(whole[-nbytes:] if nbytes else b"") is None


trailers = st.builds(
    Trailer,
    nbytes=st.integers(0, 200) | st.integers(0, (1 << 64) - 1),
    checksum=st.none() | st.integers(0, (1 << 32) - 1),
    key_hash=st.just(HASH),
)
edits = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 255)), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trailer=trailers, changes=edits, before=st.binary(max_size=200), seal=st.booleans())
@example(trailer=Trailer(0, None, HASH), changes=[], before=b"", seal=False)
@example(trailer=Trailer(0, None, HASH), changes=[(12, 1)], before=b"", seal=True)
@example(trailer=Trailer(0, 0, HASH), changes=[(40, 1)], before=b"", seal=True)
def test_both_readers_agree_on_anything(
    core: Core, trailer: Trailer, changes: list[tuple[int, int]], before: bytes, *, seal: bool
) -> None:
    """Whatever the 64 bytes are, Python and C accept the same ones and read the same from them."""
    changed = bytearray(pack_trailer(trailer, crc))
    for at, value in changes:
        changed[at] = value
    stored = before + (resealed(changed) if seal else bytes(changed))

    assert reference(stored) == core.read(stored)


@given(data=st.binary(max_size=130), stored_nbytes=st.integers(0, 1 << 65))
def test_the_parser_takes_any_bytes(data: bytes, stored_nbytes: int) -> None:
    """Any bytes at all are a trailer or a TrailerError, never another exception."""
    try:
        found = unpack_trailer(
            data, stored_nbytes=stored_nbytes, expected_key_hash=HASH, crc32c=crc
        )
    except TrailerError:
        return

    assert pack_trailer(found, crc) == data


@given(one=st.tuples(st.text(), st.text()), other=st.tuples(st.text(), st.text()))
def test_hashes_tell_namespaces_and_keys_apart(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    """Different (namespace, key) pairs without a zero byte never hash alike."""
    assume(not any(ord(c) == 0 or 0xD800 <= ord(c) < 0xE000 for c in "".join(one + other)))

    assert (key_hash(*one) == key_hash(*other)) == (one == other)


@given(head=st.binary(max_size=300), tail=st.binary(max_size=300))
@example(head=b"", tail=b"")
@example(head=bytes(128), tail=b"")
@example(head=bytes(127), tail=bytes(129))
def test_the_hash_of_the_c_core_is_blake2b(head: bytes, tail: bytes) -> None:
    """At every length, block boundaries included."""
    digest = _native.new("uint8_t[]", 16)
    _native.lib.kvio_blake2b_128(head, len(head), tail, len(tail), digest)
    assert bytes(digest) == hashlib.blake2b(head + tail, digest_size=16).digest()
