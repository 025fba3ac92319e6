"""Tuning chooses modes from measured times, keeps its budget, and leaves no files."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import kvio
from kvio.backends.posix.directories import temp_prefix
from kvio.diagnostics import tuning
from kvio.diagnostics.tuning import (
    Budget,
    Cell,
    Schedule,
    calibrate,
    choose,
    crossings,
    default_steps,
    mode_at,
)
from kvio.filesystem.io_mode import Calibration, Step, load_calibration
from kvio.types import IOMode, KiB, MiB

BUFFERED, DONTCACHE, DIRECT = IOMode.BUFFERED, IOMode.DONTCACHE, IOMode.DIRECT
ALWAYS_BUFFERED = (Step(None, BUFFERED),)
CALIBRATION = ".kvio-calibration.json"


class TestChoosing:
    def test_a_mode_within_five_per_cent_replaces_nothing(self) -> None:
        """Noise of a few per cent leaves the default thresholds exactly as they are."""
        noise = random.Random(1)
        for direction in ("write", "read"):
            seconds = {
                size: {mode: noise.uniform(1.0, 1.04) for mode in (BUFFERED, DIRECT, DONTCACHE)}
                for size in tuning.SIZES
            }

            assert choose(seconds, default_steps(direction)) == default_steps(direction)

    def test_a_clear_crossing_lies_between_the_sizes_that_show_it(self) -> None:
        """One step, halfway (log) between the last size of one mode and the first of the other."""
        seconds = {
            size: {BUFFERED: 1.0, DIRECT: 2.0 if size < 64 * KiB else 0.5} for size in tuning.SIZES
        }
        steps = choose(seconds, ALWAYS_BUFFERED)

        assert steps == (Step(32 * KiB, BUFFERED), Step(None, DIRECT))

    def test_every_size_gets_a_mode_close_to_its_best_where_modes_differ_clearly(self) -> None:
        """On smooth curves the table loses at most what a step must gain."""
        for seed in range(200):
            rates = random.Random(seed)
            cost = {mode: (rates.uniform(1, 100), rates.uniform(0.1, 3)) for mode in IOMode}
            seconds = {
                size: {mode: cost[mode][0] + cost[mode][1] * size / 1e4 for mode in cost}
                for size in tuning.SIZES
            }
            steps = choose(seconds, default_steps("write"))

            for size, figures in seconds.items():
                assert figures[mode_at(steps, size)] <= min(figures.values()) * 1.05 * 1.1**2

    def test_one_noisy_size_adds_no_steps(self) -> None:
        """A single size that is 10 % faster in another mode is not worth two steps."""
        seconds = {size: {BUFFERED: 1.0, DIRECT: 1.2} for size in tuning.SIZES}
        seconds[MiB] = {BUFFERED: 1.1, DIRECT: 1.0}

        assert choose(seconds, ALWAYS_BUFFERED) == ALWAYS_BUFFERED

    def test_a_size_without_figures_keeps_the_default(self) -> None:
        """A size that the budget did not reach has the mode used without calibration."""
        seconds = {size: {BUFFERED: 1.0, DIRECT: 9.0} for size in tuning.SIZES if size <= MiB}
        seconds |= {size: {} for size in tuning.SIZES if size > MiB}

        assert choose(seconds, default_steps("write")) == default_steps("write")
        assert choose({}, default_steps("read")) == default_steps("read")

    def test_neighbours_of_one_mode_are_one_step(self) -> None:
        """The table has the fewest possible steps."""
        seconds = {size: {BUFFERED: 9.0, DIRECT: 1.0, DONTCACHE: 9.0} for size in tuning.SIZES}

        assert choose(seconds, default_steps("read")) == (Step(None, DIRECT),)

    def test_crossings_are_measured_between_sizes_far_apart(self) -> None:
        """A new size is the geometric mean; sizes a factor of two apart get none."""
        row = [cell(4 * KiB, 1, direct=2.0), cell(16 * KiB, 1, direct=0.5)]

        assert crossings(row, "write") == [8 * KiB]
        assert crossings([cell(8 * KiB, 1, direct=2.0), row[1]], "write") == []

    def test_reads_that_were_not_cold_are_ignored(self) -> None:
        """Reads from the page cache do not measure the device."""
        rows = {1: [cell(size, 1, direct=0.1) for size in tuning.SIZES]}

        assert calibrate(rows, "", cold=True).read == {1: (Step(None, DIRECT),)}
        assert calibrate(rows, "", cold=False).read == {1: default_steps("read")}


def cell(nbytes: int, concurrency: int, *, direct: float, rounds: int = 3) -> Cell:
    """Return a cell in which buffered I/O took one second."""
    one = Cell(nbytes, concurrency, 1, rounds=rounds)
    for samples in (one.write_s, one.read_s):
        samples |= {BUFFERED: [1.0] * rounds, DIRECT: [direct] * rounds}
    return one


class SimulatedDevice:
    """Records times from a formula, on a simulated clock, and the order of trials."""

    def __init__(self, seconds: Callable[[int, IOMode], float]) -> None:
        self.modes: Sequence[IOMode] = (BUFFERED, DIRECT)
        self.order: list[tuple[int, IOMode]] = []
        self._seconds = seconds

    def trial(self, cell: Cell, mode: IOMode) -> None:
        """Record the formula's times."""
        self.order.append((cell.nbytes, mode))
        for samples in (cell.write_s, cell.read_s):
            samples.setdefault(mode, []).append(self._seconds(cell.nbytes, mode))


