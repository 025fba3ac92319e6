"""Replace TensorFlow, which DLIO 2.0.0 imports even if it is not used.

It can write DLIO's TFRecord files; only kvio reads them.
"""

from __future__ import annotations

from tensorflow import compat, io, train

__all__ = ["compat", "data", "io", "profiler", "train"]


class _Absent:
    def __getattr__(self, name: str) -> object:
        raise AttributeError(f"TensorFlow is not installed: no {name}")


profiler = data = _Absent()
