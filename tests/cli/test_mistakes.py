"""User errors are one line and an exit status, and every command has help."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvio
from tests.cli.running import SCRIPT, complaint, file_of, flip_a_bit, run

pytestmark = pytest.mark.slow

COMMANDS = ("doctor", "tune", "put", "get", "ls", "stat", "rm", "verify", "sweep", "placement")


class TestMistakes:
    def test_a_missing_block_is_status_1(self, store: Path, tmp_path: Path) -> None:
        """The error is one line, and the target file is not changed."""
        existing = tmp_path / "existing"
        existing.write_bytes(b"mine")

        assert "no block 'nope'" in complaint(run("get", store, "nope", existing), 1)
        assert "no block 'nope'" in complaint(run("stat", store, "nope"), 1)
        assert existing.read_bytes() == b"mine"

    def test_a_corrupt_block_is_not_written_out(self, store: Path, tmp_path: Path) -> None:
        """The status is 1, stdout is empty, and no file is written."""
        run("put", store, "k", stdin=bytes(50_000))
        flip_a_bit(file_of(store, "k"), 40_000)
        to_stdout = run("get", store, "k", "-")

        assert "'k' is corrupt" in complaint(to_stdout, 1)
        assert to_stdout.stdout == b""
        assert complaint(run("get", store, "k", tmp_path / "out"), 1)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        "key", ["", "../x", "/x", "a//b", "a/", ".x", "a b", "é", "k" * 201, "a\nb"]
    )
    def test_an_invalid_key_is_refused(self, store: Path, key: str) -> None:
        """The status is 2, and nothing is stored."""
        assert "invalid key" in complaint(run("put", store, key, stdin=b"x"), 2)
        assert not list(store.rglob("*~*"))

    def test_a_missing_or_wrong_file_is_named(self, store: Path, tmp_path: Path) -> None:
        """The error has the file's name and the system's reason."""
        nope = tmp_path / "nope"

        assert complaint(run("put", store, "k", nope), 2) == (
            f"kvio: {nope}: No such file or directory"
        )
        assert "Is a directory" in complaint(run("put", store, "k", tmp_path), 2)
        assert "Not a directory" in complaint(run("put", "-r", store, "k", Path(__file__)), 2)

    def test_an_unreadable_file_is_named(self, store: Path, tmp_path: Path) -> None:
        """The error has the file's name and "Permission denied"."""
        if os.geteuid() == 0:
            pytest.skip("permissions do not bind root")
        secret = tmp_path / "secret"
        secret.write_bytes(b"x")
        secret.chmod(0)

        assert complaint(run("put", store, "k", secret), 2) == f"kvio: {secret}: Permission denied"

    def test_a_target_that_cannot_be_written_is_named(self, store: Path, tmp_path: Path) -> None:
        """No temporary file is left."""
        run("put", store, "k", stdin=b"x")
        target = tmp_path / "no-such-directory" / "out"

        assert str(target) in complaint(run("get", store, "k", target), 2)
        assert os.listdir(tmp_path) == []

    def test_a_target_is_unchanged_if_its_new_content_cannot_be_written(
        self, store: Path, tmp_path: Path
    ) -> None:
        """The write exceeds the file size limit; the existing file is unchanged and alone."""
        run("put", store, "k", stdin=bytes(kvio.MiB))
        target = tmp_path / "target"
        target.write_bytes(b"existing")
        limited = subprocess.run(
            ["sh", "-c", 'ulimit -f 128; exec "$@"', "sh", SCRIPT, "get", store, "k", target],
            capture_output=True,
            check=False,
            timeout=60,
        )

        assert complaint(limited, 2) == f"kvio: {target}: File too large"
        assert target.read_bytes() == b"existing"
        assert os.listdir(tmp_path) == ["target"]

    def test_a_full_disk_is_one_line(self, store: Path) -> None:
        """A write to /dev/full fails with the system's reason."""
        if not os.path.exists("/dev/full"):
            pytest.skip("no /dev/full")
        run("put", store, "k", stdin=b"x")

        assert "No space left" in complaint(run("get", store, "k", "/dev/full"), 2)

    def test_no_store_is_one_line(self, tmp_path: Path) -> None:
        """Every command reports that the store does not exist."""
        for arguments in (["ls"], ["get", "k"], ["verify"], ["sweep"], ["rm", "k"], ["stat", "k"]):
            command, *rest = arguments
            done = run(command, tmp_path / "nope", *rest)

            assert "does not exist" in complaint(done, 2)

    def test_an_unknown_backend_is_reported_with_a_suggestion(self) -> None:
        """For a typo the error suggests the nearest name, else it lists the backends."""
        assert "did you mean 'hybrid'" in complaint(run("ls", "hybird:///mnt"), 2)
        assert "no backend is named 'gopher'" in complaint(run("doctor", "gopher://b/p"), 2)

    def test_bad_options_are_one_line(self, store: Path) -> None:
        """The error names the invalid option of the URL or command, and the help to read."""
        assert "unknown option 'durabilty'" in complaint(
            run("ls", f"hybrid://{store}?durabilty=x"), 2
        )
        assert "kvio put --help" in complaint(run("put", store), 2)
        assert "kvio put --help" in complaint(run("put", store, "k", "--if-exists", "never"), 2)
        assert "kvio --help" in complaint(run("frobnicate"), 2)
        assert "--offset" in complaint(run("get", store, "k", "--offset", "-1"), 2)
        assert "--prefix needs" in complaint(run("get", "--prefix", store, "k"), 2)

    def test_a_root_writable_by_others_is_refused(self, store: Path) -> None:
        """The error has the reason and the option that allows it."""
        store.chmod(0o777)

        assert "shared_root=true" in complaint(run("put", store, "k", stdin=b"x"), 2)

    def test_a_closed_pipe_ends_it_quietly(self, store: Path) -> None:
        """`kvio get | head` prints no error and exits with 141."""
        run("put", store, "k", stdin=bytes(3 * kvio.MiB))
        with subprocess.Popen(
            [SCRIPT, "get", store, "k", "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(1)
            process.stdout.close()

            assert process.stderr.read() == b""
            assert process.wait() == 141

    @pytest.mark.usefixtures("ctrl_c")
    def test_ctrl_c_ends_it_quietly(self, store: Path) -> None:
        """The exit status is 130, without a traceback and without a block."""
        with subprocess.Popen(
            [SCRIPT, "put", store, "k", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stderr is not None
            # More than a pipe's buffer: when this returns, kvio is reading.
            process.stdin.write(bytes(kvio.MiB))
            process.stdin.flush()
            process.send_signal(signal.SIGINT)
            # Python may handle a signal that arrives between two reads only after the second.
            process.stdin.close()

            assert process.stderr.read() == b""
            assert process.wait() == 130
        assert not list(store.glob("?/?/*"))


class TestHelp:
    def test_without_arguments_it_prints_help(self) -> None:
        """The help lists all commands."""
        done = run()

        assert (done.returncode, done.stderr) == (0, b"")
        assert all(command in done.stdout.decode() for command in COMMANDS)
        assert done.stdout == run("--help").stdout

    def test_the_version_is_the_package_s(self) -> None:
        """Both the script and the module print one line."""
        expected = f"kvio {kvio.__version__}\n"
        module = [sys.executable, "-m", "kvio", "--version"]

        found = subprocess.run(module, capture_output=True, text=True, timeout=60)

        assert run("--version").stdout.decode() == expected
        assert found.stdout == expected

    @pytest.mark.parametrize("columns", [80, 120])
    def test_every_help_fits_the_terminal_and_has_an_example(self, columns: int) -> None:
        """No line is longer than the terminal is wide."""
        for command in COMMANDS:
            lines = run(command, "--help", COLUMNS=str(columns)).stdout.decode().splitlines()

            assert max(map(len, lines)) <= columns
            assert any(f"kvio {command}" in line for line in lines[2:])

    def test_without_the_extra_it_names_the_extra(self) -> None:
        """The error is one line with status 2, whichever of the two packages is missing."""
        for name in ("typer", "rich"):
            code = (
                f"import sys; sys.modules[{name!r}] = None; from kvio.cli import main; "
                "sys.exit(main())"
            )
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
            )

            assert "pip install 'kvio[cli]'" in complaint(done, 2)
