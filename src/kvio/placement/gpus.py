"""Find the NUMA node of a GPU by its CUDA device number."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from kvio.filesystem.sysfs import Tree
from kvio.placement.devices import Device, Location, location_of, node_above

_DRIVER: Final = "/proc/driver/nvidia/gpus"
_BOUND: Final = "/sys/bus/pci/drivers/nvidia"
_PCI: Final = "/sys/bus/pci/devices"
_ADDRESS: Final = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]").fullmatch
_UUID: Final = re.compile(r"^GPU UUID:\s*(\S+)", re.MULTILINE)
_NUMBER: Final = re.compile(r"[0-9]{1,4}").fullmatch


@dataclass(frozen=True, slots=True)
class CudaNames:
    """The two environment variables that define the numbers of CUDA devices.

    Attributes:
        order: ``CUDA_DEVICE_ORDER``; unless ``PCI_BUS_ID``, CUDA numbers the fastest GPU first
            and only CUDA knows which that is.
        visible: the entries of ``CUDA_VISIBLE_DEVICES``, or None: all.
    """

    order: str | None = None
    visible: tuple[str, ...] | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read the variables."""
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            return cls(environment.get("CUDA_DEVICE_ORDER"))
        entries = (entry.strip() for entry in visible.split(","))
        # What comes after an entry that names nothing is not seen either.
        names = tuple(itertools.takewhile(lambda name: name not in ("", "-1"), entries))
        return cls(environment.get("CUDA_DEVICE_ORDER"), names)


def locate_cuda(tree: Tree, index: int, names: CudaNames) -> Location:
    """Find the node of a CUDA device without starting CUDA.

    By torch, where the process has CUDA running in it already; by the driver's list where that is
    numbered as the environment says; and where all GPUs are on one node, it is that.
    """
    what = f"cuda:{index}"
    asked = _address_by_torch(index) if tree.is_system else None
    if asked is not None:
        return location_of(what, [_gpu(tree, asked)])
    addresses = gpu_addresses(tree)
    if not addresses:
        return Location((), f"{what}: no GPU of the NVIDIA driver is seen here")
    if _is_hidden(index, names, len(addresses)):
        return Location((), f"{what}: this process sees no such device ({len(addresses)} GPUs)")
    address = _address_by_names(tree, index, names, addresses)
    if address is not None:
        return location_of(what, [_gpu(tree, address)])
    found = location_of(f"{what}: one of", (_gpu(tree, address) for address in addresses))
    if len(found.nodes) == 1:
        return found
    return Location(
        (),
        f"{found.why}; which one is known if CUDA_DEVICE_ORDER=PCI_BUS_ID is set, "
        "or if torch uses CUDA before",
    )


def gpu_addresses(tree: Tree) -> tuple[str, ...]:
    """Return the PCI addresses of the GPUs, ascending; in a container those it may use."""
    for directory in (_DRIVER, _BOUND):
        found = tuple(filter(_ADDRESS, map(str.lower, tree.names(directory))))
        if found:
            return found
    return ()


def _gpu(tree: Tree, address: str) -> Device:
    directory = tree.real(f"{_PCI}/{address}")
    return Device(address, None if directory is None else node_above(tree, directory))


def _is_hidden(index: int, names: CudaNames, gpus: int) -> bool:
    return index >= (gpus if names.visible is None else len(names.visible))


def _address_by_names(
    tree: Tree, index: int, names: CudaNames, addresses: tuple[str, ...]
) -> str | None:
    """Use PCI order where CUDA does, or a UUID in CUDA_VISIBLE_DEVICES."""
    name = str(index) if names.visible is None else names.visible[index]
    if _NUMBER(name):
        by_bus = names.order == "PCI_BUS_ID" and int(name) < len(addresses)
        return addresses[int(name)] if by_bus else None
    matching = [address for address, uuid in _uuids(tree, addresses) if uuid.startswith(name)]
    return matching[0] if name.startswith("GPU-") and len(matching) == 1 else None


def _uuids(tree: Tree, addresses: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for address in addresses:
        match = _UUID.search(tree.text(f"{_DRIVER}/{address}/information") or "")
        if match is not None:
            yield address, match[1]


def _address_by_torch(index: int) -> str | None:
    """Ask torch for the PCI address, if it has started CUDA in this process."""
    torch: Any = sys.modules.get("torch")
    return None if torch is None else address_by(torch, index)


def address_by(torch: Any, index: int) -> str | None:
    """Return a PCI address from torch; None if CUDA is not started or torch is too old."""
    if not torch.cuda.is_initialized() or index >= torch.cuda.device_count():
        return None
    properties = torch.cuda.get_device_properties(index)
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        return f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:
        return None
