"""Objects that are longer than any memory, or that a server says are."""

from __future__ import annotations

from typing import Final, Literal, SupportsIndex, overload

import pytest

import kvio
from kvio.backends.s3 import body
from tests.s3.failing import BUCKET, PREFIX, open_faulty
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES

TiB: Final = 1 << 40


class Sparse(bytes):
    """1 TiB that ends in these bytes."""

    def __len__(self) -> int:
        return TiB

    @overload
    def __getitem__(self, place: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> bytes: ...
    def __getitem__(self, place: SupportsIndex | slice) -> int | bytes:
        assert isinstance(place, slice)
        first, last, _ = place.indices(TiB)
        return bytes(last - first)[: max(0, TiB - 64 - first)] + bytes(self)[-(last - first) :]


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_object_longer_than_any_memory_is_refused_by_name(
    library: str, layout: Literal["block", "plain"], faulty: FaultyServer
) -> None:
    """A server that says 1 TiB is not asked for 1 TiB; what else is there can be read."""
    ends = {"block": body.make("", "huge", TiB - 64, None), "plain": b"z" * 64}
    faulty.put(BUCKET, f"{PREFIX}/huge", Sparse(ends[layout]))
    with open_faulty(library, faulty, {"layout": layout}) as store:
        store.write_block("small", b"abc")

        with pytest.raises(kvio.OutOfMemoryError) as caught:
            store.read_block("huge")
        nbytes = TiB - 64 if layout == "block" else TiB
        assert (caught.value.key, caught.value.nbytes) == ("huge", nbytes)
        assert bytes(store.read_block("small")) == b"abc"
