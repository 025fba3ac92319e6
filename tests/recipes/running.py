"""What the tests of recipes share: the libraries they need, and how their programs run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests import snippets

SOURCE: Final = Path(__file__).parents[2] / "src"
#: No hub is asked, no thread fights for the few processors, and warnings do not fill stderr.
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH", "")))),
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}


def require(*libraries: str) -> None:
    """Skip a module of tests where one of the libraries is not installed."""
    for library in libraries:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed", allow_module_level=True)


def write_program(page: str, folder: Path, *, name: str, instead: Mapping[str, str]) -> Path:
    """Write the one program of a page to a file, with other places than those it names."""
    (snippet,) = snippets.snippets(page)
    code = snippet.code
    for word, other in instead.items():
        assert word in code, word
        code = code.replace(word, other)
    path = folder / name
    path.write_text(code, encoding="utf-8")
    return path


def run(
    program: Path, *arguments: str, ranks: int = 0, env: Mapping[str, str] | None = None
) -> list[str]:
    """Run a program, by torchrun if there are *ranks*, and return the lines it printed, sorted."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    ended = subprocess.run(
        [sys.executable, *(launcher if ranks else ()), str(program), *arguments],
        cwd=program.parent,
        env={**os.environ, **ENVIRONMENT, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    return sorted(line for line in ended.stdout.splitlines() if line.strip())
