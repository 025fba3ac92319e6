"""The end of a sealed file: it survives its bytes, and no other bytes pass for one."""

from __future__ import annotations

import struct

import pytest
from google_crc32c import extend, value
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.sharedfile import index as indices
from kvio.sharedfile.index import TRAILER_BYTES, Index, SealError
from kvio.sharedfile.layout import Layout

from .strategies import layouts

#: The trailer as docs/format.md has it.
TRAILER = struct.Struct("<8sHHI16sQQQIIII20xI")
VERSION, FLAGS, WRITERS, SIZE, STRIPE, CELLS, CELL, ALIGN, SIZES, TABLE = 1, 2, 3, *range(5, 12)
ODD = Index(b"i" * 16, Layout(10_000, 3, 4096, 4096, 0, (5000, 0, 5000)), (1, 2, 3, 4))


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """Draw an index, with checksums or without."""
    layout = draw(layouts())
    words = st.lists(
        st.integers(0, (1 << 32) - 1), min_size=layout.cells, max_size=layout.cells
    ).map(tuple)
    file_id = draw(st.binary(min_size=16, max_size=16))
    return Index(file_id, layout, draw(st.none() | words))


def end_of(index: Index) -> tuple[bytes, bytes, int]:
    """Return table, trailer and the length of the whole file."""
    data = indices.pack(index)
    return (
        data[:-TRAILER_BYTES],
        data[-TRAILER_BYTES:],
        indices.starts_at(index.layout) + len(data),
    )


def signed(fields: list[object], table: bytes) -> bytes:
    """Encode a trailer with right checksums over whatever it says."""
    fields[TABLE] = value(table)
    head = TRAILER.pack(*fields)[:-4]
    return head + struct.pack("<I", value(head))


@given(indexes())
def test_an_index_survives_its_bytes(index: Index) -> None:
    """What is packed is unpacked as it was."""
    table, trailer, nbytes = end_of(index)

    assert indices.table_nbytes(trailer, nbytes) == len(table)
    assert indices.unpack(table, trailer, nbytes) == index


@given(indexes())
def test_an_index_begins_on_a_block_behind_the_payload(index: Index) -> None:
    """Payload and index share no file block, and the length is as announced."""
    table, trailer, nbytes = end_of(index)
    start = indices.starts_at(index.layout)

    assert start % index.layout.align == 0
    assert index.layout.size <= start < index.layout.size + index.layout.align
    assert len(table) + len(trailer) == indices.nbytes_of(
        index.layout, checksum=index.checksums is not None
    )
    assert nbytes == start + len(table) + len(trailer)


def test_the_trailer_is_as_the_format_says() -> None:
    """The last 96 bytes are the fields of the format, in its order."""
    table, trailer, _ = end_of(ODD)
    fields = TRAILER.unpack(trailer)

    assert table == struct.pack("<3Q4I", 5000, 0, 5000, 1, 2, 3, 4)
    assert fields[:-1] == (
        *(b"KVIOSHF\n", 1, 1, 3, b"i" * 16, 10_000, 0, 4, 4096, 4096, 3),
        value(table),
    )
    assert signed(list(fields), table) == trailer


@given(indexes(), st.data())
def test_the_whole_checksum_is_that_of_the_payload(index: Index, data: st.DataObject) -> None:
    """Checksums of cells join to the CRC32C of all bytes; none were computed: None."""
    payload = data.draw(st.randoms(use_true_random=False)).randbytes(index.layout.size)
    sums = [value(payload[a:b]) for _, _, a, b in index.layout.all_cells()]

    assert indices.whole_checksum(Index(b"i" * 16, index.layout, sums)) == value(payload)
    assert indices.whole_checksum(Index(b"i" * 16, index.layout, None)) is None


def test_no_byte_of_table_or_trailer_may_change() -> None:
    """Every single changed byte, padding included, is found."""
    table, trailer, nbytes = end_of(ODD)
    data = bytearray(table + trailer)
    for at in range(len(data)):
        for change in (0x01, 0x80, 0xFF):
            data[at] ^= change
            with pytest.raises(SealError):
                indices.unpack(bytes(data[: len(table)]), bytes(data[len(table) :]), nbytes)
            data[at] ^= change


