"""Find the network devices that a network file system may use."""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvio.filesystem.mounts import Mount
from kvio.filesystem.sysfs import Tree

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
        all_used: traffic goes through all of them; else through some, nobody knows which.
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
        return Interfaces(tuple(_hardware(tree, f"{_NET}/{name}", 0)), True, f"by {name}")
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


def _hardware(tree: Tree, link: str, depth: int) -> Iterator[str]:
    """Yield the devices that a bond, bridge or VLAN is made of, or the device itself."""
    directory = tree.real(link)
    if directory is None or depth > _DEEPEST:
        return
    lower = [name for name in tree.names(directory) if name.startswith("lower_")]
    if not lower:
        yield directory
    for name in lower:
        yield from _hardware(tree, f"{directory}/{name}", depth + 1)


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
