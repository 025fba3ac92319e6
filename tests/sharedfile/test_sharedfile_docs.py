"""docs/sharedfile.md and the formats are true: what they name is there."""

from __future__ import annotations

import dataclasses
import re
import struct
from pathlib import Path

import pytest

import kvio
from kvio import MiB, SharedFile, SharedFileOptions
from kvio.sharedfile import index as indices
from kvio.sharedfile import plan as plans
from kvio.sharedfile import sidecar
from kvio.sharedfile.layout import Layout

from . import kills, raw

FOLDER = Path(__file__).parent
DOCS = FOLDER.parent.parent / "docs"
TEXT = (DOCS / "sharedfile.md").read_text(encoding="utf-8")
FORMAT = (DOCS / "format.md").read_text(encoding="utf-8")
#: The layout of the test vectors.
VECTORS = Layout(10_000, 3, 4096, 8192, 0, (5000, 0, 5000))
PAYLOAD = bytes(at % 251 for at in range(VECTORS.size))


def test_every_test_it_names_is_there() -> None:
    """In this folder, under the name that the table gives."""
    there = "".join(path.read_text(encoding="utf-8") for path in FOLDER.rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", TEXT)

    assert len(named) > 30
    assert [name for name in named if f"def {name}(" not in there] == []


def test_every_option_it_names_has_the_default_it_says() -> None:
    """The table has every field of the options, and no other."""
    table = TEXT.partition("## Options")[2].partition("\n\n`create`")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", table, re.MULTILINE))
    said = {name: eval(default, {"MiB": MiB}) for name, default in rows.items()}

    assert said == dataclasses.asdict(SharedFileOptions())


def test_every_link_leads_somewhere() -> None:
    """To a file that is there and, where a heading is named, to that."""
    wrong = []
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        name, _, heading = target.partition("#")
        path = DOCS / (name or "sharedfile.md")
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        slugs = {
            re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
        if not text or (heading and heading not in slugs):
            wrong.append(target)

    assert wrong == []


def test_every_error_it_names_is_kvio_s() -> None:
    """And is exported."""
    named = set(re.findall(r"`(\w+Error)`", TEXT))

    assert len(named) > 4
    assert [name for name in named if not hasattr(kvio, name)] == []


def test_the_names_in_the_directory_are_those_it_says(real_disk: Path) -> None:
    """While a file is written, and when it is sealed; the longest name is as long as it says."""
    named = [name.replace("NAME", "file") for name in re.findall(r"`(\.NAME\.kvio-\w+)`", TEXT)]
    with SharedFile.create(real_disk / "file", 1) as file:
        while_written = raw.names(real_disk)
        modes = {raw.permissions(real_disk / name) for name in while_written}
        file.pwrite(b"x", 0)
        file.seal()
    SharedFile.create(real_disk / ("n" * 207), 1).abort()

    assert while_written == sorted(named)
    assert modes == {0o600}
    assert raw.names(real_disk) == ["file"]
    assert raw.permissions(real_disk / "file") == kills.sealed_mode()
    with pytest.raises(kvio.ConfigError, match="longer than 207 bytes"):
        SharedFile.create(real_disk / ("n" * 208), 1)


@pytest.mark.parametrize(
    ("durability", "writers", "size", "direct"),
    [("visible", 1, 8 * MiB, False), ("durable", 1, 8 * MiB, True),
     ("visible", 2, 4 * MiB, True), ("visible", 2, 4 * MiB - 2, False)],
)  # fmt: skip
def test_hybrid_takes_the_mode_of_its_table(
    durability: str, writers: int, size: int, *, direct: bool, real_disk: Path
) -> None:
    """The first line that fits, where the file system has direct I/O at all."""
    try:
        SharedFile.create(real_disk / "probe", 1, mode="direct").abort()
    except kvio.ConfigError as exc:
        pytest.skip(f"no direct I/O on {real_disk.parent}: {exc}")
    with SharedFile.create(real_disk / "f", size, writers=writers, durability=durability) as file:
        assert file.mode == ("direct" if direct else "buffered")
        file.abort()


def _fields(section: str) -> list[tuple[int, int, str]]:
    """Return offset, length and name of each field in a section's byte table."""
    text = FORMAT.partition(f"\n## {section}")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\w ]+?) \|", text, re.MULTILINE)
    return [(int(at), int(nbytes), name) for at, nbytes, name in rows]


