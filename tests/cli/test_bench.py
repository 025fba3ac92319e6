"""bench, and the verbs that went to the repository's benchmarks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio.diagnostics import bench as benches
from kvio.diagnostics.bench import COLD, HOT, READ, WRITE, Measured, bench, sentences
from tests.cli.running import SCRIPT, complaint, load_json, read_to_end, run, terminal

SMALL = ("--sizes", "4KiB,64KiB", "--max-bytes", "128KiB", "--budget", "1s")


class TestBench:
    """The backends compared on a directory, or one store."""

    def test_a_directory_is_measured_with_every_backend_and_left_as_it_was(
        self, disk_path: Path
    ) -> None:
        """Tables with a row per backend, a sentence per operation, and no file."""
        done = run("bench", disk_path, *SMALL)
        text = done.stdout.decode()

        assert (done.returncode, done.stderr) == (0, b"")
        for operation in (WRITE, HOT, COLD):
            assert f"{operation}, MB/s: median of" in text
            assert f"\n{operation}: " in text
        left_out = [line for line in text.splitlines() if line.startswith("left out: ")]
        assert len(re.findall("posix-tmpfile +│", text)) == 3
        assert len(re.findall("posix-direct +│", text)) == (0 if left_out else 3)
        tables = [
            line for line in text.splitlines() if not line.startswith(("left", "write:", "read,"))
        ]
        assert max(map(len, tables)) <= 80
        assert list(disk_path.iterdir()) == []

    def test_json_has_every_round(self, disk_path: Path) -> None:
        """With the median that the tables print, and the I/O modes."""
        content = load_json(run("bench", disk_path, *SMALL, "--json").stdout)
        places = {(one["nbytes"], one["operation"]) for one in content["measured"]}

        assert places == {(n, op) for n in (4096, 65536) for op in (WRITE, HOT, COLD)}
        for one in content["measured"]:
            assert one["rounds"] == len(one["bytes_per_s"]) > 0
            assert min(one["bytes_per_s"]) <= one["median_bytes_per_s"] <= max(one["bytes_per_s"])
            assert sum(one["modes"].values()) > 0

    def test_a_store_of_a_url_keeps_what_it_had_and_nothing_else(self, tmp_path: Path) -> None:
        """Its own options are used; the blocks of the measurement are removed."""
        url = f"posix-tmpfile://{tmp_path / 'store'}?create=true&layout=plain"
        assert run("put", url, "mine", stdin=b"x").returncode == 0
        done = run("bench", url, *SMALL)

        assert done.returncode == 0, done.stderr
        assert f"{READ}, MB/s" in done.stdout.decode()
        assert run("ls", url).stdout == b"mine\n"

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("/nonexistent",), "/nonexistent: no such directory"),
            ((".", "--sizes", "0"), "at least 1 byte"),
            ((".", "--sizes", "many"), "many"),
            ((".", "--budget", "soon"), "soon"),
            (("nope://x",), "nope"),
        ],
    )
    def test_a_mistake_is_one_line(self, arguments: tuple[str, ...], named: str) -> None:
        """Status 2, and the wrong word is in it."""
        assert named in complaint(run("bench", *arguments), 2)

    def test_memory_has_no_cold_reads_and_what_cannot_be_used_is_named(self) -> None:
        """On tmpfs bytes stay in memory, and direct I/O is refused."""
        shm = Path("/dev/shm")
        if not shm.is_dir():
            pytest.skip("needs tmpfs on /dev/shm")
        with tempfile.TemporaryDirectory(dir=shm) as root:
            found = bench(root, sizes=[4096], budget_s=0, max_bytes=4096)
            with pytest.raises(kvio.UnsupportedError, match="no backend can be used"):
                bench(root, durability="durable")
            assert os.listdir(root) == []

        assert {one.operation for one in found.measured} == {WRITE, HOT}
        assert "posix-direct" in found.left_out

    @pytest.mark.parametrize("target", ["directory", "url"])
    def test_a_wrong_byte_is_an_error(
        self, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Although the store reports success; the blocks are removed all the same."""
        honest = kvio.Store.read_block_into

        def wrong(self: kvio.Store, key: str, out: Any, **options: Any) -> int:
            count = honest(self, key, out, **options)
            out[-1] ^= 1
            return count

        monkeypatch.setattr(kvio.Store, "read_block_into", wrong)
        where = str(tmp_path) if target == "directory" else f"posix-tmpfile://{tmp_path}"
        with pytest.raises(kvio.StorageError, match="other bytes came back"):
            bench(where, sizes=[4096], max_bytes=8192)

        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

    @pytest.mark.usefixtures("ctrl_c")
    def test_ctrl_c_leaves_nothing(self, disk_path: Path) -> None:
        """Status 130, in a directory and in the store of a URL."""
        for target in (str(disk_path), f"posix-tmpfile://{disk_path}?layout=plain"):
            with terminal() as (master, slave):
                process = subprocess.Popen(
                    [SCRIPT, "bench", target, *SMALL[:4], "--budget", "100s"],
                    stdout=subprocess.DEVNULL,
                    stderr=slave,
                )
                os.close(slave)
                shown = b""
                while b"round 2" not in shown:
                    shown += os.read(master, 4096)
                process.send_signal(signal.SIGINT)
                shown = read_to_end(master)
            assert process.wait(60) == 130, shown.decode(errors="replace")
            assert [path for path in disk_path.rglob("*") if path.is_file()] == []


