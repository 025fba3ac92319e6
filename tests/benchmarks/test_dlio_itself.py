"""Scenario dlio runs the real command, and finds any byte that it should not have stored."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks.harness import s3_server
from benchmarks.harness.run import Limits
from benchmarks.scenarios.dlio import places, scenario
from benchmarks.scenarios.dlio.places import REFERENCE, TMPFILE
from benchmarks.scenarios.dlio.process import missing, of_phase, run_dlio
from benchmarks.scenarios.dlio.scenario import EPOCH, GENERATION, WORKLOADS, Case, Load
from kvio import MiB

needs_dlio = pytest.mark.skipif(
    importlib.util.find_spec("dlio_benchmark") is None, reason="dlio_benchmark is not installed"
)
LOAD: Final = Load(max_bytes=MiB, read_threads=2, epochs=2, compute_s=0.001)


# Bytes


def _fill(root: Path) -> None:
    (root / "data" / "train").mkdir(parents=True)
    for number in range(3):
        (root / "data" / "train" / f"{number}.npz").write_bytes(bytes([number]) * (2 * MiB + 1))


def _change(root: Path) -> None:
    with (root / "data/train/1.npz").open("r+b") as file:
        file.seek(2 * MiB)
        file.write(b"x")


def _truncate(root: Path) -> None:
    os.truncate(root / "data/train/1.npz", MiB)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_change, "data/train/1.npz: other bytes"),
        (_truncate, "data/train/1.npz: other bytes"),
        (lambda root: (root / "data/train/1.npz").unlink(), "data/train/1.npz: missing"),
        (lambda root: (root / "more").touch(), "more: stored, and not expected"),
    ],
)
def test_a_place_is_the_expected_one_or_the_first_difference_is_named(
    harm: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    """Equal to the byte, no file less and none more."""
    one, other = tmp_path / "one", tmp_path / "other"
    for root in (one, other):
        _fill(root)
    place = places.Directory(one, TMPFILE)

    assert place.difference(other) is None
    harm(one)
    assert place.difference(other) == said


@pytest.mark.slow
def test_objects_are_compared_by_the_raw_client_and_removed(tmp_path: Path) -> None:
    """A bucket is held to the same bytes and names as a directory, and is empty afterwards."""
    expected, base = tmp_path / "expected", tmp_path / "base"
    _fill(expected)
    base.mkdir()
    with s3_server.in_memory("bucket", MiB) as serving:
        inspector, client = serving.inspector(), serving.client(4 * MiB)
        inspector.make_bucket()

        def put(name: str, body: bytes) -> None:
            assert client.call("PUT", f"/bucket/base/data/train/{name}", body=body).status == 200

        with places.place_of("s3+boto3", base, serving) as place:
            for path in (expected / "data" / "train").iterdir():
                put(path.name, path.read_bytes())
            assert place.difference(expected) is None
            put("1.npz", bytes([1]) * 2 * MiB + b"x")
            assert place.difference(expected) == "data/train/1.npz: other bytes"
            put("4.npz", b"4")
            assert place.difference(expected) == "data/train/4.npz: stored, and not expected"
            inspector.delete(["base/data/train/4.npz", "base/data/train/0.npz"])
            assert place.difference(expected) == "data/train/0.npz: missing"
            assert len(inspector.sizes("base/")) == 2
        assert inspector.sizes("") == {}
        inspector.close()
        client.close()


# DLIO itself


def _tiny(work: Path) -> list[str]:
    return [
        *Case(WORKLOADS["unet3d"], 1).dlio_options(LOAD),
        *places.Directory(work / "stock", REFERENCE).dlio_options(),
        "++workload.dataset.record_length=4096",
    ]


def _processes_that_name(path: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(path) in command:
                found.append(int(entry.name))
    return found


@pytest.fixture
def alarm() -> Iterator[None]:
    """Make the alarm signal what Ctrl-C is."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@needs_dlio
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("ending", [TimeoutError, KeyboardInterrupt])
def test_nothing_of_a_run_that_is_ended_goes_on(
    ending: type[BaseException], ranks: int, tmp_path: Path, alarm: None
) -> None:
    """Ctrl-C and the end of the time kill mpirun, and ranks with process groups of their own."""
    del alarm
    if (absent := missing(ranks)) is not None:
        pytest.skip(absent)
    endless = "++workload.train.computation_time=60"
    phase = of_phase(generate=True, train=True)
    if ending is KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 3.0)

    with pytest.raises(ending):
        run_dlio([*_tiny(tmp_path), *phase, endless], work=tmp_path, ranks=ranks, timeout_s=4.0)
    ends = time.monotonic() + 30.0  # one that was killed is there until the kernel is done
    while left := _processes_that_name(tmp_path):
        assert time.monotonic() < ends, left


@needs_dlio
@pytest.mark.slow
def test_dlio_itself_stores_the_same_through_kvio(tmp_path: Path, disk_parent: Path) -> None:
    """One round of the real command: numbers of every phase, equal bytes, exact counts."""
    results = tmp_path / "results"
    root = disk_parent / f"kvio-test-{os.getpid()}-it's"  # a quote must not end the option
    root.mkdir()
    try:
        limits = Limits(root=root, results=results, max_bytes=MiB, max_rounds=1)
        status = scenario.run(
            limits,
            workloads=("unet3d", "checkpoint"),
            ranks=(1,),
            contenders=(TMPFILE,),
            epochs=LOAD.epochs,
        )
        assert os.listdir(root) == []
    finally:
        shutil.rmtree(root)

    assert status == 0
    samples = json.loads((results / "dlio.json").read_text())["samples"]
    found = {(s["operation"], s["contender"]): s for s in samples}
    assert len(found) == 6
    assert all(s["intact"] and s["wall_s"] > 0 for s in samples)
    counts = found[EPOCH, TMPFILE]["facts"]["counts"]
    assert [one["read"][0] for one in counts] == [2 * Case(WORKLOADS["unet3d"], 1).files(LOAD)]
    assert found[GENERATION, TMPFILE]["facts"]["put_window_s"] > 0
    assert found[EPOCH, TMPFILE]["facts"]["samples_per_s"] > 0
    assert found[EPOCH, TMPFILE]["cached_before"] == 1.0
