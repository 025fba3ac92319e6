"""Slots of the threads of stores, tiers and shared files, as the kernel sees them."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest

import kvio
from kvio.core.executor import Executor
from kvio.placement import Placement, Slot, Topology, thread_placer
from tests.occupied import queue
from tests.posix import faultlab
from tests.staging.controlled import draining_with_all


def need_two_cpus() -> None:
    """Skip where every thread runs on the only CPU there is."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")


def masks(threads: Iterable[int]) -> list[tuple[int, ...]]:
    """Ask the kernel where threads may run."""
    return sorted(tuple(sorted(os.sched_getaffinity(thread))) for thread in threads)


def expected(threads: int) -> list[tuple[int, ...]]:
    """Return the CPUs of the slots of a pool that is spread over cores."""
    slots = Placement(order="spread").slots(Topology.from_system(), threads)
    return sorted(slot.cpus for slot in slots)


def threads_of(executor: Executor, threads: int) -> list[int]:
    """Make a pool start all of its threads, and return their ids: each waits for the others."""
    together = threading.Barrier(threads)

    def meet() -> int:
        together.wait(60)
        return threading.get_native_id()

    jobs = [queue(executor, meet, nbytes=0, read=True) for _ in range(threads)]
    return [job.future.result() for job in jobs]


def test_io_threads_of_a_store_run_on_their_slots(tmp_path: Path) -> None:
    """Each I/O thread has its slot's mask, and the caller keeps its own."""
    need_two_cpus()
    before = os.sched_getaffinity(0)
    wish = Placement(order="spread")
    with kvio.open_store("posix-tmpfile", root=tmp_path, io_threads=2, placement=wish) as store:
        assert masks(threads_of(store._calls.executor, 2)) == expected(2)
    assert os.sched_getaffinity(0) == before


def test_a_store_keeps_its_placement_across_pickling(tmp_path: Path) -> None:
    """What is opened anew from a pickle places its threads alike."""
    wish = Placement(map_by="numa", memory="local")
    with (
        kvio.open_store("posix-tmpfile", root=tmp_path, placement=wish) as store,
        pickle.loads(pickle.dumps(store)) as again,
    ):
        assert again._settings.placement == wish


def test_drain_threads_of_a_tier_run_on_their_slots() -> None:
    """Each drain thread has its slot's mask; what they drain arrives."""
    need_two_cpus()
    wish = Placement(order="spread")
    with draining_with_all(2, placement=wish) as drains:
        assert masks(drains) == expected(2)


def test_writers_of_a_shared_file_run_on_their_slots(tmp_path: Path) -> None:
    """The threads of submit_pwrite have their slots' masks."""
    need_two_cpus()
    wish = Placement(order="spread")
    with kvio.SharedFile.create(
        tmp_path / "f", 8192, durability="visible", io_threads=2, placement=wish
    ) as file:
        for offset in (0, 4096):
            file.submit_pwrite(bytes(4096), offset).result()
        executor = file._submitter._executor
        assert executor is not None
        assert masks(threads_of(executor, 2)) == expected(2)
        file.seal()


def test_a_placement_that_cannot_be_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    """A mistake shows where it was made, not in a thread, and leaves nothing open."""
    before = faultlab.open_descriptors()
    for wrong in ({"map_by": "cpu"}, {"near": "disk"}, {"memory": "mine"}):
        with pytest.raises(kvio.ConfigError):
            kvio.open_store("posix-tmpfile", root=tmp_path, placement=Placement(**wrong))  # type: ignore[arg-type]
    assert faultlab.open_descriptors() == before


def test_what_a_machine_withholds_is_warned_of_and_done_without() -> None:
    """Whoever asks is warned; a thread that cannot be placed goes on where it is."""

    class Gone(Placement):
        """A wish that names a CPU that is not there."""

        __slots__ = ()

        def slots(self, topology: Topology, n: int) -> tuple[Slot, ...]:
            assert topology.cpus
            return (Slot((100_000,), None),) * n

    before = os.sched_getaffinity(0)
    with pytest.warns(UserWarning, match="not placed as asked"):
        place = thread_placer(Gone(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place(0)
    assert os.sched_getaffinity(0) == before
