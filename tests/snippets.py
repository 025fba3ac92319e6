"""The blocks of Python in the documentation, each a program that runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TREE = Path(__file__).parent.parent
PAGES = sorted(
    str(path.relative_to(TREE))
    for path in (*TREE.glob("*.md"), *(TREE / "docs").rglob("*.md"))
    if "```python\n" in path.read_text(encoding="utf-8")
)


class Snippet(NamedTuple):
    """A block of code, its page and the line that it begins after."""

    page: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def snippets(page: str) -> list[Snippet]:
    """Find the blocks of a page."""
    text = (TREE / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [Snippet(page, text[: one.start()].count("\n") + 1, one[1]) for one in found]


def run(
    snippet: Snippet,
    folder: Path,
    *,
    instead: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a block as a script of its own and return what it printed; it must end with status 0.

    The directories /mnt/kv and /mnt/ckpt are those of these names in *folder*. *instead* has what
    stands for other places that the block names, *before* what the interpreter is run by.
    """
    code = snippet.code
    for name in ("kv", "ckpt"):
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    for word, other in {**(instead or {}), "/mnt/": f"{folder}/"}.items():
        code = code.replace(word, other)
    script = folder / "snippet.py"
    script.write_text(code, encoding="utf-8")
    ended = subprocess.run(
        [*before, sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), f"{snippet}\n{ended.stderr}"
    return ended.stdout
