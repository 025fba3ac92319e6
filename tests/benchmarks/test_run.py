"""A run takes its trials within its budget, loses no sample, and says what a reader must know."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvio
from benchmarks.harness import run as runs
from benchmarks.harness.columns import ratio_text
from benchmarks.harness.judging import UNDECIDED, Claim
from benchmarks.harness.machine import creates_slowly, describe_file_system
from benchmarks.harness.measure import Sample, summarise
from benchmarks.harness.run import Limits, Progress, Run, Scenario, check_room
from kvio import MiB
from tests.posix.mounts import has_journal

SCENARIO = Scenario(
    name="tried",
    title="Tried",
    reference="a",
    contenders=("a", "b", "c"),
    claims=(Claim(text="b is faster", pairs=[("b", "a")], at_least=1.0),),
)


def sample(case: str, name: str, index: int, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "subject": case,
        "block_nbytes": MiB,
        "contender": name,
        "checksum": False,
        "operation": "write",
        "round": index,
        "wall_s": 1.0 if name == "a" else 0.5,
        "latencies_s": [0.1],
    }
    return Sample(**(values | changes))


def trial(case: str, name: str, index: int) -> Iterator[Sample]:
    yield sample(case, name, index)


def a_run(tmp_path: Path, **limits: Any) -> Run:
    return Run(SCENARIO, Limits(root=tmp_path, results=tmp_path / "results", **limits))


def finish(run: Run) -> int:
    return run.finish(["how"], lambda *_: [], None)


def recorded(tmp_path: Path) -> Any:
    return json.loads((tmp_path / "results" / "tried.json").read_text())


class _Clock:
    """A clock that every trial moves on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_s: float) -> None:
        self.now_s = 0.0
        self._step_s = step_s
        monkeypatch.setattr(Progress, "elapsed_s", property(lambda _: self.now_s))

    def trial(self, case: str, name: str, index: int) -> Iterator[Sample]:
        self.now_s += self._step_s
        yield sample(case, name, index)


def test_no_trial_starts_after_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of the first round; what was not reached is counted and named."""
    clock = _Clock(monkeypatch, 3.0)
    run = a_run(tmp_path, budget_s=10.0)
    run.take_trials(["one", "two", "three"], ["a", "b", "c"], clock.trial)

    assert clock.now_s == 12.0
    assert len(run.samples) == 4
    [note] = [note for note in run.notes() if "NOT REACHED" in note]
    assert "within 10 s: 5 of the first round's trials, from two, " in note
    assert finish(run) == 0


def test_no_round_starts_that_would_end_after_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the slowest of its case so far."""
    clock = _Clock(monkeypatch, 1.0)
    run = a_run(tmp_path, budget_s=8.0)
    run.take_trials(["one"], ["a", "b", "c"], clock.trial)

    assert clock.now_s == 6.0
    assert {s.round for s in run.samples} == {0, 1}
    assert not any("NOT REACHED" in note for note in run.notes())