class TestSchedule:
    def schedule(self, device: SimulatedDevice, max_bytes: int) -> Schedule:
        return Schedule(device, Budget(1000.0, max_bytes, None), trial_bytes=64 * MiB)

    def test_modes_alternate_and_the_first_rotates(self) -> None:
        """Drift of the machine affects all modes equally."""
        device = SimulatedDevice(lambda _n, _m: 1.0)
        schedule = self.schedule(device, 10 * MiB)
        schedule.add(MiB, 1)
        schedule.spend(share=1.0)

        assert [mode for _, mode in device.order[:4]] == [BUFFERED, DIRECT, DIRECT, BUFFERED]

    def test_no_more_is_written_than_allowed(self) -> None:
        """The limit on bytes holds for all sizes."""
        for max_bytes in (0, MiB, 7 * MiB, 100 * MiB):
            device = SimulatedDevice(lambda _n, _m: 1.0)
            schedule = self.schedule(device, max_bytes)
            for size in tuning.SIZES:
                schedule.add(size, 1)
            schedule.spend(share=1.0)
            blocks = {c.nbytes: c.nblocks for c in schedule.cells}

            assert sum(size * blocks[size] for size, _ in device.order) <= max_bytes

    def test_small_sizes_get_enough_rounds_first(self) -> None:
        """If the budget ends early, the large sizes keep the default."""
        device = SimulatedDevice(lambda _n, _m: 1.0)
        schedule = self.schedule(device, 40 * MiB)
        for size in tuning.SIZES:
            schedule.add(size, 1)
        schedule.spend(share=1.0)
        measured = [c.measured for c in schedule.row(1)]

        assert measured == sorted(measured, reverse=True)
        assert measured[0]
        assert not measured[-1]

    def test_a_simulated_device_is_calibrated_within_five_per_cent(self) -> None:
        """On a device whose modes cross once, every measured size gets its faster mode."""

        def seconds(nbytes: int, mode: IOMode) -> float:
            return 100 + nbytes / 1e4 if mode is DIRECT else 10 + nbytes / 1e3

        device = SimulatedDevice(seconds)
        schedule = self.schedule(device, 10**12)
        for size in tuning.SIZES:
            schedule.add(size, 1)
        schedule.spend(share=1.0)
        steps = calibrate({1: schedule.row(1)}, "", cold=True).write[1]

        for size in tuning.SIZES:
            figures = [seconds(size, mode) for mode in device.modes]
            assert seconds(size, mode_at(steps, size)) <= min(figures) * 1.05


