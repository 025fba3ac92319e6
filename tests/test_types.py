"""Keys, levels, receipts and errors: the values that cross the public interface."""

from __future__ import annotations

import errno
import itertools
import pickle
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvio
from kvio import types
from kvio.errors import storage_error
from kvio.types import Cancellation, Level, check_key, check_keys, is_key, status_of

_FIRST = set(string.ascii_letters + string.digits + "_")
_REST = _FIRST | set(".=@+-")


def allowed(key: str) -> bool:
    """Return whether a key keeps the rules, one character at a time."""
    if not 1 <= len(key) <= 200:
        return False
    expect_first = True
    for character in key:
        if character == "/":
            if expect_first:
                return False
            expect_first = True
        elif character not in (_FIRST if expect_first else _REST):
            return False
        else:
            expect_first = False
    return not expect_first


def accepted(key: str) -> bool:
    """Return whether kvio takes a key."""
    try:
        check_key(key)
    except kvio.InvalidKeyError:
        return False
    return True


near_keys = st.text(alphabet="aZ09_.=@+-/~ %\n\\é", max_size=12)
long_keys = st.builds(lambda n, c: c * n, st.integers(190, 210), st.sampled_from(["k", "k/", "/k"]))


@given(key=near_keys | long_keys | st.text(max_size=20))
@example(key="a\n")
@example(key="a" * 200)
@example(key="a" * 201)
@example(key="٣")  # a digit, but not an ASCII one
@example(key="a/../b")
@example(key="a/.b")
@example(key="k" * 199 + "/")
def test_keys_are_those_the_rules_allow(key: str) -> None:
    """Exactly the keys of the design are accepted, and names on a disk are judged alike."""
    assert accepted(key) == is_key(key) == allowed(key)


@given(keys=st.lists(near_keys, max_size=6))
@example(keys=["a\nb"])
@example(keys=["a\nb", "c"])
@example(keys=["a", "", "b"])
@example(keys=["a" * 201, "b"])
def test_many_keys_are_checked_like_each(keys: list[str]) -> None:
    """A list of keys is refused exactly when one of them is, and by that one's name."""
    wrong = [key for key in keys if not allowed(key)]
    if not wrong:
        check_keys(keys)
        return
    with pytest.raises(kvio.InvalidKeyError) as caught:
        check_keys(keys)

    assert caught.value.key == wrong[0]


@pytest.mark.parametrize("key", [None, 5, b"bytes", ["a"], 3.5], ids=repr)
def test_what_is_no_text_is_no_key(key: object) -> None:
    """A key of another type is an InvalidKeyError, not a crash."""
    with pytest.raises(kvio.InvalidKeyError):
        check_key(key)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(kvio.InvalidKeyError):
        check_keys(["fine", key])  # type: ignore[list-item]  # on purpose


def test_the_error_of_a_key_is_short_and_named() -> None:
    """A huge key is not repeated in full, but is there in ``.key``."""
    key = "x" * 100_000

    with pytest.raises(kvio.InvalidKeyError) as caught:
        check_key(key)

    assert len(str(caught.value)) < 400
    assert caught.value.key == key


def test_levels_compare_by_safety() -> None:
    """Accepted < visible < durable, against each other and against their names."""
    order = [Level.ACCEPTED, Level.VISIBLE, Level.DURABLE]
    for (i, low), (j, high) in itertools.product(enumerate(order), repeat=2):
        for other in (high, high.value):
            assert (low < other) == (i < j)
            assert (low <= other) == (i <= j)
            assert (low > other) == (i > j)
            assert (low >= other) == (i >= j)
            assert (low == other) == (i == j)
    assert sorted([order[2], order[0], order[1]]) == order
    assert max(order) is Level.DURABLE
    with pytest.raises(ValueError, match="safe"):
        assert Level.VISIBLE < "safe"


def _values() -> list[object]:
    receipt = kvio.Receipt("a", 5, 1, Level.VISIBLE, kvio.IOMode.DIRECT, "why", False)
    return [
        receipt,
        kvio.BlockStat("a", 5, 1, 69, 10),
        kvio.BlockResult("a", kvio.BlockStatus.OK, 5, None, receipt),
        kvio.Capabilities(),
        kvio.StoreStats(modes={}),
    ]


