"""docs/staging.md is true: the tests and options it names are there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import kvio

FOLDER = Path(__file__).parent
TEXT = (FOLDER.parent.parent / "docs" / "staging.md").read_text(encoding="utf-8")


def test_every_test_it_names_is_there() -> None:
    """In this folder, under the name that the table gives."""
    there = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", TEXT)

    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in there] == []


def test_every_option_it_names_has_the_default_it_says() -> None:
    """As the signature of `kvio.stage` has it, where the default is a value."""
    table = TEXT.partition("## Options of")[2].partition("\n## ")[0]
    parameters = inspect.signature(kvio.stage).parameters
    for names, defaults in re.findall(r"^\| (`.*?`) \| (.*?) \|", table, re.MULTILINE):
        words = re.findall(r"`(\w+)`", names)
        values = defaults.split(", ")
        for word, value in zip(words, values, strict=True):
            expected = None if not value.startswith("`") else eval(value.strip("`"))
            assert parameters[word].default == expected, word
