"""What the campaign does to a store, a shared file and a staging tier, each under one fault.

A bench repeats one operation: `calls` counts the system calls of an undisturbed run by site, and
`trial` runs it under a fault and finds out whether every promise was kept.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import kvio
from kvio._native import faults
from tests.faults.calls.fault_kinds import counted
from tests.posix import faultlab
from tests.posix.scenarios import NEW, OLD, SCENARIOS, Memory, Outcome, Scenario
from tests.posix.test_syscall_faults import KINDS, Bench, Fault, require
from tests.sharedfile import kills
from tests.sharedfile import test_faults as lives
from tests.sharedfile.kills import CASES, Case


class AnyBench(Protocol):
    """An operation that can be repeated under faults."""

    def calls(self) -> dict[str, int]:
        """Count an undisturbed run's calls by site."""

    def trial(self, fault: Fault | None) -> bool:
        """Run under a fault; whether it came to pass. Raises if a promise was broken."""

    def close(self) -> None:
        """Let go of everything."""


# Stores.


def _delete_batch(scenario: Scenario, store: kvio.Store) -> Outcome:
    results = store.delete_blocks(scenario.keys)
    return {result.key: result.error for result in results}


def _submit(scenario: Scenario, store: kvio.Store) -> Outcome:
    assert scenario.new is not None
    (key,) = scenario.keys
    try:
        store.submit_write(key, scenario.new).result(60)
    except kvio.KvioError as exc:
        return {key: exc}
    return {key: scenario.new}


def _in_time(scenario: Scenario, store: kvio.Store) -> Outcome:
    assert scenario.new is not None
    (key,) = scenario.keys
    try:
        store.write_block(key, scenario.new, if_exists="replace", timeout=60)
    except kvio.KvioError as exc:
        return {key: exc}
    return {key: scenario.new}


def _contains(scenario: Scenario, store: kvio.Store) -> Outcome:
    (key,) = scenario.keys
    try:
        if not store.contains(key):  # which is right for what looks like a truncated file
            return {key: kvio.CorruptBlockError("it is not there", key=key)}
    except kvio.KvioError as exc:
        return {key: exc}
    return {key: scenario.standing}


_BATCH: Final = ("k1", "k92", "k0")
#: Operations that the scenarios of the POSIX backend's own tests leave out.
MORE: Final = (
    Scenario("delete a batch", _delete_batch, keys=_BATCH, standing=OLD, new=None, deletes=True),
    Scenario(
        "delete a batch, durable",
        _delete_batch,
        options={"durability": "durable"},
        keys=_BATCH,
        standing=OLD,
        new=None,
        deletes=True,
    ),
    Scenario("submit a write", _submit, new=NEW),
    Scenario("replace in time", _in_time, standing=OLD),
    Scenario("contains", _contains, standing=OLD, new=None),
)
STORES: Final = (*SCENARIOS, *MORE)


# Shared files.


class FileBench:
    """The whole life of a shared file."""

    def __init__(self, case: Case, root: Path) -> None:
        self.case = case
        self.path = root / "f"
        for left in root.iterdir():  # by a life that broke its promises
            left.unlink()
        refusal = kills.need_direct(case, root)
        if refusal:
            raise kvio.UnsupportedError(refusal)

    def calls(self) -> dict[str, int]:
        """Count a life's calls by site."""
        seen = lives.seen_by(self.path, self.case)
        return {site: seen.get(site, 0) for site in faults.sites()}

    def trial(self, fault: Fault | None) -> bool:
        """Live with the fault; the shared files' own check, which wants it to come to pass."""
        if fault is None:
            return False
        before = faultlab.open_descriptors()
        given = lives.Fault(fault.site, fault.nth, fault.error, fault.times, fault.transfer)
        lives.try_with(given, self.path, self.case)
        require(lives.descriptors(before) == before, "a descriptor leaked")
        return True

    def close(self) -> None:
        """Nothing stays open between lives."""


# Staging.


class TierBench:
    """A block that is staged, stored behind the caller's back, and read back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = kvio.open_store("posix-tmpfile", root=root, io_threads=2)
        self.memory = Memory(self.store)
        self.tier = kvio.stage(self.store, capacity="1MiB", retries=0, drain_threads=1)
        self.write(NEW)

    def write(self, data: bytes) -> kvio.StagedReceipt:
        """Stage a block that does not stand yet and wait until it is stored, or is not."""
        self.memory.put_back()
        faultlab.file_of(self.root, "k").unlink(missing_ok=True)
        receipt = self.tier.write_block("k", data)
        try:
            receipt.wait(timeout=60)
        except kvio.KvioError:
            assert receipt.error is not None
        return receipt

    def calls(self) -> dict[str, int]:
        """Count the calls of a drain by site."""
        with counted() as seen:
            assert self.write(NEW).error is None
            return seen()

    def trial(self, fault: Fault | None) -> bool:
        """Stage under a fault: truth of the receipt, bytes kept until they are stored."""
        if fault is None:
            return False
        before = len(faultlab.open_descriptors())
        with faults.inject(
            fault.site, nth=fault.nth, times=fault.times, error=fault.error, transfer=fault.transfer
        ) as armed:
            receipt = self.write(NEW)
            fired = bool(armed.seen[faults.sites()[fault.site]] >= fault.nth)
        self._check(receipt, fault)
        require(len(faultlab.open_descriptors()) == before, "a descriptor leaked")
        require(self.tier.stats().used_bytes == 0, "staging memory leaked")
        require(not faultlab.temporaries(self.root), "a temporary was left")
        return fired

    def _check(self, receipt: kvio.StagedReceipt, fault: Fault) -> None:
        stored = faultlab.peek(self.root, receipt.key)
        if receipt.error is None:
            require(stored == NEW, "a receipt, but the block is not what was written")
            return
        number = getattr(receipt.error, "errno", None)
        require(fault.error != errno.EINTR, "an interrupted call is not repeated")
        if fault.transfer is None:
            right = number == fault.error and type(receipt.error) is KINDS[fault.error]
            require(right, f"not the right error: {receipt.error!r}")
        require(stored in (None, NEW), "a torn block")
        require(bytes(self.tier.read_block(receipt.key)) == NEW, "staged bytes were lost")
        for again in self.tier.retry_failed():
            again.wait(timeout=60)
        require(faultlab.peek(self.root, receipt.key) == NEW, "retried it is not stored")

    def close(self) -> None:
        """Close tier and store."""
        self.tier.close(timeout=60)
        self.store.close()


def all_benches() -> Iterator[tuple[str, Callable[[Path], AnyBench]]]:
    """Name every bench of the campaign, and say how it is made in an empty directory."""
    for scenario in STORES:
        yield scenario.name, lambda root, scenario=scenario: Bench(scenario, root)  # type: ignore[misc]
    for case in CASES:
        yield f"shared file, {case}", lambda root, case=case: FileBench(case, root)  # type: ignore[misc]
    yield "staging", TierBench


BENCHES: Final = dict(all_benches())
