"""The messages between clients and the drain daemon; each is one packet.

Every message begins with a magic number, the version and its kind (8 bytes); its fields follow,
packed, little-endian, each length before what it counts. docs/staging-daemon.md has the table.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import fields as fields_of
from errno import ENOMEM
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from kvio import errors
from kvio.errors import BlockError, InvalidKeyError, KvioError, StorageError, TierNotDrainedError
from kvio.staging.allocator import Span
from kvio.staging.options import TierStats
from kvio.staging.writing import WhenFull
from kvio.types import IfExists, IOMode, Level, check_key, is_key

#: The number of a kind is its place; new ones go to the end.
_KINDS: Final[tuple[type[KvioError], ...]] = (
    errors.StorageError,
    errors.StorageFullError,
    errors.AccessDeniedError,
    errors.TransientStorageError,
    errors.StorageTimeoutError,
    errors.TierNotDrainedError,
    errors.BlockError,
    errors.InvalidKeyError,
    errors.BlockNotFoundError,
    errors.BlockExistsError,
    errors.BlockSizeError,
    errors.CorruptBlockError,
    errors.ConfigError,
    errors.UnsupportedError,
    errors.StoreClosedError,
)


def failure_of(error: BaseException) -> Failure:
    """Encode an error; a type that clients do not know becomes its nearest base class."""
    kind = next((k for k in type(error).__mro__ if k in _KINDS), StorageError)
    key = getattr(error, "key", None)
    number = getattr(error, "errno", None)
    return Failure(
        _KINDS.index(kind),
        number if isinstance(number, int) else None,
        str(error) if isinstance(error, KvioError) else f"{type(error).__name__}: {error}",
        key if isinstance(key, str) and is_key(key) else None,
        tuple(getattr(error, "keys", ()))[: MAX_KEYS // 2],
    )


def error_of(failure: Failure) -> KvioError:
    """Decode an error that a client raises.

    Raises:
        ProtocolError: there is no such type.
    """
    if failure.kind >= len(_KINDS):
        raise ProtocolError(f"there is no error {failure.kind}")
    kind = _KINDS[failure.kind]
    if issubclass(kind, TierNotDrainedError):
        return kind(failure.text, keys=failure.keys)
    if kind is errors.TransientStorageError and failure.errno == ENOMEM:
        kind = errors.OutOfMemoryError  # which the protocol has no number for
    if issubclass(kind, StorageError):
        return kind(failure.text, errno=failure.errno, key=failure.key)
    if issubclass(kind, BlockError):
        return kind(failure.text, key=failure.key)
    return kind(failure.text)


# --------------------------------------------------------------------------------------------------
# The fields of messages: encoding, and the checks of decoding.


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


#
# Every message begins with a magic number, the version and its kind (8 bytes); its fields follow,
# packed, little-endian, each length before what it counts. docs/staging-daemon.md has the table.


VERSION: Final = 4
_MAGIC: Final = b"kvsd"
_HEADER: Final = struct.Struct("<4sHH")

#: The most items in one packet; more are sent in several.
MAX_SPANS: Final = 4000
MAX_KEYS: Final = 300
MAX_SEQUENCES: Final = 8000
SESSION_BYTES: Final = 16
CENTURY_US: Final = 100 * 365 * 86_400 * 10**6
#: The session of a client that has none yet.
NO_SESSION: Final = bytes(SESSION_BYTES)

# From clients. Those marked (*) have no answer.


class Hello(NamedTuple):
    """The first of every connection: a new client, or one more connection of one."""

    session: bytes
    store: str


class Reserve(NamedTuple):
    """Allocate memory for a block."""

    key: str
    nbytes: int
    if_exists: IfExists
    when_full: WhenFull
    timeout_us: int | None


class Commit(NamedTuple):
    """The bytes are there, and this is their CRC32C."""

    ticket: int
    checksum: int


class Release(NamedTuple):
    """(*) Release the memory or key of a ticket."""

    ticket: int


class Pin(NamedTuple):
    """Pin the newest bytes of a key and return their place; *lasting*: for an open file."""

    key: str
    lasting: bool


class Fence(NamedTuple):
    """Block drains of a key that is written directly to the store."""

    key: str
    nbytes: int
    if_exists: IfExists
    timeout_us: int | None


class Wrote(NamedTuple):
    """The direct write is in the store."""

    ticket: int
    checksum: int | None
    level: Level
    existed: bool


class Delete(NamedTuple):
    """Remove a block from the tier and the store."""

    key: str
    timeout_us: int | None


class Present(NamedTuple):
    """Return which of these keys are staged."""

    keys: tuple[str, ...]


class List(NamedTuple):
    """Return the staged keys with this prefix after that one, in order."""

    prefix: str
    after: str


class Ask(NamedTuple):
    """A caller waits for this write."""

    sequence: int


class Hold(NamedTuple):
    """Pause or resume drains."""

    on: bool


class Resize(NamedTuple):
    """Return staging memory to the system, or use it again."""

    nbytes: int


class Retry(NamedTuple):
    """Retry these failed writes."""

    sequences: tuple[int, ...]


class Discard(NamedTuple):
    """Discard a failed write."""

    sequence: int


class Over(NamedTuple):
    """Return which of these failed writes were discarded, or replaced by newer ones."""

    sequences: tuple[int, ...]


class Stats(NamedTuple):
    """Return the counts of the tier."""


# From the daemon.


class Welcome(NamedTuple):
    """A connection is accepted; a new client gets the descriptor of the staging memory.

    *populated*: its pages are allocated, and worth mapping before they are used.
    """

    session: bytes
    capacity_bytes: int
    level: Level
    eager: bool
    populated: bool


class Grant(NamedTuple):
    """Memory, until the ticket is committed, released or its connection ends."""

    ticket: int
    more: bool
    spans: tuple[Span, ...]


class Through(NamedTuple):
    """There is no room: the client must write directly to the store."""


class Accepted(NamedTuple):
    """A write is accepted, or a staged block was kept."""

    sequence: int
    checksum: int | None


class Pinned(NamedTuple):
    """The place of the bytes; *more* spans follow as `Grant`."""

    ticket: int
    nbytes: int
    checksum: int | None
    sequence: int
    written_ns: int
    more: bool
    spans: tuple[Span, ...]


class Absent(NamedTuple):
    """Nothing is staged under the key."""


class Fenced(NamedTuple):
    """Drains of the key are blocked; *staged*: a block that the new one replaces."""

    ticket: int
    staged: bool


class Done(NamedTuple):
    """It is done; the number is its result."""

    value: int


class Keys(NamedTuple):
    """Staged keys, in order."""

    more: bool
    keys: tuple[str, ...]


class Sequences(NamedTuple):
    """Numbers of writes; so many *events* had been sent before."""

    events: int
    sequences: tuple[int, ...]


class StatsAre(NamedTuple):
    """The counts of the tier."""

    stats: TierStats


class Failure(NamedTuple):
    """The error of a request."""

    kind: int
    errno: int | None
    text: str
    key: str | None
    keys: tuple[str, ...]


# Events: from the daemon, on a client's first connection.


class Stored(NamedTuple):
    """A write is in the store."""

    sequence: int
    absorbed: bool
    nbytes: int
    checksum: int | None
    level: Level
    mode: IOMode
    existed: bool
    reason: str


class Failed(NamedTuple):
    """A write failed for good, or was dropped."""

    sequence: int
    absorbed: bool
    failure: Failure


class Driven(NamedTuple):
    """A failed write is being retried."""

    sequence: int


Message: TypeAlias = (
    Hello | Reserve | Commit | Release | Pin | Fence | Wrote | Delete | Present | List | Ask | Hold
    | Resize | Retry | Discard | Over | Stats | Welcome | Grant | Through | Accepted | Pinned
    | Absent | Fenced | Done | Keys | Sequences | StatsAre | Failure | Stored | Failed | Driven
)  # fmt: skip


class _Record:
    """A value of several fields within a message."""

    def __init__(self, kind: Any, layout: dict[str, Field]) -> None:
        self._kind = kind
        self._layout = layout

    def pack(self, value: Any) -> bytes:
        return b"".join(field.pack(getattr(value, name)) for name, field in self._layout.items())

    def unpack(self, reader: Reader) -> Any:
        return self._kind(**{n: field.unpack(reader) for n, field in self._layout.items()})


_IF_EXISTS: Final = Word("keep", "replace", "error")
_WHEN_FULL: Final = Word("block", "raise", "pass_through")
_LEVEL: Final = Word(*Level)
_MODE: Final = Word(*IOMode)
_LIMIT: Final = Maybe(U64)
_CRC: Final = Maybe(U32)
_SPANS: Final = Many(Piece(), MAX_SPANS)
_KEYS: Final = Many(KEY, MAX_KEYS)
_SEQUENCES: Final = Many(U64, MAX_SEQUENCES)
_SESSION: Final = Blob(SESSION_BYTES)
_FAILURE: Final = (U8, Maybe(I64), Text(2000), Maybe(KEY), Many(KEY, MAX_KEYS // 2))
_STATS_KINDS: Final[dict[str, Field]] = {"str": Text(100), "int": U64, "bool": FLAG}
_STATS: Final = _Record(
    TierStats, {f.name: _STATS_KINDS[str(f.type)] for f in fields_of(TierStats)}
)

#: The number of each kind of message, and its fields.
LAYOUT: Final[dict[type[Message], tuple[int, tuple[Field, ...]]]] = {
    Hello: (1, (_SESSION, Text(4000))),
    Reserve: (2, (KEY, U64, _IF_EXISTS, _WHEN_FULL, _LIMIT)),
    Commit: (3, (U64, U32)),
    Release: (4, (U64,)),
    Pin: (5, (KEY, FLAG)),
    Fence: (6, (KEY, U64, _IF_EXISTS, _LIMIT)),
    Wrote: (7, (U64, _CRC, _LEVEL, FLAG)),
    Delete: (8, (KEY, _LIMIT)),
    Present: (9, (_KEYS,)),
    List: (10, (Text(200), Text(200))),
    Ask: (11, (U64,)),
    Hold: (12, (FLAG,)),
    Resize: (13, (I64,)),
    Retry: (14, (_SEQUENCES,)),
    Discard: (15, (U64,)),
    Over: (16, (_SEQUENCES,)),
    Stats: (17, ()),
    Welcome: (64, (_SESSION, U64, _LEVEL, FLAG, FLAG)),
    Grant: (65, (U64, FLAG, _SPANS)),
    Through: (66, ()),
    Accepted: (67, (U64, _CRC)),
    Pinned: (68, (U64, U64, _CRC, U64, U64, FLAG, _SPANS)),
    Absent: (69, ()),
    Fenced: (70, (U64, FLAG)),
    Done: (71, (U64,)),
    Keys: (72, (FLAG, _KEYS)),
    Sequences: (73, (U64, _SEQUENCES)),
    StatsAre: (74, (_STATS,)),
    Failure: (75, _FAILURE),
    Stored: (96, (U64, FLAG, U64, _CRC, _LEVEL, _MODE, FLAG, Text(1000))),
    Failed: (97, (U64, FLAG, _Record(Failure, dict(zip(Failure._fields, _FAILURE, strict=True))))),
    Driven: (98, (U64,)),
}
_BY_NUMBER: Final = {number: (kind, fields) for kind, (number, fields) in LAYOUT.items()}


def encode(message: Message) -> bytes:
    """Encode a message."""
    number, fields = LAYOUT[type(message)]
    packed = [field.pack(value) for field, value in zip(fields, message, strict=True)]
    data = b"".join((_HEADER.pack(_MAGIC, VERSION, number), *packed))
    assert len(data) <= MAX_BYTES
    return data


def decode(data: bytes) -> Message:
    """Decode a message; only bytes that `encode` returns are valid.

    Raises:
        ProtocolError: they are malformed.
    """
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of more than {MAX_BYTES} bytes")
    reader = Reader(data)
    magic, version, number = _HEADER.unpack(reader.take(_HEADER.size))
    if magic != _MAGIC or version != VERSION:
        raise ProtocolError(f"not version {VERSION} of the drain daemon's protocol")
    if number not in _BY_NUMBER:
        raise ProtocolError(f"there is no message {number}")
    kind, fields = _BY_NUMBER[number]
    values = [field.unpack(reader) for field in fields]
    reader.end()
    message: Message = kind(*values)
    return message


def microseconds(timeout: float | None) -> int | None:
    """Encode a timeout, at most a century."""
    return None if timeout is None else int(min(max(0.0, timeout) * 1e6, CENTURY_US))
