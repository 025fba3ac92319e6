"""doctor and tune."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.running import SCRIPT, complaint, load_json, read_to_end, run, terminal

pytestmark = pytest.mark.slow


class TestMedia:
    @pytest.mark.parametrize("columns", [80, 120])
    def test_doctor_fits_the_terminal_and_recommends_a_store_that_opens(
        self, store: Path, columns: int
    ) -> None:
        """The table is as wide as the terminal at most; the URL can be pasted into kvio."""
        done = run("doctor", store, COLUMNS=str(columns))
        text = done.stdout.decode()
        (url,) = re.findall(r"^Recommended: (\S+)", text, re.MULTILINE)

        assert (done.returncode, done.stderr) == (0, b"")
        table = [line for line in text.splitlines() if str(store) not in line]
        assert max(map(len, table)) <= columns
        assert run("put", url, "k", stdin=b"x").returncode == 0

    @pytest.mark.parametrize("form", [(), ("--json",)])
    def test_doctor_of_a_store_that_does_not_open_fails(
        self, store: Path, form: tuple[str, ...]
    ) -> None:
        """All answers are printed, then one line says why, and the exit status is 2."""
        done = run("doctor", f"hybrid://{store}?layout=wide", *form)

        assert "layout" in complaint(done, 2)
        assert b"free space" in done.stdout

    def test_doctor_prints_json(self, store: Path) -> None:
        """The JSON has the findings of the table."""
        content = load_json(run("doctor", store, "--json").stdout)

        assert {f["name"] for f in content["findings"]} >= {"O_TMPFILE", "direct I/O", "CRC32C"}
        assert all(set(f) == {"name", "answer", "good", "meaning"} for f in content["findings"])

    def test_doctor_refuses_a_path_that_is_no_directory(self, tmp_path: Path) -> None:
        """A missing path, and a file."""
        assert "does not exist" in complaint(run("doctor", tmp_path / "nope"), 2)
        assert "is not a directory" in complaint(run("doctor", __file__), 2)

    def test_tune_writes_what_show_prints(self, tunable: Path) -> None:
        """The file is private, the tables fit 80 columns, and hybrid stores use it."""
        tuned = run("tune", tunable, "--budget", "20s", "--max-bytes", "64MiB", "--io-threads", 2)
        shown = run("tune", tunable, "--show")
        file = tunable / ".kvio-calibration.json"

        assert (tuned.returncode, tuned.stderr) == (0, b"")
        assert tuned.stdout.startswith(shown.stdout)
        assert max(map(len, shown.stdout.decode().splitlines())) <= 80
        assert file.stat().st_mode & 0o777 == 0o600
        assert os.listdir(tunable) == [file.name]
        assert b"tuned" in run("put", tunable, "k", stdin=b"x").stdout

    def test_a_calibration_without_decisions_is_not_written(self, tunable: Path) -> None:
        """After one round, one line gives the reason, and an existing calibration is kept."""
        file = tunable / ".kvio-calibration.json"
        file.write_text("as it was")
        done = run("tune", tunable, "--budget", "0.0001s")

        assert "so nothing was decided; raise these limits" in complaint(done, 2)
        assert b"too few rounds" in done.stdout
        assert file.read_text() == "as it was"
        assert os.listdir(tunable) == [file.name]

    def test_a_dry_run_writes_nothing(self, tunable: Path) -> None:
        """The tables are printed, the directory stays empty, and --show has nothing to show."""
        done = run("tune", tunable, "--dry-run", "--budget", "20s", "--max-bytes", "32MiB")

        assert b"not written" in done.stdout
        assert os.listdir(tunable) == []
        assert "no calibration" in complaint(run("tune", tunable, "--show"), 2)

    @pytest.mark.parametrize(
        "option", ["--budget=0s", "--budget=x", "--max-bytes=x", "--max-bytes=1KiB", "--writes=x"]
    )
    def test_tune_refuses_invalid_options(self, tunable: Path, option: str) -> None:
        """The error is one line, and no file is left."""
        assert complaint(run("tune", tunable, option), 2)
        assert os.listdir(tunable) == []

    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    @pytest.mark.usefixtures("ctrl_c")
    def test_an_interrupted_tune_leaves_nothing(
        self, tunable: Path, number: signal.Signals, status: int
    ) -> None:
        """After Ctrl-C or SIGTERM there is no traceback, and the directory is empty."""
        with terminal() as (master, slave):
            process = subprocess.Popen(
                [SCRIPT, "tune", tunable, "--budget", "100s"],
                stdout=subprocess.DEVNULL,
                stderr=slave,
            )
            os.close(slave)
            shown = b""
            while b"at a time" not in shown:
                shown += os.read(master, 4096)
            process.send_signal(number)
            rest = read_to_end(master)

            assert process.wait(60) == status
        assert b"Traceback" not in rest
        assert os.listdir(tunable) == []
