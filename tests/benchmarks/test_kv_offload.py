"""The offload experiment serves what it says, counts the bytes that moved and checks them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvio
from benchmarks.harness import page_cache
from benchmarks.harness.blocks import Arena, Block, is_same
from benchmarks.harness.machine import describe_file_system
from benchmarks.harness.run import Limits
from benchmarks.harness.shapes import SHAPES
from benchmarks.scenarios.kv_offload import peers, requests
from benchmarks.scenarios.kv_offload import scenario as offload
from benchmarks.scenarios.kv_offload.peers import CONTENDERS, PLAIN
from benchmarks.scenarios.kv_offload.requests import (
    Case,
    Request,
    Size,
    distinct_keys,
    predict_hits,
)
from benchmarks.scenarios.kv_offload.serving import (
    LOAD,
    LOOKUP,
    OFFLOAD,
    Contender,
    Span,
    busy_s,
    serve,
)

KVIO = ("posix-tmpfile", "posix-direct", "hybrid")
MODEL = "gpt-oss-120b"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what peers import
#: Ten requests of six blocks of one token, three of them shared.
SMALL: dict[str, Any] = {
    "models": (MODEL,),
    "tokens": 1,
    "requests": 10,
    "request_tokens": 6,
    "fresh": 0.5,
    "contenders": (PLAIN, *KVIO),
}
WANTED = Size(requests=10, tokens=6, fresh_tokens=3, shared=0.5, block_tokens=1)


@st.composite
def _sizes(draw: st.DrawFn, least: int = 1) -> Size:
    block_tokens = draw(st.integers(1, 5))
    return Size(
        requests=draw(st.integers(least, 12)),
        tokens=draw(st.integers(block_tokens, 40)),
        fresh_tokens=draw(st.integers(0, 15)),
        shared=draw(st.floats(0, 1)),
        block_tokens=block_tokens,
    )


_FEW_TOKENS = st.lists(st.integers(0, 1), max_size=12).map(lambda t: np.array(t, np.uint64))


def _run(root: Path, results: Path, **changes: Any) -> int:
    most = changes.pop("max_bytes", kvio.MiB * 64)
    limits = Limits(root=root, results=results, max_rounds=1, max_bytes=most)
    return offload.run(limits, **(SMALL | changes))


def _recorded(results: Path) -> Any:
    return json.loads((results / "kv-offload.json").read_text())


def _samples(results: Path, operation: str) -> list[Any]:
    found = [s for s in _recorded(results)["samples"] if s["operation"] == operation]
    assert found
    return found


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list; what is put in it is called with the directory of every filled store."""
    todo: list[Any] = []
    honest = page_cache.drop

    def drop(root: Path) -> None:
        honest(root)
        for work in todo if any(path.is_file() for path in root.rglob("*")) else ():
            work(root)

    monkeypatch.setattr(page_cache, "drop", drop)
    return todo


@given(_sizes(), st.integers(0, 9))
def test_the_same_seed_gives_the_same_requests(size: Size, seed: int) -> None:
    """Every contender, round and machine serves the same; another seed gives others."""
    first, second = requests.make_requests(size, seed), requests.make_requests(size, seed)
    grown = [requests.grow(new, size, seed) for new in (first, second)]

    for left, right in ((first, second), grown):
        assert [r.keys for r in left] == [r.keys for r in right]
    assert first[0].keys != requests.make_requests(size, seed + 1)[0].keys


