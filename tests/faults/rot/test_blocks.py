"""Blocks in files: one byte changed, or lost, or of another block, is noticed by every way to read.

``layout=plain`` keeps no checksum, so a changed byte is what was stored: nothing of it is counted
here. ``layout=block`` counts each change, and that every reader refused it.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from tests.faults.rot.campaign import Campaign
from tests.faults.rot.damage import Patient
from tests.faults.rot.reading import ALL, taken_in
from tests.faults.sizes import FULL, seed, size
from tests.faults.totals import Tally
from tests.media import filesystem_of
from tests.posix import faultlab
from tests.staging.daemon.daemons import serving

KEY: Final = "models/a"
BACKENDS: Final = ("posix-tmpfile", "posix-direct", "hybrid")
#: Payloads around the trailer's length, pages, and what is read by one call, several, or threads.
SIZES: Final = (0, 1, 63, 64, 4032, 4033, 9001, 70_001, 300_003)
#: Makes blocks that several threads read.
SEGMENTS: Final[dict[str, Any]] = {"segment_bytes": 131072, "chunk_bytes": 131072}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Name each POSIX backend."""
    return str(request.param)


@pytest.fixture
def place(backend: str, request: pytest.FixtureRequest) -> Path:
    """A directory on a disk for what reads past the page cache, in memory for the others."""
    where: Path = request.getfixturevalue(
        "real_disk" if backend == "posix-direct" else "quick_place"
    )
    return where / "root"


def opened(backend: str, root: Path, **options: Any) -> kvio.Store:
    """Open a store; skip where the file system lacks what the backend needs."""
    options = {"create": True, **SEGMENTS, **options}
    try:
        return kvio.open_store(backend, root=root, io_threads=2, options=options)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"no {backend} on {filesystem_of(root.parent)}: {exc}")


def campaign(
    store: kvio.Store, nbytes: int, patient: Patient, *, tier: kvio.StagingTier | None = None
) -> Campaign:
    """Prepare to damage the block of `KEY`."""
    dice = random.Random(f"{seed()} {nbytes}")
    return Campaign(store, KEY, faultlab.pattern(nbytes, nbytes), patient, dice, tier)


def counted(done: Campaign, tally: Tally) -> None:
    """Count a campaign; whoever was taken in fails the test."""
    done.healed()
    tally.add(flips=done.flips, detected=done.detected)
    assert done.missed == [], f"KVIO_FAULTS_SEED={seed()}"


@pytest.mark.parametrize("nbytes", SIZES)
def test_no_changed_byte_is_returned(backend: str, nbytes: int, place: Path, tally: Tally) -> None:
    """Every byte of the trailer, bytes of the payload, cut, longer, and pages lost: all noticed."""
    on_disk = backend == "posix-direct"  # each change is written back before it is read
    every = FULL or (nbytes in (63, 9001) and not on_disk)
    with opened(backend, place) as store, kvio.stage(store, capacity="1MiB") as tier:
        store.write_block(KEY, faultlab.pattern(nbytes, nbytes))
        with Patient(faultlab.file_of(place, KEY)) as patient:
            done = campaign(store, nbytes, patient, tier=tier if FULL or nbytes == 9001 else None)
            done.trailer(count=None if every else 6)
            done.checksummed(size(6, 100) if on_disk else size(40, 5_500))
            done.padding(size(3, 60))
            if every or (nbytes == 0 and not on_disk):
                done.shapes(size(3, 60))
            counted(done, tally)


def test_no_changed_byte_is_returned_beside_a_daemon(quick_place: Path, tally: Tally) -> None:
    """A tier whose room a daemon has reads from the store what the daemon does not hold."""
    with (
        opened("posix-tmpfile", quick_place / "root") as store,
        serving(store) as daemon,
        kvio.stage(store, daemon=daemon.path) as tier,
    ):
        store.write_block(KEY, faultlab.pattern(9001, 9001))
        with Patient(faultlab.file_of(quick_place / "root", KEY)) as patient:
            done = campaign(store, 9001, patient, tier=tier)
            done.trailer(count=None if FULL else 20)
            done.checksummed(size(20, 1000))
            done.shapes(1)
            counted(done, tally)


