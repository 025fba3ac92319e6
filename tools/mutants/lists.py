"""The two lists in tests/mutation: mutants made by hand, and mutants that change nothing."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.mutants.mutant import Mutant

HANDMADE: Final = Path("tests/mutation/handmade.toml")
EQUIVALENT: Final = Path("tests/mutation/equivalent.toml")


class StaleEntryError(Exception):
    """An entry of a list names lines that are no longer there."""


def handmade(root: Path) -> list[Mutant]:
    """Return the mutants that are always run."""
    made = []
    for entry in tomllib.loads((root / HANDMADE).read_text())["mutant"]:
        path, old, new = entry["file"], entry["old"], entry["new"]
        text = (root / path).read_text()
        if text.count(old) != 1:
            raise StaleEntryError(
                f"{HANDMADE}: {entry['name']!r}: its lines are {text.count(old)} times in {path}; "
                "write what the lines are now, or remove the entry with the code"
            )
        at = text.index(old)
        begin = text.rindex("\n", 0, at) + 1 if "\n" in text[:at] else 0
        end = text.index("\n", at + len(old) - 1) + 1
        before = text[begin:end]
        line = text.count("\n", 0, begin) + 1
        made.append(
            Mutant(path, line, before, before.replace(old, new), f"by hand: {entry['name']}")
        )
    return made


@dataclass(frozen=True)
class Equivalent:
    """Mutations of a line that no test can see.

    Attributes:
        path: the file.
        line: the line's text, without spaces around it.
        mutations: what the line may become, without spaces around it.
        reason: why nobody can see the difference.
    """

    path: str
    line: str
    mutations: tuple[str, ...]
    reason: str

    def matches(self, mutant: Mutant) -> bool:
        """Tell whether *mutant* is one of these."""
        return (
            mutant.path == self.path
            and mutant.before.strip() == self.line
            and mutant.after.strip() in self.mutations
        )


def equivalents(root: Path) -> list[Equivalent]:
    """Return the list, after looking for each line in its file."""
    found = []
    for entry in tomllib.loads((root / EQUIVALENT).read_text()).get("mutant", []):
        line = entry["line"]
        lines = [text.strip() for text in (root / entry["file"]).read_text().splitlines()]
        if line not in lines:
            raise StaleEntryError(
                f"{EQUIVALENT}: {entry['file']} has no line {line!r} any more; remove the entry"
            )
        found.append(Equivalent(entry["file"], line, tuple(entry["becomes"]), entry["reason"]))
    return found
