"""Mutants: made by universalmutator, drawn by a seed."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from universalmutator import mutator

from tools.mutants.mutant import Mutant
from tools.mutants.tree import lacking_lines

_RULES: Final = {
    ".py": ["universal.rules", "python.rules"],
    ".c": ["universal.rules", "c_like.rules", "c.rules"],
    ".h": ["universal.rules", "c_like.rules", "c.rules"],
}


def candidates(root: Path, path: str) -> list[Mutant]:
    """List what the generator makes of one file, but for lines that no test here can run."""
    source = (root / path).read_text()
    lines = source.splitlines(keepends=True)
    lacking = lacking_lines(source) if path.endswith(".py") else set()
    with contextlib.redirect_stdout(io.StringIO()):
        made = mutator.mutants_regexp(lines, _RULES[Path(path).suffix], ignorePatterns=[])
    return [
        Mutant(path, at, lines[at - 1], text, rule[0])
        for at, text, rule, _ in made
        if at not in lacking
    ]


def draw(
    root: Path, paths: Sequence[str], *, count: int, seed: int, only: str = ""
) -> Iterator[tuple[str, int, list[Mutant]]]:
    """Yield each of *paths* with its share of the sample and its mutants in the order of the draw.

    A file's share is its share of the lines of code; mutants that turn out to change nothing are
    passed over, so that the share is of real ones.
    """
    sizes = {path: _code_lines((root / path).read_text()) for path in paths}
    total = sum(sizes.values())
    carried = 0.0
    for path in paths:
        exact = count * sizes[path] / total + carried
        share = round(exact)
        carried = exact - share
        if not path.startswith(only):
            continue
        made = candidates(root, path)
        random.Random(f"{seed}:{path}").shuffle(made)
        yield path, share, made


def _code_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and line.strip()[0] not in "#/*")