def test_the_first_trial_always_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of the budget preparing took."""
    clock = _Clock(monkeypatch, 1.0)
    clock.now_s = 99.0
    run = a_run(tmp_path, budget_s=8.0)
    run.take_trials(["one"], ["a", "b"], clock.trial)

    assert [s.contender for s in run.samples] == ["a"]


def test_samples_are_on_disk_as_they_come(tmp_path: Path) -> None:
    """Each is there when the next trial starts; the record replaces them."""
    journal = tmp_path / "results" / "tried.samples.jsonl"
    seen = []

    def watched(case: str, name: str, index: int) -> Iterator[Sample]:
        seen.append(journal.read_text().count("\n") if journal.exists() else 0)
        yield from trial(case, name, index)

    run = a_run(tmp_path, max_rounds=2)
    run.take_trials(["one"], ["a", "b"], watched)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]

    assert seen == [0, 2, 3, 4]
    assert lines[0]["experiment"] == "tried"
    assert [line["contender"] for line in lines[1:]] == [s.contender for s in run.samples]
    assert finish(run) == 0
    assert not journal.exists()
    assert len(recorded(tmp_path)["samples"]) == 4


@pytest.mark.parametrize(
    ("stop", "status", "named"),
    [
        (KeyboardInterrupt(), 130, "INTERRUPTED by Ctrl-C"),
        (SystemExit(128 + signal.SIGTERM), 143, "INTERRUPTED by SIGTERM"),
    ],
)
def test_an_interrupted_run_presents_what_it_has(
    stop: BaseException, status: int, named: str, tmp_path: Path
) -> None:
    """With a note, and the exit status of the signal."""

    def stopped(case: str, name: str, index: int) -> Iterator[Sample]:
        if index == 1:
            raise stop
        yield from trial(case, name, index)

    run = a_run(tmp_path)
    run.take_trials(["one"], ["a", "b"], stopped)

    assert finish(run) == status
    assert any(named in note for note in recorded(tmp_path)["notes"])
    assert len(recorded(tmp_path)["samples"]) == 2


def test_another_exit_is_not_an_interruption(tmp_path: Path) -> None:
    """It is raised."""

    def leaves(*_: object) -> Iterator[Sample]:
        sys.exit(7)

    with pytest.raises(SystemExit):
        a_run(tmp_path).take_trials(["one"], ["a"], leaves)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_loses_no_sample(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM leaves the whole record; after SIGKILL `report` reads what was written down."""
    command = (
        *(sys.executable, "-m", "benchmarks", "hybrid", "--sizes", "4KiB", "--contenders"),
        *("buffered,hybrid", "--max-bytes", "64KiB", "--rounds", "100000", "--budget", "100s"),
        *("--root", str(tmp_path), "--results", str(tmp_path / "results")),
    )
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if b"round 3" in line:
                break
        process.send_signal(number)
        process.stderr.read()
    if number == signal.SIGTERM:
        assert process.returncode == 143
        kept = json.loads((tmp_path / "results" / "hybrid.json").read_text())["samples"]
        assert list(tmp_path.iterdir()) == [tmp_path / "results"]
    else:
        from benchmarks.harness.report import load

        [run] = load(tmp_path / "results")
        kept = run.content["samples"]
        assert "UNFINISHED" in run.content["notes"][0]
    assert {s["round"] for s in kept} >= {0, 1}


def test_contenders_begin_in_turn_and_follow_in_any_order(tmp_path: Path) -> None:
    """So that none always follows the same one; the same in every run."""
    orders = []
    for _ in range(2):
        run = a_run(tmp_path, max_rounds=6)
        run.take_trials(["one"], ["a", "b", "c"], trial)
        names = [s.contender for s in run.samples]
        orders.append([tuple(names[at : at + 3]) for at in range(0, 18, 3)])

    assert orders[0] == orders[1]
    assert [order[0] for order in orders[0]] == ["a", "b", "c", "a", "b", "c"]
    assert len(set(orders[0])) > 3


def test_a_contender_that_is_not_supported_is_left_out(tmp_path: Path) -> None:
    """After its first trial, by name and reason; the others go on."""

    def unsupported(case: str, name: str, index: int) -> Iterator[Sample]:
        if name == "b":
            raise kvio.UnsupportedError("no such thing")
        yield from trial(case, name, index)

    run = a_run(tmp_path, max_rounds=3)
    run.take_trials(["one"], ["a", "b"], unsupported)

    assert len(run.samples) == 3
    assert run.notes()[0] == "left out: b: no such thing"


