"""Every system call of every operation fails in every way, one at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

import kvio
from kvio._native import faults
from kvio.filesystem.descriptors import SHARED
from tests.posix import faultlab
from tests.posix.scenarios import SCENARIOS, Memory, Outcome, Scenario

ERRORS = (
    errno.EPERM,  # -1, which a comparison that is off by one lets pass
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EINTR,
    errno.EAGAIN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.EROFS,
    errno.EACCES,
    errno.EOPNOTSUPP,
)
#: For operations whose every system call another scenario makes as well.
FEW_ERRORS = (errno.EIO, errno.ENOSPC, errno.EOPNOTSUPP)
FOR_EVER = 1 << 20
#: What a receipt that says durable rests on.
SYNCS = ("fdatasync", "fsync_dir")
TRANSFERS = (1, faults.HALF, 0)
KINDS: dict[int, type[kvio.KvioError]] = {
    errno.EIO: kvio.StorageError,
    errno.ENOSPC: kvio.StorageFullError,
    errno.EDQUOT: kvio.StorageFullError,
    errno.EAGAIN: kvio.TransientStorageError,
    errno.ENOMEM: kvio.OutOfMemoryError,
    errno.EMFILE: kvio.TransientStorageError,
    errno.EPERM: kvio.AccessDeniedError,
    errno.EROFS: kvio.AccessDeniedError,
    errno.EACCES: kvio.AccessDeniedError,
    errno.EOPNOTSUPP: kvio.StorageError,
}
#: What the kernel says of a removed directory, if one cannot find out that it is removed.
REMOVED = (errno.ENOENT, errno.EPERM, errno.ESTALE)
#: A short direct write is misaligned, which the kernel refuses; a write of nothing is an EIO.
BY_TRANSFER = (errno.EINVAL, errno.EIO)


#: By scenario, the sites that a run passes through; filled as the scenarios run.
REACHED: dict[str, set[str]] = {}


class Fault(NamedTuple):
    """One way for one call to fail."""

    site: str
    nth: int
    error: int
    transfer: int | None = None
    times: int = 1

    def __str__(self) -> str:
        if self.transfer is not None:
            how = {faults.HALF: "half", 0: "nothing", 1: "one byte"}[self.transfer]
        else:
            how = errno.errorcode[self.error] + (" for ever" if self.times > 1 else "")
        return f"{self.site} call {self.nth}: {how}"


class BrokenPromiseError(Exception):
    """What a trial found; collected, so that one does not hide the others."""


def require(condition: bool, otherwise: str) -> None:  # noqa: FBT001  # an assertion
    """Stop a trial."""
    if not condition:
        raise BrokenPromiseError(otherwise)


def syncs_owed(
    scenario: Scenario, needed: Mapping[str, int], reported: Mapping[str, object]
) -> dict[str, int]:
    """Return how many calls of each of `SYNCS` must have succeeded for what is asked to be stored.

    *needed*: calls without a fault. *reported*: by key, None or the error; a key that failed owes
    no sync of its file, nor of a directory that holds no other; deletions sync one each.
    """

    def home(key: str) -> str:
        return (
            key
            if scenario.deletes
            else str(faultlab.file_of(Path(), key, layout=scenario.layout).parent)
        )

    good = [key for key, error in reported.items() if not isinstance(error, Exception)]
    if not good:
        return dict.fromkeys(SYNCS, 0)
    homes = len({home(key) for key in reported}) - len({home(key) for key in good})
    return {
        "fdatasync": needed["fdatasync"] - (len(reported) - len(good)),
        "fsync_dir": needed["fsync_dir"] - homes,
    }


class Bench:
    """A store in which one scenario is repeated under one fault after another."""

    def __init__(self, scenario: Scenario, root: Path) -> None:
        self.scenario = scenario
        self.root = root
        self.store = scenario.open(root)
        self.memory = Memory(self.store)
        self.engine = faultlab.engine_of(self.store)
        self.pool = faultlab.CountingPool(self.engine.bounce)
        self.engine.bounce = self.pool
        self.dead = faultlab.dead_pid()
        self.trial(None)
        self.needed = self.calls()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def succeeds(self) -> Outcome:
        """Run once without a fault."""
        outcome = self.scenario.run(self.store)
        failed = [error for error in outcome.values() if isinstance(error, Exception)]
        assert not failed, f"fails without a fault: {failed}"
        return outcome

    def calls(self) -> dict[str, int]:
        """Count the operation's calls by site, without those of the look at what it left."""
        self.prepare()
        with faults.inject("read", nth=1 << 30) as fault:
            self.succeeds()
            return {name: fault.seen[number] for name, number in faults.sites().items()}

    def prepare(self) -> None:
        """Arrange; the same directories are open before a run and after it."""
        self.arrange()
        if self.scenario.vanished or self.scenario.fresh:
            self.scenario.run(self.store)
            self.arrange()

    def arrange(self) -> None:
        """Start from the same state, whatever the trial before has done."""
        self.memory.put_back(expects=self.scenario.expected)
        self.scenario.arrange(self.root, self.store)

    def trial(self, fault: Fault | None) -> bool:
        """Run once; True if the fault came to pass. Asserts all that must hold after it."""
        if fault is None:
            self.arrange()
            self.check_contents(self.succeeds())
            return False
        self.prepare()
        before = self.descriptors()
        with faults.inject(
            fault.site,
            nth=fault.nth,
            times=fault.times,
            error=fault.error,
            transfer=fault.transfer,
        ) as armed:
            outcome = self.scenario.run(self.store)
            made = {name: int(armed.seen[number]) for name, number in faults.sites().items()}
        self.check_errors(outcome, fault)
        self.check_syncs(outcome, fault, made)
        self.check_contents(outcome)
        self.check_leaks(fault, before)
        self.once_more()
        return made[fault.site] >= fault.nth

    def once_more(self) -> None:
        """The same without a fault succeeds, whatever the fault has left."""
        if self.scenario.deletes:
            self.arrange()
        for key, promised in self.scenario.run(self.store).items():
            failed = isinstance(promised, Exception)
            taken = isinstance(promised, kvio.BlockExistsError)
            require(taken or not failed, f"the next operation fails too: {promised!r}")
            stored = faultlab.peek(self.root, key, layout=self.scenario.layout)
            goals = (
                (None,) if self.scenario.deletes else (self.scenario.new, self.scenario.standing)
            )
            require(stored in goals, f"after the next operation it holds {_words(stored)}")
            require(self.load(key) == stored, "after the next operation it cannot be read")

    def check_errors(self, outcome: Outcome, fault: Fault) -> None:
        """An error has the type of its errno and names its block."""
        for key, error in outcome.items():
            if not isinstance(error, kvio.KvioError):
                continue
            require(fault.error != errno.EINTR, f"an interrupted call is not repeated: {error!r}")
            if isinstance(error, kvio.CorruptBlockError) and fault.transfer == 0:
                continue  # nothing left to read is what a truncated file looks like
            number = getattr(error, "errno", 0)
            if fault.transfer is not None:
                right = number in BY_TRANSFER
            elif fault.site == "fstat" and self.scenario.vanished and number in REMOVED:
                right = True
            else:
                right = number == fault.error and type(error) is KINDS[number]
            right = right and isinstance(error, kvio.StorageError) and error.key == key
            require(right, f"not the right error: {error!r}")

    def check_syncs(self, outcome: Outcome, fault: Fault, made: Mapping[str, int]) -> None:
        """Success rests on as many syncs that succeeded as without a fault."""
        owed = syncs_owed(self.scenario, self.needed, outcome)
        for site in SYNCS:
            hits = min(fault.times, max(0, made[site] - fault.nth + 1))
            good = made[site] - (hits if site == fault.site else 0)
            lacks = f"success is reported, but of {owed[site]} calls of {site} {good} succeeded"
            require(good >= owed[site], lacks)

    def check_contents(self, outcome: Outcome) -> None:
        """The file system holds what was promised, and the store reads it."""
        for key, promised in outcome.items():
            stored = faultlab.peek(self.root, key, layout=self.scenario.layout)
            if isinstance(promised, Exception):
                allowed = stored in self.scenario.allowed_after_failure()
                require(allowed, f"after {promised!r} the key holds {_words(stored)}")
            else:
                require(stored == promised, f"success is reported, but it holds {_words(stored)}")
            require(self.load(key) == stored, "the store reads something else than what is there")

    def descriptors(self) -> int:
        """Count open files and directories, beside those that stores keep.

        Sockets are those of earlier tests, whose connections may end at any time.
        """
        files = [name for name in faultlab.open_descriptors().values() if name.startswith("/")]
        return len(files) - len(SHARED._kept)

    def load(self, key: str) -> bytes | None:
        """Read a block through the store."""
        try:
            return bytes(self.store.read_block(key))
        except kvio.BlockNotFoundError:
            return None

    def check_leaks(self, fault: Fault, descriptors: int) -> None:
        """No descriptor, buffer or temporary stays, but one that a sweep finds."""
        require(self.pool.out == 0, "a bounce buffer was not given back")
        leaked = self.descriptors() - descriptors
        require(leaked <= 0, f"{leaked} descriptors leaked")  # fewer: an earlier test's was closed
        for temporary in faultlab.temporaries(self.root):
            require(fault.site == "unlink", f"{temporary.name} was left behind")
            faultlab.of_writer(temporary, self.dead)
            require(bool(self.store.sweep()), "a sweep does not find what was left behind")
        require(not faultlab.temporaries(self.root), "the sweep left something behind")


