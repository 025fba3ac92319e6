"""What a user types: ``kvio get`` gives nothing damaged out, ``kvio verify`` names all of it."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import kvio
from kvio.cli.app import run
from tests.faults.sizes import seed, size
from tests.faults.totals import Tally
from tests.posix import faultlab


def damaged(content: bytes, dice: random.Random) -> bytes:
    """Change a byte, or cut, or lengthen."""
    match dice.randrange(5):
        case 0:
            return content[: dice.randrange(len(content))]
        case 1:
            return content + bytes(dice.randrange(1, 5000))
        case _:
            at = dice.choice([dice.randrange(len(content)), len(content) - 1 - dice.randrange(64)])
            return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]


def test_verify_names_each_damaged_block_and_get_gives_none(
    quick_place: Path, tally: Tally, capfd: pytest.CaptureFixture[str]
) -> None:
    """The damaged are named, each once, the others are not; ``get`` leaves no file of one."""
    dice = random.Random(seed())
    keys = [f"k/{number}" for number in range(size(120, 1000))]
    root, out = quick_place / "root", quick_place / "out"
    options = {"create": True}
    with kvio.open_store("posix-tmpfile", root=root, options=options) as store:
        store.write_blocks((key, faultlab.pattern(1, 300)) for key in keys)
    bad = sorted(dice.sample(keys, len(keys) // 2))
    for key in bad:
        path = faultlab.file_of(root, key)
        path.write_bytes(damaged(path.read_bytes(), dice))

    assert run(["verify", str(root), "--threads", "1"]) == 1
    named = re.findall(r"^bad (\S+): ", capfd.readouterr().out, re.MULTILINE)
    tally.add(flips=len(bad), detected=len(set(named) & set(bad)))
    assert sorted(named) == bad
    for key in bad[: size(10, 100)]:
        assert run(["get", str(root), key, str(out)]) != 0
        assert not out.exists()
        assert faultlab.pattern(1, 300)[:100].decode("latin-1") not in capfd.readouterr().out
    good = next(key for key in keys if key not in bad)
    assert run(["get", str(root), good, str(out)]) == 0
    assert out.read_bytes() == faultlab.pattern(1, 300)
