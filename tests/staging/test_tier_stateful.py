"""Random games on a tier against a dictionary, with drains paused, held, failed and reordered."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvio
from kvio.testing.payloads import cut, payload
from kvio.types import IfExists
from tests.staging.controlled import LONG_S, SOON_S, disk_error, open_controlled

PAGE = 4096
CAPACITY = 24 * PAGE
_KEYS = ("a", "b", "c", "dir/a", "dir/b")

keys = st.sampled_from(_KEYS)
sizes = st.sampled_from((0, 1, 100, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 9 * PAGE + 7))
large = st.integers(CAPACITY + 1, 2 * CAPACITY)
seeds = st.integers(0, 50)
taken = st.sampled_from(("keep", "replace", "replace", "error"))


class TierMachine(RuleBasedStateMachine):
    """Random calls on one tier over a backend that holds, fails and reorders.

    The model has for each key every value that a read may give: one, but for a ``keep`` that a
    block of its length in the store may answer later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model: dict[str, set[bytes]] = {}
        self.receipts: list[kvio.StagedReceipt] = []
        self.early: list[str] = []
        self.durable = 0
        self.store = open_controlled(level="durable")
        self.backend = self.store.wrapper
        self.tier = kvio.stage(
            self.store, CAPACITY, drain_threads=3, retries=1, when_full="raise", high_water=0.8
        )

    def teardown(self) -> None:
        """Let everything end: then the backend has what the model has."""
        self.backend.forgive()
        self.backend.let_go()
        self.tier.resume()
        self.tier.retry_failed()
        with suppress(kvio.KvioError):  # failures that were fixed since, or superseded
            self.tier.barrier(timeout=LONG_S)
        self.tier.retry_failed()
        with suppress(kvio.BlockExistsError):  # a newer one is stored: told until discarded
            self.tier.barrier("durable", timeout=LONG_S)
        for receipt in self.tier.failed:
            assert isinstance(receipt.error, kvio.BlockExistsError)
            self.tier.discard(receipt)
        self.tier.barrier("durable", timeout=LONG_S)

        assert self.tier.durable_sequence == self.tier.stats().sequence
        assert self.tier.stats().used_bytes == 0
        assert all(receipt.done for receipt in self.receipts)
        for key in _KEYS:
            stored = self.backend.peek(key)
            assert stored in self.model.get(key, {None}), key
        self.tier.close(timeout=LONG_S)
        self.store.close(timeout=LONG_S)

    # Writing and deleting

    @rule(key=keys, nbytes=sizes, seed=seeds, if_exists=taken, cuts=st.lists(sizes, max_size=2))
    def write(self, key: str, nbytes: int, seed: int, if_exists: IfExists, cuts: list[int]) -> None:
        """Write one block; a full tier says so and changes nothing."""
        data = payload(nbytes, seed)
        if if_exists == "error" and key in self.model:
            with pytest.raises(kvio.BlockExistsError):
                self.tier.write_block(key, data, if_exists="error")
            return
        source = [bytearray(piece) for piece in cut(data, cuts)]
        try:
            receipt = self.tier.write_block(key, source, if_exists=if_exists)
        except kvio.StorageFullError:
            return
        for piece in source:
            piece[:] = bytes(len(piece))
        self._wrote(receipt, data, if_exists)

    @rule(key=keys, nbytes=large, seed=seeds, if_exists=taken)
    def write_through(self, key: str, nbytes: int, seed: int, if_exists: IfExists) -> None:
        """Write a block that no tier of this size could hold."""
        self._free()
        data = payload(nbytes, seed)
        if if_exists == "error" and key in self.model:
            with pytest.raises(kvio.BlockExistsError):
                self.tier.write_block(key, data, if_exists="error", timeout=LONG_S)
            return
        try:
            receipt = self.tier.write_block(key, data, if_exists=if_exists, timeout=LONG_S)
        except kvio.StorageError:  # the backend failed: what stood before still stands
            return
        assert receipt.done
        self._wrote(receipt, data, if_exists)

    def _wrote(self, receipt: kvio.StagedReceipt, data: bytes, if_exists: IfExists) -> None:
        key = receipt.key
        standing = self.model.get(key, set())
        maybe = {old for old in standing if if_exists == "keep" and len(old) == len(data)}
        self.model[key] = {data, *maybe}
        self.receipts.append(receipt)
        receipt.add_done_callback(self._reported)

    def _reported(self, receipt: kvio.StagedReceipt) -> None:
        if receipt.error is None and ("stored", receipt.key) not in self.backend.events:
            self.early.append(receipt.key)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        """Delete one block, wherever it is."""
        self._free()
        assert self.tier.delete_block(key, timeout=LONG_S) == (key in self.model)
        self.model.pop(key, None)

    def _free(self) -> None:
        """Let drains end, for which a call would wait: of a key, and of the group it is in."""
        self.backend.let_go()
        self.tier.resume()

    # Reading

    @rule(key=keys)
    def read(self, key: str) -> None:
        """Read one block."""
        if key in self.model:
            assert bytes(self.tier.read_block(key)) in self.model[key]
        else:
            with pytest.raises(kvio.BlockNotFoundError):
                self.tier.read_block(key)

    @rule(key=keys, offset=st.integers(0, 10 * PAGE), nbytes=st.integers(0, 10 * PAGE))
    def read_range(self, key: str, offset: int, nbytes: int) -> None:
        """Read a range, which may begin or end beyond the block."""
        values = self.model.get(key)
        if values is None:
            with pytest.raises(kvio.BlockNotFoundError):
                self.tier.read_block(key, offset=offset, nbytes=nbytes)
        elif offset > len(next(iter(values))):
            with pytest.raises(kvio.BlockSizeError):
                self.tier.read_block(key, offset=offset, nbytes=nbytes)
        else:
            view = bytes(self.tier.read_block(key, offset=offset, nbytes=nbytes))
            assert view in {value[offset : offset + nbytes] for value in values}

    @rule(wanted=st.lists(keys, max_size=6))
    def look(self, wanted: list[str]) -> None:
        """Look blocks up without reading them."""
        there = [key in self.model for key in wanted]
        assert [self.tier.contains(key) for key in wanted] == there
        assert self.tier.count_leading(wanted) == [*there, False].index(False)
        for key, present in zip(wanted, there, strict=True):
            assert self.tier.verify_block(key).ok == present
            if present:
                nbytes = self.tier.stat_block(key).nbytes
                assert nbytes in {len(value) for value in self.model[key]}

    @rule(wanted=st.lists(keys, max_size=6))
    def read_batch(self, wanted: list[str]) -> None:
        """Read a batch into buffers that are large enough."""
        outs = [bytearray(2 * CAPACITY) for _ in wanted]
        results = self.tier.read_blocks_into(list(zip(wanted, outs, strict=True)))
        for result, out in zip(results, outs, strict=True):
            if result.key in self.model:
                assert bytes(out[: result.nbytes]) in self.model[result.key]
            else:
                assert result.status == "missing"

    # What happens to drains

    @rule()
    def pause(self) -> None:
        """Begin no more drains."""
        self.tier.pause()

    @rule()
    def resume(self) -> None:
        """Drain again."""
        self.tier.resume()

    @rule(held=st.sets(keys, max_size=3))
    def hold(self, held: set[str]) -> None:
        """Let the store hang on some keys, so that others overtake them."""
        self.backend.hold(*held)

    @rule(key=keys)
    def let_go(self, key: str) -> None:
        """Let it go on with one."""
        self.backend.let_go(key)

    @rule(key=keys, times=st.integers(1, 3))
    def fail(self, key: str, times: int) -> None:
        """Let the next writes of a key fail."""
        self.backend.fail(key, disk_error(key), times=times)

    @rule()
    def retry(self) -> None:
        """Drive what has failed again."""
        self.tier.retry_failed()

    @rule()
    def discard(self) -> None:
        """Discard what has failed: the store's block, if any, is visible again."""
        for receipt in self.tier.failed:
            over = isinstance(receipt.error, kvio.BlockExistsError)  # nothing of it is staged
            if self.tier.discard(receipt) and not over:
                stored = self.backend.peek(receipt.key)
                self.model.pop(receipt.key)
                if stored is not None:
                    self.model[receipt.key] = {stored}

    @rule()
    def barrier(self) -> None:
        """Wait for all, or a moment; failures are reported."""
        with suppress(kvio.StorageError, kvio.BlockExistsError):
            self.tier.barrier(timeout=SOON_S)

    @rule(pages=st.integers(0, 12))
    def resize(self, pages: int) -> None:
        """Take pages out of use, and put twice as many back, as far as there are."""
        self.tier.shrink(pages * PAGE)
        self.tier.grow(2 * pages * PAGE)

    @invariant()
    def is_within_its_bounds(self) -> None:
        """Bytes never exceed the capacity, the sequence never falls, no receipt is early."""
        stats = self.tier.stats()
        assert stats.used_bytes <= CAPACITY
        assert self.durable <= stats.durable_sequence <= stats.sequence
        self.durable = stats.durable_sequence
        assert self.early == []
        assert self.backend.widest <= 1

    @invariant()
    def lists_what_is_there(self) -> None:
        """The keys listed are those of the model, each once."""
        assert sorted(self.tier.list_keys()) == sorted(self.model)
        assert sorted(self.tier.list_keys("dir/")) == sorted(
            key for key in self.model if key.startswith("dir/")
        )


TestTier = TierMachine.TestCase
TestTier.settings = settings(stateful_step_count=40)