def _words(content: bytes | None) -> str:
    return "nothing" if content is None else f"{len(content)} bytes"


def every_fault(calls: dict[str, int], errors: Sequence[int]) -> Iterator[Fault]:
    """Fail every call that an undisturbed run makes, once, and from the first one on for ever."""
    for site, seen in calls.items():
        for nth in range(1, seen + 1):
            for error in errors:
                yield Fault(site, nth, error)
            if site in ("read", "write"):
                for transfer in TRANSFERS:
                    yield Fault(site, nth, 0, transfer)
        if seen:
            yield Fault(site, 1, errno.EIO, None, FOR_EVER)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root directory of our own."""
    path = tmp_path / "root"
    path.mkdir(mode=0o700)
    return path


def bench_for(scenario: Scenario, root: Path) -> Bench:
    """Open a scenario's store, or skip where the file system cannot do it."""
    try:
        return Bench(scenario, root)
    except kvio.UnsupportedError as exc:
        pytest.skip(f"the temporary directory's file system lacks it: {exc}")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_a_failing_call_costs_the_operation_at_most(
    scenario: Scenario, root: Path, record_property: Callable[[str, object], None]
) -> None:
    """The n-th call of any site may fail in any way: truth, typed errors, no leaks."""
    bench = bench_for(scenario, root)
    calls = bench.calls()
    REACHED[scenario.name] = {site for site, seen in calls.items() if seen}
    problems = []
    fired = tried = 0

    for fault in every_fault(calls, FEW_ERRORS if scenario.sampled else ERRORS):
        tried += 1
        try:
            fired += bench.trial(fault)
        except (BrokenPromiseError, AssertionError, kvio.KvioError, OSError) as exc:
            problems.append(f"{fault}: {str(exc) or exc!r:.200}")
            bench.close()
            for temporary in faultlab.temporaries(root):
                os.unlink(temporary)
            bench = Bench(scenario, root)
    bench.close()
    record_property("faults_fired", fired)
    print(f"{scenario.name}: {fired} faults fired")

    assert not problems, f"{len(problems)} of {fired} faults:\n" + "\n".join(problems)
    assert fired == tried >= 2 * len(FEW_ERRORS), f"{tried - fired} faults did not come to pass"


