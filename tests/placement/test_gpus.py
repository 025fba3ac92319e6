"""A CUDA number means a GPU only where that is reported, and its node is that GPU's."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvio
from kvio.placement import Location, Topology
from kvio.placement.devices import address_by
from tests.placement import trees
from tests.placement.trees import Shape, link, pci, put

BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def gpus(root: Path, *nodes: int) -> Path:
    """Add GPUs in the order of their addresses."""
    for index, node in enumerate(nodes):
        address = f"0000:{index + 0x1A:02x}:00.0"
        link(root, f"/sys/bus/pci/drivers/nvidia/{address}", pci(root, address, node))
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{index}abc-7\nDevice Minor: \t {index}\n"
        put(root, f"/proc/driver/nvidia/gpus/{address}/information", text)
    return root


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return trees.build(tmp_path, Shape(sockets=2))


def locate(root: Path, index: int, **environment: str) -> Location:
    return Topology.from_system(root, environment=environment).locate(f"cuda:{index}")


@pytest.mark.parametrize(("index", "node"), [(0, 1), (1, 0), (2, 1)])
def test_by_bus_order_a_number_is_an_address(two: Path, index: int, node: int) -> None:
    """Where CUDA is asked to number so."""
    gpus(two, 1, 0, 1)
    topology = Topology.from_system(two, environment=BY_BUS)

    assert topology.node_of_cuda(index) == node
    assert topology.locate(f"cuda:{index}").why == (
        f"cuda:{index}: 0000:{index + 0x1A:02x}:00.0 (node {node})"
    )


def test_in_other_order_gpus_on_several_nodes_are_unknown(two: Path) -> None:
    """CUDA numbers the fastest first; the reason says what would help."""
    location = locate(gpus(two, 1, 0), 0)

    assert location.nodes == ()
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in location.why


def test_in_any_order_gpus_on_one_node_are_there(two: Path) -> None:
    """Whichever it is."""
    assert locate(gpus(two, 1, 1), 0).nodes == (1,)


def test_one_gpu_of_unknown_node_makes_the_others_unknown(two: Path) -> None:
    """It may be the one; -1 is not 0."""
    assert locate(gpus(two, 0, -1), 0).nodes == ()
    assert locate(two, 0, **BY_BUS).nodes == (0,)
    assert locate(two, 1, **BY_BUS).nodes == ()


@pytest.mark.parametrize(
    ("visible", "index", "nodes"),
    [
        ("2,0", 0, (1,)),
        ("2,0", 1, (0,)),
        ("1", 0, (0,)),
        ("9", 0, ()),
        ("2,-1,0", 1, ()),
        ("", 0, ()),
    ],
)
def test_visible_devices_are_numbered_anew(
    two: Path, visible: str, index: int, nodes: tuple[int, ...]
) -> None:
    """As CUDA does: what comes after an entry that names nothing is hidden."""
    root = gpus(two, 0, 0, 1)

    assert locate(root, index, CUDA_VISIBLE_DEVICES=visible, **BY_BUS).nodes == nodes


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [("GPU-1abc-7", (1,)), ("GPU-1", (1,)), ("GPU-", ()), ("GPU-9", ()), ("MIG-x", ())],
)
def test_a_uuid_names_a_gpu_in_any_order(two: Path, visible: str, nodes: tuple[int, ...]) -> None:
    """Whole or as far as it is the only one."""
    assert locate(gpus(two, 0, 1), 0, CUDA_VISIBLE_DEVICES=visible).nodes == nodes


def test_a_number_beyond_the_gpus_is_no_device(two: Path) -> None:
    """Even where all are on one node."""
    location = locate(gpus(two, 1, 1), 2)

    assert location.nodes == ()
    assert "no such device (2 GPUs)" in location.why


def test_a_container_has_the_gpus_that_its_driver_lists(two: Path) -> None:
    """The directories of the bus are those of the host."""
    gpus(two, 0, 1)
    shutil.rmtree(two / "proc/driver/nvidia/gpus/0000:1a:00.0")

    assert locate(two, 0).nodes == (1,)


def test_without_the_drivers_list_those_bound_to_it_count(two: Path) -> None:
    """Other entries of that directory are no devices."""
    gpus(two, 1)
    shutil.rmtree(two / "proc/driver")
    put(two, "/sys/bus/pci/drivers/nvidia/uevent", "")

    assert locate(two, 0).nodes == (1,)


def test_without_a_driver_it_is_unknown(two: Path) -> None:
    """With the reason."""
    assert locate(two, 0) == Location((), "cuda:0: no GPU of the NVIDIA driver is seen here")


@pytest.mark.parametrize(
    "near", ["cuda", "cuda:", "cuda:-1", "cuda:x", "gpu:0", "path:", "", "path:\0"]
)
def test_what_is_neither_a_path_nor_a_gpu_is_refused(two: Path, near: str) -> None:
    """Before anything is looked up."""
    with pytest.raises(kvio.ConfigError, match="near must be 'path:…' or 'cuda:N'"):
        Topology.from_system(two).locate(near)


class _Cuda:
    """CUDA as torch shows it, of a process that may have it running."""

    def __init__(self, *, running: bool, properties: SimpleNamespace) -> None:
        self.running, self.properties = running, properties

    def is_initialized(self) -> bool:
        return self.running

    def device_count(self) -> int:
        assert self.running, "counting starts CUDA"
        return 1

    def get_device_properties(self, index: int) -> SimpleNamespace:
        assert self.running, "asking starts CUDA"
        assert index == 0
        return self.properties


def _reported(*, running: bool, properties: SimpleNamespace, index: int = 0) -> str | None:
    cuda = _Cuda(running=running, properties=properties)
    return address_by(SimpleNamespace(cuda=cuda), index)


def test_torch_is_asked_only_where_cuda_runs_already() -> None:
    """Starting it would cost memory on every GPU and forbid forks."""
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A, pci_device_id=0)

    assert _reported(running=True, properties=known) == "0000:1a:00.0"
    assert _reported(running=False, properties=known) is None
    assert _reported(running=True, properties=known, index=1) is None
    assert _reported(running=True, properties=SimpleNamespace(name="older torch")) is None