def measured(store: str, *speeds: float) -> Measured:
    return Measured(store, 4096, WRITE, list(speeds))


def test_a_store_is_the_fastest_if_its_rounds_show_it() -> None:
    """Ahead in 6 of 6 rounds or in 9 of 10; not in 5 of 5 or in 5 of 6."""
    ahead = [2.0] * 6
    [sentence] = sentences([measured("a", *ahead), measured("b", *([1.0] * 6))])
    assert sentence == (
        "write: a is the fastest over all sizes, at 2.00 times b (ahead in 6 of 6 rounds)."
    )
    for left, right in ((ahead[:5], [1.0] * 5), (ahead, [1.0] * 5 + [3.0])):
        [sentence] = sentences([measured("a", *left), measured("b", *right)])
        assert "no backend is clearly the fastest" in sentence
    found = sentences([measured("a", *([2.0] * 10)), measured("b", *([1.0] * 9), 3.0)])
    assert "(ahead in 9 of 10 rounds)" in found[0]
    assert sentences([measured("a", 1.0)]) == []


def test_sizes_count_alike() -> None:
    """By the geometric mean over sizes in each round."""
    found = [
        Measured("a", 1, WRITE, [100.0] * 6),
        Measured("a", 2, WRITE, [1.0] * 6),
        Measured("b", 1, WRITE, [10.0] * 6),
        Measured("b", 2, WRITE, [5.0] * 6),
    ]

    assert "a is the fastest over all sizes, at 1.41 times b" in sentences(found)[0]


def test_rounds_start_with_another_store_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what the first leaves behind does not always hit the same one."""
    seen: list[str] = []
    monkeypatch.setattr(benches, "_MOST_ROUNDS", 3)
    found = bench(
        str(tmp_path),
        sizes=[4096],
        max_bytes=4096,
        report=lambda _, what: seen.append(what.split(",")[0]),
    )
    names = list(dict.fromkeys(one.store for one in found.measured))

    assert len(seen) == 3 * len(names)
    assert seen[:: len(names)] == [names[number % len(names)] for number in range(3)]


class TestMoved:
    """The verbs that kvio had before say where they went."""

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("experiment",), "python -m benchmarks NAME"),
            (("experiment", "hybrid", "--root", "/mnt/kv", "--help"), "python -m benchmarks NAME"),
            (("report", "before", "after", "-o", "page.html"), "python -m benchmarks report"),
        ],
    )
    def test_a_moved_verb_names_its_successor(self, arguments: tuple[str, ...], named: str) -> None:
        """Status 2, whatever its arguments were; neither is listed."""
        assert named in complaint(run(*arguments), 2)
        listed = run("--help").stdout.decode()
        assert arguments[0] not in listed


def test_bench_needs_nothing_of_the_repository(tmp_path: Path) -> None:
    """No module of ``benchmarks`` is loaded."""
    code = (
        "import sys\n"
        "from kvio.cli.app import run\n"
        f"run(['bench', {str(tmp_path)!r}, '--sizes', '4KiB', '--budget', '0s', '--json'])\n"
        "print(json.dumps([n for n in sys.modules if n.startswith('benchmarks')]))"
    )
    done = subprocess.run(
        [os.path.join(os.path.dirname(SCRIPT), "python"), "-c", "import json\n" + code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == []
