"""From a path to the nodes of its devices: every layer between is seen through, or said unknown."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvio.filesystem.mounts import mount_of, parse_mounts
from kvio.placement import Topology
from tests.placement import trees
from tests.placement.trees import Shape, block, link, mapped, mount, nvme, partition, put


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Return a machine with nodes 0 and 1, without devices."""
    return trees.build(tmp_path / "two", Shape(sockets=2))


def nodes_of(root: Path, path: str) -> tuple[int, ...]:
    return Topology.from_system(root).locate(f"path:{path}").nodes


def why(root: Path, path: str) -> str:
    return Topology.from_system(root).locate(f"path:{path}").why


@pytest.mark.parametrize("node", [0, 1])
def test_a_disk_is_on_the_node_of_its_controller(two: Path, node: int) -> None:
    """Found above the disk, where PCI devices report it."""
    nvme(two, 0, node, "259:0")
    mount(two, "259:0", "/mnt", "ext4", "/dev/nvme0n1")

    assert nodes_of(two, "/mnt/kv") == (node,)
    assert Topology.from_system(two).node_of_path("/mnt/kv") == node
    assert why(two, "/mnt/kv") == f"/mnt/kv (ext4): nvme0n1 (node {node})"


@pytest.mark.parametrize("node", [-1, None])
def test_a_device_that_tells_no_node_is_unknown_and_never_node_0(
    two: Path, node: int | None
) -> None:
    """-1 at every step up, or no file at all."""
    nvme(two, 0, node, "259:0")
    mount(two, "259:0", "/mnt", "ext4", "/dev/nvme0n1")

    assert Topology.from_system(two).node_of_path("/mnt") is None
    assert why(two, "/mnt") == "/mnt (ext4): nvme0n1 (node unknown)"


def test_on_one_node_unknown_stays_unknown(tmp_path: Path) -> None:
    """Even where there is nothing else it could be."""
    trees.build(tmp_path, Shape())
    nvme(tmp_path, 0, -1, "259:0")
    mount(tmp_path, "259:0", "/", "ext4", "/dev/nvme0n1")

    assert Topology.from_system(tmp_path).node_of_path("/") is None


@pytest.mark.parametrize("text", ["", "x\n", "0x1\n", "1 2\n", "-5\n", "99999999999\n", "\0"])
def test_nonsense_for_a_node_is_unknown(two: Path, text: str) -> None:
    """As -1 is."""
    nvme(two, 0, None, "259:0")
    put(two, "/sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0/numa_node", text)
    mount(two, "259:0", "/", "ext4", "/dev/nvme0n1")

    assert Topology.from_system(two).node_of_path("/") is None


def test_a_node_that_is_not_online_is_no_place(two: Path) -> None:
    """Firmware names some."""
    nvme(two, 0, 7, "259:0")
    mount(two, "259:0", "/", "ext4", "/dev/nvme0n1")

    assert nodes_of(two, "/") == ()
    assert "node 7 is not online" in why(two, "/")


def test_a_partition_is_on_the_node_of_its_disk(two: Path) -> None:
    """By the directory above it."""
    partition(two, nvme(two, 0, 1, "259:0"), "259:1")
    mount(two, "259:1", "/", "xfs", "/dev/nvme0n1p1")

    assert nodes_of(two, "/") == (1,)


def test_a_mapped_device_is_on_all_nodes_of_its_disks(two: Path) -> None:
    """Two disks on two nodes: both are reported, and there is no one node."""
    disks = [nvme(two, index, index, f"259:{index}") for index in range(2)]
    mapped(two, "dm-0", "254:0", disks)
    mount(two, "254:0", "/mnt", "xfs", "/dev/mapper/data")

    assert nodes_of(two, "/mnt") == (0, 1)
    assert Topology.from_system(two).node_of_path("/mnt") is None
    assert why(two, "/mnt") == "/mnt (xfs): nvme0n1 (node 0), nvme1n1 (node 1)"


def test_layers_of_mapped_devices_and_partitions_are_seen_through(two: Path) -> None:
    """Encryption over a RAID of partitions of disks on one node."""
    parts = [partition(two, nvme(two, n, 1, f"259:{2 * n}"), f"259:{2 * n + 1}") for n in range(2)]
    raid = mapped(two, "md0", "9:0", parts)
    mapped(two, "dm-0", "254:0", [raid])
    mount(two, "254:0", "/mnt", "ext4", "/dev/mapper/crypt")

    assert nodes_of(two, "/mnt") == (1,)


def test_one_unknown_disk_makes_all_unknown(two: Path) -> None:
    """A part that is known is not the whole."""
    disks = [nvme(two, 0, 1, "259:0"), nvme(two, 1, -1, "259:1")]
    mapped(two, "md0", "9:0", disks)
    mount(two, "9:0", "/mnt", "ext4", "/dev/md0")

    assert nodes_of(two, "/mnt") == ()
    assert "nvme0n1 (node 1), nvme1n1 (node unknown)" in why(two, "/mnt")


def test_devices_made_of_each_other_are_unknown(two: Path) -> None:
    """A tree that no kernel makes does not run for ever."""
    one = mapped(two, "dm-0", "254:0", ())
    other = mapped(two, "dm-1", "254:1", [one])
    link(two, f"{one}/slaves/dm-1", other)
    mount(two, "254:0", "/", "ext4", "/dev/dm-0")

    assert nodes_of(two, "/") == ()


def _multipath(root: Path, nodes: tuple[int, ...]) -> str:
    """Add a disk behind several controllers; it belongs to none of them."""
    subsystem = "/sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    for index, node in enumerate(nodes):
        controller = f"{trees.pci(root, f'0000:0{index + 1}:00.0', node)}/nvme/nvme{index}"
        put(root, f"{controller}/numa_node", f"{node}\n")
        put(root, f"{controller}/nvme0c{index}n1/hidden", "1\n")
        link(root, f"{subsystem}/nvme{index}", controller)
    return block(root, f"{subsystem}/nvme0n1", "259:0")


@pytest.mark.parametrize("nodes", [(1,), (0, 1), (1, 1)])
def test_a_multipath_disk_is_on_the_nodes_of_its_controllers(
    two: Path, nodes: tuple[int, ...]
) -> None:
    """By the links of its subsystem."""
    _multipath(two, nodes)
    mount(two, "259:0", "/", "ext4", "/dev/nvme0n1")

    assert nodes_of(two, "/") == tuple(sorted(set(nodes)))


def test_a_multipath_disk_is_on_the_nodes_of_its_own_paths(two: Path) -> None:
    """Where the kernel lists them, a controller that does not lead to the disk does not count."""
    disk = _multipath(two, (0, 1))
    path = "/sys/devices/pci0000:00/0000:00:01.0/0000:02:00.0/nvme/nvme1/nvme0c1n1"
    link(two, f"{disk}/multipath/nvme0c1n1", path)
    mount(two, "259:0", "/", "ext4", "/dev/nvme0n1")

    assert nodes_of(two, "/") == (1,)


def test_a_partition_of_a_multipath_disk(two: Path) -> None:
    """Both layers at once."""
    partition(two, _multipath(two, (1, 1)), "259:5")
    mount(two, "259:5", "/", "ext4", "/dev/nvme0n1p1")

    assert nodes_of(two, "/") == (1,)


def test_a_loop_device_is_where_its_file_is(two: Path) -> None:
    """By the file's path."""
    nvme(two, 0, 1, "259:0")
    loop = block(two, "/sys/devices/virtual/block/loop0", "7:0")
    put(two, f"{loop}/loop/backing_file", "/images/kv.img\n")
    mount(two, "259:0", "/", "ext4", "/dev/nvme0n1")
    mount(two, "7:0", "/mnt", "ext4", "/dev/loop0")

    assert nodes_of(two, "/mnt") == (1,)


def test_a_loop_device_on_itself_is_unknown(two: Path) -> None:
    """A tree that no kernel makes does not run for ever."""
    loop = block(two, "/sys/devices/virtual/block/loop0", "7:0")
    put(two, f"{loop}/loop/backing_file", "/mnt/kv.img\n")
    mount(two, "7:0", "/mnt", "ext4", "/dev/loop0")

    assert nodes_of(two, "/mnt") == ()


