"""Stub of tensorflow.compat."""

from __future__ import annotations

from tensorflow.compat import v1

__all__ = ["v1"]
