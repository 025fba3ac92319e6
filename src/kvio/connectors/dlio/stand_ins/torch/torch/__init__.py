"""Stub of torch for DLIO 2.0.0 with kvio's loader and checkpoints."""

from __future__ import annotations

from typing import Never

__version__ = "0.0+kvio.stands.in"


class cuda:  # noqa: N801  # torch's name
    """No device."""

    @staticmethod
    def is_available() -> bool:
        """Return False: there is no device."""
        return False


def mean(*_: object) -> Never:
    """Raise NotImplementedError: torch is not installed."""
    raise NotImplementedError("torch is not installed")
