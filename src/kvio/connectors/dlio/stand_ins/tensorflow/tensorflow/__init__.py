"""Stands in for TensorFlow, which DLIO 2.0.0 imports whether it is used or not.

What writes DLIO's TFRecord files is here; nothing reads them but kvio.
"""

from __future__ import annotations

from tensorflow import compat, io, train

__all__ = ["compat", "data", "io", "profiler", "train"]


class _Absent:
    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"TensorFlow is not installed: no {name}")


profiler = data = _Absent()