@given(_FEW_TOKENS, _FEW_TOKENS, st.integers(1, 4))
def test_a_key_stands_for_a_block_and_all_before_it(left: Any, right: Any, tokens: int) -> None:
    """Two requests have a key in common if and only if they agree up to the end of its block."""
    mine, other = requests.block_keys(left, tokens), requests.block_keys(right, tokens)

    assert (len(mine), len(other)) == (len(left) // tokens, len(right) // tokens)
    for i, key in enumerate(mine):
        for j, their in enumerate(other):
            ends = ((i + 1) * tokens, (j + 1) * tokens)
            agree = left[: ends[0]].tolist() == right[: ends[1]].tolist()
            assert (key == their) is agree


@given(_sizes())
def test_requests_have_their_length_and_grow_at_the_end(size: Size) -> None:
    """Tokens that fill no block have no key; a request that grows finds all that it had."""
    new = requests.make_requests(size, 1)
    grown = requests.grow(new, size, 2)

    assert len(new) == size.requests
    for request, longer in zip(new, grown, strict=True):
        assert len(request.tokens) == size.tokens
        assert len(request.keys) == size.request_blocks == size.tokens // size.block_tokens
        assert len(longer.tokens) == size.tokens + size.fresh_tokens
        assert longer.keys[: len(request.keys)] == request.keys
    assert predict_hits(grown, distinct_keys(new)) == [size.request_blocks] * size.requests


@given(_sizes(least=2), st.sampled_from([0.0, 0.5, 1.0]))
def test_new_requests_find_their_shared_prefix_or_nothing(size: Size, shared: float) -> None:
    """Nothing shared is nothing found; all shared is found by some request, whole."""
    size = replace(size, shared=shared)
    hits = predict_hits(requests.make_requests(size, 3))

    assert set(hits) <= {0, size.shared_tokens // size.block_tokens}
    if shared == 0:
        assert set(hits) == {0}
    if shared == 1:
        assert size.request_blocks in hits
        assert hits.count(0) <= size.prefixes < size.requests


@given(_sizes(), st.integers(1, 200))
def test_a_cut_trace_fits_and_is_never_larger_than_wanted(wanted: Size, most: int) -> None:
    """No more distinct blocks than allowed, no more than twice as many loads, one at least."""
    size = requests.fit(wanted, most)
    grown = requests.grow(requests.make_requests(size, 1), size, 2)

    assert 1 <= size.requests <= wanted.requests
    assert size.block_tokens <= size.tokens <= wanted.tokens
    assert size.fresh_tokens <= wanted.fresh_tokens
    assert 1 <= len(distinct_keys(grown)) <= most
    assert size.requests * size.request_blocks <= 2 * most
    if wanted.most_blocks() <= most and wanted.requests * wanted.request_blocks <= 2 * most:
        assert size == wanted


def test_the_original_requests_are_cut_only_where_there_is_no_room() -> None:
    """300 requests of 12,000 tokens have 46 blocks of 256 each; with less room both shrink."""
    wanted = Size(requests=300, tokens=12_000, fresh_tokens=3_000, shared=0.5, block_tokens=256)
    cut = requests.fit(wanted, wanted.most_blocks() // 10)

    assert wanted.request_blocks == 46
    assert cut.requests >= cut.request_blocks > 20


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=8))
def test_time_in_which_calls_overlap_counts_once(calls: list[tuple[int, int]]) -> None:
    """Throughput is over the seconds in which any call ran, found here by looking at each."""
    spans = [Span(float(start), float(start + n), 1, Counter()) for start, n in calls]

    assert busy_s(spans) == sum(any(s <= t < s + n for s, n in calls) for t in range(40))


class _Lying(peers._PlainPython):
    """Says that it read everything and reads nothing."""

    def _read(self, _path: str, pieces: Any) -> int:
        return sum(piece.nbytes for piece in pieces)


class _Short(peers._PlainPython):
    """Says that a byte is missing."""

    def _read(self, path: str, pieces: Any) -> int:
        return super()._read(path, pieces) - 1


def _served(root: Path, claimed: dict[str, object], at: float = 0.0) -> Any:
    keys = ("a", "b", "c")
    source = {key: Block(key, [np.zeros(4, np.uint8)]) for key in keys}
    request = Request(np.zeros(3, np.uint64), keys)
    return serve(peers._PlainPython(root, "visible", 1), source, request, [], at, claimed)


def test_a_block_that_another_request_offloads_is_not_offloaded_again(tmp_path: Path) -> None:
    """All contenders are given the same bytes, whichever request was faster."""
    assert _served(tmp_path, {"b": object()}).spans[OFFLOAD].blocks == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_no_request_is_served_before_it_arrives(tmp_path: Path) -> None:
    """At a given rate a free thread waits, and the wait is in no latency."""
    one = _served(tmp_path, {}, arrival := time.perf_counter() + 0.01)

    assert one.spans[LOOKUP].start_s >= arrival
    assert one.late_s == one.spans[LOOKUP].start_s - arrival


@pytest.mark.parametrize("name", CONTENDERS)
def test_a_contender_finds_and_gives_back_what_it_was_given(name: str, tmp_path: Path) -> None:
    """Leading blocks are counted up to the first gap, and every piece comes back."""
    contender = CONTENDERS[name]
    if why := contender.missing():
        pytest.skip(f"needs {contender.package}: {why}")
    arenas = [Arena(2 * 3 * 4096) for _ in range(2)]
    arenas[0].fill_random(1)
    source, target = (arena.cut(blocks=2, pieces=3, piece_nbytes=4096) for arena in arenas)
    tmp_path.chmod(0o700)
    try:
        offloader = contender.open(tmp_path, "visible", 2)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"needs another file system or a library that works: {exc}")
    keys = [block.key for block in source]

    assert offloader.count_leading(keys) == 0
    offloader.offload([(block.key, block.pieces) for block in source])
    assert offloader.count_leading([*keys, "gap", keys[0]]) == 2
    assert offloader.count_leading(["gap", *keys]) == 0
    assert offloader.load([(block.key, block.pieces) for block in target]) == 2 * 3 * 4096
    assert all(map(is_same, source, target))
    offloader.close()


