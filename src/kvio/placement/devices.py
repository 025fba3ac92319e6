"""Find the NUMA nodes of GPUs, network cards and the devices below a path."""

from __future__ import annotations

import ipaddress
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from kvio.filesystem.mounts import (
    DEEPEST,
    MEMORY_FILE_SYSTEMS,
    Mount,
    block_at,
    block_of_number,
    blocks_named,
    place_of,
)
from kvio.filesystem.sysfs import Tree, parse_number

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


# --------------------------------------------------------------------------------------------------
# Find the network devices that a network file system may use.


NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "beegfs", "afs", "9p", "gfs2", "ocfs2"}
)
_NET: Final = "/sys/class/net"
_RDMA: Final = "/sys/class/infiniband"
_SERVER: Final = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,3}){3})(?:[@:,]|$)").match
_IS_UP: Final = 0x1  # RTF_UP
_REJECTS: Final = 0x200  # RTF_REJECT
_DEEPEST: Final = 8  # bonds of VLANs of bridges


@dataclass(frozen=True, slots=True)
class Interfaces:
    """Network devices by their directories in sysfs.

    Attributes:
        directories: of the devices, or of those they are made of.
        all_used: traffic goes through all of them; else through some; which is unknown.
        why: how they were found.
    """

    directories: tuple[str, ...]
    all_used: bool
    why: str


def interfaces_of(tree: Tree, mount: Mount) -> Interfaces:
    """Find the devices by the route to the server; else return all candidates."""
    if "@o2ib" in mount.source or (mount.option("proto") or "").startswith("rdma"):
        return Interfaces(_rdma(tree), False, "the RDMA devices")
    server = _server_of(mount)
    name = None if server is None else _route(tree.text("/proc/net/route") or "", server)
    if name is not None:
        return Interfaces(tuple(_cards(tree, f"{_NET}/{name}", 0)), True, f"by {name}")
    return Interfaces(_physical(tree), False, "the network devices that are up")


def _server_of(mount: Mount) -> ipaddress.IPv4Address | None:
    match = _SERVER(mount.option("addr") or mount.source)
    try:
        return None if match is None else ipaddress.IPv4Address(match[1])
    except ValueError:
        return None


def _route(table: str, server: ipaddress.IPv4Address) -> str | None:
    """Return the interface with the longest prefix, as ip-route(8) does; ignore malformed lines.

    The table has addresses as hexadecimal numbers of the machine's own byte order.
    """
    address = int.from_bytes(server.packed, sys.byteorder)
    best: tuple[int, int, str] | None = None
    for line in table.splitlines()[1:]:
        fields = line.split()
        try:
            name, target, mask = fields[0], int(fields[1], 16), int(fields[7], 16)
            flags, metric = int(fields[3], 16), int(fields[6])
        except (IndexError, ValueError):
            continue
        if address & mask == target and flags & _IS_UP and not flags & _REJECTS:
            found = (-mask.bit_count(), metric, name)
            best = found if best is None else min(best, found)
    return None if best is None else best[2]


def _cards(tree: Tree, link: str, depth: int) -> Iterator[str]:
    """Yield the devices that a bond, bridge or VLAN is made of, or the device itself."""
    directory = tree.real(link)
    if directory is None or depth > _DEEPEST:
        return
    lower = [name for name in tree.names(directory) if name.startswith("lower_")]
    if not lower:
        yield directory
    for name in lower:
        yield from _cards(tree, f"{directory}/{name}", depth + 1)


def _physical(tree: Tree) -> tuple[str, ...]:
    found = (tree.real(f"{_NET}/{name}") for name in tree.names(_NET))
    return tuple(
        directory
        for directory in found
        if directory is not None
        and tree.real(f"{directory}/device") is not None
        and (tree.text(f"{directory}/operstate") or "").strip() != "down"
    )


def _rdma(tree: Tree) -> tuple[str, ...]:
    found = (tree.real(f"{_RDMA}/{name}") for name in tree.names(_RDMA))
    return tuple(directory for directory in found if directory is not None)


# --------------------------------------------------------------------------------------------------
# Find the NUMA nodes of the devices below a path.


_CONTROLLER: Final = re.compile(r"nvme[0-9]+").fullmatch


@dataclass(frozen=True, slots=True)
class Location:
    """The nodes of a device, ascending; none: unknown. *why* explains the answer."""

    nodes: tuple[int, ...]
    why: str

    @property
    def node(self) -> int | None:
        """The node if there is exactly one, else None."""
        return self.nodes[0] if len(self.nodes) == 1 else None


@dataclass(frozen=True, slots=True)
class Device:
    """A device by its name, and its node if the kernel reports one."""

    name: str
    node: int | None


