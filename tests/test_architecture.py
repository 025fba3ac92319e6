"""The page about the architecture names files that are there, and every room."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TREE = Path(__file__).parent.parent
PAGES = ("docs/architecture.md", "docs/backends.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    """A file that moves takes its link along."""
    text = (TREE / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)", text)
    missing = [link for link in links if not (TREE / page).parent.joinpath(link).exists()]

    assert links
    assert missing == []


def test_every_room_is_in_the_picture() -> None:
    """A new one is drawn before it is built."""
    text = (TREE / "docs/architecture.md").read_text(encoding="utf-8")
    picture = text[text.index("```text") : text.index("| room |")]
    source = TREE / "src" / "kvio"
    rooms = [path.name for path in source.iterdir() if (path / "__init__.py").exists()]
    modules = [path.stem for path in source.glob("*.py") if not path.stem.startswith("__")]

    assert len(rooms) > 8
    for name in (*rooms, *modules):
        assert re.search(rf"\b{name}\b", picture), name


def test_code_that_is_named_is_there() -> None:
    """Functions and classes of the journeys."""
    for path, names in {
        "core/store.py": ("calls.inside", "fast.read("),
        "core/calls.py": ("class Pending", "def run(", "deliver"),
        "backends/posix/quick.py": ("def write(", "for_write"),
        "backends/posix/engine.py": ("def write_one(",),
        "backends/posix/directories.py": ("class RootWatch",),
        "filesystem/io_mode.py": ("class Always", "class Hybrid"),
        "_native/python.c": ("PyObject *run_one(", "PyObject *read_fast("),
        "_native/transfer.c": ("int kvio_stream_write(",),
        "_native/write.c": ("#define WINDOW 64",),
        "core/executor.py": ("MOST_STUCK: Final = 64",),
    }.items():
        text = (TREE / "src" / "kvio" / path).read_text(encoding="utf-8")
        for name in names:
            assert name in text, (path, name)