def test_durable_plain_python_synchronises_the_file_before_its_name_and_then_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a name could survive a loss of power that its bytes did not."""
    steps: list[str] = []
    rename, how = os.replace, peers._PlainPython

    def seen_replace(*names: str) -> None:
        steps.append("name")
        rename(*names)

    def seen_fsync(fd: int) -> None:
        steps.append("directory" if S_ISDIR(os.fstat(fd).st_mode) else "file")

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    how(tmp_path, "visible", 1).offload([("a", [b"x"])])
    how(tmp_path, "durable", 1).offload([("b", [b"x", b"y"]), ("c", [b"z"])])

    assert steps == ["name", *["file", "name"] * 2, "directory"]


def test_a_run_records_lookup_load_and_offload_of_every_contender(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loads are cold and compared, nothing is left on the disk, every guarantee is stated."""
    (root := tmp_path / "root").mkdir()

    assert _run(root, tmp_path) == 0
    notes = _recorded(tmp_path)["notes"]
    left_out = {name for name in KVIO if f"left out: {name}" in str(notes)}
    names = {PLAIN, *KVIO} - left_out
    assert {"posix-tmpfile", PLAIN} <= names
    for operation in (LOOKUP, LOAD, OFFLOAD):
        assert {s["contender"] for s in _samples(tmp_path, operation)} == names
    assert {s["intact"] for op in (LOAD, LOOKUP) for s in _samples(tmp_path, op)} == {True}
    if not describe_file_system(root).is_memory:  # else, or without cachestat, nobody can tell
        assert {s["cached_before"] for s in _samples(tmp_path, LOAD)} <= {0.0, None}
    assert list(root.iterdir()) == []
    said = capsys.readouterr().out
    assert all(word in said for word in (*names, "p99 ms", "x plain", "cached before", "MB/s"))
    assert all(any(n.startswith(f"{name}: ") for n in notes) for name in names)
    assert "CUT" not in str(notes)


@pytest.mark.parametrize("threads", [1, 4])
def test_requests_find_what_the_trace_predicts(tmp_path: Path, threads: int) -> None:
    """Served one by one, new requests do; those that come again do on any number of threads."""
    assert _run(tmp_path, tmp_path, threads=threads) == 0

    case = Case(SHAPES[MODEL], WANTED, kvio.GiB)
    new, again = predict_hits(case.first), predict_hits(case.again, distinct_keys(case.first))
    assert 3 in new
    assert again == [6] * 10
    assert all(s["facts"]["hits"] == again for s in _samples(tmp_path, LOOKUP))
    if threads == 1:
        firsts = _samples(tmp_path, "lookup, new requests")
        assert all(s["facts"]["hits"] == new for s in firsts)


@pytest.mark.parametrize("threads", [1, 4])
def test_bytes_are_those_that_moved(tmp_path: Path, threads: int, between: list[Any]) -> None:
    """Every distinct block is offloaded once, as the medium shows, and every hit is loaded."""
    seen: dict[str, int] = {}
    between.append(lambda root: seen.update((p.name, p.stat().st_size) for p in root.iterdir()))
    assert _run(tmp_path, tmp_path, threads=threads, contenders=(PLAIN,)) == 0

    case = Case(SHAPES[MODEL], WANTED, kvio.GiB)
    nbytes = SHAPES[MODEL].block_nbytes(1)
    assert seen == dict.fromkeys(distinct_keys(case.first), nbytes)
    moved = {OFFLOAD: len(seen), LOAD: 60, "offload, among loads": len(case.keys) - len(seen)}
    for operation, blocks in moved.items():
        for sample in _samples(tmp_path, operation):
            assert sample["block_nbytes"] == nbytes
            assert len(sample["latencies_s"]) == sum(sample["facts"]["request_blocks"]) == blocks