@pytest.mark.parametrize("value", _values(), ids=lambda value: type(value).__name__)
def test_values_are_immutable_and_travel(value: object) -> None:
    """Receipts, results and capabilities cannot be changed, gain nothing, and pickle."""
    names = getattr(value, "_fields", None) or list(type(value).__annotations__)
    for name in names:
        with pytest.raises(AttributeError):
            setattr(value, name, None)
    with pytest.raises((AttributeError, TypeError)):
        value.other = 1  # type: ignore[attr-defined]  # on purpose

    assert pickle.loads(pickle.dumps(value)) == value


def test_a_result_is_ok_where_the_block_is_where_it_should_be() -> None:
    """``ok`` and ``kept`` are ok, every other status is not."""
    good = {
        status for status in kvio.BlockStatus if kvio.BlockResult("key", status, 0, None, None).ok
    }

    assert good == {kvio.BlockStatus.OK, kvio.BlockStatus.KEPT}


def test_capabilities_promise_nothing_by_default() -> None:
    """What a backend does not name, it does not promise; but that it stores is what it is for."""
    capabilities = kvio.Capabilities()
    names = type(capabilities).__annotations__

    assert [name for name in names if getattr(capabilities, name) is True] == ["writable"]
    assert capabilities.memory_alignment == 1


_ERRNOS = [
    *((number, kvio.StorageFullError) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
    *((number, kvio.AccessDeniedError) for number in (errno.EACCES, errno.EPERM, errno.EROFS)),
    *(
        (number, kvio.TransientStorageError)
        for number in (errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE)
    ),
    (errno.ENOMEM, kvio.OutOfMemoryError),
    (errno.ETIMEDOUT, kvio.StorageTimeoutError),
    (errno.EIO, kvio.StorageError),
    (99999, kvio.StorageError),
]


@pytest.mark.parametrize(("number", "kind"), _ERRNOS)
def test_every_errno_has_its_error(number: int, kind: type[kvio.StorageError]) -> None:
    """An errno becomes the typed error of the tree, which names the step, the block and itself."""
    error = storage_error(number, "write", key="a/b", backend="hybrid")

    assert type(error) is kind
    assert isinstance(error, OSError)
    assert (error.errno, error.key, error.backend) == (number, "a/b", "hybrid")
    assert "write" in str(error)
    assert "'a/b'" in str(error)
    assert errno.errorcode.get(number, str(number)) in str(error)


@pytest.mark.parametrize(
    "error",
    [
        kvio.CorruptBlockError("broken", key="a/b"),
        kvio.InvalidKeyError("wrong", key=None),
        kvio.StorageFullError("full", errno=28, key="a", backend="hybrid"),
        kvio.StorageTimeoutError("late"),
        kvio.OutOfMemoryError("none", key="a", backend="hybrid", nbytes=1 << 40),
        kvio.ConfigError("option"),
        kvio.StoreClosedError("closed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: kvio.KvioError) -> None:
    """A pickled error comes back with its type, message and attributes."""
    other = pickle.loads(pickle.dumps(error))

    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_a_status_says_what_an_error_means() -> None:
    """Misses, taken keys, damage and deadlines have a status; every other error is ``failed``."""
    assert status_of(kvio.BlockNotFoundError("x", key="a")) == "missing"
    assert status_of(kvio.BlockExistsError("x", key="a")) == "exists"
    assert status_of(kvio.CorruptBlockError("x", key="a")) == "corrupt"
    assert status_of(kvio.StorageTimeoutError("x")) == "timeout"
    for other in (kvio.StorageFullError("x"), kvio.BlockSizeError("x"), kvio.ConfigError("x")):
        assert status_of(other) == "failed"


def test_a_cancellation_calls_the_one_who_asked_now_or_later() -> None:
    """Callbacks run once each, before or after the request they were given."""
    called: list[str] = []
    cancel = Cancellation()
    cancel.on_request(lambda: called.append("before"))
    assert called == []

    cancel.request()
    cancel.on_request(lambda: called.append("after"))

    assert cancel.requested
    assert called == ["before", "after"]


def test_units_are_what_they_say() -> None:
    """KiB, MiB and GiB are powers of 1024."""
    assert (types.KiB, types.MiB, types.GiB) == (1024, 1024**2, 1024**3)
