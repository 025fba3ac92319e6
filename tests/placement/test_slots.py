"""Slots on machines that everyone knows, written out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import kvio
from kvio.placement import Placement, Slot, Topology
from tests.placement import trees
from tests.placement.trees import Shape, mapped, mount, nvme, put


def on(machines: Mapping[str, Path], name: str) -> Topology:
    return Topology.from_system(machines[name])


def cpus(slots: tuple[Slot, ...]) -> list[tuple[int, ...]]:
    return [slot.cpus for slot in slots]


def nodes(slots: tuple[Slot, ...]) -> list[int | None]:
    return [slot.node for slot in slots]


class TestUnits:
    """What a slot is bound to, in which order. Two sockets have CPUs 0-3 and 4-7."""

    @pytest.mark.parametrize(
        ("map_by", "order", "n", "expected"),
        [
            ("core", "pack", 6, [0, 1, 2, 3, 4, 5]),
            ("core", "spread", 6, [0, 4, 1, 5, 2, 6]),
            ("socket", "pack", 6, [0, 0, 0, 0, 4, 4]),
            ("socket", "spread", 5, [0, 4, 0, 4, 0]),
            ("numa", "pack", 10, [0, 0, 0, 0, 4, 4, 4, 4, 0, 0]),
        ],
    )
    def test_pack_fills_a_unit_and_spread_deals_in_turn(
        self, machines: Mapping[str, Path], map_by: Any, order: Any, n: int, expected: list[int]
    ) -> None:
        """By the first CPU of each slot."""
        wish = Placement(map_by=map_by, order=order)
        slots = wish.slots(on(machines, "two sockets"), n)

        assert [slot.cpus[0] for slot in slots] == expected
        assert {len(slot.cpus) for slot in slots} == {1 if map_by == "core" else 4}

    @pytest.mark.parametrize(
        ("map_by", "expected"),
        [
            ("core", [(0,), (8,), (4,), (12,), (2,), (10,), (6,), (14,), (1,)]),
            ("l3", [(0, 1), (8, 9), (4, 5), (12, 13), (2, 3)]),
            ("numa", [(0, 1, 2, 3), (8, 9, 10, 11), (4, 5, 6, 7)]),
            ("socket", [(0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15)]),
        ],
    )
    def test_spread_goes_as_far_as_it_can(
        self, map_by: Any, expected: list[tuple[int, ...]], tmp_path: Path
    ) -> None:
        """Sockets in turn, then their nodes, then the caches of these."""
        shape = Shape(sockets=2, nodes=2, caches=2, cores=2)
        topology = Topology.from_system(trees.build(tmp_path, shape))
        slots = Placement(map_by=map_by, order="spread").slots(topology, len(expected))

        assert cpus(slots) == expected

    def test_siblings_are_one_core(self, machines: Mapping[str, Path]) -> None:
        """A slot has both; a second slot gets the next core."""
        slots = Placement().slots(on(machines, "SMT siblings"), 7)

        assert cpus(slots) == [(0, 6), (1, 7), (2, 8), (3, 9), (4, 10), (5, 11), (0, 6)]

    def test_a_cpuset_bounds_the_slots(self, machines: Mapping[str, Path]) -> None:
        """What is left of each unit is taken; CPUs 5 and 13 are one core."""
        topology = on(machines, "a cpuset subset")

        assert cpus(Placement(map_by="numa", order="spread").slots(topology, 4)) == [
            (1,),
            (5, 6, 13),
            (5, 6, 13),
            (1,),
        ]
        assert cpus(Placement().slots(topology, 4)) == [(1,), (5, 13), (6,), (1,)]

    def test_an_offline_node_has_no_slot(self, machines: Mapping[str, Path]) -> None:
        """Nodes 0 and 2 of three."""
        slots = Placement(map_by="numa", order="spread", memory="bind").slots(
            on(machines, "an offline node"), 3
        )

        assert slots == (Slot((0, 1), 0), Slot((4, 5), 2), Slot((0, 1), 0))

    def test_where_nothing_is_reported_all_cpus_are_one_unit(self, tmp_path: Path) -> None:
        """Of an unknown package, node and cache; its node is unknown, not 0."""
        put(tmp_path, f"{trees.CPU}/online", "0-3\n")
        topology = Topology.from_system(tmp_path)
        for map_by in ("l3", "numa", "socket"):
            wish = Placement(map_by=map_by, memory="local")

            assert wish.slots(topology, 1) == (Slot((0, 1, 2, 3), None),)


class TestMemory:
    """The memory node of a slot: near to its CPUs, with memory, allowed, or None."""

    @pytest.mark.parametrize("memory", ["local", "bind"])
    def test_it_is_the_node_of_the_cpus(self, machines: Mapping[str, Path], memory: Any) -> None:
        """Where that has memory."""
        wish = Placement(order="spread", memory=memory)

        assert nodes(wish.slots(on(machines, "two sockets"), 4)) == [0, 1, 0, 1]

    @pytest.mark.parametrize("memory", [None, "interleave"])
    def test_it_is_none_where_no_one_node_is_asked_for(
        self, machines: Mapping[str, Path], memory: Any
    ) -> None:
        """Unasked, or over all nodes."""
        assert nodes(Placement(memory=memory).slots(on(machines, "two sockets"), 2)) == [None, None]

    def test_nodes_without_cpus_give_no_slot_and_no_memory(
        self, machines: Mapping[str, Path]
    ) -> None:
        """The memory of GPUs is not taken while the CPUs have their own."""
        wish = Placement(map_by="numa", order="spread", memory="local")

        assert wish.slots(on(machines, "memory nodes without CPUs"), 2) == (
            Slot(tuple(range(8)), 0),
            Slot(tuple(range(8)), 0),
        )

    def test_without_memory_of_its_own_it_is_the_nearest_that_has(
        self, machines: Mapping[str, Path]
    ) -> None:
        """Also where the own is not allowed."""
        wish = Placement(map_by="numa", order="spread", memory="bind")

        assert nodes(wish.slots(on(machines, "a node without memory"), 2)) == [0, 0]
        assert nodes(wish.slots(on(machines, "a cpuset subset"), 2)) == [1, 1]

    def test_of_nodes_as_near_as_each_other_it_is_the_first(self, tmp_path: Path) -> None:
        """And a farther one is not taken, whatever its number."""
        shape = Shape(sockets=2, nodes=3, cores=1, memoryless=(0, 1, 5))
        topology = Topology.from_system(trees.build(tmp_path, shape))
        wish = Placement(map_by="numa", memory="local")

        assert nodes(wish.slots(topology, 6)) == [2, 2, 2, 3, 4, 3]

    def test_a_socket_of_several_nodes_has_no_one_memory_node(
        self, machines: Mapping[str, Path]
    ) -> None:
        """Its threads may be on any of them; nothing is guessed, and the advice is to map finer."""
        topology = on(machines, "four nodes a socket")
        wish = Placement(map_by="socket", memory="bind")

        assert nodes(wish.slots(topology, 1)) == [None]
        assert "being on nodes 0-3: map by numa, l3 or core" in wish.explain(topology, 1)

    def test_where_distances_are_not_reported_no_other_node_is_the_nearest(
        self, tmp_path: Path
    ) -> None:
        """Unless there is only one."""
        trees.build(tmp_path, Shape(sockets=3, cores=1, memoryless=(2,)))
        for node in range(3):
            (tmp_path / f"{trees.NODE}/node{node}/distance").unlink()
        wish = Placement(map_by="numa", memory="bind")

        assert nodes(wish.slots(Topology.from_system(tmp_path), 3)) == [0, 1, None]
        trees.allow(tmp_path, range(3), [1])
        assert nodes(wish.slots(Topology.from_system(tmp_path), 3)) == [1, 1, 1]


class TestNear:
    """Units in the order of their distance from a device."""

    @pytest.fixture
    def epyc(self, tmp_path: Path) -> Path:
        """Return eight nodes with a core each; a disk on node 6, one on 1, one of unknown node."""
        root = trees.build(tmp_path, Shape(sockets=2, nodes=4, cores=1))
        disks = [nvme(root, n, node, f"259:{n}") for n, node in enumerate((6, 1, -1))]
        for index, point in enumerate(("/six", "/one", "/unknown")):
            mount(root, f"259:{index}", point, "ext4", f"/dev/nvme{index}n1")
        mapped(root, "md0", "9:0", disks[:2])
        mount(root, "9:0", "/both", "ext4", "/dev/md0")
        return root

    @pytest.mark.parametrize("order", ["pack", "spread"])
    @pytest.mark.parametrize("map_by", ["core", "l3", "numa"])
    def test_nearest_first(self, epyc: Path, map_by: Any, order: Any) -> None:
        """The node, its socket, the other socket."""
        wish = Placement(map_by=map_by, order=order, near="path:/six/kv", memory="local")
        slots = wish.slots(Topology.from_system(epyc), 8)

        assert nodes(slots) == [6, 4, 5, 7, 0, 1, 2, 3]

    def test_sockets_by_their_nearest_node(self, epyc: Path) -> None:
        """The second socket comes first."""
        wish = Placement(map_by="socket", order="spread", near="path:/six")

        assert cpus(wish.slots(Topology.from_system(epyc), 2)) == [(4, 5, 6, 7), (0, 1, 2, 3)]

    def test_a_device_on_two_nodes_is_near_to_both(self, epyc: Path) -> None:
        """Both come before all others."""
        wish = Placement(map_by="numa", near="path:/both", memory="local")

        assert nodes(wish.slots(Topology.from_system(epyc), 4))[:2] == [1, 6]

    def test_near_a_device_of_unknown_node_is_as_if_not_asked_for(self, epyc: Path) -> None:
        """With the reason, and not as if it were node 0's."""
        topology = Topology.from_system(epyc)
        wish = Placement(map_by="numa", order="spread", near="path:/unknown")
        text = wish.explain(topology, 8)

        assert wish.slots(topology, 8) == Placement(map_by="numa", order="spread").slots(
            topology, 8
        )
        assert "nvme2n1 (node unknown)" in text
        assert "near is without effect" in text

    def test_units_of_unknown_distance_come_last(self, epyc: Path) -> None:
        """The device's own node is at 10, as ACPI has it, though its row is not reported."""
        (epyc / f"{trees.NODE}/node6/distance").unlink()
        wish = Placement(map_by="numa", near="path:/six", memory="local")

        assert nodes(wish.slots(Topology.from_system(epyc), 8)) == [6, 0, 1, 2, 3, 4, 5, 7]

    def test_a_device_by_memory_without_cpus_is_near_to_the_nearest_cpus(
        self, tmp_path: Path
    ) -> None:
        """As a GPU with memory of its own on a node of its own is."""
        root = trees.build(tmp_path, Shape(sockets=2, cores=1, bare_nodes=(2,)))
        put(root, f"{trees.NODE}/node2/distance", "80 40 10\n")
        nvme(root, 0, 2, "259:0")
        mount(root, "259:0", "/", "ext4", "/dev/nvme0n1")
        topology = Topology.from_system(root)
        wish = Placement(map_by="numa", near="path:/", memory="local")

        assert nodes(wish.slots(topology, 2)) == [1, 0]
        assert "node 2 has no CPU that may be used; the nearest that has is node 1" in wish.explain(
            topology, 2
        )


class TestMistakes:
    @pytest.mark.parametrize(
        ("options", "complaint"),
        [
            ({"map_by": "die"}, "map_by must be 'core', 'l3', 'numa' or 'socket', not 'die'"),
            ({"order": "scatter"}, "order must be 'pack' or 'spread', not 'scatter'"),
            ({"memory": "far"}, "memory must be 'local', 'bind' or 'interleave', not 'far'"),
            ({"near": "disk"}, "near must be 'path:…' or 'cuda:N', not 'disk'"),
            ({"near": "path:"}, "near must be 'path:…' or 'cuda:N', not 'path:'"),
        ],
    )
    def test_a_wish_that_cannot_be_names_the_choices(
        self, options: dict[str, Any], complaint: str
    ) -> None:
        """When it is made."""
        with pytest.raises(kvio.ConfigError) as caught:
            Placement(**options)

        assert str(caught.value) == complaint

    @pytest.mark.parametrize("n", [0, -1])
    def test_no_slots_are_refused(self, machines: Mapping[str, Path], n: int) -> None:
        """As are fewer."""
        with pytest.raises(kvio.ConfigError, match="at least 1"):
            Placement().slots(on(machines, "one node"), n)
