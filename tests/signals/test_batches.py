"""A signal ends a batch between two system calls, and the exception says what was done."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvio
from tests.signals import programs
from tests.signals.programs import Traced

#: More than twice the blocks that a disk stores in the tenth of a second in which a handler runs.
MANY = 60_000

INTERRUPTED = """
BLOCK = bytes(range(256)) * 16
items = [(f"k{{n}}", BLOCK) for n in range({many})]
store = kvio.open_store(
    "posix-tmpfile", root=root, durability={durability!r}, layout="plain",
    io_threads={threads}, options={{"verify": "full"}},
)
store.contains("large")  # which opens the directory
before = descriptors()
send_when(lambda: published() >= 100)
try:
    store.write_blocks(items, timeout={timeout})
except Stop as exc:
    stored = [result for result in exc.kvio_results if result.ok]
    report(
        notes=exc.__notes__,
        keys=[result.key for result in exc.kvio_results],
        stored=sorted(result.key for result in stored),
        receipts=[str(result.receipt.level) for result in stored],
        others=sorted({{str(r.status) for r in exc.kvio_results if not r.ok}}),
        names=names(),
        descriptors=descriptors() - before,
        running=[str(t) for t in store._calls.executor._running],
    )
store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [None, 200.0])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("durability", ["visible", "durable"])
def test_what_the_exception_says_is_what_is_stored(
    root: Path, durability: str, threads: int, timeout: float | None
) -> None:
    """Whatever a handler raises in a batch says which blocks are on the disk, each intact."""
    facts = programs.run(
        INTERRUPTED.format(many=MANY, durability=durability, threads=threads, timeout=timeout),
        root,
    )

    assert facts["keys"] == [f"k{n}" for n in range(MANY)]
    assert 100 <= len(facts["stored"]) < MANY // 2
    assert facts["names"] == facts["stored"]
    assert facts["notes"][0].startswith(f"{len(facts['stored'])} of {MANY} blocks were stored")
    assert set(facts["receipts"]) == {durability}
    assert facts["others"] == ["cancelled"]
    assert facts["descriptors"] == 0
    with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
        read = store.read_blocks_into([(key, bytearray(4096)) for key in facts["stored"]])
        assert {result.status for result in read} == {kvio.BlockStatus.OK}


@pytest.mark.slow
def test_a_durable_window_is_left_between_two_syncs(root: Path, tmp_path: Path) -> None:
    """Of blocks that wait for the disk together none is stored, and none is waited for any more."""
    traced = Traced(tmp_path / "log", "fdatasync:signal=USR1:delay_exit=40000:when=5+")
    facts = traced.run(
        """
store = kvio.open_store(
    "posix-tmpfile", root=root, durability="durable", layout="plain", io_threads=1
)
store.contains("large")  # which opens the directory
before = descriptors()
try:
    store.write_blocks([(f"k{n}", b"data") for n in range(64)])
except Stop as exc:
    report(notes=exc.__notes__, names=names(), descriptors=descriptors() - before)
""",
        root,
    )

    assert facts["notes"][0].startswith("0 of 64 blocks were stored")
    assert facts["names"] == []
    assert facts["descriptors"] == 0
    assert 5 <= traced.calls("fdatasync") < 64


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_a_handler_that_returns_runs_in_the_middle_of_a_batch(
    root: Path, tmp_path: Path, threads: int
) -> None:
    """It sees a batch that is not done, which then is done to its end."""
    facts = Traced(tmp_path / "log", "fdatasync:delay_exit=4000").run(
        f"""
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(len(names())))
store = kvio.open_store(
    "posix-tmpfile", root=root, durability="durable", layout="plain", io_threads={threads}
)
send_when(lambda: published() >= 64)
results = store.write_blocks([(f"k{{n}}", bytes(4096)) for n in range(640)])
report(seen=seen, stored=sum(result.ok for result in results))
""",
        root,
    )

    assert len(facts["seen"]) == 1
    assert 64 <= facts["seen"][0] < 640
    assert facts["stored"] == 640


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_the_memory_of_an_interrupted_read_is_the_callers(
    root: Path, tmp_path: Path, threads: int
) -> None:
    """Buffers whose result is ``ok`` are filled; nothing changes any after the exception."""
    with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
        store.write_blocks([(f"k{n}", b"\1" * 4096) for n in range(3000)])
    facts = Traced(tmp_path / "log", "preadv2:delay_exit=3000").run(
        f"""
store = kvio.open_store("posix-tmpfile", root=root, layout="plain", io_threads={threads})
outs = [bytearray(4096) for _ in range(3000)]
send_when(lambda: outs[20][-1])
try:
    store.read_blocks_into([(f"k{{n}}", out) for n, out in enumerate(outs)])
except Stop as exc:
    then = list(map(bytes, outs))
    store.close()
    report(
        notes=exc.__notes__,
        read=[out == b"\\1" * 4096 for out in then],
        ok=[result.ok for result in exc.kvio_results],
        same=then == outs,
    )
""",
        root,
    )

    assert facts["ok"] == facts["read"]
    assert 20 <= sum(facts["ok"]) < 3000
    assert facts["notes"][0].startswith(f"{sum(facts['ok'])} of 3000 blocks were read")
    assert facts["same"]


@pytest.mark.slow
def test_an_interrupted_deletion_says_what_is_gone(root: Path, tmp_path: Path) -> None:
    """The blocks whose result is ``ok`` are gone, the others stand."""
    with kvio.open_store("posix-tmpfile", root=root, layout="plain") as store:
        store.write_blocks([(f"k{n}", b"data") for n in range(3000)])
    facts = Traced(tmp_path / "log", "unlinkat:delay_exit=3000").run(
        """
store = kvio.open_store("posix-tmpfile", root=root, layout="plain", io_threads=3)
send_when(lambda: len(names()) < 2900)
try:
    store.delete_blocks([f"k{n}" for n in range(3000)])
except Stop as exc:
    store.close()
    report(
        gone=sorted(result.key for result in exc.kvio_results if result.ok),
        stand=sorted(result.key for result in exc.kvio_results if not result.ok),
        names=names(),
    )
""",
        root,
    )

    assert facts["stand"] == facts["names"]
    assert 100 < len(facts["gone"]) < 3000