def _victim(root: Path) -> Path:
    return max(path for path in root.rglob("*") if path.is_file() and path.stat().st_size)


def _flip(root: Path) -> None:
    path = _victim(root)
    stored = path.read_bytes()
    path.write_bytes(bytes([stored[0] ^ 1]) + stored[1:])


@pytest.mark.parametrize("contender", [PLAIN, "posix-tmpfile"])
def test_a_wrong_byte_is_noticed(tmp_path: Path, between: list[Any], contender: str) -> None:
    """One bit of one stored block between the phases fails the run, checksum or not."""
    between.append(_flip)

    assert _run(tmp_path, tmp_path, contenders=(contender,)) == 1
    assert [s["intact"] for s in _samples(tmp_path, LOAD)] == [False]
    assert f"BYTES DIFFER: {contender}, {MODEL}, load" in _recorded(tmp_path)["notes"]


@pytest.mark.parametrize("contender", [PLAIN, "posix-tmpfile"])
def test_a_lost_block_is_noticed(tmp_path: Path, between: list[Any], contender: str) -> None:
    """What was offloaded and is not found any more fails the run, though nothing read is wrong."""
    between.append(lambda root: _victim(root).unlink())

    assert _run(tmp_path, tmp_path, contenders=(contender,)) == 1
    assert [s["intact"] for s in _samples(tmp_path, LOAD)] == [True]
    assert any("HITS DIFFER" in note for note in _recorded(tmp_path)["notes"])


@pytest.mark.parametrize("how", [_Lying, _Short])
def test_only_whole_and_right_loads_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """What another contender left in memory passes for no load, and bytes must not lack."""
    monkeypatch.setitem(CONTENDERS, PLAIN, replace(CONTENDERS[PLAIN], open=how))

    assert _run(tmp_path, tmp_path, contenders=("posix-tmpfile", PLAIN)) == 1
    assert [s["intact"] for s in _samples(tmp_path, LOAD)] == [True, False]


def test_requests_are_cut_to_the_bytes_that_are_allowed(tmp_path: Path) -> None:
    """The notes say from what to what, and no more is stored."""
    most = 12 * SHAPES[MODEL].block_nbytes(1)

    assert _run(tmp_path, tmp_path, contenders=(PLAIN,), max_bytes=most) == 0
    moved = _samples(tmp_path, OFFLOAD) + _samples(tmp_path, "offload, among loads")
    assert 0 < sum(len(s["latencies_s"]) * s["block_nbytes"] for s in moved) <= most
    assert any("CUT from 10 of 6 tokens" in note for note in _recorded(tmp_path)["notes"])


def test_a_peer_takes_part_or_is_left_out_by_its_package(tmp_path: Path) -> None:
    """Nobody is silently absent; where a package is missing its name for pip is told."""
    assert _run(tmp_path, tmp_path, contenders=None, requests=2) == 0

    record = _recorded(tmp_path)
    took_part = {sample["contender"] for sample in record["samples"]}
    for name in CONTENDERS:
        left_out = [note for note in record["notes"] if note.startswith(f"left out: {name}: ")]
        assert (name in took_part) is not bool(left_out)
        assert CONTENDERS[name].missing() in (None, *(n.split(": ", 2)[2] for n in left_out))
    absent = Contender(name="x", package="no_such", guarantee="none", open=peers._PlainPython)
    assert absent.missing() == "not installed: pip install no_such"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"models": ("GPT-7",)}, "GPT-7"),
        ({"models": ()}, "model"),
        ({"contenders": ("posix-drect",)}, "posix-drect"),
        ({"threads": 0}, "threads"),
        ({"request_tokens": 5, "tokens": 6}, "request_tokens"),
        ({"shared": 1.5}, "shared"),
        ({"fresh": float("nan")}, "fresh"),
        ({"rate": 0.0}, "rate"),
        ({"durability": "perhaps"}, "perhaps"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_written(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    """`ConfigError` with the name of what is wrong."""
    with pytest.raises(kvio.ConfigError, match="no such directory"):
        _run(tmp_path / "none", tmp_path / "results")
    with pytest.raises(kvio.ConfigError, match=named):
        _run(tmp_path, tmp_path / "results", **changes)

    assert list(tmp_path.iterdir()) == []
