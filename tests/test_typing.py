"""The types of the public API as a consumer's mypy sees them, strict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvio

GOOD = Path(__file__).parent / "typing" / "api.py"
#: Every line marked E must be an error; in a string, so that mypy does not find it in a file.
MISUSE = """\
import kvio
from kvio.abc import Backend

store = kvio.open_store("memory", io_thread=4)  # E
store.write_block("key", b"bytes", if_exists="overwrite")  # E
store.write_block("key", b"bytes", "replace")  # E
store.write_block(5, b"bytes")  # E
store.write_block(b"key", b"bytes")  # E
store.read_block("key", "5")  # E
store.read_block_into("key")  # E
store.count_leading(5)  # E
store.write_blocks([("key", b"bytes", 1)])  # E
store.capabilities.shared = True  # E
store.write_block("key", b"bytes").nbytes = 5  # E
store.receipts()  # E
kvio.open_store("memory", durability="forever")  # E
kvio.open_store("memory", layout=1)  # E
text: str = store.read_block("key")  # E
names = kvio.names()  # E


class Half(Backend):
    '''A backend that forgets what it must do.'''


Half()  # E
"""


def error_lines(file: Path, cache: Path) -> list[int]:
    """Check one file with mypy --strict and give the lines it finds errors in."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    source = str(Path(kvio.__file__).parents[1])  # an editable install is no typed package to mypy
    options = ("--strict", "--config-file", os.devnull, "--cache-dir", str(cache))
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        env=os.environ | {"MYPYPATH": source},
        cwd=cache,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = re.findall(rf"^.*\b{file.name}:(\d+): error: ", run.stdout, re.MULTILINE)
    assert bool(found) == (run.returncode == 1), run.stdout
    return sorted({int(line) for line in found})


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Share what mypy learnt of kvio between the checks."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.slow
def test_good_use_has_no_type_errors(cache: Path) -> None:
    """Every verb can be used as documented, and gives the types it says."""
    assert error_lines(GOOD, cache) == []


@pytest.mark.slow
def test_misuse_is_a_type_error(cache: Path, tmp_path: Path) -> None:
    """Each misuse is an error at its line, and nothing else is."""
    file = tmp_path / "misuse.py"
    file.write_text(MISUSE)
    expected = [n for n, line in enumerate(MISUSE.splitlines(), 1) if line.endswith("# E")]

    assert error_lines(file, cache) == expected
