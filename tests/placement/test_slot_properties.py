"""What holds of slots on every machine, under every mask, for every wish."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvio
from kvio.placement import Placement, Slot, Topology
from tests.placement import trees
from tests.placement.trees import SHAPES, Shape, mapped, mount, nvme

pytestmark = pytest.mark.slow

#: What a wish may be near to; each machine has these mounts.
NEAR = (None, "path:/node0", "path:/node1", "path:/unknown", "path:/both", "path:/not/there")
NAMES = pytest.mark.parametrize("name", SHAPES)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return the root of each machine, with disks."""
    base = tmp_path_factory.mktemp("with-disks")
    return {name: _build(base / f"{n}", shape) for n, (name, shape) in enumerate(SHAPES.items())}


def _build(root: Path, shape: Shape) -> Path:
    trees.build(root, shape)
    disks = [nvme(root, index, node, f"259:{index}") for index, node in enumerate((0, 1, -1))]
    mapped(root, "dm-0", "254:0", disks[:2])
    points = ("/node0", "/node1", "/unknown")
    for index, point in enumerate(points):
        mount(root, f"259:{index}", point, "ext4", f"/dev/nvme{index}n1")
    mount(root, "254:0", "/both", "xfs", "/dev/mapper/both")
    return root


@contextmanager
def allowing(root: Path, cpus: set[int], mems: set[int]) -> Iterator[None]:
    """Let the process have less of a machine."""
    file = root / "proc/self/status"
    before = file.read_bytes()
    trees.allow(root, sorted(cpus), sorted(mems))
    try:
        yield
    finally:
        file.write_bytes(before)