def test_btrfs_is_on_all_its_devices(two: Path) -> None:
    """Its mounts have no number of a block device and name one device of several."""
    disks = [nvme(two, index, index, f"259:{index}") for index in range(2)]
    for disk in disks:
        link(two, f"/sys/fs/btrfs/1-2-3/devices/{Path(disk).name}", disk)
    put(two, "/sys/fs/btrfs/features/raid56", "0\n")
    mount(two, "0:45", "/mnt", "btrfs", "/dev/nvme1n1")

    assert nodes_of(two, "/mnt/kv") == (0, 1)


def test_btrfs_on_a_mapped_device(two: Path) -> None:
    """Named by device-mapper, which sysfs does not."""
    volume = mapped(two, "dm-3", "254:3", [nvme(two, 0, 1, "259:0")])
    put(two, f"{volume}/dm/name", "vg-kv\n")
    mount(two, "0:45", "/mnt", "btrfs", "/dev/mapper/vg-kv")

    assert nodes_of(two, "/mnt") == (1,)


def test_an_overlay_is_where_its_upper_directory_is(two: Path) -> None:
    """Writes go there."""
    nvme(two, 0, 1, "259:0")
    mount(two, "259:0", "/disk", "ext4", "/dev/nvme0n1")
    (two / "disk" / "a, b").mkdir(parents=True)
    options = r"rw,lowerdir=/low,upperdir=/disk/a\054\040b,workdir=/work"
    mount(two, "0:50", "/", "overlay", "overlay", options=options)

    assert nodes_of(two, "/kv") == (1,)


@pytest.mark.parametrize("options", ["rw,lowerdir=/a:/b", "rw,upperdir=/var/lib/elsewhere/diff"])
def test_an_overlay_whose_upper_directory_is_out_of_sight_is_unknown(
    two: Path, options: str
) -> None:
    """In a container it is the host's path, or there is none."""
    nvme(two, 0, 1, "259:0")
    mount(two, "0:50", "/", "overlay", "overlay", options=options)

    assert nodes_of(two, "/kv") == ()
    assert "upper directory" in why(two, "/kv")


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("tmpfs", "tmpfs", "is memory"),
        ("fuse.sshfs", "host:/x", "unknown"),
        ("zfs", "tank/kv", "unknown"),
        ("btrfs", "/dev/gone", "gone (node unknown)"),
    ],
)
def test_what_has_no_device_that_is_reported_is_unknown(
    two: Path, kind: str, source: str, reason: str
) -> None:
    """With the reason."""
    mount(two, "0:60", "/mnt", kind, source)

    assert nodes_of(two, "/mnt") == ()
    assert reason in why(two, "/mnt")


def test_without_a_list_of_mounts_it_is_unknown(two: Path) -> None:
    """/proc may be hidden."""
    assert nodes_of(two, "/mnt") == ()
    assert "no mount" in why(two, "/mnt")


def test_a_mount_without_its_device_in_sysfs_is_unknown(two: Path) -> None:
    """/sys may be hidden in part."""
    mount(two, "259:9", "/mnt", "ext4", "/dev/nvme9n1")

    assert nodes_of(two, "/mnt") == ()


def test_a_link_out_of_the_tree_is_not_followed(two: Path, tmp_path: Path) -> None:
    """What is there is not this machine."""
    outside = tmp_path / "outside"
    put(outside, "numa_node", "1\n")
    (two / "sys/dev/block").mkdir(parents=True)
    (two / "sys/dev/block/8:0").symlink_to(outside)
    mount(two, "8:0", "/", "ext4", "/dev/sda")

    assert nodes_of(two, "/") == ()


_MOUNTS = r"""
22 1 254:0 / / rw - ext4 /dev/root rw
23 22 259:1 / /mnt rw,relatime shared:1 master:2 - xfs /dev/nvme0n1 rw
24 22 259:2 / /mnt/a\040b rw - ext4 /dev/sdb rw
25 22 259:3 / /mnt rw - ext4 /dev/sdc rw
not a mount
26 22 x:y / /bad rw - ext4 /dev/sdd rw
27 22 0:40 / /btr rw - btrfs /dev/sde rw
28 22 259:4 / /short
"""


