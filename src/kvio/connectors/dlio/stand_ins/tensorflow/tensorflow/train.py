"""Stub of tensorflow.train with the messages that DLIO's record generator creates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvio.connectors.dlio.decoding import example


@dataclass(frozen=True, kw_only=True)
class BytesList:
    """Values that are bytes."""

    value: Sequence[bytes]


@dataclass(frozen=True, kw_only=True)
class Int64List:
    """Values that are numbers."""

    value: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A list of values of either kind."""

    bytes_list: BytesList | None = None
    int64_list: Int64List | None = None

    @property
    def only(self) -> bytes | int:
        """Return the only value of the feature."""
        values = self.bytes_list or self.int64_list
        if values is None:
            raise ValueError("a feature without values")
        [value] = values.value
        return value


@dataclass(frozen=True, kw_only=True)
class Features:
    """Features by name."""

    feature: Mapping[str, Feature]


@dataclass(frozen=True, kw_only=True)
class Example:
    """The message in DLIO's records."""

    features: Features

    def SerializeToString(self) -> bytes:  # noqa: N802  # TensorFlow's name
        """Return the bytes of the message."""
        return example({name: one.only for name, one in self.features.feature.items()})


def __getattr__(name: str) -> object:
    raise AttributeError(f"TensorFlow is not installed: no train.{name}")
