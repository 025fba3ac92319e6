"""A write that is given up goes on in a library while its caller reuses the memory."""

from __future__ import annotations

import threading
from typing import Any, Final

import pytest

import kvio
from kvio import MiB
from kvio.s3 import companions
from kvio.s3.conditions import RequestFailed
from kvio.s3.options import S3Options
from kvio.types import Cancellation
from kvio.url import Secret
from tests.posix.gate import wait_until_ended
from tests.s3.failing import PART_BYTES, PATIENT, look, open_faulty, stored
from tests.s3.faulty import FaultyServer
from tests.s3.libraries import LIBRARIES, require

KEY: Final = "slowtake/block"
#: Three parts, each of which takes over a second to be taken slowly.
DATA: Final = bytes(range(256)) * (11 * MiB // 256)
WAIT_S: Final = 0.7


def given_up(store: kvio.Store, timeout: float | None) -> list[threading.Thread]:
    """Begin a write, give it up, reuse its memory, and name the threads that are still in it."""
    memory = bytearray(DATA)
    with pytest.raises(kvio.StorageTimeoutError):
        store.write_block(KEY, memory, if_exists="replace", timeout=timeout)
    memory[:] = b"\xff" * len(memory)
    return [*store._calls.executor._quarantined, *companions._abandoned]


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_call_gave_up_is_whole_or_not_there(
    library: str, layout: str, faulty: FaultyServer
) -> None:
    """The object may come yet, but only with the bytes that were to be written."""
    options = {**PATIENT, "part_bytes": PART_BYTES, "layout": layout}
    with open_faulty(library, faulty, options) as store:
        wait_until_ended(given_up(store, WAIT_S))

        whole = stored(KEY, DATA) if layout == "block" else DATA
        assert look(faulty, KEY) in (None, whole)


def test_what_a_request_gave_up_is_whole_or_not_there(faulty: FaultyServer) -> None:
    """s3torchconnector's call cannot be ended, and is left behind."""
    options = {**PATIENT, "request_timeout_s": WAIT_S, "part_bytes": PART_BYTES, "layout": "plain"}
    with open_faulty("s3+torch", faulty, options) as store:
        left = given_up(store, None)
        wait_until_ended(left)

        assert left
        assert look(faulty, KEY) in (None, DATA)


class GivenUpMeanwhile:
    """The second half of a block; nobody waits any more when it is looked at."""

    def __init__(self, cancel: Cancellation) -> None:
        self._cancel = cancel

    def __len__(self) -> int:
        return PART_BYTES

    def __getitem__(self, _: slice) -> memoryview:
        self._cancel.request()
        return memoryview(b"\xff" * PART_BYTES)


def test_a_call_that_was_left_behind_publishes_nothing(faulty: FaultyServer) -> None:
    """It looks whether anybody waits after each part that it took from the caller's memory."""
    require("s3+torch")
    from kvio.backends import s3_torch

    endpoint, cancel = faulty.endpoint, Cancellation()
    options = S3Options(
        bucket="bucket",
        endpoint_url=endpoint.url,
        region=endpoint.region,
        access_key=Secret(endpoint.access_key),
        secret_key=Secret(endpoint.secret_key),
        part_bytes=PART_BYTES,
    )
    objects = s3_torch.TorchObjects(options)
    parts: Any = [memoryview(bytes(PART_BYTES)), GivenUpMeanwhile(cancel)]
    with pytest.raises(RequestFailed, match="was cancelled"):
        objects.put(
            "k", parts, crc32c=None, if_none_match=False, run_all=lambda _: [], cancel=cancel
        )

    assert faulty.get("bucket", "k") is None


def test_who_is_left_behind_is_told_before_its_caller_goes_on() -> None:
    """By then nothing that it takes from the caller's memory counts."""
    gate, cancel = threading.Event(), Cancellation()
    with pytest.raises(RequestFailed):
        companions.DetachableThreads(0.01).run(lambda: gate.wait(60), cancel)
    told = cancel.requested
    gate.set()

    assert told
