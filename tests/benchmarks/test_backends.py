"""The comparison of backends measures what it says, checks every byte and keeps what it found."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import kvio
from benchmarks.cli import app
from benchmarks.harness import machine, page_cache
from benchmarks.harness.blocks import Arena, is_same
from benchmarks.harness.measure import COLD, HOT, WRITE, Sample, percentile, summarise, time_calls
from benchmarks.harness.run import Progress
from benchmarks.harness.shapes import SHAPES
from benchmarks.harness.table import Table
from benchmarks.scenarios import backends
from benchmarks.scenarios.backends import PLAIN, Entry, entries

SMALL = ["--tokens", "1", "--models", "gpt-oss-120b", "--max-bytes", "256KiB", "--rounds", "1"]


@pytest.fixture
def disk() -> Iterator[Path]:
    """Yield a directory whose page cache can be emptied."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        if machine.describe_file_system(Path(name)).is_memory:
            pytest.skip("needs a disk file system under /var/tmp")
        yield Path(name)


def _main(root: Path, results: Path, *arguments: str) -> int:
    command = ["backends", "--root", str(root), "--results", str(results), *SMALL, *arguments]
    return int(get_command(app).main(command, standalone_mode=False) or 0)


def _recorded(results: Path) -> Any:
    return json.loads((results / "backends.json").read_text())


def _sample(contender: str, index: int, wall_s: float, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "subject": "model",
        "block_nbytes": 100,
        "contender": contender,
        "checksum": True,
        "operation": WRITE,
        "round": index,
        "wall_s": wall_s,
        "latencies_s": [wall_s],
        "modes": {"direct": 1},
        "reasons": ["size"],
        **dict.fromkeys(("cached_before", "intact")),
    }
    return Sample(**(values | changes))


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("Llama-3.1-8B", 32),
        ("Llama-3.1-70B", 80),
        ("Qwen3-8B", 36),
        ("Qwen3-32B", 64),
        ("gpt-oss-120b", 18),
    ],
)
def test_blocks_have_the_size_that_follows_from_the_configuration(name: str, mib: int) -> None:
    """2 x layers x KV heads x head size x 2 bytes x 256 tokens, worked out by hand."""
    shape = SHAPES[name]

    assert shape.block_nbytes() == mib * kvio.MiB
    assert "config.json" in shape.source


def test_sliding_window_layers_can_be_reported_from_the_others() -> None:
    """Half of gpt-oss-120b's layers see 128 tokens; without them half the bytes remain."""
    shape = SHAPES["gpt-oss-120b"]

    assert (shape.sliding_layers, shape.sliding_window) == (18, 128)
    assert 2 * shape.full_attention_nbytes() == shape.block_nbytes()


def test_percentiles_are_calls_that_happened() -> None:
    """Nearest rank: no value is made up, and few values make the slowest the 99th."""
    values = [5.0, 1.0, 4.0, 2.0, 3.0]

    assert percentile(values, 50) == 3.0
    assert percentile(values, 99) == 5.0
    assert percentile([float(i) for i in range(1, 201)], 99) == 198.0


def test_ratios_compare_within_a_round() -> None:
    """A machine that slows down between rounds slows both sides of a ratio."""
    samples = [
        _sample(PLAIN, 0, 1.0),
        _sample("hybrid", 0, 0.5),
        _sample(PLAIN, 1, 10.0),
        _sample("hybrid", 1, 5.0),
        _sample("hybrid", 2, 1.0),
    ]

    plain, hybrid = summarise(samples, PLAIN)
    assert (plain.ratio, hybrid.ratio) == (1.0, 2.0)
    assert hybrid.bytes_per_s == 100.0
    assert (hybrid.slowest_bytes_per_s, hybrid.fastest_bytes_per_s) == (20.0, 200.0)
    assert (hybrid.rounds, hybrid.calls, hybrid.modes) == (3, 3, {"direct": 3})


def test_results_keep_the_order_of_the_calls_on_several_threads() -> None:
    """Each call is timed on its own and its result stays in its place."""
    timed = time_calls([lambda i=i: i for i in range(50)], 4)  # type: ignore[misc]  # i is bound

    assert timed.results == list(range(50))
    assert len(timed.latencies_s) == 50
    assert all(0 <= seconds <= timed.wall_s for seconds in timed.latencies_s)


def test_pieces_of_a_block_are_apart_and_cover_their_own_memory() -> None:
    """No byte belongs to two pieces, and none that was asked for is left out."""
    arena = Arena(2 * 3 * 4096)
    blocks = arena.cut(blocks=2, pieces=3, piece_nbytes=4096)
    for number, piece in enumerate(p for block in blocks for p in block.pieces):
        piece[:] = number

    assert [piece[0] for block in blocks for piece in block.pieces] == list(range(6))
    assert arena.cut(blocks=1, pieces=1, piece_nbytes=6 * 4096)[0].pieces[0].tolist() == [
        number for number in (0, 3, 1, 4, 2, 5) for _ in range(4096)
    ]


