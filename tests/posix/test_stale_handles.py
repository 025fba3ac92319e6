"""ESTALE: what FUSE and NFS answer when a file is replaced while its name is looked up."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

import kvio
from kvio._native import faults
from tests.posix import faultlab

DATA: Final = faultlab.pattern(1, 9000)
FOR_EVER: Final = 1 << 20
#: By name, what is done with the block `k` and the first call of its own that can be answered so.
CALLS: Final[dict[str, tuple[str, Callable[[kvio.Store], object]]]] = {
    "read": ("open_read", lambda store: bytes(store.read_block("k"))),
    "read_into": ("open_read", lambda store: store.read_block_into("k", bytearray(9000))),
    "verify": ("open_read", lambda store: store.verify_block("k")),
    "stat": ("fstat", lambda store: store.stat_block("k")),
    "count": ("fstat", lambda store: store.count_leading(["k"])),
    "delete": ("unlink", lambda store: store.delete_block("k")),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvio.Store]:
    """Yield a store with a block in it."""
    with kvio.open_store(
        "posix-tmpfile", root=tmp_path / "root", options={"create": True}
    ) as store:
        store.write_block("k", DATA)
        yield store


@pytest.mark.parametrize("times", [1, 2, 8])
@pytest.mark.parametrize("name", CALLS)
def test_a_name_that_changed_meanwhile_is_asked_again(
    store: kvio.Store, name: str, times: int
) -> None:
    """However often it changes in a row, up to eight times: the caller does not hear of it."""
    site, call = CALLS[name]
    usual = None if name == "delete" else call(store)
    with faults.inject(site, error=errno.ESTALE, times=times) as fault:
        answer = call(store)
    assert fault.seen[faults.sites()[site]] > times
    assert answer if name == "delete" else answer == usual


@pytest.mark.parametrize("name", CALLS)
def test_a_handle_that_stays_stale_is_a_typed_error(store: kvio.Store, name: str) -> None:
    """It is not asked for ever, and nothing is reported that was not seen."""
    site, call = CALLS[name]
    with faults.inject(site, error=errno.ESTALE, times=FOR_EVER) as fault:
        if name == "count":
            assert call(store) == 0
        elif name == "verify":
            assert isinstance(store.verify_block("k").error, kvio.TransientStorageError)
        else:
            with pytest.raises(kvio.TransientStorageError):
                call(store)
    assert fault.seen[faults.sites()[site]] < 40
    assert bytes(store.read_block("k")) == DATA