#: Every property is tried on every machine, so that each may have fewer tries.
_EACH = settings(
    max_examples=settings().max_examples // 3,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
shapes = st.builds(
    Shape,
    sockets=st.integers(1, 3),
    nodes=st.integers(1, 3),
    caches=st.integers(1, 2),
    cores=st.integers(1, 3),
    threads=st.integers(1, 2),
    bare_nodes=st.sampled_from(((), (9,), (9, 12))),
    offline=st.sampled_from(((), (1,), (0, 2))),
    memoryless=st.sampled_from(((), (0,), (0, 1, 9))),
    numa=st.sampled_from((True, True, True, False)),
)
wishes = st.builds(
    Placement,
    map_by=st.sampled_from(("core", "l3", "numa", "socket")),
    order=st.sampled_from(("pack", "spread")),
    near=st.sampled_from(NEAR),
    memory=st.sampled_from((None, "local", "bind", "interleave")),
)
masks = st.sets(st.integers(0, 31), min_size=1)
mem_sets = st.sets(st.integers(0, 7))
counts = st.integers(1, 70)


def uses(topology: Topology, slots: tuple[Slot, ...]) -> dict[tuple[int, ...], tuple[int, int]]:
    """Return each unit's slots and cores, by its CPUs."""
    slots_of = Counter(slot.cpus for slot in slots)
    cores_of = {
        cpus: sum(set(core.cpus) <= set(cpus) for core in topology.cores) for cpus in slots_of
    }
    return {cpus: (slots_of[cpus], cores_of[cpus]) for cpus in slots_of}


@NAMES
@_EACH
@given(wish=wishes, n=counts, mask=masks, mems=mem_sets)
def test_slots_lie_within_what_the_process_may_use(
    roots: Mapping[str, Path], name: str, wish: Any, n: int, mask: set[int], mems: set[int]
) -> None:
    """CPUs that are online and allowed, at least one; nodes with memory that is allowed."""
    shape = SHAPES[name]
    with allowing(roots[name], mask, mems):
        try:
            topology = Topology.from_system(roots[name])
        except kvio.ConfigError:
            assert mask.isdisjoint(shape.online)
            return
        slots = wish.slots(topology, n)

    assert len(slots) == n
    having = set(shape.online_nodes) - set(shape.memoryless)
    for slot in slots:
        assert slot.cpus == tuple(sorted(set(slot.cpus)))
        assert slot.cpus
        assert set(slot.cpus) <= mask & set(shape.online)
        assert slot.node is None or slot.node in having & mems
    if wish.memory not in ("local", "bind"):
        assert {slot.node for slot in slots} == {None}


@NAMES
@_EACH
@given(wish=wishes, n=counts, mask=masks, seed=st.integers(0, 99))
def test_slots_do_not_depend_on_the_order_in_which_things_are_listed(
    roots: Mapping[str, Path], name: str, wish: Any, n: int, mask: set[int], seed: int
) -> None:
    """Read twice they are the same, and so with cores shuffled and nodes counted backwards."""
    mask |= {SHAPES[name].online[0]}
    with allowing(roots[name], mask, set(range(8))):
        topology = Topology.from_system(roots[name])
        again = Topology.from_system(roots[name])
    cores = list(topology.cores)
    random.Random(seed).shuffle(cores)
    backwards = replace(
        topology,
        cores=tuple(cores),
        nodes=topology.nodes[::-1],
        distances=tuple(row[::-1] for row in topology.distances[::-1]),
        memory_nodes=topology.memory_nodes[::-1],
    )

    assert wish.slots(topology, n) == wish.slots(again, n)
    assert wish.slots(topology, n) == wish.slots(backwards, n)
    assert wish.explain(topology, n) == wish.explain(again, n)


@NAMES
@_EACH
@given(wish=wishes, n=counts, mask=masks)
def test_slots_are_dealt_evenly(
    roots: Mapping[str, Path], name: str, wish: Any, n: int, mask: set[int]
) -> None:
    """No core has two slots more than another, whatever the order and however many there are.

    A unit's slots are spread over its cores by the kernel; as many for each unit as its cores make
    it. While there are fewer slots than units, spread gives none a second one; pack gives none to
    a unit before the one before it is full.
    """
    mask |= {SHAPES[name].online[0]}
    with allowing(roots[name], mask, set(range(8))):
        topology = Topology.from_system(roots[name])
    slots = wish.slots(topology, n)
    units = {slot.cpus: None for slot in wish.slots(topology, len(topology.cores))}
    rounds, rest = divmod(n, len(topology.cores))
    dealt = uses(topology, slots)

    assert sum(len(cpus) for cpus in units) == len(topology.cpus)
    for count, cores in dealt.values():
        assert rounds * cores <= count <= (rounds + (rest > 0)) * cores
    last = Counter(slot.cpus for slot in slots[n - rest :])
    if wish.order == "spread":
        cores_of = {cpus: sum(set(c.cpus) <= set(cpus) for c in topology.cores) for cpus in units}
        for one in units:
            for other in units:
                assert last[one] <= last[other] + 1 or last[other] == cores_of[other]
    else:
        assert sum(last[cpus] not in (0, dealt[cpus][1]) for cpus in last) <= 1
        assert (
            list(dict.fromkeys(slot.cpus for slot in slots[n - rest :])) == list(units)[: len(last)]
        )


@NAMES
@_EACH
@given(wish=wishes, n=counts, fewer=counts)
def test_more_slots_begin_as_fewer_do(
    roots: Mapping[str, Path], name: str, wish: Any, n: int, fewer: int
) -> None:
    """A thread that is added moves no other."""
    topology = Topology.from_system(roots[name])
    most, least = max(n, fewer), min(n, fewer)

    assert wish.slots(topology, most)[:least] == wish.slots(topology, least)


@given(shape=shapes, wish=wishes, n=counts)
def test_slots_of_any_machine_are_usable_and_even(
    tmp_path_factory: pytest.TempPathFactory, shape: Shape, wish: Any, n: int
) -> None:
    """Of machines that nobody made: what holds of the named ones holds of these."""
    if not shape.online:
        return
    root = _build(tmp_path_factory.mktemp("any"), shape)
    topology = Topology.from_system(root)
    shutil.rmtree(root)
    slots = wish.slots(topology, n)
    rounds, rest = divmod(n, len(topology.cores))

    assert topology.cpus == shape.usable
    assert {slot.node for slot in slots} <= {None, *shape.memory_nodes}
    for count, cores in uses(topology, slots).values():
        assert rounds * cores <= count <= (rounds + (rest > 0)) * cores


@NAMES
@_EACH
@given(wish=wishes)
def test_no_unit_comes_before_a_nearer_one(roots: Mapping[str, Path], name: str, wish: Any) -> None:
    """By the distances that the machine was built with."""
    shape, topology = SHAPES[name], Topology.from_system(roots[name])
    devices = {"path:/node0": (0,), "path:/node1": (1,), "path:/both": (0, 1)}.get(wish.near, ())
    if not shape.numa or not set(devices) <= set(shape.online_nodes):
        devices = ()
    slots = wish.slots(topology, len(topology.cores))
    order = list(dict.fromkeys(slot.cpus for slot in slots))
    distances = [
        min((shape.distance(at, shape.node_of(cpu)) for at in devices for cpu in cpus), default=0)
        for cpus in order
    ]

    assert distances == sorted(distances)
    if not devices and wish.near is not None:
        unasked = replace(wish, near=None)
        assert wish.slots(topology, 9) == unasked.slots(topology, 9)


@NAMES
@_EACH
@given(wish=wishes, n=counts, mask=masks, mems=mem_sets)
def test_explain_names_every_slot_and_is_lines_of_text(
    roots: Mapping[str, Path], name: str, wish: Any, n: int, mask: set[int], mems: set[int]
) -> None:
    """Each slot once, with its CPUs, and nothing raises on the way."""
    mask |= {SHAPES[name].online[0]}
    with allowing(roots[name], mask, mems):
        topology = Topology.from_system(roots[name])
        text = wish.explain(topology, n)
    named: list[int] = []
    for line in text.splitlines():
        what, _, rest = line.partition(": CPUs ")
        if rest and what.startswith("slot"):
            indices = kvio.placement.parse_cpulist(what.split(" ")[1])
            cpus = kvio.placement.parse_cpulist(rest.partition(" ")[0])
            named += indices
            assert {
                slot.cpus for slot in wish.slots(topology, n)[indices[0] : indices[-1] + 1]
            } == {cpus}

    assert named == list(range(n))
    assert text.startswith(f"{n} slot")
    assert "None" not in text
