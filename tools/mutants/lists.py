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
        line: where the line is, counted from 1.
        mutations: what the line may become, without spaces around it.
        reason: why the difference cannot be seen.
    """

    path: str
    line: int
    mutations: tuple[str, ...]
    reason: str

    def matches(self, mutant: Mutant) -> bool:
        """Return whether *mutant* is one of these."""
        return (
            mutant.path == self.path
            and mutant.line == self.line
            and mutant.after.strip() in self.mutations
        )


def equivalents(root: Path) -> list[Equivalent]:
    """Return the list, after finding each line in its file.

    Raises:
        StaleEntryError: a line is not there, or more than once and `after` does not say which.
    """
    found: list[Equivalent] = []
    for entry in tomllib.loads((root / EQUIVALENT).read_text()).get("mutant", []):
        line, after = entry["line"], entry.get("after")
        lines = [text.strip() for text in (root / entry["file"]).read_text().splitlines()]
        before = ["", *lines]
        places = [
            number
            for number, text in enumerate(lines, 1)
            if text == line and after in (None, before[number - 1])
        ]
        if len(places) != 1:
            raise StaleEntryError(
                f"{EQUIVALENT}: the line {line!r} is {len(places)} times in {entry['file']}; "
                "remove the entry, or say by `after`, the line before it, which one is meant"
            )
        becomes = tuple(entry["becomes"])
        found.append(Equivalent(entry["file"], places[0], becomes, entry["reason"]))
    return found
