"""A network file system is on the node of the device it goes through, where that can be known."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvio.placement import Topology
from tests.placement import trees
from tests.placement.trees import Shape, link, mount, network, pci, put


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a machine with a network device on each of its two nodes."""
    root = trees.build(tmp_path, Shape(sockets=2))
    network(root, "eth0", "0000:11:00.0", 0)
    network(root, "eth1", "0000:12:00.0", 1)
    put(root, "/sys/devices/virtual/net/lo/operstate", "unknown\n")
    link(root, "/sys/class/net/lo", "/sys/devices/virtual/net/lo")
    return root


def nodes_of(root: Path) -> tuple[int, ...]:
    return Topology.from_system(root).locate("path:/mnt/kv").nodes


def _hex(address: str) -> str:
    """Write an address as the kernel does: in the machine's own byte order."""
    return f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}"


def route(root: Path, *lines: tuple[str, str, str, int, int]) -> None:
    """Write the routing table: device, target, mask, flags, metric."""
    text = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
    for name, target, mask, flags, metric in lines:
        fields = (name, _hex(target), _hex("0.0.0.0"), f"{flags:04X}", "0", "0", str(metric))
        text += "\t".join((*fields, _hex(mask), "0", "0", "0")) + "\n"
    put(root, "/proc/net/route", text)


def nfs(root: Path, *, address: str = "10.0.5.7", options: str = "rw,vers=4.2") -> None:
    mount(root, "0:70", "/mnt", "nfs4", "srv:/export", options=f"{options},addr={address}")


@pytest.mark.parametrize(
    ("address", "node"), [("10.0.5.7", 1), ("10.0.6.7", 0), ("192.168.1.1", 0), ("10.0.5.99", 0)]
)
def test_it_is_the_device_of_the_most_exact_route(two: Path, address: str, node: int) -> None:
    """A host route before a network's, that before the default; of equals the smaller metric."""
    route(
        two,
        ("eth0", "0.0.0.0", "0.0.0.0", 3, 100),
        ("eth1", "0.0.0.0", "0.0.0.0", 3, 200),
        ("eth1", "10.0.5.0", "255.255.255.0", 1, 0),
        ("eth0", "10.0.5.99", "255.255.255.255", 5, 0),
        ("eth1", "192.168.1.0", "255.255.255.0", 0x201, 0),
        ("eth1", "10.0.6.0", "255.255.255.0", 0, 0),
    )
    nfs(two, address=address)

    assert nodes_of(two) == (node,)


@pytest.mark.parametrize("kind", ["nfs", "lustre", "ceph", "cifs"])
def test_the_server_may_be_named_in_the_source(two: Path, kind: str) -> None:
    """Lustre and Ceph list addresses there."""
    route(two, ("eth1", "10.0.0.0", "255.0.0.0", 1, 0))
    source = {"lustre": "10.0.5.7@tcp:/fs", "ceph": "10.0.5.7:6789,10.0.5.8:/"}.get(
        kind, "10.0.5.7:/x"
    )
    mount(two, "0:70", "/mnt", kind, source)

    assert nodes_of(two) == (1,)


def test_a_bond_is_on_the_nodes_of_all_its_devices(two: Path) -> None:
    """Through a VLAN on top of it."""
    bond = "/sys/devices/virtual/net/bond0"
    for index in range(2):
        device = f"/sys/devices/pci0000:00/0000:00:01.0/0000:1{index + 1}:00.0/net/eth{index}"
        link(two, f"{bond}/lower_eth{index}", device)
    link(two, "/sys/devices/virtual/net/vlan7/lower_bond0", bond)
    link(two, "/sys/class/net/vlan7", "/sys/devices/virtual/net/vlan7")
    route(two, ("vlan7", "10.0.0.0", "255.0.0.0", 1, 0))
    nfs(two)

    assert nodes_of(two) == (0, 1)


@pytest.mark.parametrize("address", ["10.0.5.7", "fd00::7", "256.1.1.1"])
def test_without_a_route_it_is_unknown_which_of_two_nodes(two: Path, address: str) -> None:
    """Nothing is guessed, and the reason names what it may be."""
    nfs(two, address=address)
    location = Topology.from_system(two).locate("path:/mnt/kv")

    assert location.nodes == ()
    assert "eth0 (node 0), eth1 (node 1); which of them is unknown" in location.why


def test_without_a_route_it_is_the_node_that_all_devices_are_on(two: Path) -> None:
    """Those that are down carry nothing."""
    put(two, "/sys/class/net/eth0/operstate", "down\n")
    nfs(two)

    assert nodes_of(two) == (1,)


def test_a_server_on_this_machine_has_no_device(two: Path) -> None:
    """The loopback device is no hardware."""
    route(two, ("lo", "127.0.0.0", "255.0.0.0", 1, 0))
    nfs(two, address="127.0.0.1")

    assert nodes_of(two) == ()


@pytest.mark.parametrize(("second", "expected"), [(1, (1,)), (0, ()), (-1, ())])
def test_over_rdma_it_is_the_node_that_all_rdma_devices_are_on(
    two: Path, second: int, expected: tuple[int, ...]
) -> None:
    """Which of several is used is unknown."""
    for index, node in enumerate((1, second)):
        device = pci(two, f"0000:2{index}:00.0", node)
        put(two, f"{device}/infiniband/mlx5_{index}/node_type", "1: CA\n")
        link(two, f"/sys/class/infiniband/mlx5_{index}", f"{device}/infiniband/mlx5_{index}")
    route(two, ("eth0", "0.0.0.0", "0.0.0.0", 3, 0))
    nfs(two, options="rw,proto=rdma")

    assert nodes_of(two) == expected


def test_lustre_over_infiniband_goes_by_rdma(two: Path) -> None:
    """As its network's name says."""
    device = pci(two, "0000:20:00.0", 1)
    put(two, f"{device}/infiniband/mlx5_0/node_type", "1: CA\n")
    link(two, "/sys/class/infiniband/mlx5_0", f"{device}/infiniband/mlx5_0")
    mount(two, "0:70", "/mnt", "lustre", "10.0.5.7@o2ib:10.0.5.8@o2ib:/fs")

    assert nodes_of(two) == (1,)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.text(), st.text(alphabet="0123456789ABCDEFx \t\neth")))
def test_no_routing_table_can_crash_it(two: Path, text: str) -> None:
    """Lines that are not whole are ignored."""
    if not (two / "proc/self/mountinfo").exists():
        nfs(two)
    put(two, "/proc/net/route", f"header\n{text.encode('utf-8', 'replace').decode()}")

    assert nodes_of(two) in ((), (0,), (1,))
