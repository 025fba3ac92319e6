"""Stands in for TensorFlow, which DLIO 2.0.0 imports whether it is used or not."""

from __future__ import annotations

from typing import Never


class _Absent:
    def __getattr__(self, name: str) -> Never:
        raise AttributeError(f"TensorFlow is not installed: no {name}")


profiler = data = io = train = _Absent()
