"""Stands in for torch: what DLIO 2.0.0 needs of it when loader and checkpoints are kvio's."""

from __future__ import annotations

from typing import Never

__version__ = "0.0+kvio.stands.in"


class cuda:  # noqa: N801  # torch's name
    """No device."""

    @staticmethod
    def is_available() -> bool:
        """Say that there is none."""
        return False


def mean(*_: object) -> Never:
    """Stand where DLIO decorates torch's."""
    raise NotImplementedError("torch is not installed")
