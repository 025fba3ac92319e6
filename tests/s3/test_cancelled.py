"""An abandoned write continues in the library while its caller reuses the buffer."""

from __future__ import annotations

import threading
from typing import Any, Final

import pytest

import kvio
from kvio import MiB
from kvio.backends.s3 import timeouts as companions
from kvio.backends.s3.errors import RequestFailed
from kvio.backends.s3.options import S3Options
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
    """Start a write, abandon it, reuse its buffer, and return the threads still in it."""
    memory = bytearray(DATA)
    with pytest.raises(kvio.StorageTimeoutError):
        store.write_block(KEY, memory, if_exists="replace", timeout=timeout)
    memory[:] = b"\xff" * len(memory)
    return [*store._calls.executor._quarantined, *companions._abandoned]


@pytest.mark.parametrize("layout", ["block", "plain"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_an_abandoned_write_stores_the_whole_block_or_nothing(
    library: str, layout: str, faulty: FaultyServer
) -> None:
    """The object may appear later, but only with the intended bytes."""
    options = {**PATIENT, "part_bytes": PART_BYTES, "layout": layout}
    with open_faulty(library, faulty, options) as store:
        wait_until_ended(given_up(store, WAIT_S))

        whole = stored(KEY, DATA) if layout == "block" else DATA
        assert look(faulty, KEY) in (None, whole)


def test_a_request_that_timed_out_stores_the_whole_block_or_nothing(faulty: FaultyServer) -> None:
    """A call of s3torchconnector cannot be interrupted and is abandoned."""
    options = {**PATIENT, "request_timeout_s": WAIT_S, "part_bytes": PART_BYTES, "layout": "plain"}
    with open_faulty("s3+torch", faulty, options) as store:
        left = given_up(store, None)
        wait_until_ended(left)

        assert left
        assert look(faulty, KEY) in (None, DATA)


class GivenUpMeanwhile:
    """The second half of a block; reading it requests the cancellation."""

    def __init__(self, cancel: Cancellation) -> None:
        self._cancel = cancel

    def __len__(self) -> int:
        return PART_BYTES

    def __getitem__(self, _: slice) -> memoryview:
        self._cancel.request()
        return memoryview(b"\xff" * PART_BYTES)


def test_an_abandoned_call_publishes_nothing(faulty: FaultyServer) -> None:
    """After each part it checks for a cancellation."""
    require("s3+torch")
    from kvio.backends.s3 import torch as s3_torch

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


def test_an_abandoned_call_is_cancelled_before_its_caller_continues() -> None:
    """Bytes that it reads from the caller's buffer afterwards are not published."""
    gate, cancel = threading.Event(), Cancellation()
    with pytest.raises(RequestFailed):
        companions.DetachableThreads(0.01).run(lambda: gate.wait(60), cancel)
    reported = cancel.requested
    gate.set()

    assert reported
