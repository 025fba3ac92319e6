"""The fields of messages: encoding, and the checks of decoding."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, Protocol

from kvio.errors import InvalidKeyError, StorageError
from kvio.types import check_key
from kvio.wrappers.staging.extents import Span

#: No message is longer: the kernel takes a packet of this size at once.
MAX_BYTES: Final = 1 << 16


class ProtocolError(StorageError):
    """A malformed message: the connection to its sender is closed."""


class Reader:
    """A reader of bytes that never reads beyond their end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, nbytes: int) -> bytes:
        """Read exactly so many bytes."""
        piece = self._data[self._at : self._at + nbytes]
        if len(piece) != nbytes:
            raise ProtocolError(f"a message of {len(self._data)} bytes is cut short")
        self._at += nbytes
        return piece

    def end(self) -> None:
        """Raise `ProtocolError` if bytes are left."""
        if self._at != len(self._data):
            raise ProtocolError(f"{len(self._data) - self._at} bytes follow a message")


class Field(Protocol):
    """One value of a message; `unpack` accepts exactly what `pack` returns."""

    def pack(self, value: Any) -> bytes: ...  # noqa: D102
    def unpack(self, reader: Reader) -> Any: ...  # noqa: D102


class Number:
    """An integer of a fixed width, little-endian."""

    def __init__(self, code: str) -> None:
        self._struct = struct.Struct(f"<{code}")

    def pack(self, value: int) -> bytes:  # noqa: D102
        return self._struct.pack(value)

    def unpack(self, reader: Reader) -> int:  # noqa: D102
        number: int = self._struct.unpack(reader.take(self._struct.size))[0]
        return number


class Word:
    """One of a few values, as its index in one byte."""

    def __init__(self, *choices: Any) -> None:
        self._choices = choices

    def pack(self, value: Any) -> bytes:  # noqa: D102
        return bytes([self._choices.index(value)])

    def unpack(self, reader: Reader) -> Any:  # noqa: D102
        at = reader.take(1)[0]
        if at >= len(self._choices):
            raise ProtocolError(f"{at} is none of {len(self._choices)} choices")
        return self._choices[at]


class Blob:
    """Bytes of a fixed number."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def pack(self, value: bytes) -> bytes:  # noqa: D102
        assert len(value) == self._nbytes
        return value

    def unpack(self, reader: Reader) -> bytes:  # noqa: D102
        return reader.take(self._nbytes)


class Text:
    """UTF-8 of at most so many bytes, after their number; longer text is truncated."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def pack(self, value: str) -> bytes:  # noqa: D102
        encoded = value.encode("utf-8", "replace")
        if len(encoded) > self._max_bytes:
            encoded = encoded[: self._max_bytes].decode("utf-8", "ignore").encode()
        return U16.pack(len(encoded)) + encoded

    def unpack(self, reader: Reader) -> str:  # noqa: D102
        nbytes = U16.unpack(reader)
        if nbytes > self._max_bytes:
            raise ProtocolError(f"a text of {nbytes} bytes, at most {self._max_bytes}")
        try:
            return reader.take(nbytes).decode()
        except UnicodeDecodeError:
            raise ProtocolError("a text is not UTF-8") from None


class Key:
    """A block's name, checked, after its length in one byte."""

    def pack(self, value: str) -> bytes:  # noqa: D102
        encoded = value.encode("ascii")
        return bytes([len(encoded)]) + encoded

    def unpack(self, reader: Reader) -> str:  # noqa: D102
        key = reader.take(reader.take(1)[0]).decode("latin-1")
        try:
            check_key(key)
        except InvalidKeyError as exc:
            raise ProtocolError(str(exc)) from None
        return key


class Maybe:
    """A value or None, after a byte that says which."""

    def __init__(self, field: Field) -> None:
        self._field = field

    def pack(self, value: Any) -> bytes:  # noqa: D102
        return b"\0" if value is None else b"\1" + self._field.pack(value)

    def unpack(self, reader: Reader) -> Any:  # noqa: D102
        return self._field.unpack(reader) if FLAG.unpack(reader) else None


class Many:
    """Values of one kind, at most so many, after their number."""

    def __init__(self, field: Field, most: int) -> None:
        self._field = field
        self.most = most

    def pack(self, value: Sequence[Any]) -> bytes:  # noqa: D102
        assert len(value) <= self.most
        return U16.pack(len(value)) + b"".join(map(self._field.pack, value))

    def unpack(self, reader: Reader) -> tuple[Any, ...]:  # noqa: D102
        count = U16.unpack(reader)
        if count > self.most:
            raise ProtocolError(f"{count} values, at most {self.most}")
        return tuple(self._field.unpack(reader) for _ in range(count))


class Piece:
    """A span of staging memory; its reader checks that it lies within the memory."""

    def pack(self, value: Span) -> bytes:  # noqa: D102
        return U64.pack(value.offset) + U64.pack(value.nbytes)

    def unpack(self, reader: Reader) -> Span:  # noqa: D102
        return Span(U64.unpack(reader), U64.unpack(reader))


U8: Final = Number("B")
U16: Final = Number("H")
U32: Final = Number("I")
U64: Final = Number("Q")
I64: Final = Number("q")
FLAG: Final = Word(False, True)
KEY: Final = Key()