def test_one_wrong_byte_makes_blocks_differ() -> None:
    """The comparison looks at the last byte of the last piece."""
    left, right = (Arena(8192).cut(blocks=1, pieces=2, piece_nbytes=4096)[0] for _ in range(2))
    for block in (left, right):
        for piece in block.pieces:
            piece[:] = 7
    assert is_same(left, right)

    right.pieces[1][-1] = 8
    assert not is_same(left, right)


def test_random_blocks_differ_from_each_other() -> None:
    """A store that returned another block's bytes would be noticed."""
    arena = Arena(4 * 4096)
    arena.fill_random(1)
    blocks = arena.cut(blocks=4, pieces=1, piece_nbytes=4096)

    assert len({block.pieces[0].tobytes() for block in blocks}) == 4


def test_plain_python_stores_the_joined_pieces_and_nothing_else(tmp_path: Path) -> None:
    """The baseline's file holds exactly the payload, under its final name alone."""
    contender = Entry(backend=None, checksum=False).open(tmp_path, "durable")
    contender.write("block", [np.arange(5, dtype=np.uint8), np.arange(3, dtype=np.uint8)])
    out = [np.zeros(4, np.uint8), np.zeros(4, np.uint8)]

    assert contender.read("block", out) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["block"]
    assert (tmp_path / "block").read_bytes() == bytes([0, 1, 2, 3, 4, 0, 1, 2])
    assert np.concatenate(out).tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_a_contender_without_checksum_stores_none(tmp_path: Path) -> None:
    """What the table calls "no checksum" has none on the disk."""
    for checksum in (True, False):
        root = tmp_path / str(checksum)
        root.mkdir(mode=0o700)
        contender = Entry(backend="posix-tmpfile", checksum=checksum).open(root, "visible")
        contender.write("block", [b"payload"])
        contender.close()
        with kvio.open_store("posix-tmpfile", root=root) as store:
            assert (store.stat_block("block").checksum is not None) is checksum


def test_contenders_have_names_of_their_own() -> None:
    """Tables and plots tell all of them apart, plain Python first."""
    names = [entry.name for entry in entries(["hybrid", "posix-direct"], "both")]

    assert names[0] == PLAIN
    assert len(set(names)) == len(names) == 5


def test_dropped_files_are_cold_and_warmed_files_are_hot(disk: Path) -> None:
    """The kernel confirms the cache state in which reads are timed."""
    (disk / "below").mkdir()
    (disk / "below" / "file").write_bytes(os.urandom(3 * kvio.MiB + 5))
    if page_cache.cached_fraction(disk) is None:
        pytest.skip("needs cachestat (Linux 6.5)")

    page_cache.drop(disk)
    assert page_cache.cached_fraction(disk) == 0.0
    page_cache.warm(disk)
    assert page_cache.cached_fraction(disk) == 1.0


def test_the_innermost_and_latest_mount_is_the_one_that_counts() -> None:
    """Of mounts over each other the last hides the others; a name's prefix is not a parent."""
    mountinfo = "\n".join(
        [
            "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro",
            "22 21 0:9 / /mnt/my\\040kv rw - tmpfs none rw",
            "23 22 8:2 / /mnt/my\\040kv rw,noatime - xfs /dev/sdb rw,logbufs=8",
            "24 21 0:7 / /mnt/my rw - proc proc rw",
        ]
    )

    expected = ("xfs", "/dev/sdb", "/mnt/my kv", "rw,noatime,rw,logbufs=8")
    assert machine._mount(Path("/mnt/my kv/store"), mountinfo) == expected
    assert machine._mount(Path("/mnt/my kvs"), mountinfo)[0] == "ext4"


def test_tables_line_up_and_numbers_stand_right() -> None:
    """Every column begins at the same place in every line."""
    table = Table(
        title="t",
        headings=("a", "n"),
        rows=[("long cell", "1"), ("b", "100")],
        right=frozenset("n"),
    )

    assert table.plain().splitlines()[2:] == [
        "a            n",
        "---------  ---",
        "long cell    1",
        "b          100",
    ]


def test_a_bar_in_a_cell_does_not_split_a_markdown_table() -> None:
    """Mount options and error texts may hold anything."""
    table = Table(title="t", headings=("a",), rows=[("x|y",)])

    assert table.markdown().splitlines()[-1] == "| x\\|y |"


