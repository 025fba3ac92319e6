"""docs/staging-daemon.md is true: its tables are those of the code, its example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvio
from kvio.staging.daemon import protocol
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.protocol import MAX_BYTES
from kvio.types import IOMode
from tests import snippets
from tests.staging.daemon.daemons import serving

TEXT = (Path(__file__).parents[3] / "docs" / "staging-daemon.md").read_text(encoding="utf-8")


_NAMED = {
    *("ticket", "sequence", "nbytes", "if_exists", "when_full", "more", "staged", "session"),
    *("capacity_bytes", "eager", "populated"),
}


def test_the_table_has_every_message_and_its_fields() -> None:
    """By number and name; a field of a word's own type is named there by it."""
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.*?) \|", TEXT, re.MULTILINE)

    assert {(int(number), name) for number, name, _ in rows} == {
        (number, kind.__name__) for kind, (number, _) in say.LAYOUT.items()
    }
    fields = {name: text for _, name, text in rows}
    for kind in say.LAYOUT:
        for field in kind.__annotations__:
            if field in _NAMED:
                assert field in fields[kind.__name__], (kind, field)


def test_limits_and_lists_are_those_of_the_code() -> None:
    """Sizes, modes, kinds of errors."""
    modes = ", ".join(mode.value for mode in IOMode)
    kinds = ", ".join(kind.__name__ for kind in protocol._KINDS)

    assert f"at most {MAX_BYTES} bytes" in TEXT
    assert f"the version as u16 ({say.VERSION})" in TEXT
    assert f"Modes, in order: {modes}." in TEXT
    assert f"in order from 0: {kinds}." in TEXT
    for most in (say.MAX_KEYS, say.MAX_SPANS, say.MAX_SEQUENCES):
        assert f"({most})" in TEXT


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets.snippets("docs/staging-daemon.md"), ids=str)
def test_a_snippet_runs(snippet: snippets.Snippet, tmp_path: Path) -> None:
    """With a socket and a store of ours in place of those it names."""
    url = f"posix-tmpfile://{tmp_path}/store?create=true"
    with kvio.open_store(url) as store, serving(store) as daemon:
        instead = {
            "hybrid:///mnt/kv?durability=durable": url,
            "/run/user/1000/kvio/stage.sock": daemon.path,
            'wait("durable")': 'wait("visible")',
        }
        snippets.run(snippet, tmp_path, instead=instead)

        assert bytes(store.read_block("ckpt/step-100/rank-0")) == bytes(1 << 16)