def test_a_contender_takes_no_trial_where_it_takes_no_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is one announced."""
    run = a_run(tmp_path, max_rounds=2)
    run.take_trials(
        ["one", "two"], ["a", "b"], trial, lambda case, name: (case, name) != ("two", "b")
    )

    assert {(s.subject, s.contender) for s in run.samples} == {
        ("one", "a"),
        ("one", "b"),
        ("two", "a"),
    }
    assert "two, b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda run: run.failed.append("LOST: b"), "LOST: b"),
        (lambda run: run.samples.append(sample("one", "c", 0, intact=False)), "BYTES DIFFER: c"),
    ],
)
def test_a_wrong_byte_and_a_lost_trial_fail_the_run(
    change: Callable[[Run], None], named: str, tmp_path: Path
) -> None:
    """Exit status 1, with a note."""
    run = a_run(tmp_path, max_rounds=1)
    run.take_trials(["one"], ["a", "b"], trial)
    change(run)

    assert finish(run) == 1
    assert any(named in note for note in recorded(tmp_path)["notes"])


def test_nothing_measured_is_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The notes say why, and no folder is made."""
    run = a_run(tmp_path)
    run.left_out["a"] = "absent"

    assert finish(run) == 2
    assert "nothing was measured" in (said := capsys.readouterr().err)
    assert "left out: a: absent" in said
    assert list(tmp_path.iterdir()) == []


def test_a_busy_machine_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs' runnable tasks are counted before each trial, and recorded."""
    busy = 1 + 3 * len(os.sched_getaffinity(0))
    found = []
    for runnable in (1, busy):
        monkeypatch.setattr(runs, "runnable_tasks", lambda runnable=runnable: runnable)
        run = a_run(tmp_path, max_rounds=8)
        run.take_trials(["one"], ["a", "b"], trial)
        assert finish(run) == 0
        found.append(recorded(tmp_path))

    assert [record["claims"][0]["verdict"] for record in found] == ["met", UNDECIDED]
    assert [record["machine"]["load_of_others"] for record in found] == [0.0, 3.0]
    assert any("BUSY" in note for note in found[1]["notes"])
    assert found[0]["conclusions"] == [
        "claim: b is faster (>= 1): met; farthest: 2.00 [2.00, 2.00] (one, 1 MiB, write, 8 rounds)"
    ]


def test_a_ratio_has_an_interval_from_six_rounds_on(tmp_path: Path) -> None:
    """Below, there is the median alone."""
    texts = []
    for rounds in (5, 6):
        run = a_run(tmp_path, max_rounds=rounds)
        run.take_trials(["one"], ["a", "b"], trial)
        [_, faster] = summarise(run.samples, "a", ["a", "b"])
        texts.append(ratio_text(faster))

    assert texts == ["2.00", "2.00 [2.00, 2.00]"]


def test_room_is_checked_before_anything_is_made(tmp_path: Path) -> None:
    """The disk, the memory and the directory itself."""
    check_room(tmp_path, 1, 1)
    for arguments, named in (
        ((tmp_path / "absent", 1), "no such directory"),
        ((tmp_path, 1 << 60), "less --max-bytes"),
        ((tmp_path, 1, 1 << 60), "of memory"),
    ):
        with pytest.raises(kvio.ConfigError, match=named):
            check_room(*arguments)


def test_an_ext4_without_a_journal_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every creation is slow there after deletions, by any program."""
    slow = describe_file_system(tmp_path).kind == "ext4" and not has_journal(tmp_path)
    assert creates_slowly(tmp_path) == slow
    run = a_run(tmp_path)
    with run.workplace():
        pass

    assert ("has no journal" in capsys.readouterr().err) == slow
    assert any("SLOW CREATION" in note for note in run.notes()) == slow


@pytest.mark.root
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_loop_file_system_is_what_is_measured_and_then_gone(kind: str, tmp_path: Path) -> None:
    """Its kind is recorded, with a journal, under the name of the directory that was given."""
    run = a_run(tmp_path, loop=kind)
    try:
        with run.workplace() as base:
            assert run.file_system is not None
            assert (run.file_system.kind, run.file_system.path) == (kind, str(tmp_path))
            assert not any("SLOW" in note for note in run.notes())
            assert list(base.iterdir()) == []
    except kvio.UnsupportedError as exc:
        pytest.skip(f"loop file systems: {exc}")
    assert list(tmp_path.iterdir()) == []
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
