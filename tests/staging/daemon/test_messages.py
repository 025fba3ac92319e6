"""The protocol: what is written is read back, and of all other bytes nothing is trusted."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvio
from kvio.staging.allocator import Span
from kvio.staging.daemon import protocol as say
from kvio.staging.daemon.protocol import MAX_BYTES, ProtocolError, error_of, failure_of
from kvio.staging.daemon.sockets import name_of
from kvio.staging.options import TierStats
from kvio.types import IOMode, Level
from kvio.url import Secret, StoreURL

_KEYS = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._=@+-]{0,20}(/[a-z0-9]{1,9}){0,3}\Z")
_U64 = st.integers(0, (1 << 64) - 1)
_CRC = st.integers(0, (1 << 32) - 1)
_LIMITS = st.none() | st.integers(0, 1 << 52)
_WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
_SPANS = st.lists(st.builds(Span, _U64, _U64), max_size=9).map(tuple)
_FAILURES = st.builds(
    say.Failure,
    kind=st.integers(0, 14),
    errno=st.none() | st.integers(-200, 200),
    text=_WORDS,
    key=st.none() | _KEYS,
    keys=st.lists(_KEYS, max_size=5).map(tuple),
)
_STATS = st.builds(
    TierStats,
    **{
        field.name: {"str": _WORDS, "int": _U64, "bool": st.booleans()}[str(field.type)]
        for field in dataclasses.fields(TierStats)
    },
)
_BY_NAME: dict[str, Any] = {
    "session": st.binary(min_size=16, max_size=16),
    "key": _KEYS,
    "keys": st.lists(_KEYS, max_size=9).map(tuple),
    "spans": _SPANS,
    "sequences": st.lists(_U64, max_size=9).map(tuple),
    "if_exists": st.sampled_from(["keep", "replace", "error"]),
    "when_full": st.sampled_from(["block", "raise", "pass_through"]),
    "level": st.sampled_from(Level),
    "mode": st.sampled_from(IOMode),
    "failure": _FAILURES,
    "stats": _STATS,
}
_BY_TYPE: dict[str, Any] = {
    "int": _U64,
    "bool": st.booleans(),
    "str": _WORDS,
    "int | None": _LIMITS,
}


def _values(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Make any message of a kind."""
    if kind is say.Failure:
        return _FAILURES
    if kind is say.Resize:
        return st.builds(kind, st.integers(-(1 << 63), (1 << 63) - 1))
    fields: dict[str, Any] = {}
    for name, annotation in kind.__annotations__.items():
        text = annotation.__forward_arg__
        by_name = _BY_NAME[name] if name in _BY_NAME else _BY_TYPE[text]
        checksum = _CRC if text == "int" else st.none() | _CRC
        fields[name] = checksum if name == "checksum" else by_name
    return st.builds(kind, **fields)


_MESSAGES = st.one_of([_values(kind) for kind in say.LAYOUT])


@given(_MESSAGES)
def test_a_message_comes_back_as_it_was(message: say.Message) -> None:
    """Every kind, every value that its fields can have."""
    assert say.decode(say.encode(message)) == message


def _header(number: int) -> bytes:
    return struct.pack("<4sHH", b"kvsd", say.VERSION, number)


@given(
    st.binary(max_size=300)
    | st.builds(
        lambda number, rest: _header(number) + rest,
        st.sampled_from([number for number, _ in say.LAYOUT.values()]),
        st.binary(max_size=200),
    )
    | st.builds(
        lambda message, at, new: _changed(say.encode(message), at, new),
        _MESSAGES,
        st.integers(0, 10_000),
        st.integers(0, 255),
    )
    | st.builds(lambda message, n: say.encode(message)[:n], _MESSAGES, st.integers(0, 400))
)
@example(b"")
@example(bytes(MAX_BYTES + 1))
@example(_header(1) + bytes(16) + b"\xff\xff")
@example(_header(9) + b"\xff\xff")
@example(_header(5) + b"\x04a/..")
@example(_header(12) + b"\x02")
def test_any_bytes_are_one_message_or_none(data: bytes) -> None:
    """What is read would be written the same; all else is the protocol's one error."""
    try:
        message = say.decode(data)
    except ProtocolError:
        return
    assert say.encode(message) == data


_SAMPLES: list[say.Message] = [
    say.Hello(bytes(range(16)), "hybrid:///mnt/kv"),
    say.Reserve("a/b", 9, "keep", "raise", 5),
    say.Commit(1, 2),
    say.Release(1),
    say.Pin("k", lasting=True),
    say.Fence("k", 9, "error", None),
    say.Wrote(1, None, Level.DURABLE, existed=False),
    say.Delete("k", 7),
    say.Present(("k", "l")),
    say.List("k", ""),
    say.Ask(1),
    say.Hold(on=True),
    say.Resize(-9),
    say.Retry((1, 2)),
    say.Discard(1),
    say.Over((1, 2)),
    say.Stats(),
    say.Welcome(bytes(16), 9, Level.VISIBLE, eager=True, populated=False),
    say.Grant(1, more=False, spans=(Span(0, 9),)),
    say.Through(),
    say.Accepted(1, 2),
    say.Pinned(1, 2, 3, 4, 5, more=False, spans=(Span(0, 2),)),
    say.Absent(),
    say.Fenced(1, staged=True),
    say.Done(1),
    say.Keys(more=False, keys=("k",)),
    say.Sequences(3, (1, 2)),
    say.Failure(3, 5, "words", "k", ("k", "l")),
    say.Stored(1, True, 9, 7, Level.DURABLE, IOMode.DIRECT, False, "words"),
    say.Failed(1, absorbed=False, failure=say.Failure(3, None, "", None, ())),
    say.Driven(1),
]


