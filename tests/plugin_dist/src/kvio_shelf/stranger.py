"""Registers something that is no backend."""

from __future__ import annotations


class StrangerBackend:
    """Has nothing to do with kvio."""
