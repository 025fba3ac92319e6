"""The suite over any store: ``pytest --pyargs kvio.testing.test_url --kvio-url URL``.

The store must be empty at first; ``{tmp}`` in the URL stands for a directory fresh for every test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvio.testing.suite import BackendTests


class TestURL(BackendTests):
    """Everything the store of ``--kvio-url`` must do."""

    url: str

    @pytest.fixture(autouse=True)
    def _choose(self, kvio_url: str) -> None:
        self.url = kvio_url

    def open(self, tmp_path: Path) -> str:  # noqa: ARG002  # the URL has it already
        """Return the URL of ``--kvio-url``."""
        return self.url
