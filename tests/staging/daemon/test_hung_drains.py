"""Drains that hang and are abandoned: what they were given stays as it was until they end."""

from __future__ import annotations

import pytest

import kvio
from kvio import MiB
from kvio.staging.daemon.server import StageDaemon
from kvio.testing import payloads
from kvio.testing.fakes import WrappedStore
from tests.staging.controlled import LONG_S, ControlledBackend
from tests.staging.daemon.daemons import client_of, serving, until
from tests.staging.hung import Hung

PAGE = 4096


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what goes to the store go through 8 pages."""
    monkeypatch.setattr("kvio.staging.daemon.engine._RING_BYTES", 8 * PAGE)


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [8 * PAGE, 200], ids=["a block", "a group of small ones"])
def test_a_drain_that_hangs_sees_its_own_bytes(
    store: WrappedStore[ControlledBackend], nbytes: int
) -> None:
    """However many others are stored meanwhile, through a buffer no larger than one of them."""
    hung = Hung(store, "k", "l")
    with serving(store, MiB, timeout=1.0, retries=9) as daemon, client_of(store, daemon) as t:
        data = {key: payloads.payload(nbytes, seed) for seed, key in enumerate("kl")}
        t.pause()
        first = [t.write_block("k", data["k"])]
        if nbytes < PAGE:
            first.append(t.write_block("l", data["l"]))
        t.resume()
        for receipt in first:
            receipt.wait(timeout=LONG_S)
        for n in range(6):
            t.write_block(f"other-{n}", payloads.payload(nbytes, 9 + n)).wait(timeout=LONG_S)

        stuck = store.stats().quarantined_threads
        seen = {key: hung.sees(key) for key in hung.parts}
        hung.let_go()
        assert stuck >= 1
        assert seen == {key: data[key] for key in seen}
        assert "k" in seen
        until(lambda: _ring_is_free(daemon))


@pytest.mark.slow
def test_a_buffer_full_of_hung_calls_is_reported_in_words(
    store: WrappedStore[ControlledBackend],
) -> None:
    """The write that finds no room says what keeps it, and is stored when that has ended."""
    hung = Hung(store, "k", "l")
    with (
        serving(store, MiB, timeout=1.0, retries=0, drain_threads=1) as daemon,
        client_of(store, daemon) as tier,
    ):
        receipts = []
        for key in ("k", "l", "m"):
            receipts.append(tier.write_block(key, key.encode() * (8 * PAGE)))
            with pytest.raises(kvio.StorageTimeoutError) as late:
                receipts[-1].wait(timeout=LONG_S)
            if key != "m":
                continue
            assert f"{16 * PAGE} bytes are kept for abandoned calls" in str(late.value)
        hung.let_go()
        until(lambda: store.stats().quarantined_threads == 0)
        for receipt in tier.retry_failed():
            receipt.wait(timeout=LONG_S)

        assert [store.wrapper.peek(k) for k in "klm"] == [c * 8 * PAGE for c in (b"k", b"l", b"m")]


def _ring_is_free(daemon: StageDaemon) -> bool:
    with daemon.core.drains.ring.lend(0):
        return daemon.core.drains.ring.lent_bytes == 0
