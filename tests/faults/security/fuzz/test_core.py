"""The C core under AddressSanitizer and UBSan: trailers, block files and gather lists, mutated.

Needs a C compiler with libasan and libubsan (Debian package gcc).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.faults.sizes import seed, size
from tests.faults.totals import Tally

HERE: Final = Path(__file__).parent
NATIVE: Final = HERE.parents[3] / "src/kvio/_native"
FLAGS: Final = (
    *("-std=gnu11", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-g", "-O1"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{NATIVE}"),
)
#: What a broken core does: its file, what stands there, what it becomes.
MUTANTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "trusts a trailer's checksum": (
        "trailer.c",
        "kvio_crc32c(0, in, 60) != (uint32_t)get_le(in + 60, 4)",
        "0",
    ),
    "trusts a trailer's length": ("trailer.c", "out->nbytes > room || ", ""),
    "takes any key": (
        "trailer.c",
        "memcmp(in + 24, key_hash, 16)",
        "(memcmp(in + 24, key_hash, 16) & 0)",
    ),
    "does not compare payloads": ("read.c", "crc != trailer->crc", "((crc ^ trailer->crc) & 0)"),
    "gathers a byte too many": (
        "parts.c",
        "size_t n = (size_t)kvio_min(nbytes, cursor->part->nbytes - cursor->at);",
        "size_t n = (size_t)kvio_min(nbytes, cursor->part->nbytes - cursor->at + 1);",
    ),
}


class Builder:
    """The core's objects and the fuzzer, compiled with sanitizers."""

    def __init__(self, folder: Path) -> None:
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler to fuzz the C core with (Debian: gcc)")
        self._compiler, self._folder = shlex.split(compiler), folder
        trial = folder / "trial.c"
        trial.write_text("int main(void) { return 0; }\n")
        if self._run(*FLAGS, "-o", str(folder / "trial"), str(trial)).returncode:
            pytest.skip("no sanitizers with this C compiler (Debian: libasan, libubsan of gcc)")
        self.objects = {
            source.name: self.compile(source)
            for source in (*sorted(NATIVE.glob("*.c")), HERE / "fuzz_core.c")
            if "#include <Python.h>" not in source.read_text()  # the core alone
        }

    def compile(self, source: Path) -> Path:
        """Make an object."""
        out = self._folder / f"{source.stem}.o"
        done = self._run(*FLAGS, "-c", "-o", str(out), str(source))
        assert done.returncode == 0, done.stderr
        return out

    def link(self, name: str, objects: Sequence[Path]) -> Path:
        """Make a program."""
        out = self._folder / name
        done = self._run(*FLAGS, "-o", str(out), *map(str, objects))
        assert done.returncode == 0, done.stderr
        return out

    def broken(self, number: int, mutant: tuple[str, str, str]) -> Path:
        """Make the program of a broken core."""
        name, old, new = mutant
        text = (NATIVE / name).read_text()
        assert old in text, f"{name} has changed: {old!r}"
        source = self._folder / f"broken{number}_{name}"
        source.write_text(text.replace(old, new))
        objects = {**self.objects, name: self.compile(source)}
        return self.link(f"broken{number}", list(objects.values()))

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*self._compiler, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)


def fuzz(program: Path, folder: Path, *counts: int) -> subprocess.CompletedProcess[str]:
    """Run a fuzzer."""
    return subprocess.run(
        [program, str(seed()), *map(str, counts)],
        cwd=folder,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """Compile the core once."""
    return Builder(tmp_path_factory.mktemp("core"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_bytes_mislead_the_core(builder: Builder, tmp_path: Path, tally: Tally) -> None:
    """What it takes is what docs/format.md says; no byte beyond is touched, all is closed."""
    counts = size(20_000, 1_000_000), size(2_000, 60_000), size(4_000, 200_000)
    done = fuzz(builder.link("sound", list(builder.objects.values())), tmp_path, *counts)

    tally.add(fuzzed=sum(counts))
    assert done.returncode == 0, f"KVIO_FAULTS_SEED={seed()}: {done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_core_that_is_misled_is_found(
    name: str, builder: Builder, tmp_path: Path, tally: Tally
) -> None:
    """Each broken core is reported by the fuzzer within a few thousand rounds."""
    tally.add(mutants=1)
    program = builder.broken(list(MUTANTS).index(name), MUTANTS[name])
    done = fuzz(program, tmp_path, 20_000, 2_000, 2_000)

    tally.add(caught=done.returncode != 0)
    assert done.returncode != 0
