"""Putting, getting, listing and removing blocks."""

from __future__ import annotations

import hashlib
import os
import random
import re
from pathlib import Path

import pytest

import kvio
from kvio.cli.blocks import escape, unescape
from kvio.types import is_key
from tests.cli.running import (
    complaint,
    file_of,
    flip_a_bit,
    kvio_crc32c,
    run,
    run_on_terminal,
)

pytestmark = pytest.mark.slow


class TestRoundTrips:
    def test_a_large_file_comes_back_bit_for_bit_through_files(
        self, store: Path, source: Path, tmp_path: Path
    ) -> None:
        """Get writes the bytes that put stored to a file, and leaves no part file."""
        out = tmp_path / "out" / "copy.bin"
        out.parent.mkdir()
        put = run("put", store, "a/b", source)
        got = run("get", store, "a/b", out)

        assert (put.returncode, got.returncode, got.stdout, got.stderr) == (0, 0, b"", b"")
        assert out.read_bytes() == source.read_bytes()
        assert os.listdir(out.parent) == ["copy.bin"]

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_large_file_comes_back_bit_for_bit_through_pipes(
        self, store: Path, source: Path, unbuffered: str
    ) -> None:
        """Standard input and output carry bytes, whatever Python does to its streams."""
        run("put", store, "a", "-", stdin=source.read_bytes(), PYTHONUNBUFFERED=unbuffered)
        got = run("get", store, "a", "-", PYTHONUNBUFFERED=unbuffered)

        assert hashlib.sha256(got.stdout).digest() == hashlib.sha256(source.read_bytes()).digest()

    def test_the_receipt_is_one_line_of_level_mode_reason_and_checksum(
        self, store: Path, source: Path
    ) -> None:
        """The receipt shows length, level, mode and checksum; the file holds the bytes."""
        put = run("put", f"posix-tmpfile://{store}", "k", source)
        crc = kvio_crc32c(source.read_bytes())

        assert put.stdout.decode() == (
            f"stored k: {20 * kvio.MiB + 13} bytes, visible, buffered (the backend's only mode), "
            f"crc32c {crc:08x}\n"
        )
        assert file_of(store, "k").read_bytes().startswith(source.read_bytes())

    def test_a_range_of_a_block_is_read(self, store: Path) -> None:
        """Offset and nbytes count bytes of the block; the range ends at its end."""
        run("put", store, "k", stdin=bytes(range(100)))

        assert run("get", store, "k", "-", "--offset", 90).stdout == bytes(range(90, 100))
        assert run("get", store, "k", "--offset", 5, "--nbytes", 3).stdout == bytes([5, 6, 7])
        assert run("get", store, "k", "--offset", 98, "--nbytes", 9).stdout == bytes([98, 99])

    def test_an_empty_block_is_a_block(self, store: Path) -> None:
        """A block of 0 bytes is stored, read and listed."""
        assert run("put", store, "k", stdin=b"").returncode == 0
        assert run("get", store, "k", "-").stdout == b""
        assert run("ls", store).stdout == b"k\n"

    def test_a_directory_comes_back_as_it_was(self, store: Path, tmp_path: Path) -> None:
        """Get --prefix restores the files that put --recursive stored."""
        tree = {"x": b"1", "d/y": b"", "d/e/z": random.Random(1).randbytes(70_000)}
        for name, content in tree.items():
            path = tmp_path / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        put = run("put", "-r", store, "run7", tmp_path / "in")
        run("put", store, "other", stdin=b"not part of it")
        got = run("get", "--prefix", store, "run7/", tmp_path / "out")

        assert put.stdout.startswith(b"stored 3 of 3 blocks")
        assert got.stdout.startswith(b"read 3 of 3 blocks")
        found = {
            str(path.relative_to(tmp_path / "out" / "run7")): path.read_bytes()
            for path in (tmp_path / "out").rglob("*")
            if path.is_file()
        }
        assert found == tree

    def test_an_invalid_key_is_reported_and_other_files_are_stored(
        self, store: Path, tmp_path: Path
    ) -> None:
        """A file name that is no valid key is one error line; the other files are stored."""
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "good").write_bytes(b"1")
        (tmp_path / "in" / "not good").write_bytes(b"2")
        put = run("put", "-r", store, "", tmp_path / "in")

        said = complaint(put, 2)
        assert "invalid key 'not good'" in said
        assert said.endswith("use --escape for such names")
        assert run("ls", store).stdout == b"good\n"

    def test_an_ordinary_tree_comes_back_with_escapes(self, store: Path, tmp_path: Path) -> None:
        """Names have spaces, leading dots, other alphabets and undecodable bytes."""
        names = ["my file", ".profile", "a/.git/HEAD", "ü=x", "_=y", "-z", os.fsdecode(b"\xff")]
        for name in names:
            path = tmp_path / "in" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.fsencode(name))
        put = run("put", "-r", "--escape", store, "run=7", tmp_path / "in")
        got = run("get", "--prefix", "--escape", store, "run=7/", tmp_path / "out")

        assert put.stdout.startswith(b"stored 7 of 7 blocks")
        assert got.stdout.startswith(b"read 7 of 7 blocks")
        out = tmp_path / "out" / "run=7"
        assert all((out / name).read_bytes() == os.fsencode(name) for name in names)
        assert len([path for path in (tmp_path / "out").rglob("*") if path.is_file()]) == 7

    @pytest.mark.parametrize("command", [("put", "--escape"), ("get", "--escape")])
    def test_escape_needs_many_names(self, store: Path, command: tuple[str, ...]) -> None:
        """A single block has the key that the user gives."""
        assert "--escape needs" in complaint(run(*command, store, "k", "x"), 2)

    def test_a_long_block_has_a_progress_bar(self, store: Path, tmp_path: Path) -> None:
        """A terminal shows the bar for a long block and not for a short one."""
        with open(tmp_path / "long", "wb") as file:
            file.truncate(96 << 20)
        (tmp_path / "short").write_bytes(b"1")

        for name, bar in (("long", True), ("short", False)):
            shown, _ = run_on_terminal("put", store, name, tmp_path / name)
            assert (b"MiB" in shown) is bar
            shown, _ = run_on_terminal("get", store, name, tmp_path / "copy")
            assert (b"MiB" in shown) is bar