def location_of(what: str, devices: Iterable[Device]) -> Location:
    """Combine devices: their nodes if all are known, else unknown."""
    found = sorted(set(devices), key=lambda device: (device.name, device.node or 0))
    names = ", ".join(f"{device.name} ({_node_name(device.node)})" for device in found)
    why = f"{what}: {names}" if names else f"{what}: no hardware is known below it"
    if any(device.node is None for device in found):
        return Location((), why)
    return Location(tuple(sorted({d.node for d in found if d.node is not None})), why)


def node_above(tree: Tree, directory: str) -> int | None:
    """Return the node of a device: its own, or that of the nearest parent with one."""
    for place in tree.upwards(directory):
        node = parse_number(tree.text(f"{place}/numa_node"))
        if node is not None:
            return node
    return None


def locate_path(tree: Tree, path: str, *, depth: int = 0) -> Location:
    """Find the devices below a path: through mounts, partitions, RAID and device mapper."""
    if depth > DEEPEST:
        return Location((), f"{path} lies on itself")
    try:
        place = place_of(tree, path)
    except (OSError, ValueError) as exc:
        return Location((), f"{path}: {getattr(exc, 'strerror', None) or exc}")
    mount, number = place.mount, place.number
    if number is not None:
        kind = f" ({mount.kind})" if mount is not None and mount.device == number else ""
        hardware = _hardware(tree, block_of_number(number), depth)
        return location_of(f"{place.name}{kind}", hardware)
    if mount is None:
        return Location((), f"{place.name}: the kernel lists no mount for it")
    return _locate_without_number(tree, place.name, mount, depth)


def _locate_without_number(tree: Tree, name: str, mount: Mount, depth: int) -> Location:
    """Use the source of the mount, if the file system has no block device number."""
    what = f"{name} ({mount.kind} on {mount.source})"
    if mount.kind in MEMORY_FILE_SYSTEMS:
        return Location((), f"{name}: {mount.kind} is memory, on no device")
    if mount.kind == "overlay":
        return _locate_overlay(tree, name, mount, depth)
    if mount.kind in NETWORK_FILE_SYSTEMS:
        return _locate_network(tree, what, mount)
    if mount.source.startswith("/dev/"):
        blocks = blocks_named(tree, mount.source)
        found = (device for block in blocks for device in _hardware(tree, block, depth))
        return location_of(what, found)
    return Location((), f"{what}: its devices are unknown")


def _locate_overlay(tree: Tree, name: str, mount: Mount, depth: int) -> Location:
    """Use the upper directory of an overlay; in a container it is often not visible."""
    upper = mount.option("upperdir")
    if upper is None:
        return Location((), f"{name}: overlay without an upper directory")
    if tree.real(upper) is None:
        return Location((), f"{name}: overlay, and its upper directory {upper} is not seen here")
    below = locate_path(tree, upper, depth=depth + 1)
    return Location(below.nodes, f"{name}: overlay over {below.why}")


def _locate_network(tree: Tree, what: str, mount: Mount) -> Location:
    used = interfaces_of(tree, mount)
    devices = [Device(os.path.basename(at), node_above(tree, at)) for at in used.directories]
    found = location_of(f"{what}, {used.why}", devices)
    if len(found.nodes) > 1 and not used.all_used:
        return Location((), f"{found.why}; which of them is unknown")
    return found


def _hardware(tree: Tree, link: str, depth: int) -> Iterator[Device]:
    """Yield the physical devices below a block device."""
    block = block_at(tree, link)
    if block.directory is None or depth > DEEPEST:
        yield Device(block.name, None)
    elif block.parts:
        for part in block.parts:
            yield from _hardware(tree, part, depth + 1)
    elif block.file is not None:
        nodes: Sequence[int | None] = locate_path(tree, block.file, depth=depth + 1).nodes
        yield from (Device(f"{block.name} on {block.file}", node) for node in nodes or (None,))
    else:
        places = _controllers(tree, block.directory) or (block.directory,)
        yield from (Device(os.path.basename(at), node_above(tree, at)) for at in places)


def _controllers(tree: Tree, directory: str) -> tuple[str, ...]:
    """Return the controllers of an NVMe multipath disk."""
    subsystem = os.path.dirname(directory)
    if not os.path.basename(subsystem).startswith("nvme-subsys"):
        return ()
    paths = [tree.real(f"{directory}/multipath/{n}") for n in tree.names(f"{directory}/multipath")]
    if paths:  # Linux 6.15: exactly those that lead to this disk
        found = [os.path.dirname(path) for path in paths if path is not None]
    else:
        names = filter(_CONTROLLER, tree.names(subsystem))
        links = [tree.real(f"{subsystem}/{name}") for name in names]
        found = [link for link in links if link is not None]
    return tuple(dict.fromkeys(found))


def _node_name(node: int | None) -> str:
    return "node unknown" if node is None else f"node {node}"
