"""Stub of tensorflow.io with what DLIO's record generator uses."""

from __future__ import annotations

from typing import Self

from kvio.connectors.dlio.decoding import framed


class TFRecordWriter:
    """Writes a file of framed records."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  # closed by `close`

    def write(self, record: bytes) -> None:
        """Append a record."""
        self._file.write(framed(record))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def __getattr__(name: str) -> object:
    raise AttributeError(f"TensorFlow is not installed: no io.{name}")
