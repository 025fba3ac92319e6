"""The machine is read as the kernel reports it, within what the process may use."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvio
from kvio.placement import Topology
from tests.placement.trees import CPU, NODE, SHAPES, Shape, build, put

NAMES = pytest.mark.parametrize("name", SHAPES)


@NAMES
def test_usable_are_the_cpus_that_are_online_and_allowed(
    machines: Mapping[str, Path], name: str
) -> None:
    """No others, each in one core."""
    topology = Topology.from_system(machines[name])

    assert topology.cpus == SHAPES[name].usable
    assert topology.online == SHAPES[name].online


def _grouped(shape: Shape, number: Callable[[int], int]) -> set[tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for cpu in shape.usable:
        found.setdefault(number(cpu), []).append(cpu)
    return {tuple(cpus) for cpus in found.values()}


@NAMES
def test_groups_are_those_of_the_machine(machines: Mapping[str, Path], name: str) -> None:
    """Cores, caches, nodes and packages, each bounded by what is usable."""
    shape, topology = SHAPES[name], Topology.from_system(machines[name])

    assert {core.cpus for core in topology.cores} == _grouped(shape, shape.core_of)
    assert {group.cpus for group in topology.l3_groups} == _grouped(shape, shape.cache_of)
    assert {group.cpus for group in topology.packages} == _grouped(shape, shape.socket_of)
    if shape.numa:
        assert {group.cpus for group in topology.numa} == _grouped(shape, shape.node_of)
        assert all(core.node == shape.node_of(core.cpus[0]) for core in topology.cores)
    else:
        assert [(group.number, group.cpus) for group in topology.numa] == [(None, shape.usable)]


@NAMES
def test_memory_nodes_have_memory_and_are_allowed(machines: Mapping[str, Path], name: str) -> None:
    """Nodes without CPUs among them; offline nodes are none."""
    topology = Topology.from_system(machines[name])

    assert topology.nodes == SHAPES[name].online_nodes
    assert topology.memory_nodes == SHAPES[name].memory_nodes


@NAMES
def test_distances_are_between_the_nodes_that_are_online(
    machines: Mapping[str, Path], name: str
) -> None:
    """An offline node has no column in the kernel's rows."""
    shape, topology = SHAPES[name], Topology.from_system(machines[name])

    for one in shape.online_nodes:
        for other in shape.online_nodes:
            assert topology.distance(one, other) == shape.distance(one, other)
    assert topology.distance(0, 999) is None


def test_a_cache_that_two_nodes_share_is_two_groups_of_cores(tmp_path: Path) -> None:
    """As with sub-NUMA clustering, where the kernel counts one L3 to all nodes of a socket."""
    build(tmp_path, Shape(nodes=2, cores=2))
    for cpu in range(4):
        put(tmp_path, f"{CPU}/cpu{cpu}/cache/index1/shared_cpu_list", "0-3\n")
    topology = Topology.from_system(tmp_path)

    assert [(core.cpus, core.node, core.l3) for core in topology.cores] == [
        ((0,), 0, 0),
        ((1,), 0, 0),
        ((2,), 1, 0),
        ((3,), 1, 0),
    ]


def test_what_is_not_reported_is_unknown(tmp_path: Path) -> None:
    """A tree with nothing but CPUs: no package, cache or node, and never 0 in their place."""
    put(tmp_path, f"{CPU}/online", "0-1\n")
    put(tmp_path, "proc/self/status", "Cpus_allowed_list:\t0-7\n")
    topology = Topology.from_system(tmp_path)

    assert topology.cpus == (0, 1)
    assert [(c.cpus, c.l3, c.node, c.package) for c in topology.cores] == [
        ((0,), None, None, None),
        ((1,), None, None, None),
    ]
    assert (topology.nodes, topology.memory_nodes, topology.distances) == ((), (), ())


def test_minus_one_is_no_package(tmp_path: Path) -> None:
    """Some virtual machines say so."""
    build(tmp_path, Shape())
    put(tmp_path, f"{CPU}/cpu0/topology/physical_package_id", "-1\n")

    assert {core.cpus: core.package for core in Topology.from_system(tmp_path).cores}[(0,)] is None


def test_the_mask_of_the_thread_is_asked_before_that_of_the_process(tmp_path: Path) -> None:
    """A thread that was bound plans for where it may run."""
    build(tmp_path, Shape())
    put(tmp_path, "proc/thread-self/status", "Cpus_allowed_list:\t2\nMems_allowed_list:\t0\n")

    assert Topology.from_system(tmp_path).cpus == (2,)


def test_without_a_mask_all_that_is_online_is_taken_and_said_so(tmp_path: Path) -> None:
    """/proc may be hidden."""
    build(tmp_path, Shape())
    (tmp_path / "proc/self/status").unlink()
    topology = Topology.from_system(tmp_path)

    assert topology.cpus == (0, 1, 2, 3)
    assert "the mask of the thread: unknown" in topology.remarks[0]


