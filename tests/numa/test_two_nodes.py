"""Placement on a machine with two memory nodes and a disk at the second, which QEMU makes.

It proves where things are, never how fast.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.numa.machine import Guest
from tests.numa.observations import ALL, BLOCK, PAGES

pytestmark = [pytest.mark.numa, pytest.mark.slow]


def test_the_machine_is_the_one_that_was_asked_for(guest: Guest) -> None:
    """Two nodes, twice as far from each other as from themselves, and the disk at node 1."""
    seen = guest["machine"]

    assert (seen["online"], seen["cpus"]) == ("0-1", ["0-1", "2-3"])
    assert seen["distances"] == ["10 21", "21 10"]
    assert seen["disk"] == "1"
    assert "/pci0000:80/" in seen["disk_at"]
    assert seen["block"] == "a block"


def test_everything_was_observed(guest: Guest) -> None:
    """No observation failed, and none was left out."""
    assert guest.errors == {}
    assert set(guest.facts) == {observe.__name__ for observe in ALL}, guest.console[-6000:]


def test_the_topology_is_the_machine(guest: Guest) -> None:
    """Nodes, their CPUs, their memory and their distance are those that QEMU was given."""
    seen = guest["topology"]

    assert seen["nodes"] == seen["memory_nodes"] == [0, 1]
    assert seen["distances"] == [10, 21]
    assert seen["cpus"] == [0, 1, 2, 3]
    assert seen["numa"] == [[0, [0, 1]], [1, [2, 3]]]
    assert seen["packages"] == [[0, 1], [2, 3]]
    assert seen["remarks"] == []


def test_a_path_has_the_node_of_its_disk(guest: Guest) -> None:
    """A file, its folder, one yet to come, the partition and the disk below are at node 1."""
    seen = guest["paths"]

    assert {path: node for path, node in seen.items() if node is not None} == dict.fromkeys(
        (BLOCK, "/disk", "/disk/none/yet", "/dev/nvme0n1p1", "/dev/nvme0n1"), 1
    )


def test_what_is_in_memory_is_at_no_node(guest: Guest) -> None:
    """Unknown is not node 0."""
    seen = guest["paths"]

    assert (seen["/"], seen["/proc"]) == (None, None)


def test_slots_near_the_disk_are_at_its_node(guest: Guest) -> None:
    """Without the wish they begin at node 0; with it, CPUs and memory are those of node 1."""
    seen = guest["slots"]

    assert seen["anywhere"] == [[[0], 0], [[1], 0]]
    assert seen["near"] == [[[2], 1], [[3], 1]]
    assert seen["near_by_node"] == [[[2, 3], 1]] * 2
    assert "nvme0n1 (node 1)" in seen["why"]


def test_slots_are_spread_over_sockets(guest: Guest) -> None:
    """Each socket gets one, with its own memory; interleaved memory is of no node."""
    seen = guest["slots"]

    assert seen["spread"] == [[[0, 1], 0], [[2, 3], 1]]
    assert seen["interleave"] == [[[0], None], [[1], None]]


@pytest.mark.parametrize(
    ("case", "state", "pages"),
    [
        ("bind 1 from 0", ["0-1", ["bind:1"]], {"1": PAGES}),
        ("bind 0 from 1", ["2-3", ["bind:0"]], {"0": PAGES}),
        ("local 0", ["0-1", ["local"]], {"0": PAGES}),
        ("local 1", ["3", ["local"]], {"1": PAGES}),
    ],
)
def test_a_threads_new_pages_are_where_it_was_reported(
    guest: Guest, case: str, state: object, pages: dict[str, int]
) -> None:
    """Mask, policy and the node of every page, as move_pages and the list of mappings report it."""
    seen = guest["threads_memory"][case]

    assert seen["state"] == state
    assert seen["asked"] == seen["mapped"] == pages
    assert seen["outcome"]["policy"] == state[1][0]  # type: ignore[index]
    assert seen["outcome"]["degraded"] is None
    assert seen["verified"] == {"ok": True, "misplaced": [], "unknown": []}


def test_a_threads_interleaved_pages_are_on_both_nodes(guest: Guest) -> None:
    """Neither node has much more than half: other pages of the thread take turns with these."""
    seen = guest["threads_memory"]["interleave"]

    assert seen["state"] == ["2", ["interleave:0-1"]]
    assert seen["asked"] == seen["mapped"]
    assert sum(seen["mapped"].values()) == PAGES
    assert min(seen["mapped"].get(node, 0) for node in "01") >= PAGES // 4
    assert seen["verified"]["ok"]


def test_memory_has_its_policy_the_one_who_touches_it(guest: Guest) -> None:
    """Half of it was touched from each node, and all of it is on the node it was bound to."""
    seen = guest["placed_memory"]["bind"]

    assert seen["pages"] == [1] * PAGES
    assert seen["mapped"] == {"1": PAGES}


def test_interleaved_memory_alternates(guest: Guest) -> None:
    """Page by page, and it is the page's place that decides, not who touches it."""
    seen = guest["placed_memory"]["interleave"]

    assert set(seen["pages"]) == {0, 1}
    assert all(one != other for one, other in pairwise(seen["pages"]))
    assert seen["mapped"] == {"0": PAGES // 2, "1": PAGES // 2}


def test_a_buffer_of_kvio_is_on_the_node_of_its_thread(guest: Guest) -> None:
    """A buffer that a bound thread takes and fills is on that node, all of it."""
    assert guest["buffers"] == {"0": {"0": 256}, "1": {"1": 256}}


def test_the_page_cache_is_on_the_node_of_the_writer(guest: Guest) -> None:
    """What a bound thread writes through the page cache lies there on its node, all of it."""
    assert guest["page_cache"] == {"0": {"0": PAGES}, "1": {"1": PAGES}}


def test_pages_that_are_elsewhere_are_found(guest: Guest) -> None:
    """Memory on the wrong node, or not spread, is distinguished from memory in place."""
    bound, spread, in_place = guest["misplaced_memory"]["seen"]

    assert bound["misplaced"] == [f"buffer 0: {PAGES} of {PAGES} pages are on node 0, not on 1"]
    assert spread["misplaced"] == [f"buffer 0: none of {PAGES} pages is on node 1"]
    assert in_place == {"ok": True, "misplaced": [], "unknown": []}
    assert guest["misplaced_memory"]["pages"] == [{"0": PAGES}] * 3


def test_mask_and_policy_come_back(guest: Guest) -> None:
    """After a block, and after an exception, a thread has its own again; the main one always."""
    seen = guest["restored"]

    assert seen["inside"] == ["3", ["interleave:0-1"]]
    assert seen["inside_too"] == ["0", ["bind:1"]]
    assert seen["before"] == seen["after"] == seen["after_error"] == ["1-2", ["bind:0"]]
    assert seen["main"] == seen["main_after"] == ["0-3", ["default"]]


def test_threads_are_verified_from_outside(guest: Guest) -> None:
    """Four threads spread over the nodes are each in their slot, and in no other."""
    seen = guest["other_threads"]

    assert seen["masks"] == [[0], [2], [1], [3]]
    assert seen["ok"] == [True] * 4
    assert seen["swapped"] == [False] * 4


def test_a_processor_that_is_off_is_done_without(guest: Guest) -> None:
    """A slot that has another too is degraded, one that has no other is refused."""
    seen = guest["offline"]

    assert seen["topology"] == {"cpus": [0, 1, 2], "memory_nodes": [0, 1]}
    assert (seen["some"]["cpus"], seen["some"]["policy"]) == ([2], "bind:1")
    assert seen["some"]["degraded"] == "CPUs 3 are offline or outside this process's cpuset"
    assert seen["none"]["why"].startswith("this process may run on none of the CPUs 3;")
    assert seen["none"]["as_before"]


def test_a_cpuset_is_not_left(guest: Guest) -> None:
    """In a container of CPUs 1-2 and node 0 slots are cut to it, or refused if nothing is left."""
    seen = guest["cpuset"]

    assert seen["topology"] == {"cpus": [1, 2], "memory_nodes": [0]}
    assert (seen["some"]["cpus"], seen["some"]["policy"]) == ([2], "bind:0")
    assert seen["some"]["degraded"] == "CPUs 3 are offline or outside this process's cpuset"
    assert seen["spread"]["outcome"]["policy"] == "interleave:0"
    assert seen["spread"]["mapped"] == {"0": PAGES}
    assert seen["spread"]["verified"]["ok"], "node 1 is missed where it is not allowed"
    assert "none of the CPUs 0;" in seen["no_cpu"]["why"]
    assert seen["no_node"]["why"] == "memory='bind': none for this process on nodes 1"
    assert seen["no_cpu"]["as_before"]
    assert seen["no_node"]["as_before"]