def test_a_run_records_every_contender_and_operation(
    tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record holds all samples, each checked, and the medium; the root is left as it was."""
    assert _main(disk, tmp_path, "--checksum", "on") == 0

    record = _recorded(tmp_path)
    took_part = {(sample["contender"], sample["operation"]) for sample in record["samples"]}
    names = [PLAIN, *(name for name in backends.BACKENDS if name in str(record["summaries"]))]
    assert took_part == {(name, operation) for name in names for operation in (WRITE, HOT, COLD)}
    assert "posix-tmpfile" in names
    assert {s["intact"] for s in record["samples"] if s["operation"] != WRITE} == {True}
    assert record["file_system"]["path"] == str(disk)
    assert record["machine"]["kvio"] == kvio.__version__
    assert list(disk.iterdir()) == []
    said = capsys.readouterr().out
    assert all(name.removeprefix("posix-") in said for name in (*names, "MB/s"))
    tables = said[said.index("\nwrite: ") : said.index("\nwrite: the fastest backend is ")]
    assert max(map(len, tables.splitlines())) <= 80
    for operation in (WRITE, HOT, COLD):
        assert f"\n{operation}: the fastest backend is " in said
    written = (tmp_path / "backends.md").read_text()
    assert "| posix-tmpfile |" in written
    assert all(name in written for name in ("p99 ms", "calls", "because", "x plain"))


def test_a_plot_is_drawn_where_matplotlib_is_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A PNG, or a sentence that names the extra that is missing."""
    assert _main(tmp_path, tmp_path / "results", "--backends", "posix-tmpfile") == 0

    if importlib.util.find_spec("matplotlib") is None:
        assert "kvio[plot]" in capsys.readouterr().out
    else:
        assert (tmp_path / "results" / "backends.png").read_bytes().startswith(b"\x89PNG")


def test_a_wrong_byte_fails_the_run_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1, although the store said that all went well."""
    honest = kvio.Store.read_block_into

    def wrong(self: kvio.Store, key: str, out: Any, **options: Any) -> int:
        count = honest(self, key, out, **options)
        out[-1][-1] ^= 1
        return count

    monkeypatch.setattr(kvio.Store, "read_block_into", wrong)

    assert _main(tmp_path, tmp_path / "results", "--backends", "posix-tmpfile") == 1
    assert "BYTES DIFFER: posix-tmpfile" in capsys.readouterr().out


def test_a_read_that_leaves_the_memory_alone_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the hot read brought does not pass for what the cold read should have brought."""
    honest = kvio.Store.read_block_into
    seen: set[str] = set()

    def lazy(self: kvio.Store, key: str, out: Any, **options: Any) -> int:
        if key in seen:
            return sum(piece.nbytes for piece in out)
        seen.add(key)
        return honest(self, key, out, **options)

    monkeypatch.setattr(kvio.Store, "read_block_into", lazy)

    assert _main(tmp_path, tmp_path, "--backends", "hybrid", "--checksum", "on") == 1
    kvios = [s for s in _recorded(tmp_path)["samples"] if s["contender"] == "hybrid"]
    assert [sample["intact"] for sample in kvios] == [None, True, False]


def test_one_store_at_a_time_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every trial removes what it wrote, so the disk holds one trial's bytes at most."""
    left: list[int] = []

    def say(_: Progress, _step: str) -> None:
        measured = (path for path in tmp_path.rglob("*") if path.parent.name != "results")
        left.append(sum(path.is_file() for path in measured))

    monkeypatch.setattr(Progress, "say", say)

    assert _main(tmp_path, tmp_path / "results", "--rounds", "2") == 0
    assert len(left) > 2
    assert set(left) == {0}


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table and the record hold the turns that ended, and say that some are missing."""
    said: list[str] = []

    def say(_: Progress, step: str) -> None:
        said.append(step)
        if len(said) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "say", say)
    root = tmp_path / "root"
    root.mkdir()
    assert _main(root, tmp_path) == 130
    record = _recorded(tmp_path)
    assert {sample["contender"] for sample in record["samples"]} == {PLAIN}
    assert any("INTERRUPTED" in note for note in record["notes"])
    assert PLAIN in capsys.readouterr().out
    assert list(root.iterdir()) == []


def test_no_round_begins_after_the_budget(tmp_path: Path) -> None:
    """The first round is always whole; with no time left there is no second."""
    assert _main(tmp_path, tmp_path, "--rounds", "5", "--budget", "0") == 0

    assert {sample["round"] for sample in _recorded(tmp_path)["samples"]} == {0}


def test_rounds_begin_with_another_contender_each(tmp_path: Path) -> None:
    """Nobody is always first."""
    options = ("--rounds", "3", "--backends", "posix-tmpfile", "--checksum", "both")
    assert _main(tmp_path, tmp_path, *options) == 0

    first: dict[int, str] = {}
    for sample in _recorded(tmp_path)["samples"]:
        first.setdefault(sample["round"], sample["contender"])
    assert len(set(first.values())) == 3


def test_a_medium_that_refuses_is_left_out_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """On tmpfs there is no direct I/O; the run goes on and says what is not comparable."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or machine.describe_file_system(shm).kind != "tmpfs":
        pytest.skip("needs tmpfs on /dev/shm")
    with tempfile.TemporaryDirectory(dir=shm) as root:
        assert _main(Path(root), tmp_path) == 0

    said = capsys.readouterr().out
    assert "left out: posix-direct" in said
    assert "NOT COMPARABLE: tmpfs is memory" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--models", "GPT-7"], "GPT-7"),
        (["--backends", "posix-drect"], "posix-drect"),
        (["--threads", "0"], "threads"),
        (["--root", "/nonexistent"], "/nonexistent"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, before anything is written."""
    assert _main(tmp_path, tmp_path / "results", *arguments) == 2

    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