def test_without_a_list_of_online_cpus_the_mask_is_taken_and_said_so(tmp_path: Path) -> None:
    """/sys may be hidden."""
    build(tmp_path, Shape(allowed=(1, 2)))
    (tmp_path / f"{CPU}/online").unlink()
    topology = Topology.from_system(tmp_path)

    assert topology.cpus == (1, 2)
    assert "which CPUs are online: unknown" in topology.remarks[0]


def test_a_machine_without_usable_cpus_is_refused(tmp_path: Path) -> None:
    """Nothing there at all, or nothing both online and allowed."""
    with pytest.raises(kvio.ConfigError, match="no CPUs are listed"):
        Topology.from_system(tmp_path)
    build(tmp_path, Shape(allowed=(64,)))
    with pytest.raises(kvio.ConfigError, match="online are 0-3, allowed 64"):
        Topology.from_system(tmp_path)


@pytest.mark.parametrize("path", [f"{CPU}/online", "proc/self/status"])
def test_lists_that_bound_the_cpus_must_be_lists(tmp_path: Path, path: str) -> None:
    """What is usable is never guessed."""
    build(tmp_path, Shape())
    put(tmp_path, path, "Cpus_allowed_list:\t0-x\n" if "status" in path else "0-x\n")

    with pytest.raises(kvio.ConfigError, match="is not a list such as 0-3,8"):
        Topology.from_system(tmp_path)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (f"{NODE}/online", "0,x\n"),
        (f"{NODE}/has_memory", "oops"),
        (f"{NODE}/node1/cpulist", "4-1\n"),
        (f"{NODE}/node0/distance", "10\n"),
        (f"{NODE}/node0/distance", "10 -1\n"),
        (f"{NODE}/node0/distance", "10 300\n"),
        (f"{CPU}/cpu1/topology/thread_siblings_list", "\0"),
        (f"{CPU}/cpu1/cache/index1/shared_cpu_list", "0-99999999\n"),
    ],
)
def test_other_nonsense_is_taken_as_unknown_and_reported(
    tmp_path: Path, path: str, text: str
) -> None:
    """The CPUs stay what they are."""
    build(tmp_path, Shape(sockets=2))
    put(tmp_path, path, text)
    topology = Topology.from_system(tmp_path)

    assert topology.cpus == tuple(range(8))
    assert any(path in remark for remark in topology.remarks)


_READ = [
    *(f"{CPU}/online", f"{NODE}/online", f"{NODE}/has_memory", f"{NODE}/node1/cpulist"),
    *(f"{NODE}/node0/distance", f"{CPU}/cpu1/topology/thread_siblings_list"),
    *(f"{CPU}/cpu2/topology/physical_package_id", f"{CPU}/cpu3/cache/index1/level"),
    *(f"{CPU}/cpu3/cache/index1/shared_cpu_list", "proc/self/status"),
]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(_READ),
    content=st.one_of(
        st.binary(max_size=80), st.text(alphabet="0123456789-,\n\t :x").map(str.encode)
    ),
)
def test_no_file_of_the_kernel_can_crash_it(tmp_path: Path, path: str, content: bytes) -> None:
    """Whatever a file says, there is a topology of the machine's CPUs, or `ConfigError`."""
    if not (tmp_path / "sys").exists():
        build(tmp_path, Shape(sockets=2))
    file = tmp_path / path
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        topology = Topology.from_system(tmp_path)
    except kvio.ConfigError:
        return
    finally:
        file.write_bytes(before)

    assert topology.cpus
    assert len(set(topology.cpus)) == sum(len(core.cpus) for core in topology.cores)
    assert set(topology.memory_nodes) <= set(topology.nodes)


def test_a_file_without_end_is_cut(tmp_path: Path) -> None:
    """And a directory in a file's place is as if it were missing."""
    build(tmp_path, Shape())
    os.remove(tmp_path / f"{NODE}/has_memory")
    os.symlink("/dev/zero", tmp_path / f"{NODE}/has_memory")
    os.remove(tmp_path / f"{NODE}/node0/distance")
    os.mkdir(tmp_path / f"{NODE}/node0/distance")
    topology = Topology.from_system(tmp_path)

    assert topology.memory_nodes == ()
    assert topology.distances == ((),)


@NAMES
def test_a_topology_is_a_value(machines: Mapping[str, Path], name: str) -> None:
    """Read twice it is equal, it can be a key, and it can go to another process."""
    one, other = (Topology.from_system(machines[name]) for _ in range(2))

    assert one == other
    assert len({one, other}) == 1
    assert pickle.loads(pickle.dumps(one)) == one


def test_this_machine_has_the_cpus_that_the_kernel_gives_this_thread() -> None:
    """Asked by the system call."""
    topology = Topology.from_system()

    assert set(topology.cpus) == os.sched_getaffinity(0)


def test_a_bound_thread_sees_its_own_cpus_alone() -> None:
    """The mask is that of the calling thread."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        bound = Topology.from_system()
    finally:
        os.sched_setaffinity(0, before)

    assert bound.cpus == (min(before),)
