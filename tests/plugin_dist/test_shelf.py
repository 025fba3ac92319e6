"""What the third party would have: the contract of kvio, over its own backend."""

from __future__ import annotations

from pathlib import Path

from kvio.testing.suite import BackendTests


class TestShelf(BackendTests):
    """The shelf keeps the contract."""

    def open(self, tmp_path: Path) -> str:
        """Return a shelf of one's own."""
        return f"shelf://{tmp_path}"