class TestTuning:
    def tune(self, path: Path, **options: object) -> tuning.Tuning:
        arguments: dict[str, object] = {
            "budget_s": 200.0,  # for a slow disk: on others the bytes end it
            "max_bytes": 96 * MiB,
            "io_threads": 2,
            "sizes": (4 * KiB, 256 * KiB),
        }
        return tuning.tune(str(path), **(arguments | options))  # type: ignore[arg-type]  # by name

    def test_it_measures_every_mode_and_leaves_nothing(self, tunable: Path) -> None:
        """Writes and reads are measured in all modes, one and two at a time; no file is left."""
        result = self.tune(tunable)
        cells = result.measured["cells"]

        assert os.listdir(tunable) == []
        assert {c["concurrency"] for c in cells} == {1, 2}
        for one in cells:
            assert one["rounds"] >= tuning.MIN_ROUNDS
            assert {"buffered", "direct"} <= set(one["write_mb_per_s"])
            assert set(one["write_mb_per_s"]) == set(one["read_mb_per_s"])
        assert result.measured["bytes_written"] <= 96 * MiB

    def test_a_visible_buffered_write_reports_its_dirty_pages(self, tunable: Path) -> None:
        """A visible buffered write leaves more dirty bytes than a direct one."""
        cells = self.tune(tunable, sizes=(256 * KiB,), max_bytes=48 * MiB).measured["cells"]
        if not cells[0]["dirty_bytes"]:
            pytest.skip("no cachestat: the kernel does not say what is dirty")

        assert cells[0]["dirty_bytes"]["buffered"] > 0
        assert cells[0]["dirty_bytes"]["direct"] < cells[0]["dirty_bytes"]["buffered"]

    def test_durable_writes_leave_nothing_dirty(self, tunable: Path) -> None:
        """A durable write includes the transfer to the disk."""
        tuned = self.tune(tunable, sizes=(64 * KiB,), max_bytes=48 * MiB, writes="durable")
        cells = tuned.measured["cells"]

        assert all(dirty == 0 for one in cells for dirty in one["dirty_bytes"].values())

    def test_a_failure_in_the_middle_leaves_nothing(self, tunable: Path) -> None:
        """After an exception the directory is as before."""
        seen: list[str] = []

        def stop(_share: float, what: str) -> None:
            seen.extend([what, *os.listdir(tunable)])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.tune(tunable, report=stop)

        assert len(seen) == 2
        assert os.listdir(tunable) == []

    def test_leftovers_of_a_killed_run_are_removed(self, tunable: Path) -> None:
        """The directory of a dead process is removed, that of a live process is kept."""
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            gone.wait()
        prefix = temp_prefix()
        dead = tunable / f"{prefix.replace(f'-{os.getpid()}-', f'-{gone.pid}-')}{'0' * 16}tune"
        living = tunable / f"{prefix}{'0' * 16}tune"
        for path in (dead, living):
            (path / "deep").mkdir(parents=True)
        with tuning.scratch_directory(str(tunable)) as directory:
            assert os.stat(directory).st_mode & 0o777 == 0o700

        assert os.listdir(tunable) == [living.name]

    def test_a_file_system_with_one_mode_is_refused_with_a_reason(self) -> None:
        """Tmpfs has only one mode, and no file is left."""
        shm = Path("/dev/shm")
        if not shm.is_dir():
            pytest.skip("no tmpfs at /dev/shm")
        before = set(os.listdir(shm))

        with pytest.raises(kvio.UnsupportedError, match="nothing to tune"):
            self.tune(shm)
        assert {name for name in set(os.listdir(shm)) - before if name.endswith("tune")} == set()

    @pytest.mark.parametrize(
        "options", [{"budget_s": 0}, {"budget_s": math.nan}, {"io_threads": 0}, {"max_bytes": 0}]
    )
    def test_invalid_numbers_are_refused(self, tunable: Path, options: dict[str, object]) -> None:
        """Tune raises ConfigError and leaves no files."""
        with pytest.raises(kvio.ConfigError):
            self.tune(tunable, **options)
        assert os.listdir(tunable) == []

    def test_hybrid_uses_the_chosen_modes(self, tunable: Path) -> None:
        """Stores use the saved file, also for dontcache."""
        table: dict[int, tuple[Step, ...]] = {
            1: (Step(100, BUFFERED), Step(200, DIRECT), Step(None, DONTCACHE))
        }
        tuning.save(str(tunable), tuning.Tuning(Calibration(table, table, "by hand"), {}))
        with kvio.open_store("hybrid", root=tunable) as store:
            taken = [store.write_block(f"k{n}", bytes(n)) for n in (99, 100, 199, 200)]

        assert [r.mode for r in taken[:3]] == [BUFFERED, DIRECT, DIRECT]
        assert taken[3].mode in (DONTCACHE, BUFFERED)
        assert all("by hand" in receipt.reason for receipt in taken)