@given(indexes(), st.data())
def test_what_was_cut_or_grew_is_refused(index: Index, data: st.DataObject) -> None:
    """A table, trailer or file of another length is a SealError."""
    table, trailer, nbytes = end_of(index)
    by = data.draw(st.integers(-5000, 5000).filter(bool))
    short = data.draw(st.integers(0, TRAILER_BYTES - 1))

    with pytest.raises(SealError, match=f"{nbytes + by} bytes, not {nbytes}"):
        indices.unpack(table, trailer, nbytes + by)
    with pytest.raises(SealError, match="shorter"):
        indices.unpack(table, trailer[:short], nbytes)
    with pytest.raises(SealError):
        indices.unpack(table + b"\0", trailer, nbytes)
    if table:
        with pytest.raises(SealError):
            indices.unpack(table[:-1], trailer, nbytes)


@pytest.mark.parametrize(("place", "number"), [(VERSION, 0), (VERSION, 2), (FLAGS, 3)])
def test_another_version_is_named(place: int, number: int) -> None:
    """Another version or an unknown flag is refused by name, though all checksums are right."""
    table, trailer, nbytes = end_of(ODD)
    fields = list(TRAILER.unpack(trailer))
    fields[place] = number

    with pytest.raises(SealError, match=f"version {fields[VERSION]} with flags {fields[FLAGS]}"):
        indices.unpack(table, signed(fields, table), nbytes)


def test_a_foreign_end_is_refused() -> None:
    """A file that ends otherwise is no sealed shared file."""
    table, trailer, nbytes = end_of(ODD)

    for foreign in (bytes(TRAILER_BYTES), b"KVIOMAP\n" + trailer[8:]):
        with pytest.raises(SealError, match="does not end"):
            indices.unpack(table, foreign, nbytes)


NUMBERS_32 = st.one_of(st.integers(0, 9), st.sampled_from([4096, 1 << 16, (1 << 32) - 1]))
NUMBERS_64 = st.one_of(NUMBERS_32, st.sampled_from([1 << 32, 1 << 60, (1 << 64) - 1]))


@settings(max_examples=300)
@given(st.data())
def test_a_trailer_with_right_checksums_is_still_checked(data: st.DataObject) -> None:
    """Whatever a signed trailer says: an index that fits the file, or a SealError, at once."""
    table, trailer, nbytes = end_of(ODD)
    fields = list(TRAILER.unpack(trailer))
    wide = (SIZE, STRIPE, CELLS)
    for place in data.draw(st.sets(st.sampled_from([WRITERS, *range(5, 11)]), min_size=1)):
        fields[place] = data.draw(NUMBERS_64 if place in wide else NUMBERS_32)
    fields[FLAGS] = data.draw(st.integers(0, 1))
    changed = signed(fields, table)
    file_nbytes = data.draw(st.sampled_from([nbytes, 96]))
    try:
        length = indices.table_nbytes(changed, file_nbytes)
        index = indices.unpack(table[:length], changed, file_nbytes)
    except SealError:
        return

    assert indices.starts_at(index.layout) + length + TRAILER_BYTES == file_nbytes


def test_an_index_is_no_longer_than_its_file_has_room_for() -> None:
    """What a trailer says of the length of its index is compared with the file before it is read.

    The trailer's checksum is right, and a sparse file is as long as it says.
    """
    table, trailer, _ = end_of(ODD)
    fields = list(TRAILER.unpack(trailer))
    fields[CELLS] = 1 << 38
    forged = signed(fields, table)

    with pytest.raises(SealError, match="cannot have"):
        indices.table_nbytes(forged, 1 << 40)
    with pytest.raises(SealError, match="it has"):
        indices.table_nbytes(trailer, 1 << 40)


@given(st.data())
def test_a_rank_more_than_there_can_be_is_refused(data: st.DataObject) -> None:
    """A trailer with more writers than a file can have is not read with fewer."""
    layout = Layout(4096, 1, 4096, 4096, 4096)
    table, trailer, nbytes = end_of(Index(b"i" * 16, layout, (7,)))
    fields = list(TRAILER.unpack(trailer))
    fields[WRITERS] = data.draw(st.integers((1 << 16) + 1, (1 << 32) - 1))

    with pytest.raises(SealError):
        indices.unpack(table, signed(fields, table), nbytes)


@settings(max_examples=200)
@given(st.binary(max_size=60), st.binary(max_size=130), st.integers(0, 1 << 62))
def test_any_bytes_are_a_seal_error(table: bytes, trailer: bytes, nbytes: int) -> None:
    """Bytes that nobody packed end in a SealError, with the right magic and version too."""
    for end in (trailer, (b"KVIOSHF\n\1\0\1\0" + trailer).ljust(96, b"\0")[:96]):
        with pytest.raises(SealError):
            indices.unpack(table, end, nbytes)


def test_crc_of_the_tests_is_castagnoli() -> None:
    """The checksum that these tests compute without kvio is CRC32C."""
    assert value(b"123456789") == extend(0, b"123456789") == 0xE3069283
