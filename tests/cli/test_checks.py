"""kvio verify and kvio sweep."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import complaint, file_of, flip_a_bit, run, run_on_terminal, temporary_prefix

pytestmark = pytest.mark.slow


class TestVerify:
    def test_a_clean_store_is_clean(self, store: Path) -> None:
        """Verify exits with 0 and prints one line, and nothing on stderr."""
        for number in range(3):
            run("put", store, f"k/{number}", stdin=bytes(number))
        done = run("verify", store)

        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"3 blocks checked, all good")

    def test_every_kind_of_damage_is_a_line_with_its_reason(self, store: Path) -> None:
        """A flipped bit, a truncated, a swapped and a misplaced file are reported."""
        for key in ("flipped", "cut", "swapped", "other", "misplaced", "good"):
            run("put", store, key, stdin=key.encode() * 1000)
        flip_a_bit(file_of(store, "flipped"), 100)
        os.truncate(file_of(store, "cut"), 10)
        file_of(store, "swapped").write_bytes(file_of(store, "other").read_bytes())
        path = file_of(store, "misplaced")
        elsewhere = next(leaf for leaf in store.glob("?/?") if leaf != path.parent)
        path.rename(elsewhere / path.name)
        done = run("verify", store)
        reasons = dict(re.findall(r"^bad (\S+): (.*)$", done.stdout.decode(), re.MULTILINE))

        assert done.returncode == 1
        assert sorted(reasons) == ["cut", "flipped", "misplaced", "swapped"]
        assert "checksum" in reasons["flipped"]
        assert "truncated" in reasons["cut"]
        assert "another key" in reasons["swapped"]
        assert "wrong directory" in reasons["misplaced"]
        assert "6 blocks checked, 4 bad" in done.stdout.decode()

    def test_only_the_prefix_is_checked(self, store: Path) -> None:
        """A bad block with another prefix is not reported."""
        run("put", store, "a/1", stdin=b"x")
        run("put", store, "b/1", stdin=b"x")
        flip_a_bit(file_of(store, "b/1"), 0)

        assert run("verify", store, "a/").returncode == 0
        assert run("verify", store, "b/").returncode == 1

    def test_without_checksums_it_reports_that_they_are_missing(self, store: Path) -> None:
        """In layout=plain only names and lengths are checked, and verify reports this."""
        url = f"hybrid://{store}?layout=plain"
        run("put", url, "k", stdin=b"x")

        assert "no checksums" in complaint(run("verify", url), 0)

    def test_a_missing_store_is_no_clean_store(self, tmp_path: Path) -> None:
        """The exit status is 2, not 0."""
        assert "does not exist" in complaint(run("verify", tmp_path / "nope"), 2)

    def test_the_bar_is_for_terminals_only(self, store: Path) -> None:
        """The bar appears on a terminal and not on a pipe; stdout is the same."""
        run("put", store, "k", stdin=b"x")
        shown, stdout = run_on_terminal("verify", store)

        assert b"verifying" in shown
        assert stdout.startswith(b"1 block checked, all good")


class TestRemoval:
    """`kvio verify --delete-corrupt` and ``--quarantine``."""

    @pytest.fixture
    def damaged(self, store: Path) -> dict[str, bytes]:
        """Store good and corrupt blocks; return the stored bytes of the corrupt ones."""
        for key in ("good", "a/flipped", "cut"):
            run("put", store, key, stdin=key.encode() * 1000)
        flip_a_bit(file_of(store, "a/flipped"), 100)
        os.truncate(file_of(store, "cut"), 10)
        return {key: file_of(store, key).read_bytes() for key in ("a/flipped", "cut")}

    def test_corrupt_blocks_are_removed(self, store: Path, damaged: dict[str, bytes]) -> None:
        """Each has a line, the exit status is 0 as none is left, and the next check is clean."""
        done = run("verify", store, "--delete-corrupt")
        lines = done.stdout.decode().splitlines()

        assert (done.returncode, done.stderr) == (0, b"")
        assert {f"removed {key}" for key in damaged} < set(lines)
        assert {line.split(":")[0] for line in lines if line.startswith("bad ")} == {
            f"bad {key}" for key in damaged
        }
        assert lines[-1].startswith("3 blocks checked, 2 bad, 2 removed")
        assert run("ls", store).stdout == b"good\n"
        assert run("verify", store).returncode == 0

    def test_corrupt_blocks_are_moved(
        self, store: Path, damaged: dict[str, bytes], tmp_path: Path
    ) -> None:
        """Their stored bytes are in the directory, under the name in the printed line."""
        directory = tmp_path / "quarantine"
        done = run("verify", store, "--quarantine", directory)
        moved = dict(re.findall(r"^moved (\S+) to (.*)$", done.stdout.decode(), re.MULTILINE))

        assert (done.returncode, done.stderr) == (0, b"")
        assert {key: Path(path).read_bytes() for key, path in moved.items()} == damaged
        assert sorted(os.listdir(directory)) == ["a~flipped", "cut"]
        assert "2 bad, 2 moved" in done.stdout.decode()
        assert run("ls", store).stdout == b"good\n"

    def test_blocks_that_cannot_be_removed_are_reported(self, store: Path) -> None:
        """Misplaced files and intact blocks of other keys are kept; the exit status is 1."""
        for key in ("flipped", "swapped", "other", "misplaced"):
            run("put", store, key, stdin=key.encode() * 1000)
        flip_a_bit(file_of(store, "flipped"), 100)
        file_of(store, "swapped").write_bytes(file_of(store, "other").read_bytes())
        path = file_of(store, "misplaced")
        path.rename(next(leaf for leaf in store.glob("?/?") if leaf != path.parent) / path.name)
        done = run("verify", store, "--delete-corrupt")

        assert done.returncode == 1
        assert "\nleft swapped: " in done.stdout.decode()
        assert "another key or namespace" in done.stdout.decode()
        assert "4 blocks checked, 3 bad, 1 removed" in done.stdout.decode()
        assert run("ls", store).stdout == b"misplaced\nother\nswapped\n"

    def test_only_the_prefix_is_removed(self, store: Path, damaged: dict[str, bytes]) -> None:
        """Blocks with another prefix are not changed."""
        assert run("verify", store, "a/", "--delete-corrupt").returncode == 0
        assert file_of(store, "cut").read_bytes() == damaged["cut"]

    @pytest.mark.usefixtures("damaged")
    def test_invalid_options_are_refused_before_anything_is_done(
        self, store: Path, tmp_path: Path
    ) -> None:
        """Both options, a directory inside the store, or one that cannot be created."""
        (tmp_path / "file").write_bytes(b"")
        for options in (
            ("--delete-corrupt", "--quarantine", tmp_path / "q"),
            ("--quarantine", store / "q"),
            ("--quarantine", store),
            ("--quarantine", tmp_path / "file" / "q"),
            ("--quarantine", tmp_path / "file"),
        ):
            done = run("verify", store, *options)
            assert done.returncode == 2, done
            assert done.stdout == b""
            assert done.stderr
        assert run("ls", store).stdout == b"a/flipped\ncut\ngood\n"
        assert not (tmp_path / "q").exists()

    def test_a_clean_store_stays_as_it_is(self, store: Path, tmp_path: Path) -> None:
        """Without corrupt blocks the exit status is 0."""
        run("put", store, "k", stdin=b"x")

        assert run("verify", store, "--delete-corrupt").returncode == 0
        assert run("verify", store, "--quarantine", tmp_path / "q").returncode == 0
        assert os.listdir(tmp_path / "q") == []
        assert run("get", store, "k").stdout == b"x"


class TestSweep:
    def leftovers(self, store: Path) -> tuple[Path, Path]:
        """Create temporary files of a dead and of a live writer beside a block."""
        run("put", store, "k", stdin=b"x")
        leaf = file_of(store, "k").parent
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            gone.wait()
        prefix = temporary_prefix(os.getpid())
        living = leaf / f"{prefix}{'0' * 32}"
        dead = leaf / f"{temporary_prefix(gone.pid)}{'0' * 32}"
        for path in (living, dead):
            path.write_bytes(b"half a block")
        return dead, living

    def test_a_dry_run_removes_nothing(self, store: Path) -> None:
        """Only the dead writer's file is printed, and it still exists."""
        dead, _ = self.leftovers(store)
        done = run("sweep", store, "--dry-run")

        assert done.stdout.decode() == f"{dead}\n"
        assert done.stderr == b"1 leftover would be removed\n"
        assert dead.exists()

    def test_a_sweep_removes_only_files_of_dead_writers(self, store: Path) -> None:
        """The live writer's file and the block are kept."""
        dead, living = self.leftovers(store)
        done = run("sweep", store)

        assert done.stdout.decode() == f"{dead}\n"
        assert not dead.exists()
        assert living.exists()
        assert run("get", store, "k").stdout == b"x"

    @pytest.mark.parametrize("age", ["", "soon", "-1s", "3w", "1e3"])
    def test_an_invalid_age_is_refused(self, store: Path, age: str) -> None:
        """A typo must not become an age of zero."""
        assert "not a duration" in complaint(run("sweep", store, f"--older-than={age}"), 2)