def test_the_scenarios_reach_every_system_call_site(tmp_path: Path) -> None:
    """No site of the C core is left out of the fault tests."""
    skipped = []
    for number, scenario in enumerate(SCENARIOS):
        if scenario.name in REACHED:
            continue
        root = tmp_path / str(number)
        root.mkdir(mode=0o700)
        try:
            bench = Bench(scenario, root)
        except kvio.UnsupportedError as exc:
            skipped.append(f"{scenario.name}: {exc}")
            continue
        with closing(bench):
            REACHED[scenario.name] = {site for site, seen in bench.calls().items() if seen}

    missed = set(faults.sites()).difference(*REACHED.values())
    if missed and skipped:
        pytest.skip(f"sites {sorted(missed)} need what this file system lacks: {skipped}")
    assert not missed


@pytest.mark.parametrize("times", [1, 2, 1 << 20], ids=["once", "twice", "for ever"])
def test_a_write_error_is_retried_once_on_a_fresh_inode(root: Path, times: int) -> None:
    """EIO on write: the bytes go to a new inode, once, and a second failure is reported."""
    with kvio.open_store("posix-tmpfile", root=root) as store:
        with faults.inject("write", error=errno.EIO, times=times) as fault:
            if times == 1:
                assert store.write_block("k", b"data").nbytes == 4
            else:
                with pytest.raises(kvio.StorageError) as caught:
                    store.write_block("k", b"data")
                assert caught.value.errno == errno.EIO
        opened = fault.seen[faults.sites()["open_temp"]]

    assert opened == 2
    assert faultlab.peek(root, "k") == (b"data" if times == 1 else None)


def test_no_temporary_is_named_without_random_bytes(root: Path) -> None:
    """If the kernel gives no random bytes, nothing is made under a name that others could guess."""
    with (
        kvio.open_store("posix-tmpfile", root=root, options={"publish": "rename"}) as store,
        faults.inject("random", error=errno.EIO, times=FOR_EVER) as fault,
        pytest.raises(kvio.StorageError) as caught,
    ):
        store.write_block("k", b"data")

    assert caught.value.errno == errno.EIO
    assert fault.seen[faults.sites()["open_temp"]] == 0


def test_a_fault_that_lasts_fails_every_block_of_a_batch_alone(root: Path) -> None:
    """A full device fails each block with its own error; when it recovers, the rest is stored."""
    items = [(f"k{i}", faultlab.pattern(i, 3000)) for i in range(20)]
    with (
        kvio.open_store("posix-tmpfile", root=root) as store,
        faults.inject("write", nth=6, times=5, error=errno.ENOSPC),
    ):
        results = store.write_blocks(items)

    status = [result.status for result in results]
    assert status == ["ok"] * 5 + ["failed"] * 5 + ["ok"] * 10
    assert all(
        isinstance(result.error, kvio.StorageFullError) and result.error.key == result.key
        for result in results[5:10]
    )
    stored = [faultlab.peek(root, key) for key, _ in items]
    assert stored == [None if 5 <= i < 10 else data for i, (_, data) in enumerate(items)]
