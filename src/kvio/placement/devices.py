"""Find the NUMA nodes of the devices below a path."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvio.filesystem.layers import (
    DEEPEST,
    MEMORY_FILE_SYSTEMS,
    block_at,
    block_of_number,
    blocks_named,
    place_of,
)
from kvio.filesystem.mounts import Mount
from kvio.filesystem.sysfs import Tree
from kvio.placement.cpulist import parse_number
from kvio.placement.network import NETWORK_FILE_SYSTEMS, interfaces_of

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
