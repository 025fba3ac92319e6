"""The command line of ``python -m benchmarks``, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.benchmarks.running import COMMAND, run
from tests.cli.running import complaint, read_to_end, terminal

SMALL = ("--sizes", "4KiB", "--contenders", "buffered,hybrid", "--max-bytes", "64KiB")


class TestScenarios:
    """Results are left in a folder, mistakes are one line."""

    def test_a_scenario_leaves_tables_and_samples(self, disk_path: Path) -> None:
        """JSON, Markdown and the table on standard output; nothing where it was measured."""
        results = disk_path / "results"
        root = disk_path / "root"
        root.mkdir()
        done = run("hybrid", *SMALL, "--rounds", "2", "--root", root, "--results", results)

        assert done.returncode == 0, done.stderr
        assert b"read, cold, MB/s" in done.stdout
        samples = json.loads((results / "hybrid.json").read_text())["samples"]
        assert {sample["contender"] for sample in samples} == {"buffered", "hybrid"}
        assert (results / "hybrid.md").read_text().startswith("# Bandwidth")
        assert list(root.iterdir()) == []

    def test_a_report_joins_and_compares(self, disk_path: Path) -> None:
        """One page for two folders, and what changed on standard output."""
        for name in ("before", "after"):
            done = run(
                "hybrid", *SMALL, "--rounds", "1", "--root", disk_path, "--results",
                disk_path / name,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        page = disk_path / "page.html"
        done = run("report", disk_path / "before", disk_path / "after", "--out", page)

        assert done.returncode == 0, done.stderr
        assert b"after / before" in done.stdout
        assert page.read_text().count("<h2>") == 3

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("hybrid", "--sizes", "5KiB"), "5120"),
            (("hybrid", "--sizes", "many"), "many"),
            (("hybrid", "--contenders", "bufered"), "bufered"),
            (("hybrid", "--budget", "soon"), "soon"),
            (("hybrid", "--max-bytes", "0"), "--max-bytes"),
            (("hybrid", "--root", "/nonexistent"), "/nonexistent"),
            (("media", "--kinds", "ntfs"), "ntfs"),
            (("tmpfile", "--threads", "one"), "one"),
            (("tmpfile", "--contenders", "rename"), "rename"),
            (("kv-offload", "--models", "GPT-7"), "GPT-7"),
            (("kv-offload", "--threads", "0"), "threads"),
            (("hybird",), "hybird"),
        ],
    )
    def test_a_mistake_is_one_line(
        self, arguments: tuple[str, ...], named: str, tmp_path: Path
    ) -> None:
        """Status 2, and the wrong word is in it."""
        done = run(*arguments, "--results", tmp_path / "results")

        assert named in complaint(done, 2)
        assert list(tmp_path.iterdir()) == []

    def test_without_a_name_the_scenarios_are_listed(self) -> None:
        """As help, not as a complaint."""
        done = run()

        assert done.returncode == 0
        assert b"hybrid" in done.stdout

    def test_a_report_of_nothing_is_refused(self, tmp_path: Path) -> None:
        """Neither a folder that is not there nor an empty one."""
        assert "no such folder" in complaint(run("report", tmp_path / "missing"), 2)
        assert "no results" in complaint(run("report", tmp_path), 2)

    @pytest.mark.usefixtures("ctrl_c")
    def test_ctrl_c_keeps_what_was_measured(self, disk_path: Path) -> None:
        """Status 130, a record that says rounds are missing, and an empty root."""
        results = disk_path / "results"
        root = disk_path / "root"
        root.mkdir()
        command: list[str | Path] = [*COMMAND, "hybrid", *SMALL, "--rounds", "10000"]
        with terminal() as (master, slave):
            process = subprocess.Popen(
                [*command, "--root", root, "--results", results, "--budget", "100s"],
                stdout=subprocess.DEVNULL,
                stderr=slave,
            )
            os.close(slave)
            shown = b""
            while b"round 2" not in shown:
                shown += os.read(master, 4096)
            process.send_signal(signal.SIGINT)
            read_to_end(master)
            status = process.wait(60)

        assert status == 130
        notes = json.loads((results / "hybrid.json").read_text())["notes"]
        assert any("INTERRUPTED" in note for note in notes)
        assert list(root.iterdir()) == []