TRAILER = _fields("The end of a sealed shared file")
SIDECAR = _fields("The sidecar of a plain shared file")
MAP = _fields("The map of a shared file")


@pytest.mark.parametrize(
    ("fields", "nbytes"),
    [(TRAILER, indices.TRAILER_BYTES), (MAP, plans.WRITERS_AT), (SIDECAR, sidecar.HEAD_BYTES)],
    ids=["trailer", "map", "sidecar"],
)
def test_the_fields_of_the_formats_follow_each_other(
    fields: list[tuple[int, int, str]], nbytes: int
) -> None:
    """Without gaps or overlaps, to the last byte of what is fixed."""
    ends = [at + length for at, length, _ in fields]

    assert [at for at, _, _ in fields] == [0, *ends[:-1]]
    assert ends[-1] == nbytes


def test_what_changes_in_a_map_is_where_the_format_says() -> None:
    """The words that processes share are at the offsets of the table."""
    at = {name: start for start, _, name in MAP}

    assert (at["state"], at["progress"]) == (plans.STATE_AT, plans.PROGRESS_AT)
    assert (at["waiters"], at["doubt"]) == (plans.WAITERS_AT, plans.REREAD_AT)
    assert (at["device"], at["inode"]) == (plans.INODE_AT, plans.INODE_AT + 8)


def _vector(what: str) -> bytes:
    found = re.search(rf"^\| {what}.*? \| `([0-9a-f]+)` \|$", FORMAT, re.MULTILINE)
    assert found is not None
    return bytes.fromhex(found[1])


def _numbers(fields: list[tuple[int, int, str]], data: bytes) -> dict[str, int]:
    """Read the integers of a table from bytes, by the table alone."""
    return {
        name: int.from_bytes(data[at : at + nbytes], "little")
        for at, nbytes, name in fields
        if nbytes in (2, 4, 8) and at + nbytes <= len(data)
    }


def test_the_vectors_are_what_the_code_writes() -> None:
    """Head, sizes, checksums and trailer of one file, to the last bit."""
    file_id, boot_id = bytes(range(16)), bytes(range(16, 32))
    choices = True, True, True, True, False, False, 0o444
    plan = plans.Plan(file_id, boot_id, VECTORS, 512, *choices)
    sums = [raw.crc32c(PAYLOAD[start:end]) for _, _, start, end in VECTORS.all_cells()]
    end = _vector("sizes, in both") + _vector("checksums") + _vector("trailer")

    assert plans.pack(plan) == (_vector("head of the map"), _vector("sizes, in both"))
    assert indices.pack(indices.Index(file_id, VECTORS, sums)) == end
    assert (plan.sizes_at, plan.cells_at, plan.blocks_at) == (240, 264, 4096)
    assert (indices.starts_at(VECTORS), VECTORS.shared_blocks) == (12_288, (1,))


def test_the_vectors_are_read_by_the_tables_alone() -> None:
    """Every number, magic and checksum is where its table has it."""
    head, trailer = _vector("head of the map"), _vector("trailer")
    sizes, sums = _vector("sizes, in both"), _vector("checksums")
    of_map, of_file = _numbers(MAP, head), _numbers(TRAILER, trailer)
    common = {
        "writers": 3, "size": 10_000, "cell_bytes": 8192, "stripe_bytes": 0, "align": 4096,
        "sizes": 3,
    }  # fmt: skip

    assert common.items() <= of_map.items()
    assert common.items() <= of_file.items()
    assert (of_map["version"], of_map["flags"], of_map["memory align"]) == (2, 15, 512)
    assert of_map["permissions"] == 0o444
    assert (of_file["version"], of_file["flags"], of_file["cells"]) == (1, 1, 2)
    assert (head[:8], trailer[:8]) == (b"KVIOMAP\n", b"KVIOSHF\n")
    assert of_map["head checksum"] == raw.crc32c(head[:124] + sizes)
    assert of_file["index checksum"] == raw.crc32c(sizes + sums)
    assert of_file["trailer checksum"] == raw.crc32c(trailer[:92])
    assert struct.unpack("<2I", sums) == (raw.crc32c(PAYLOAD[:5000]), raw.crc32c(PAYLOAD[5000:]))
