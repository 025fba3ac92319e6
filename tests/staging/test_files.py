"""Files on a staging tier: staged as they are written, published when they are closed."""

from __future__ import annotations

import gc
import io
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvio
from kvio import _native
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.inside import wait_until_inside
from tests.staging.controlled import LONG_S, ControlledBackend, open_controlled, staged
from tests.staging.engines import local
from tests.staging.files import CAPACITY, PAGE, absolute, returned


@pytest.fixture
def store() -> WrappedStore[ControlledBackend]:
    """A store that claims to make blocks durable."""
    return open_controlled(level="durable")


@pytest.fixture
def tier(store: WrappedStore[ControlledBackend]) -> Iterator[kvio.StagingTier]:
    """A small tier before it, with nowhere to spill to."""
    with staged(store, CAPACITY, timeout=LONG_S) as tier:
        yield tier


@pytest.fixture
def spilling(store: WrappedStore[ControlledBackend], tmp_path: Path) -> Iterator[kvio.StagingTier]:
    """The same with a directory to spill to."""
    with staged(store, CAPACITY, timeout=LONG_S, spool=tmp_path) as tier:
        yield tier


# Publishing


def test_nothing_is_seen_of_a_file_before_it_is_closed(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """Neither by the tier nor by its store; then it is one block, with a receipt like any."""
    data = payloads.payload(30_000, 1)
    file = tier.open("dir/k", "wb")
    file.write(data)
    before = (tier.contains("dir/k"), list(tier.list_keys()), tier.stats().accepted, file.receipt)
    file.close()
    assert file.receipt is not None
    stored = file.receipt.wait(timeout=LONG_S)

    assert before == (False, [], 0, None)
    assert (stored.level, stored.nbytes) == ("durable", 30_000)
    assert file.receipt.checksum == _native.crc32c(data)
    assert store.wrapper.peek("dir/k") == data
    assert store.wrapper.order("begin") == ["dir/k"]


def test_bytes_are_in_staging_memory_as_soon_as_they_are_written(tier: kvio.StagingTier) -> None:
    """All but less than a window of them; the caller's buffer may be reused at once."""
    tier.pause()
    source = bytearray(payloads.payload(30_001, 2))
    expected = bytes(source)
    with tier.open("k", "wb") as file:
        for at in range(0, 30_001, 7_001):
            piece = memoryview(source)[at : at + 7_001]
            file.write(piece)
            piece[:] = bytes(len(piece))
        used = tier.stats().used_bytes

    assert 30_001 - 8 * kvio.KiB < used <= 30_001
    assert bytes(tier.read_block("k")) == expected
    assert tier.verify_block("k").ok


def test_every_byte_is_copied_into_staging_memory_once(
    tier: kvio.StagingTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large writes straight from the caller's memory, in whole pages, and never again at close."""
    tier.pause()
    filled: list[tuple[int, int]] = []
    fill = local(tier).memory.fill

    def noted(spans, parts, *, checksum):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        filled.append((sum(map(len, parts)), len(parts[-1])))
        return fill(spans, parts, checksum=checksum)

    monkeypatch.setattr(local(tier).memory, "fill", noted)
    data = payloads.payload(50_000, 3)
    with tier.open("k", "wb") as file:
        file.write(data[:100])
        file.write(data[100:])

    assert sum(nbytes for nbytes, _ in filled) == 50_000
    assert all(nbytes % PAGE == 0 for nbytes, _ in filled[:-1])
    assert filled[0] == (8192, 8092)
    assert bytes(tier.read_block("k")) == data


def test_a_file_left_by_an_exception_publishes_nothing(tier: kvio.StagingTier) -> None:
    """Its room is free again, and the older block of its key stands."""
    tier.write_block("k", b"older").wait(timeout=LONG_S)
    file = tier.open("k", "wb")
    with pytest.raises(ZeroDivisionError), file:
        file.write(bytes(file.write(bytes(40_000)) // 0))

    assert tier.stats().used_bytes == 0
    assert file.closed
    assert file.receipt is None
    assert bytes(tier.read_block("k")) == b"older"
    assert tier.stats().accepted == 1


def test_an_aborted_file_publishes_nothing_and_cannot_be_used(tier: kvio.StagingTier) -> None:
    """Closing it afterwards changes nothing."""
    file = tier.open("k", "wb")
    file.write(bytes(40_000))
    file.abort()
    file.close()
    file.abort()

    assert tier.stats().used_bytes == 0
    assert file.receipt is None
    assert not tier.contains("k")
    with pytest.raises(ValueError, match="closed"):
        file.write(b"more")


def test_a_dropped_file_publishes_nothing_and_says_so(tier: kvio.StagingTier) -> None:
    """A `ResourceWarning` names it, and its room is given back."""
    files = [tier.open("dropped/k", "wb")]
    files[0].write(bytes(40_000))
    with pytest.warns(ResourceWarning, match="'dropped/k' was dropped, not closed"):
        files.clear()
    gc.collect()
    returned(tier)

    assert tier.stats().used_bytes == 0
    assert not tier.contains("dropped/k")
    with tier.open("next", "wb") as file:
        file.write(bytes(CAPACITY))
    assert not file.spilled


def test_files_may_be_dropped_at_any_time(tier: kvio.StagingTier) -> None:
    """Garbage is collected wherever a thread is: here it has the lock of the tier."""
    tier.pause()
    tier.write_block("read", bytes(PAGE))
    file, reader = tier.open("k", "wb"), tier.open("read", "rb")
    file.write(bytes(40_000))
    with local(tier).ledger.lock, warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        del file, reader
        gc.collect()
    returned(tier)

    assert tier.stats().used_bytes == PAGE
    assert local(tier).ledger.allocator.open_bytes == 0


def test_the_file_of_a_key_that_is_closed_last_wins(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """As with writes: the order of closing counts, not that of opening or writing."""
    tier.pause()
    first, second = tier.open("k", "wb"), tier.open("k", "wb")
    first.write(b"first" * 4000)
    second.write(b"second" * 2000)
    second.close()
    between = bytes(tier.read_block("k"))
    first.close()
    tier.resume()
    tier.barrier(timeout=LONG_S)

    assert between == b"second" * 2000
    assert second.receipt is not None
    assert second.receipt.absorbed
    assert store.wrapper.peek("k") == b"first" * 4000


@pytest.mark.parametrize("nbytes", [10, 20_000])
def test_a_taken_key_is_refused_when_a_file_is_opened_or_closed(
    tier: kvio.StagingTier, nbytes: int
) -> None:
    """With ``if_exists="error"``; the room is given back and the other's block stands."""
    tier.pause()
    file = tier.open("k", "wb", if_exists="error")
    file.write(bytes(nbytes))
    tier.write_block("k", b"faster")
    with pytest.raises(kvio.BlockExistsError):
        tier.open("k", "wb", if_exists="error")
    with pytest.raises(kvio.BlockExistsError):
        file.close()

    assert file.closed
    assert file.receipt is None
    assert tier.stats().used_bytes == PAGE
    assert local(tier).ledger.allocator.open_bytes == 0
    assert bytes(tier.read_block("k")) == b"faster"


@pytest.mark.parametrize("nbytes", [10, 20_000])
def test_a_key_that_was_stored_meanwhile_is_refused_when_a_file_is_closed(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend], nbytes: int
) -> None:
    """With ``if_exists="error"``, before anything of the file is accepted."""
    file = tier.open("k", "wb", if_exists="error")
    file.write(bytes(nbytes))
    store.write_block("k", b"faster")
    with pytest.raises(kvio.BlockExistsError):
        file.close()

    assert file.receipt is None
    assert tier.stats().used_bytes == 0
    assert local(tier).ledger.allocator.open_bytes == 0
    assert store.wrapper.peek("k") == b"faster"


def test_the_end_waits_for_what_dropped_files_give_back(tier: kvio.StagingTier) -> None:
    """Their room is free when a tier has closed, and no thread of it runs."""
    events: SimpleQueue[str] = SimpleQueue()

    def end() -> None:
        local(tier).files.end()
        events.put("ended")

    def give_back() -> None:
        thread.start()
        wait_until_inside(thread, "join")
        events.put("given back")

    thread = threading.Thread(target=end)
    tier.open("k", "wb").abort()
    local(tier).files.later(give_back)

    assert events.get(timeout=LONG_S) == "given back"
    assert events.get(timeout=LONG_S) == "ended"


def test_room_that_cannot_be_given_back_is_warned_of(tier: kvio.StagingTier) -> None:
    """And the room of files that are dropped later is given back."""

    def fail() -> None:
        raise kvio.StorageError("the kernel refuses")

    def give_back() -> None:
        local(tier).files.later(fail)
        returned(tier)

    tier.open("k", "wb").abort()
    with pytest.warns(RuntimeWarning, match="not released: the kernel refuses"):
        give_back()


def test_a_staged_block_of_this_length_is_kept(tier: kvio.StagingTier) -> None:
    """With ``if_exists="keep"``, as for writes; the file's room is free."""
    tier.pause()
    tier.write_block("k", b"a" * 20_000)
    with tier.open("k", "wb", if_exists="keep") as file:
        file.write(b"b" * 20_000)

    assert file.receipt is not None
    assert bytes(tier.read_block("k")) == b"a" * 20_000
    assert tier.stats().kept == 1
    assert tier.stats().used_bytes == 5 * PAGE


# Positions


def test_a_header_can_be_patched_when_the_rest_is_written(
    tier: kvio.StagingTier, store: WrappedStore[ControlledBackend]
) -> None:
    """The checksum is that of the bytes as they are in the end."""
    data = bytearray(payloads.payload(50_000, 4))
    with tier.open("k", "wb") as file:
        file.write(data)
        file.seek(3)
        file.write(b"header")
        file.seek(-10, io.SEEK_END)
        file.write(b"end")
        file.seek(8190)  # over the edge of a piece
        file.write(b"edge")
    data[3:9], data[-10:-7], data[8190:8194] = b"header", b"end", b"edge"
    assert file.receipt is not None
    file.receipt.wait(timeout=LONG_S)

    assert file.receipt.checksum == _native.crc32c(data)
    assert store.wrapper.peek("k") == bytes(data)


_WRITES = st.tuples(
    st.just("write"),
    st.one_of(
        st.integers(0, 50), st.sampled_from([4096, 8191, 8192, 8193]), st.integers(0, 30_000)
    ),
    st.integers(0, 255),
)
_SEEKS = st.tuples(st.just("seek"), st.integers(-40_000, 90_000), st.sampled_from([0, 1, 2]))


@given(st.lists(st.one_of(_WRITES, _SEEKS), max_size=25), st.sampled_from([CAPACITY, 1 << 20]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_does_what_a_file_in_memory_does(
    tmp_path: Path, steps: list[tuple[str, int, int]], capacity: int
) -> None:
    """Against `io.BytesIO`: every answer, every refusal and every byte, staged or spilled."""
    model = io.BytesIO()
    store = open_controlled()
    with (
        staged(store, capacity, timeout=LONG_S, spool=tmp_path) as tier,
        tier.open("k", "wb") as file,
    ):
        for verb, size, how in steps:
            if verb == "write":
                data = payloads.payload(size, how)
                assert file.write(data) == model.write(data)
            elif absolute(model, size, how) < 0:
                with pytest.raises(ValueError, match="negative"):
                    file.seek(size, how)
            else:
                assert file.seek(size, how) == model.seek(absolute(model, size, how))
            assert file.tell() == model.tell()
            assert file.nbytes == len(model.getvalue())
            assert tier.stats().used_bytes <= capacity
        file.close()
        assert file.receipt is not None
        file.receipt.wait(timeout=LONG_S)
        expected = model.getvalue()

        assert file.receipt.checksum == _native.crc32c(expected)
        assert store.wrapper.peek("k") == expected
        assert tier.stats().used_bytes == 0
        assert local(tier).ledger.allocator.open_bytes == 0
    assert os.listdir(tmp_path) == []


def test_it_answers_what_programs_ask_a_file(tier: kvio.StagingTier) -> None:
    """It can be written and sought, has a name, and neither a descriptor nor anything to read."""
    with tier.open("dir/k", "wb") as file:
        assert (file.writable(), file.seekable(), file.readable()) == (True, True, False)
        assert (file.name, file.mode, file.isatty()) == ("dir/k", "wb", False)
        for refused in (file.fileno, file.read, file.truncate):
            with pytest.raises(io.UnsupportedOperation):
                refused()
        with pytest.raises(TypeError):
            file.write("text")
        with pytest.raises(ValueError, match="whence"):
            file.seek(0, 9)
        text = io.TextIOWrapper(file, "utf-8")
        text.write("grüße\n" * 3000)
        text.flush()
        text.detach()
        file.flush()
        file.writelines([b"a", b"b"])

    assert bytes(tier.read_block("dir/k")) == ("grüße\n" * 3000 + "ab").encode()
    with pytest.raises(kvio.ConfigError, match="mode"):
        tier.open("k", "r+b")  # type: ignore[call-overload]
    with pytest.raises(kvio.InvalidKeyError):
        tier.open("../k", "wb")


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, 8 * kvio.KiB, 8 * kvio.KiB + 1])
def test_files_of_any_length_are_blocks(tier: kvio.StagingTier, nbytes: int) -> None:
    """Nothing at all, less than a window, exactly one, and more."""
    with tier.open("k", "wb") as file:
        for byte in payloads.payload(nbytes, 9):
            file.write(bytes([byte]))
    tier.barrier(timeout=LONG_S)

    assert bytes(tier.read_block("k")) == payloads.payload(nbytes, 9)


@pytest.mark.parametrize("nbytes", [10, 20_000, 100_000])
def test_a_child_process_cannot_use_files_of_its_parent(
    store: WrappedStore[ControlledBackend], tmp_path: Path, nbytes: int
) -> None:
    """It is refused before it changes a byte, staged or spilled, and may drop them."""
    with staged(store, CAPACITY, timeout=LONG_S, spool=tmp_path) as tier:
        file = tier.open("k", "wb")
        file.write(bytes(nbytes))
        pid = os.fork()
        if not pid:
            refused = 0
            for call in (lambda: file.seek(0) or file.write(b"child"), file.close):
                try:
                    call()
                except kvio.UnsupportedError:
                    refused += 1
            os._exit(refused)
        _, status = os.waitpid(pid, 0)
        file.close()

        assert os.waitstatus_to_exitcode(status) == 2
        assert bytes(tier.read_block("k")) == bytes(nbytes)


def test_a_file_says_what_it_is(store: WrappedStore[ControlledBackend]) -> None:
    """Key, length and state; nothing of its bytes."""
    with staged(store) as tier:
        with tier.open("a/b", "wb") as file:
            file.write(b"secret")
            text = repr(file)
        assert text == "<kvio.StagedFile 'a/b' 6 bytes open>"
        assert repr(file) == "<kvio.StagedFile 'a/b' 6 bytes closed>"
