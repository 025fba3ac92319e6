"""The messages between clients and the drain daemon; each is one packet.

Every message begins with a magic number, the version and its kind (8 bytes); its fields follow,
packed, little-endian, each length before what it counts. docs/staging-daemon.md has the table.
"""

from __future__ import annotations

import struct
from dataclasses import fields as fields_of
from typing import Any, Final, NamedTuple, TypeAlias

from kvio.types import IfExists, IOMode, Level
from kvio.wrappers.staging.daemon.fields import (
    FLAG,
    I64,
    KEY,
    MAX_BYTES,
    U8,
    U32,
    U64,
    Blob,
    Field,
    Many,
    Maybe,
    Piece,
    ProtocolError,
    Reader,
    Text,
    Word,
)
from kvio.wrappers.staging.extents import Span
from kvio.wrappers.staging.stats import TierStats
from kvio.wrappers.staging.writing import WhenFull

VERSION: Final = 3
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
    Wrote: (7, (U64, _CRC, _LEVEL)),
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
