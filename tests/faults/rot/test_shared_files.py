"""Shared files: sealed ones, and what they are made of until then, with bytes changed.

A sealed file does not hold its name, so one that is put under another's path is that file; and a
file that was replaced is distinguished from the one before it by its receipt alone. Neither is
counted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import kvio
from kvio import SharedFile
from kvio.types import KiB
from tests.faults.rot import damage
from tests.faults.rot.damage import Patient
from tests.faults.sizes import FULL, seed, size
from tests.faults.totals import Tally
from tests.sharedfile import raw

SIZE: Final = 50_123
DATA: Final = raw.random_bytes(SIZE)
TRAILER_BYTES: Final = 96
#: How the bytes belong to writers.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "one": {"writers": 1},
    "domains": {"writers": 3, "sizes": (20_000, 123, 30_000)},
    "stripes": {"writers": 2, "stripe_bytes": 12 * KiB},
}


def made(path: Path, shape: str, data: bytes = DATA, **more: Any) -> SharedFile:
    """Make a file with all its bytes written, not sealed yet."""
    options = {"durability": "visible", "cell_bytes": 8 * KiB, **SHAPES[shape], **more}
    file = SharedFile.create(path, len(data), **options)
    file.pwrite(data, 0)
    return file


def refuses(path: Path) -> bool:
    """Return whether a reader of the file notices the damage, whole or by cell.

    Where it is not, every byte must be right.
    """
    out = bytearray(SIZE)
    try:
        with SharedFile.open(path) as file:
            file.pread_into(out)
    except (kvio.CorruptBlockError, kvio.BlockNotFoundError):
        return True
    assert bytes(out) == DATA
    return False


def look(patient: Patient, changes: Iterator[tuple[int, int]], path: Path, tally: Tally) -> None:
    """Change single bytes, of which each must be noticed."""
    for at, value in changes:
        with patient.byte(at, value):
            noticed = refuses(path)
        tally.add(flips=1, detected=noticed)
        assert noticed, f"byte {at} is {value:#x}, KVIO_FAULTS_SEED={seed()}"


@pytest.mark.parametrize("shape", SHAPES)
def test_no_changed_byte_of_a_sealed_file_is_returned(
    shape: str, quick_place: Path, tally: Tally
) -> None:
    """Trailer, index, payload, length: whatever is changed, it is refused; padding is not read."""
    path, dice = quick_place / "file", random.Random(seed())
    with made(path, shape) as file:
        file.seal()
    with Patient(path) as patient:
        whole = patient.whole
        index_at = -(-SIZE // 4096) * 4096
        end = len(whole) - TRAILER_BYTES
        if FULL or shape == "one":
            look(patient, damage.flips(whole, index_at, len(whole), dice), path, tally)
        look(patient, damage.sampled(whole, index_at, end, dice, 20), path, tally)
        look(patient, damage.sampled(whole, 0, SIZE, dice, size(60, 3000)), path, tally)
        for at, value in damage.sampled(whole, SIZE, index_at, dice, size(5, 100)):
            with patient.byte(at, value):
                refuses(path)
        for content in contents(whole, dice):
            with patient.content(content):
                noticed = refuses(path)
            tally.add(flips=1, detected=noticed)
            assert noticed, f"{len(content)} bytes of {len(whole)}"
    assert not refuses(path)


def contents(whole: bytes, dice: random.Random) -> Iterator[bytes]:
    """Yield what may be left of a file, or have got into it."""
    cuts = damage.lengths(len(whole), dice, size(2, 50))
    yield from (whole[:n] for n in (cuts if FULL else cuts[:: len(cuts) // 12]))
    yield from (content for _, content in damage.extensions(whole, dice))
    zeros = bytes(damage.PAGE_BYTES)
    yield from (content for _, content in damage.overwritten(whole, SIZE, zeros, ""))
    cell = 8 * KiB
    yield whole[cell : 2 * cell] + whole[:cell] + whole[2 * cell :]  # two cells change places
    yield bytes(len(whole))
    yield b""


def test_a_range_of_a_shared_file_is_checked(quick_place: Path, tally: Tally) -> None:
    """A range is verified by the cells it touches: in them damage is noticed, elsewhere not."""
    path, dice = quick_place / "file", random.Random(seed())
    with made(path, "domains") as file:
        file.seal()
    cells = cells_of(path)
    with Patient(path) as patient, SharedFile.open(path) as reader:
        for at, value in damage.sampled(patient.whole, 0, SIZE, dice, size(150, 6000)):
            start = dice.randrange(SIZE)
            out = bytearray(dice.randrange(1, min(12 * KiB, SIZE - start) + 1))
            stop = start + len(out)
            touched = any(
                first <= at < last and first < stop and start < last for first, last in cells
            )
            with patient.byte(at, value):
                try:
                    reader.pread_into(out, start)
                    noticed = False
                except kvio.CorruptBlockError:
                    noticed = True
            assert noticed == touched, f"byte {at}, range {start} to {stop}"
            assert noticed or out == DATA[start:stop]
            tally.add(flips=touched, detected=noticed)


def cells_of(path: Path) -> list[tuple[int, int]]:
    """Cut a file of domains into cells, as docs/format.md says."""
    sealed = raw.sealed(path)
    found, start = [], 0
    for nbytes in sealed.sizes:
        stop, at = start + nbytes, start
        while at < stop:
            origin = start // sealed.align * sealed.align
            last = origin + ((at - origin) // sealed.cell_bytes + 1) * sealed.cell_bytes
            found.append((at, min(last, stop)))
            at = min(last, stop)
        start = stop
    assert sealed.checksums is not None
    assert len(found) == len(sealed.checksums)
    return found


def test_a_changed_head_of_a_map_is_refused(quick_place: Path, tally: Tally) -> None:
    """Every bit of it, and of the sizes: nobody joins, takes over, or touches what is there."""
    path, dice = quick_place / "file", random.Random(seed())
    made(path, "domains").close()
    map_path = quick_place / ".file.kvio-map"
    with Patient(map_path) as patient:
        sizes_at = 192 + 3 * 16
        regions = ((0, 128), (sizes_at, sizes_at + 3 * 8))
        for start, stop in regions:
            changes = list(damage.flips(patient.whole, start, stop, dice))
            for at, value in changes if FULL else changes[:: len(changes) // 150]:
                with patient.byte(at, value):
                    noticed = [not_usable(path, 0), not_usable(path, None)]
                    assert map_path.read_bytes()[at] == value, "what cannot be used was changed"
                tally.add(flips=1, detected=all(noticed))
                assert all(noticed), f"byte {at} is {value:#x}: {noticed}"
        for n in range(0, len(patient.whole), size(97, 13)):
            with patient.content(patient.whole[:n]):
                assert not_usable(path, 0)
                assert not_usable(path, None)
            tally.add(flips=1, detected=1)
    with SharedFile.recover(path) as file:
        file.seal()
    assert not refuses(path)


def not_usable(path: Path, rank: int | None) -> bool:
    """Return whether joining (or, without a rank, taking over) ends in a CorruptBlockError."""
    try:
        (SharedFile.recover(path) if rank is None else SharedFile.open(path, rank)).close()
    except kvio.CorruptBlockError:
        return True
    return False


def test_a_changed_count_of_a_map_never_makes_wrong_bytes(quick_place: Path, tally: Tally) -> None:
    """What a map counts has no checksum: damage may cost the file, but what is sealed is right.

    A crash left some cells unwritten; one byte of the counts, or of a block that several domains
    share, has changed since. Whoever takes over may be refused; if not, what can be read is right.
    """
    dice = random.Random(seed())
    for number in range(size(40, 1000)):
        path = quick_place / f"file{number}"
        options = {"durability": "visible", "cell_bytes": 8 * KiB, **SHAPES["domains"]}
        with SharedFile.create(path, SIZE, **options) as file:
            file.pwrite(DATA[:20_000], 0)
            file.pwrite(DATA[40_000:], 40_000)
        map_path = quick_place / f".file{number}.kvio-map"
        content = bytearray(map_path.read_bytes())
        at = dice.choice([dice.randrange(128, 400), dice.randrange(128, len(content))])
        content[at] ^= 1 << dice.randrange(8)
        map_path.write_bytes(content)
        go_on_with(path)
        tally.add(fuzzed=1, torn=0)


def go_on_with(path: Path) -> None:
    """Take a file over, write what is missing, seal and read it: each may be refused."""
    out = bytearray(SIZE)
    try:
        with SharedFile.recover(path) as file:
            for missing in file.missing():
                stop = missing.offset + missing.nbytes
                file.pwrite(DATA[missing.offset : stop], missing.offset)
            file.seal()
        with SharedFile.open(path) as file:
            file.pread_into(out)
    except kvio.KvioError:
        return
    assert bytes(out) == DATA, f"{path.name}, KVIO_FAULTS_SEED={seed()}"


def test_a_sealed_file_under_another_name_is_that_file(quick_place: Path) -> None:
    """A file does not hold its name: exchanged files are whole files. Stated, not counted."""
    for name, data in (("one", DATA), ("two", DATA[::-1])):
        with made(quick_place / name, "one", data) as file:
            file.seal()
    (quick_place / "one").rename(quick_place / "there")
    (quick_place / "two").rename(quick_place / "one")
    out = bytearray(SIZE)
    with SharedFile.open(quick_place / "one") as file:
        file.pread_into(out)

    assert bytes(out) == DATA[::-1]
