"""What a block device can do to a file system, and the file system to a store: cuts, stops, errors.

Needs root, loop devices, FUSE, a C compiler, and to make file systems of their own the programs
mkfs.ext4, mkfs.xfs and mkfs.btrfs (Debian packages gcc, libc6-dev, pkg-config, libfuse3-dev, fuse3,
e2fsprogs, xfsprogs, btrfs-progs).
"""