@pytest.mark.parametrize(
    ("path", "device", "expected"),
    [
        ("/etc", None, 0),
        ("/mntx", None, 0),
        ("/mnt/a b/kv", None, 2),
        ("/mnt", None, 3),
        ("/mnt/kv", (259, 1), 1),
        ("/btr/kv", (0, 99), 4),
        ("/bad", None, 0),
        ("/short/x", None, 0),
    ],
)
def test_a_path_is_on_the_last_of_the_deepest_mounts(
    path: str, device: tuple[int, int] | None, expected: int
) -> None:
    """Unless its device number names another; lines that are not whole are ignored."""
    mounts = tuple(parse_mounts(_MOUNTS))
    found = mount_of(mounts, path, device)

    assert found is not None
    assert (
        found.device == {0: (254, 0), 1: (259, 1), 2: (259, 2), 3: (259, 3), 4: (0, 40)}[expected]
    )


def test_a_mount_that_is_not_listed_is_none() -> None:
    """No list, or a path whose number shows that the mount it seems to be on is another."""
    assert mount_of((), "/mnt") is None
    assert mount_of(tuple(parse_mounts(_MOUNTS)), "/mnt/kv", (0, 99)) is None


def test_a_path_that_is_not_there_yet_is_where_it_would_be_made(tmp_path: Path) -> None:
    """By the nearest directory above it, which the reason names; through a link that dangles."""
    (tmp_path / "link").symlink_to(tmp_path / "to" / "be")
    topology = Topology.from_system()
    here = topology.locate(f"path:{tmp_path}")
    for path in (tmp_path / "not" / "yet", tmp_path / "link"):
        location = topology.locate(f"path:{path}")

        assert location.nodes == here.nodes
        assert location.why == here.why.replace(
            str(tmp_path), f"{path}, not there yet, in {tmp_path}", 1
        )


def test_a_path_that_cannot_be_is_unknown_with_the_reason(tmp_path: Path) -> None:
    """Below a file, and longer than names may be."""
    (tmp_path / "file").touch()
    topology = Topology.from_system()

    for path, reason in (("x" * 300, "File name too long"), ("file/below", "Not a directory")):
        location = topology.locate(f"path:{tmp_path}/{path}")

        assert location.nodes == ()
        assert location.why == f"{tmp_path}/{path}: {reason}"


def test_a_path_on_this_machine_is_on_the_node_that_its_device_says(real_disk: Path) -> None:
    """As read from sysfs by hand, step by step."""
    number = os.stat(real_disk).st_dev
    if os.major(number) == 0:
        pytest.skip(f"{real_disk} has no block device of its own")
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if list(device.glob("slaves/*")) or "virtual" in device.parts:
        pytest.skip(f"{device.name} is made of other devices")
    files = (place / "numa_node" for place in (device, *device.parents))
    reported = [int(file.read_text()) for file in files if file.exists()]
    expected = next((node for node in reported if node >= 0), None)

    assert Topology.from_system().node_of_path(real_disk) == expected
    assert Topology.from_system().node_of_path(os.path.relpath(real_disk)) == expected


def test_the_file_of_a_block_device_is_that_device(real_disk: Path) -> None:
    """Not the file system that device files are on."""
    number = os.stat(real_disk).st_dev
    facts = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/uevent")
    names = re.findall(r"^DEVNAME=(.+)$", facts.read_text() if facts.exists() else "", re.MULTILINE)
    files = [path for path in (Path("/dev", name) for name in names) if path.is_block_device()]
    if not files:
        pytest.skip("no file of the disk's block device in /dev")
    topology = Topology.from_system()

    assert topology.locate(f"path:{files[0]}").nodes == topology.locate(f"path:{real_disk}").nodes
    assert "memory" not in topology.locate(f"path:{files[0]}").why


def test_every_mount_of_this_machine_is_located() -> None:
    """No path of a real machine, whatever is mounted there, makes it raise."""
    topology = Topology.from_system()
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [mount.point for mount in parse_mounts(file.read())]

    assert points
    for point in points:
        assert set(topology.locate(f"path:{point}").nodes) <= set(topology.nodes), point
