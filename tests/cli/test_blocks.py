"""Putting, getting, listing and removing blocks."""

from __future__ import annotations

import hashlib
import os
import random
import re
from pathlib import Path

import pytest

import kvio
from kvio.cli.escapes import escape, unescape
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
        """What put stored, get writes to a file, with no part file beside it."""
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
        """A user sees what was stored, how and how safe it is; the medium holds the bytes."""
        put = run("put", f"posix-tmpfile://{store}", "k", source)
        crc = kvio_crc32c(source.read_bytes())

        assert put.stdout.decode() == (
            f"stored k: {20 * kvio.MiB + 13} bytes, visible, buffered (the backend's only mode), "
            f"crc32c {crc:08x}\n"
        )
        assert file_of(store, "k").read_bytes().startswith(source.read_bytes())

    def test_a_range_is_cut_from_the_block(self, store: Path) -> None:
        """Offset and nbytes mean bytes of the block, and its end ends the range."""
        run("put", store, "k", stdin=bytes(range(100)))

        assert run("get", store, "k", "-", "--offset", 90).stdout == bytes(range(90, 100))
        assert run("get", store, "k", "--offset", 5, "--nbytes", 3).stdout == bytes([5, 6, 7])
        assert run("get", store, "k", "--offset", 98, "--nbytes", 9).stdout == bytes([98, 99])

    def test_an_empty_block_is_a_block(self, store: Path) -> None:
        """No bytes in, no bytes out, and no error."""
        assert run("put", store, "k", stdin=b"").returncode == 0
        assert run("get", store, "k", "-").stdout == b""
        assert run("ls", store).stdout == b"k\n"

    def test_a_directory_comes_back_as_it_was(self, store: Path, tmp_path: Path) -> None:
        """Put --recursive and get --prefix are each other's inverse."""
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

    def test_what_cannot_be_a_key_is_named_and_stops_nothing(
        self, store: Path, tmp_path: Path
    ) -> None:
        """A file name that is no key is one complaint; the other files are stored."""
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "good").write_bytes(b"1")
        (tmp_path / "in" / "not good").write_bytes(b"2")
        put = run("put", "-r", store, "", tmp_path / "in")

        said = complaint(put, 2)
        assert "invalid key 'not good'" in said
        assert said.endswith("--escape stores such names")
        assert run("ls", store).stdout == b"good\n"

    def test_an_ordinary_tree_comes_back_with_escapes(self, store: Path, tmp_path: Path) -> None:
        """Spaces, dot files, other alphabets and bytes that are no text."""
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
    def test_escapes_are_for_many_names(self, store: Path, command: tuple[str, ...]) -> None:
        """One block has the name that it is given."""
        assert "--escape is for" in complaint(run(*command, store, "k", "x"), 2)

    def test_a_long_block_has_a_progress_bar(self, store: Path, tmp_path: Path) -> None:
        """On a terminal; of a short one nothing is shown."""
        with open(tmp_path / "long", "wb") as file:
            file.truncate(96 << 20)
        (tmp_path / "short").write_bytes(b"1")

        for name, bar in (("long", True), ("short", False)):
            shown, _ = run_on_terminal("put", store, name, tmp_path / name)
            assert (b"MiB" in shown) is bar
            shown, _ = run_on_terminal("get", store, name, tmp_path / "copy")
            assert (b"MiB" in shown) is bar


@pytest.mark.parametrize("seed", range(3))
def test_every_name_of_a_file_has_a_key_and_no_other(seed: int) -> None:
    """Names that are drawn from what the escapes themselves are made of come back."""
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
def test_no_key_becomes_a_path_that_leads_elsewhere(key: str) -> None:
    """What the escapes never make is taken as it is."""
    assert unescape(key) == key


class TestIfExists:
    def test_keep_is_the_default_and_says_so(self, store: Path) -> None:
        """The second writer of as many bytes is late and right."""
        run("put", store, "k", stdin=b"one")
        again = run("put", store, "k", stdin=b"two")

        assert again.stdout.startswith(b"kept k: 3 bytes")
        assert run("get", store, "k").stdout == b"one"

    def test_replace_replaces(self, store: Path) -> None:
        """What was written last is read."""
        run("put", store, "k", stdin=b"one")
        run("put", store, "k", "--if-exists", "replace", stdin=b"two")

        assert run("get", store, "k").stdout == b"two"

    def test_error_refuses_a_taken_key(self, store: Path) -> None:
        """One line, exit status 2, and the block as it was."""
        run("put", store, "k", stdin=b"one")
        again = run("put", store, "k", "--if-exists", "error", stdin=b"two")

        assert "exists" in complaint(again, 2)
        assert run("get", store, "k").stdout == b"one"


class TestLooking:
    def test_ls_is_sorted_and_filters_by_prefix(self, store: Path) -> None:
        """One key a line, in order."""
        for key in ("b/2", "a", "b/10", "c"):
            run("put", store, key, stdin=b"x")

        assert run("ls", store).stdout == b"a\nb/10\nb/2\nc\n"
        assert run("ls", store, "b/").stdout == b"b/10\nb/2\n"

    def test_ls_long_and_stat_tell_size_and_checksum(self, store: Path) -> None:
        """The figures are those of the payload, by a checksum made without kvio."""
        run("put", store, "k", stdin=b"123456789")
        line = run("ls", "-l", store).stdout.decode().split()
        stat = run("stat", store, "k").stdout.decode()

        assert (line[0], line[-2], line[-1]) == ("9", "e3069283", "k")
        assert re.search(r"^size +9 bytes", stat, re.MULTILINE)
        assert re.search(
            rf"^stored +{file_of(store, 'k').stat().st_size} bytes", stat, re.MULTILINE
        )
        assert re.search(r"^crc32c +e3069283$", stat, re.MULTILINE)

    def test_ls_goes_on_after_a_corrupt_trailer(self, store: Path) -> None:
        """A block that cannot be described is named on stderr; the exit status is 1."""
        for key in ("a", "b", "c"):
            run("put", store, key, stdin=b"x")
        flip_a_bit(file_of(store, "b"), -1)
        listed = run("ls", "-l", store)

        assert "'b' is corrupt" in complaint(listed, 1)
        assert [line.split()[-1] for line in listed.stdout.splitlines()] == [b"a", b"c"]

    def test_rm_removes_and_misses(self, store: Path) -> None:
        """What was there is gone, what was not is named, and the exit status is 1."""
        run("put", store, "k", stdin=b"x")

        assert "no block 'nope'" in complaint(run("rm", store, "nope", "k"), 1)
        assert not list(store.glob("?/?/*"))
        assert complaint(run("rm", store, "k"), 1)


class TestNewStores:
    def test_a_store_that_is_missing_is_made_where_that_is_asked_for(
        self, tmp_path: Path, source: Path
    ) -> None:
        """--create makes the directory and those above it; without it nothing is made."""
        missing = tmp_path / "a" / "store"

        for arguments in (("k", source), ("-r", "k", tmp_path)):
            assert "does not exist" in complaint(run("put", missing, *arguments), 2)
        assert not (tmp_path / "a").exists()
        assert run("put", "--create", missing, "k", source).returncode == 0
        assert run("put", "--create", f"hybrid://{tmp_path}/b/c?create=true", "k", source).stdout
        assert file_of(missing, "k").stat().st_size > source.stat().st_size
