"""What explain() says can be acted on: it names what was found, what is missing and what helps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvio.placement import Placement, Topology
from tests.placement import trees
from tests.placement.trees import NODE, Shape, mount, nvme, put


def test_the_whole_text_of_a_plan_without_troubles(tmp_path: Path) -> None:
    """What was asked for, what is there, where the device is, and every slot."""
    root = trees.build(tmp_path, Shape(sockets=2, cores=2, threads=2))
    nvme(root, 0, 1, "259:0")
    mount(root, "259:0", "/mnt/kv", "ext4", "/dev/nvme0n1")
    wish = Placement(map_by="socket", near="path:/mnt/kv", memory="bind")

    assert wish.explain(Topology.from_system(root), 3).splitlines() == [
        "3 slots by socket, pack, near path:/mnt/kv, memory bind",
        "usable: 8 CPUs (0-7): 4 cores, 2 nodes, 2 sockets",
        "near: /mnt/kv (ext4): nvme0n1 (node 1)",
        "slots 0-1: CPUs 2-3,6-7 (socket 1, node 1, distance 10), memory of node 1",
        "slot 2: CPUs 0-1,4-5 (socket 0, node 0, distance 32), memory of node 0",
    ]


@pytest.mark.parametrize(
    ("name", "options", "n", "note"),
    [
        ("one node", {"map_by": "numa"}, 1, "near and far are the same here"),
        ("one node", {"order": "spread", "map_by": "socket"}, 2, "spread is the same as pack"),
        ("one node", {}, 9, "4 cores for 9 slots: up to 3 share a core"),
        ("a cpuset subset", {}, 1, "CPUs 0,2-4,7-12,14-15 are online and outside"),
        (
            "a cpuset subset",
            {"memory": "bind"},
            1,
            "node 0 is not a node whose memory may be taken",
        ),
        ("a node without memory", {"order": "spread", "memory": "local"}, 2, "nearest is node 0"),
        ("no NUMA in the kernel", {"map_by": "numa"}, 1, "the kernel reports no NUMA nodes"),
        ("no NUMA in the kernel", {"map_by": "numa"}, 1, "without a known node are grouped"),
        (
            "no NUMA in the kernel",
            {"memory": "bind"},
            1,
            "the kernel reports none that may be used",
        ),
        ("memory nodes without CPUs", {"memory": "interleave"}, 1, "nodes 1-3 have memory but no"),
        (
            "two sockets",
            {"near": "path:/nope"},
            1,
            "near is without effect, as that node is unknown",
        ),
        ("two sockets", {"near": "cuda:0"}, 1, "numactl --cpunodebind=NODE"),
    ],
)
def test_a_wish_that_is_not_met_has_a_note(
    machines: Mapping[str, Path], name: str, options: dict[str, Any], n: int, note: str
) -> None:
    """With what is to be known or done."""
    topology = Topology.from_system(machines[name])
    text = Placement(**options).explain(topology, n)

    assert any(note in line for line in text.splitlines() if line.startswith("note: ")), text


@pytest.mark.parametrize("name", ["two sockets", "four nodes a socket"])
def test_a_wish_that_is_met_has_none(machines: Mapping[str, Path], name: str) -> None:
    """Notes are for troubles alone."""
    topology = Topology.from_system(machines[name])
    wish = Placement(map_by="numa", order="spread", memory="bind")

    assert "note:" not in wish.explain(topology, 4)


def test_interleaved_memory_names_its_nodes(machines: Mapping[str, Path]) -> None:
    """Which no slot does."""
    text = Placement(memory="interleave").explain(Topology.from_system(machines["two sockets"]), 1)

    assert "memory: interleaved over nodes 0-1" in text.splitlines()


def test_what_was_not_understood_is_reported(tmp_path: Path) -> None:
    """With the file and what it says."""
    put(trees.build(tmp_path, Shape()), f"{NODE}/has_memory", "many")
    text = Placement().explain(Topology.from_system(tmp_path), 1)

    assert f"taken as unknown: /{NODE}/has_memory: 'many' is not a list such as 0-3,8" in text


def test_a_name_with_a_line_break_stays_in_its_line(tmp_path: Path) -> None:
    """Whoever mounts a disk chooses its name, and must not write lines of ours."""
    root = trees.build(tmp_path, Shape())
    nvme(root, 0, 0, "259:0")
    mount(root, "259:0", "/", "ext4", "/dev/nvme0n1")
    text = Placement(near="path:/a\nnote: all is well").explain(Topology.from_system(root), 1)

    assert not any(line.startswith("note: all is well") for line in text.splitlines())
    assert r"/a\nnote: all is well (ext4): nvme0n1 (node 0)" in text
