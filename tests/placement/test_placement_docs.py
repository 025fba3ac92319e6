"""docs/placement.md is true: the tests it names are there, and its tables are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from kvio.placement import MapBy, Memory, Order

FOLDER = Path(__file__).parent
TEXT = (FOLDER.parent.parent / "docs" / "placement.md").read_text(encoding="utf-8")


def test_every_test_it_names_is_there() -> None:
    """In this folder, under the name that the table gives."""
    there = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", TEXT)

    assert len(named) > 8
    assert [name for name in named if f"def {name}(" not in there] == []


def test_every_choice_is_in_its_table() -> None:
    """And the table has no others."""
    table = TEXT.partition("## What can be wished for")[2].partition("\n\nWhen every")[0]
    named = set(re.findall(r"`([a-z0-9]+)`", table))

    assert named == {
        *get_args(MapBy),
        *get_args(Order),
        *get_args(Memory),
        "near",
        "order",
        "memory",
    }