def test_two_blocks_that_changed_places_are_refused(
    backend: str, place: Path, tally: Tally
) -> None:
    """Each lies whole under the other's name, and the trailer knows whose it is."""
    keys = [f"swap/{number}" for number in range(size(8, 60))]
    payloads = {key: faultlab.pattern(at, 500) for at, key in enumerate(keys)}
    with opened(backend, place) as store:
        store.write_blocks(payloads.items())
        files = {key: faultlab.file_of(place, key).read_bytes() for key in keys}
        for one, two in itertools.pairwise(keys):
            for name, other in ((one, two), (two, one)):
                faultlab.file_of(place, name).write_bytes(files[other])
            found = [taken_in(ALL, store, key, 500) for key in (one, two)]
            tally.add(flips=2, detected=found.count([]))
            assert found == [[], []]
            for name in (one, two):
                faultlab.file_of(place, name).write_bytes(files[name])
        assert [bytes(store.read_block(key)) for key in keys] == list(payloads.values())


def test_a_block_of_another_namespace_or_key_is_refused(
    backend: str, place: Path, tally: Tally
) -> None:
    """However whole it is, and in whichever place of the store it is put."""
    names = ["", "other", "tenant-1", "tenant-11", "tenant-1\x1f", "tenant-1/models"]
    with opened(backend, place, namespace="tenant-1") as store:
        payload = faultlab.pattern(1, 900)
        store.write_block(KEY, payload)
        own = faultlab.file_of(place, KEY, namespace="tenant-1")
        others = [(space, key) for space in names for key in (KEY, "models/b", "models", "a")]
        with Patient(own) as patient:
            for space, key in others:
                if (space, key) == ("tenant-1", KEY):
                    continue
                with patient.content(faultlab.seal(payload, key, namespace=space)):
                    found = taken_in(ALL, store, KEY, 900)
                tally.add(flips=1, detected=found == [])
                assert found == [], f"{space!r} {key!r}"
        assert bytes(store.read_block(KEY)) == payload


def test_an_older_block_of_the_same_key_is_legal(backend: str, place: Path) -> None:
    """It was a block of this key once: nothing in it shows that it is not the newest.

    Stated, not counted: a key names its content, or the caller keeps the checksum of a receipt.
    """
    with opened(backend, place) as store:
        store.write_block(KEY, b"older" * 100)
        older = faultlab.file_of(place, KEY).read_bytes()
        receipt = store.write_block(KEY, b"newer" * 100, if_exists="replace")
        faultlab.file_of(place, KEY).write_bytes(older)

        assert bytes(store.read_block(KEY)) == b"older" * 100
        assert store.stat_block(KEY).checksum != receipt.checksum


def test_what_goes_by_names_counts_a_block_that_rotted(backend: str, place: Path) -> None:
    """The prefix lookup and the list say so; who reads what they found gets the error.

    Stated, not counted, as above.
    """
    with opened(backend, place) as store, kvio.stage(store, capacity="1MiB") as tier:
        for key in ("a", "b", "c"):
            store.write_block(key, b"data" * 100)
        path = faultlab.file_of(place, "b")
        path.chmod(0o600)
        path.write_bytes(bytes(path.stat().st_size))

        for reader in (store, tier):
            assert reader.count_leading(["a", "b", "c", "d"]) == 3
            assert sorted(reader.list_keys()) == ["a", "b", "c"]
            assert not reader.contains("b")
            with pytest.raises(kvio.CorruptBlockError):
                reader.read_block("b")


def test_keep_writes_over_what_is_broken(backend: str, place: Path, tally: Tally) -> None:
    """What a reader refuses by its end, a writer with ``keep`` does not take for the block."""
    payload = faultlab.pattern(3, 5000)
    dice = random.Random(seed())
    with opened(backend, place) as store:
        for _ in range(size(40, 1500)):
            store.write_block(KEY, payload, if_exists="replace")
            path = faultlab.file_of(place, KEY)
            whole = path.read_bytes()
            at = len(whole) - 1 - dice.randrange(64)
            broken = whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :]
            path.write_bytes(broken if dice.randrange(3) else whole[:at])

            fixed = not store.write_block(KEY, payload).existed
            tally.add(flips=1, detected=fixed)
            assert fixed
            assert faultlab.peek(place, KEY) == payload
