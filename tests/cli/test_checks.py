"""verify and sweep."""

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
        """Exit status 0, one line, nothing on stderr."""
        for number in range(3):
            run("put", store, f"k/{number}", stdin=bytes(number))
        done = run("verify", store)

        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"3 blocks checked, all good")

    def test_every_kind_of_damage_is_a_line_with_its_reason(self, store: Path) -> None:
        """A flipped bit, a cut file, a swapped and a misplaced file are told; the rest is good."""
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
        """A bad block elsewhere is not this call's business."""
        run("put", store, "a/1", stdin=b"x")
        run("put", store, "b/1", stdin=b"x")
        flip_a_bit(file_of(store, "b/1"), 0)

        assert run("verify", store, "a/").returncode == 0
        assert run("verify", store, "b/").returncode == 1

    def test_without_checksums_it_says_what_it_could_not_check(self, store: Path) -> None:
        """Clean means little in layout=plain, and the user is told."""
        url = f"hybrid://{store}?layout=plain"
        run("put", url, "k", stdin=b"x")

        assert "no checksums" in complaint(run("verify", url), 0)

    def test_a_store_that_is_not_there_is_no_clean_store(self, tmp_path: Path) -> None:
        """Exit status 2, not 0."""
        assert "does not exist" in complaint(run("verify", tmp_path / "nope"), 2)

    def test_the_bar_is_for_terminals_only(self, store: Path) -> None:
        """A terminal sees a bar on stderr; a pipe sees nothing of it, and stdout is the same."""
        run("put", store, "k", stdin=b"x")
        shown, stdout = run_on_terminal("verify", store)

        assert b"verifying" in shown
        assert stdout.startswith(b"1 block checked, all good")


class TestSweep:
    def leftovers(self, store: Path) -> tuple[Path, Path]:
        """Put a dead writer's and a living writer's temporary beside a block."""
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

    def test_a_dry_run_names_and_keeps(self, store: Path) -> None:
        """Only the dead writer's file is named, and it still stands."""
        dead, _ = self.leftovers(store)
        done = run("sweep", store, "--dry-run")

        assert done.stdout.decode() == f"{dead}\n"
        assert done.stderr == b"1 leftover would be removed\n"
        assert dead.exists()

    def test_a_sweep_removes_what_is_dead_and_nothing_else(self, store: Path) -> None:
        """The living writer's file and the block stay."""
        dead, living = self.leftovers(store)
        done = run("sweep", store)

        assert done.stdout.decode() == f"{dead}\n"
        assert not dead.exists()
        assert living.exists()
        assert run("get", store, "k").stdout == b"x"

    @pytest.mark.parametrize("age", ["", "soon", "-1s", "3w", "1e3"])
    def test_an_age_that_is_none_is_refused(self, store: Path, age: str) -> None:
        """A typo must not become an age of zero."""
        assert "not a duration" in complaint(run("sweep", store, f"--older-than={age}"), 2)