@pytest.mark.parametrize("seed", range(3))
def test_file_names_and_keys_map_one_to_one(seed: int) -> None:
    """Names of the characters that escapes use have distinct keys and are restored."""
    rng = random.Random(seed)
    keys: dict[str, bytes] = {}
    for _ in range(20_000):
        name = bytes(rng.choices(b"._=-aA0 \xff2EF5\n", k=rng.randint(1, 7)))
        if name in (b".", b".."):
            continue
        key = escape(os.fsdecode(name))
        assert is_key(key)
        assert keys.setdefault(key, name) == name
        assert unescape(key) == os.fsdecode(name)


@pytest.mark.parametrize("key", ["_=2E", "_=2E.", "_=2E=2E", "a/_=2Fetc", "a=2Fb", "a=00", "a=2e"])
def test_no_key_becomes_a_path_outside_the_directory(key: str) -> None:
    """A key that `escape` never returns is used unchanged."""
    assert unescape(key) == key


class TestIfExists:
    def test_keep_is_the_default_and_says_so(self, store: Path) -> None:
        """A second put of the same length keeps the first block."""
        run("put", store, "k", stdin=b"one")
        again = run("put", store, "k", stdin=b"two")

        assert again.stdout.startswith(b"kept k: 3 bytes")
        assert run("get", store, "k").stdout == b"one"

    def test_replace_replaces(self, store: Path) -> None:
        """A get returns the block of the last put."""
        run("put", store, "k", stdin=b"one")
        run("put", store, "k", "--if-exists", "replace", stdin=b"two")

        assert run("get", store, "k").stdout == b"two"

    def test_error_refuses_an_existing_key(self, store: Path) -> None:
        """The exit status is 2, and the block is unchanged."""
        run("put", store, "k", stdin=b"one")
        again = run("put", store, "k", "--if-exists", "error", stdin=b"two")

        assert "exists" in complaint(again, 2)
        assert run("get", store, "k").stdout == b"one"


class TestLsStatRm:
    def test_ls_is_sorted_and_filters_by_prefix(self, store: Path) -> None:
        """Each line has one key."""
        for key in ("b/2", "a", "b/10", "c"):
            run("put", store, key, stdin=b"x")

        assert run("ls", store).stdout == b"a\nb/10\nb/2\nc\n"
        assert run("ls", store, "b/").stdout == b"b/10\nb/2\n"

    def test_ls_long_and_stat_print_size_and_checksum(self, store: Path) -> None:
        """They are those of the payload; the expected checksum was computed without kvio."""
        run("put", store, "k", stdin=b"123456789")
        line = run("ls", "-l", store).stdout.decode().split()
        stat = run("stat", store, "k").stdout.decode()

        assert (line[0], line[-2], line[-1]) == ("9", "e3069283", "k")
        assert re.search(r"^size +9 bytes", stat, re.MULTILINE)
        assert re.search(
            rf"^stored +{file_of(store, 'k').stat().st_size} bytes", stat, re.MULTILINE
        )
        assert re.search(r"^crc32c +e3069283$", stat, re.MULTILINE)

    def test_ls_continues_after_a_corrupt_trailer(self, store: Path) -> None:
        """A block with a corrupt trailer is named on stderr; the exit status is 1."""
        for key in ("a", "b", "c"):
            run("put", store, key, stdin=b"x")
        flip_a_bit(file_of(store, "b"), -1)
        listed = run("ls", "-l", store)

        assert "'b' is corrupt" in complaint(listed, 1)
        assert [line.split()[-1] for line in listed.stdout.splitlines()] == [b"a", b"c"]

    def test_rm_removes_blocks_and_names_missing_ones(self, store: Path) -> None:
        """Existing blocks are removed; a missing one is named, and the exit status is 1."""
        run("put", store, "k", stdin=b"x")

        assert "no block 'nope'" in complaint(run("rm", store, "nope", "k"), 1)
        assert not list(store.glob("?/?/*"))
        assert complaint(run("rm", store, "k"), 1)


class TestNewStores:
    def test_a_missing_store_is_created_with_the_option_create(
        self, tmp_path: Path, source: Path
    ) -> None:
        """--create creates the directory and its parents; without it nothing is created."""
        missing = tmp_path / "a" / "store"

        for arguments in (("k", source), ("-r", "k", tmp_path)):
            assert "does not exist" in complaint(run("put", missing, *arguments), 2)
        assert not (tmp_path / "a").exists()
        assert run("put", "--create", missing, "k", source).returncode == 0
        assert run("put", "--create", f"hybrid://{tmp_path}/b/c?create=true", "k", source).stdout
        assert file_of(missing, "k").stat().st_size > source.stat().st_size
