"""docs/connectors/torch_dcp.md is true: its example runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import snippets

pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("snippet", snippets.snippets("docs/connectors/torch_dcp.md"), ids=str)
def test_a_snippet_runs(snippet: snippets.Snippet, real_disk: Path) -> None:
    """One process saves, loads and saves again without waiting."""
    snippets.run(snippet, real_disk, env={"PYTHONWARNINGS": "ignore"})