class TestCalibrationFile:
    saved = tuning.Tuning(
        Calibration({1: ALWAYS_BUFFERED}, {1: (Step(KiB, DIRECT), Step(None, BUFFERED))}, "why"),
        {"cells": [], "writes": "visible"},
    )

    def test_it_is_private_whatever_the_umask(self, tmp_path: Path) -> None:
        """The mode is 0600, there is no other file, and load() returns what was saved."""
        before = os.umask(0)
        try:
            name = tuning.save(str(tmp_path), self.saved)
        finally:
            os.umask(before)

        assert os.listdir(tmp_path) == [CALIBRATION]
        assert os.stat(name).st_mode & 0o777 == 0o600
        assert tuning.load(str(tmp_path)) == self.saved
        assert load_calibration(Path(name).read_text(), name) == self.saved.calibration

    def test_a_failed_save_keeps_the_old_file(self, tmp_path: Path) -> None:
        """A directory with the file's name cannot be replaced; no temporary file is left."""
        (tmp_path / CALIBRATION / "x").mkdir(parents=True)

        with pytest.raises(kvio.StorageError, match="calibration"):
            tuning.save(str(tmp_path), self.saved)
        assert os.listdir(tmp_path) == [CALIBRATION]

    def test_a_missing_calibration_is_a_config_error(self, tmp_path: Path) -> None:
        """The file is missing, or the directory."""
        for path in (tmp_path, tmp_path / "nope"):
            with pytest.raises(kvio.ConfigError, match="no calibration"):
                tuning.load(str(path))

    @pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"version": 99}'])
    def test_garbage_is_a_config_error(self, tmp_path: Path, content: bytes) -> None:
        """Load does not raise the JSON library's errors."""
        (tmp_path / CALIBRATION).write_bytes(content)

        with pytest.raises(kvio.ConfigError, match="tune again"):
            tuning.load(str(tmp_path))

    def test_unknown_measurements_are_ignored(self, tmp_path: Path) -> None:
        """Only the modes are used."""
        content = json.loads(self.saved.dump()) | {"measured": [1, 2]}
        (tmp_path / CALIBRATION).write_text(json.dumps(content))

        assert tuning.load(str(tmp_path)).calibration == self.saved.calibration


@pytest.fixture
def tunable(real_disk: Path) -> Path:
    """Return a directory on a file system with direct I/O."""
    with kvio.open_store("hybrid", root=real_disk) as opened:
        if not opened.capabilities.direct_io:
            pytest.skip("no direct I/O here: nothing to tune")
    return real_disk
