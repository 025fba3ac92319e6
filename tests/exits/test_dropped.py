"""What is dropped without a close() says so, gives back what it held, and loses nothing."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest

import kvio
from kvio.types import Level
from tests.posix import faultlab
from tests.staging.controlled import open_controlled

DATA = faultlab.pattern(1, 100_000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def before() -> tuple[set[str], int]:
    """The threads and the number of descriptors that there are without kvio.

    What earlier tests dropped in cycles is gone first: the collector would take it in the middle.
    """
    gc.collect()
    return threads(), len(faultlab.open_descriptors())


def threads() -> set[str]:
    """Name the threads of kvio."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvio")}


def all_is_given_back(before: tuple[set[str], int]) -> None:
    """Wait until threads and descriptors are as they were; the test's timeout is the limit."""
    while (threads(), len(faultlab.open_descriptors())) != before:
        pass


@pytest.mark.parametrize("kind", [kvio.Store, kvio.AsyncStore])
def test_a_store_without_threads_is_closed_at_once(
    root: Path, before: tuple[set[str], int], kind: type
) -> None:
    """Its descriptors are back when the reference is gone."""
    store = kvio.open_store("hybrid", root=root)
    store.write_block("k", DATA)
    held = store if kind is kvio.Store else kvio.AsyncStore(store)
    with pytest.warns(ResourceWarning, match=f"store hybrid://{root} was dropped, not closed"):
        del store, held

    assert (threads(), len(faultlab.open_descriptors())) == before


def test_a_store_in_a_cycle_is_closed_by_the_collector(
    root: Path, before: tuple[set[str], int]
) -> None:
    """Wherever that runs."""
    store = kvio.open_store("hybrid", root=root)
    store.write_blocks([(f"k{n}", DATA) for n in range(100)])
    store.itself = store  # type: ignore[attr-defined]
    del store
    with pytest.warns(ResourceWarning, match="was dropped, not closed"):
        gc.collect()

    all_is_given_back(before)


def test_what_was_submitted_to_a_dropped_store_is_stored(
    root: Path, before: tuple[set[str], int]
) -> None:
    """And its futures end, then its threads."""
    store = kvio.open_store("hybrid", root=root, io_threads=2)
    futures = [store.submit_write(f"k{n}", DATA) for n in range(300)]
    with pytest.warns(ResourceWarning, match="was dropped, not closed"):
        del store

    assert {future.result(60).nbytes for future in futures} == {len(DATA)}
    all_is_given_back(before)
    with kvio.open_store("hybrid", root=root) as store:
        assert len(list(store.list_keys())) == 300


def test_what_was_staged_in_a_dropped_tier_is_stored(
    root: Path, before: tuple[set[str], int]
) -> None:
    """The threads of the tier end, and the store that only the tier held is closed."""
    tier = kvio.stage(kvio.open_store("hybrid", root=root), "64MiB", close_store=True)
    tier.pause()
    receipts = [tier.write_block(f"k{n}", DATA) for n in range(300)]
    with pytest.warns(ResourceWarning, match=f"staging tier of hybrid://{root} was dropped"):
        del tier

    assert {receipt.wait(timeout=60).level for receipt in receipts} == {Level.VISIBLE}
    del receipts
    all_is_given_back(before)


def test_a_dropped_tier_says_what_could_not_be_stored(
    before: tuple[set[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else can: its keys are in the log, and its threads end."""
    with open_controlled() as store:
        store.wrapper.fail("bad", kvio.StorageError("no"), times=100)
        tier = kvio.stage(store, "1MiB", retries=0)
        receipts = [tier.write_block(key, DATA) for key in ("good", "bad")]
        with pytest.warns(ResourceWarning, match="was dropped, not closed"):
            del tier
        assert receipts[0].wait(timeout=60)
        while "kvio-dropped" in threads():
            pass
        assert "'bad'" in caplog.text
        assert store.contains("good")
    all_is_given_back(before)


def test_a_dropped_handle_of_a_shared_file_is_closed(
    root: Path, before: tuple[set[str], int]
) -> None:
    """After the writes that were queued; the file stays unfinished, for `recover`."""
    path = root / "file"
    file = kvio.SharedFile.create(path, len(DATA) * 100, io_threads=2)
    futures = [file.submit_pwrite(DATA, n * len(DATA)) for n in range(100)]
    with pytest.warns(ResourceWarning, match=f"handle of shared file '{path}' was dropped"):
        del file

    assert {future.result(60) for future in futures} == {len(DATA)}
    all_is_given_back(before)
    assert not path.exists()
    with kvio.SharedFile.recover(path) as again:
        assert again.missing() == []
        again.seal()


def test_a_closed_one_warns_of_nothing(root: Path) -> None:
    """Nor does one that could not be opened."""
    with kvio.open_store("hybrid", root=root) as store, kvio.stage(store, "1MiB") as tier:
        tier.write_block("k", DATA)
    with pytest.raises(kvio.ConfigError):
        kvio.open_store("hybrid", root=root / "none")
    with kvio.SharedFile.create(root / "file", 10) as file:
        file.abort()
    del store, tier, file
    gc.collect()