@pytest.mark.parametrize("message", _SAMPLES, ids=lambda message: type(message).__name__)
def test_every_byte_of_a_message_counts(message: say.Message) -> None:
    """Cut anywhere, longer by a byte, or with any byte changed: another message, or none."""
    data = say.encode(message)
    for short in range(len(data)):
        with pytest.raises(ProtocolError):
            say.decode(data[:short])
    with pytest.raises(ProtocolError):
        say.decode(data + b"\0")
    for at in range(len(data)):
        for new in (0, 1, 2, 3, 46, 127, 200, 255):
            changed = _changed(data, at, new)
            try:
                read = say.decode(changed)
            except ProtocolError:
                continue
            assert say.encode(read) == changed


@pytest.mark.parametrize(
    "data",
    [
        _header(5) + b"\x00\x00",
        _header(5) + b"\x04a/..\x00",
        _header(5) + b"\x02a\n\x00",
        _header(5) + b"\x02\xc3\xa9\x00",
        _header(5) + b"\xc9" + b"k" * 201 + b"\x00",
        _header(9) + struct.pack("<H", say.MAX_KEYS + 1) + b"\x01k" * (say.MAX_KEYS + 1),
        _header(10) + b"\x02\x00\xff\xfe\x00\x00",
        _header(10) + struct.pack("<H", 201) + b"k" * 201 + b"\x00\x00",
        _header(12) + b"\x02",
    ],
    ids=["empty key", "dots", "newline", "not ASCII", "long key", "keys", "UTF-8", "text", "flag"],
)
def test_what_breaks_the_rules_is_refused(data: bytes) -> None:
    """Keys as everywhere in kvio, lists and texts no longer than agreed."""
    with pytest.raises(ProtocolError):
        say.decode(data)


def _changed(data: bytes, at: int, new: int) -> bytes:
    changed = bytearray(data)
    changed[at % len(data)] = new
    return bytes(changed)


def test_the_largest_messages_fit_into_one_packet() -> None:
    """Every list at its longest, every name too."""
    key = "k" * 200
    span = Span((1 << 64) - 1, (1 << 64) - 1)
    largest: list[say.Message] = [
        say.Grant(1, more=True, spans=(span,) * say.MAX_SPANS),
        say.Pinned(1, 2, 3, 4, 5, more=True, spans=(span,) * say.MAX_SPANS),
        say.Keys(more=True, keys=(key,) * say.MAX_KEYS),
        say.Present((key,) * say.MAX_KEYS),
        say.Sequences(1, (1,) * say.MAX_SEQUENCES),
        say.Retry((1,) * say.MAX_SEQUENCES),
        say.Over((1,) * say.MAX_SEQUENCES),
        failure_of(kvio.TierNotDrainedError("x" * 99_999, keys=(key,) * 9_999)),
    ]

    for message in largest:
        data = say.encode(message)
        assert len(data) <= MAX_BYTES
        assert say.encode(say.decode(data)) == data


@pytest.mark.parametrize(
    "number", sorted(set(range(130)) - {number for number, _ in say.LAYOUT.values()})
)
def test_a_kind_that_nobody_knows_is_refused(number: int) -> None:
    """Whatever follows."""
    with pytest.raises(ProtocolError):
        say.decode(_header(number))


def test_another_version_is_refused() -> None:
    """Nothing of it is read."""
    data = bytearray(say.encode(say.Stats()))
    data[4] += 1
    with pytest.raises(ProtocolError, match="version"):
        say.decode(bytes(data))


@pytest.mark.parametrize(
    "error",
    [
        kvio.StorageError("disk", errno=5, key="a/b"),
        kvio.StorageFullError("full", errno=28),
        kvio.OutOfMemoryError("no memory", key="k"),
        kvio.TransientStorageError("busy", errno=11, key="k"),
        kvio.StorageTimeoutError("late", key="k"),
        kvio.TierNotDrainedError("left", keys=("a", "b")),
        kvio.BlockExistsError("taken", key="k"),
        kvio.CorruptBlockError("damaged", key="k"),
        kvio.StoreClosedError("closed"),
        kvio.UnsupportedError("never"),
    ],
)
def test_an_error_arrives_as_what_it_is(error: kvio.KvioError) -> None:
    """Its kind, its words, and what it names."""
    failure = say.decode(say.encode(failure_of(error)))
    assert isinstance(failure, say.Failure)
    arrived = error_of(failure)

    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    for name in ("key", "keys", "errno"):
        assert getattr(arrived, name, None) == getattr(error, name, None)


def test_a_strange_error_arrives_as_one_of_ours() -> None:
    """A fault of the daemon's is reported, by its name."""
    arrived = error_of(failure_of(RuntimeError("no idea")))

    assert type(arrived) is kvio.StorageError
    assert "RuntimeError: no idea" in str(arrived)


def test_a_store_is_named_without_secrets_and_alike_by_all() -> None:
    """By URL or by root, with what goes without saying or not."""
    names = {
        name_of(StoreURL("hybrid", "", "/mnt/kv", {"create": "true"})),
        name_of(StoreURL("hybrid", "", "", {"root": "/mnt/kv/"})),
        name_of(StoreURL("hybrid", "", "/mnt/../mnt/kv", {"durability": "visible"})),
        name_of(StoreURL("hybrid", "", "/mnt/kv", {"layout": "block"})),
        name_of(StoreURL("hybrid", "", "/mnt/kv", {"secret_key": Secret("hush")})),
    }

    assert names == {"hybrid:///mnt/kv"}
    assert name_of(StoreURL("hybrid", "", "/mnt/kv", {"durability": "durable"})) not in names
    assert name_of(StoreURL("hybrid", "", "/mnt/kv", {"layout": "plain"})) not in names
