"""Files, readers and blocks of one tier in one hand: every call ends, and every byte is right."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvio
from kvio.staging import StagedFile
from kvio.testing import payloads
from tests.staging.controlled import LONG_S, open_controlled, staged
from tests.staging.engines import local
from tests.staging.files import CAPACITY

_KEYS = st.integers(0, 2)
_SIZES = st.one_of(st.integers(0, 70_000), st.sampled_from([4_096, 8_192, 40_960, CAPACITY]))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), _KEYS, _SIZES),
            st.tuples(st.sampled_from(["close", "abort", "read", "done"]), _KEYS, st.just(0)),
            st.tuples(st.just("block"), _KEYS, _SIZES),
        ),
        max_size=40,
    ),
    st.sampled_from(["block", "raise", "pass_through"]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_order_of_calls_ends_where_nothing_can_go_on(
    tmp_path: Path, steps: list[tuple[str, int, int]], when_full: str
) -> None:
    """One thread has files, readers and blocks in hand, so whatever waits for it waits for ever."""
    model: dict[str, bytes] = {}
    files: dict[str, tuple[StagedFile, bytearray]] = {}
    readers: dict[str, tuple[io.BufferedReader, bytes]] = {}
    store = open_controlled()
    with (
        staged(store, CAPACITY, timeout=LONG_S, spool=tmp_path, when_full=when_full) as tier,
        contextlib.ExitStack() as at_end,
    ):
        for number, (verb, which, size) in enumerate(steps):
            key, data = f"k{which}", payloads.payload(size, number % 256)
            if verb == "append":
                if key not in files:
                    files[key] = (at_end.enter_context(tier.open(key, "wb")), bytearray())
                file, written = files[key]
                written += data
                file.write(data)
            elif verb == "block":
                with contextlib.suppress(kvio.StorageFullError):
                    tier.write_block(key, data)
                    model[key] = data
            elif verb in ("close", "abort") and key in files:
                file, written = files.pop(key)
                _end_of(file, verb, bytes(written), model)
            elif verb == "read" and key in model and key not in readers:
                readers[key] = (at_end.enter_context(tier.open(key, "rb")), model[key])
            elif verb == "done" and key in readers:
                reader, expected = readers.pop(key)
                assert _read_or_replaced(reader) in (expected, None)
                reader.close()
            assert tier.stats().used_bytes <= CAPACITY
        at_end.pop_all()
        for file, _ in files.values():
            file.abort()
        for reader, _ in readers.values():
            reader.close()
        tier.barrier(timeout=LONG_S)

        assert {key: store.wrapper.peek(key) for key in model} == model
        assert tier.stats().used_bytes == local(tier).ledger.allocator.open_bytes == 0


def _end_of(file: StagedFile, verb: str, written: bytes, model: dict[str, bytes]) -> None:
    if verb == "abort":
        file.abort()
        return
    with contextlib.suppress(kvio.StorageFullError):  # spilled, and nobody waits at close either
        file.close()
        model[file.key] = written


def _read_or_replaced(reader: io.BufferedReader) -> bytes | None:
    try:
        return reader.read()
    except kvio.TransientStorageError:
        return None
