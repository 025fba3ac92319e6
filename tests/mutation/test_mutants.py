"""What `nox -s mutants` rests on: its lists fit the code, and what it passes over is no mutant."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.mutants import lists, recording
from tools.mutants.mutant import Mutant, plain
from tools.mutants.tree import lacking_lines

ROOT = Path(__file__).parents[2]
CODE = """
from m import Used, Named

def f(a: Named) -> int:
    \"\"\"Return it.\"\"\"
    if a < 1:
        raise Used("it is too small")
    return a + 1
"""


def test_the_lists_fit_the_code() -> None:
    """Every mutant made by hand applies, and every line of the other list is there."""
    for mutant in lists.handmade(ROOT):
        text = (ROOT / mutant.path).read_text()
        assert mutant.apply(text) != text
    assert all(entry.reason for entry in lists.equivalents(ROOT))


def test_every_recorded_test_file_exists() -> None:
    """Recording names files and folders of tests; one that moved would be left out."""
    assert [name for name in recording.TESTS if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("name", ["handmade", "equivalent"])
def test_an_entry_that_no_longer_fits_is_an_error(name: str, tmp_path: Path) -> None:
    """A line that has changed under an entry is named."""
    (tmp_path / "tests/mutation").mkdir(parents=True)
    (tmp_path / "src.py").write_text("x = 1\n")
    entry = {
        "handmade": 'name = "n"\nfile = "src.py"\nold = "x = 2"\nnew = ""',
        "equivalent": 'file = "src.py"\nline = "x = 2"\nbecomes = ["x = 3"]\nreason = "r"',
    }[name]
    (tmp_path / f"tests/mutation/{name}.toml").write_text(f"[[mutant]]\n{entry}\n")

    with pytest.raises(lists.StaleEntryError, match=r"x = 2|'n'"):
        (lists.handmade if name == "handmade" else lists.equivalents)(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Return it", "Return"),
        ("a: Named", "a: Used"),
        (" -> int", ""),
        (", Named", ""),
        ("it is too small", "no"),
    ],
)
def test_what_is_no_behaviour_is_no_mutant(old: str, new: str) -> None:
    """Docstrings, annotations, imports for them and the wording of errors."""
    assert plain(CODE.replace(old, new)) == plain(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [("a < 1", "a <= 1"), ("return a + 1", "pass"), ("raise Used", "Used"), ("Used, ", "")],
)
def test_what_is_behaviour_is_a_mutant(old: str, new: str) -> None:
    """Anything that is executed."""
    assert plain(CODE.replace(old, new)) not in (plain(CODE), None)


def test_code_that_does_not_compile_is_no_mutant() -> None:
    """Nor does it stop a run."""
    assert plain(CODE.replace("return a + 1", "return (a")) is None


def test_a_mutant_replaces_its_lines_alone() -> None:
    """And refuses a file that has changed meanwhile."""
    mutant = Mutant("src/kvio/_native/x.c", 2, "b\n", "c\nd\n", "")
    assert mutant.apply("a\nb\ne\n") == "a\nc\nd\ne\n"
    with pytest.raises(AssertionError, match="has changed"):
        mutant.apply("a\nx\n")


def test_functions_that_need_torch_are_left_out_where_it_is_not() -> None:
    """By their lines; who only asks whether it is imported is none of them."""
    text = """import sys
def asks():
    return sys.modules.get("torch")
def needs():
    torch = sys.modules["torch"]
    return torch.uint8
def other():
    return 1
"""
    expected = set() if find_spec("torch") else {4, 5, 6}

    assert lacking_lines(text) == expected
