"""What a disk holds after a power cut, held against what had been reported before it."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import kvio
from tests.faults.guest.content import version_of
from tests.faults.guest.workload import SHARED, Place
from tests.posix import faultlab
from tests.sharedfile import raw

_LEFTOVER = re.compile(r"\.(.+)\.kvio-(map|data|probe)(\.[0-9a-f]{16})?").fullmatch


class Told(NamedTuple):
    """One receipt that reached this machine."""

    disk: str
    place: str
    key: str
    version: int


def reported(line: str) -> Told:
    """Read a line of the workload."""
    disk, place, key, version = line.split()
    return Told(disk, place, key, int(version))


@dataclass(slots=True)
class Verdict:
    """What became of blocks.

    Attributes:
        receipts: how many blocks with a receipt were looked for.
        lost: those that are not there, or only in an older version.
        torn: blocks that are not whole, with a receipt or without.
        wrong: bytes that kvio gave as good, and that are no version of the block.
    """

    receipts: int = 0
    lost: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def bad(self) -> list[str]:
        """All that must not be, in words."""
        return [
            *(f"lost: {one}" for one in self.lost),
            *(f"torn: {one}" for one in self.torn),
            *(f"given as good: {one}" for one in self.wrong),
        ]

    def add(self, other: Verdict) -> None:
        """Add what another look found."""
        self.receipts += other.receipts
        self.lost += other.lost
        self.torn += other.torn
        self.wrong += other.wrong

    def judge(self, where: str, version: int | None, newest: int | None) -> None:
        """Hold the version that was found (None: none that is whole) against the reported one."""
        if version is None:
            self.torn.append(where)
        elif newest is not None and version < newest:
            self.lost.append(f"{where}: version {version}, not {newest}")


def newest_of(receipts: Iterable[Told], disk: str, place: str) -> dict[str, int]:
    """Return the newest version of each key that has a receipt."""
    newest: dict[str, int] = {}
    for one in receipts:
        if (one.disk, one.place) == (disk, place):
            newest[one.key] = max(one.version, newest.get(one.key, 0))
    return newest


def judge_store(root: Path, place: Place, newest: dict[str, int]) -> Verdict:
    """Read every block of a store, through kvio and without it; leave no temporary behind."""
    verdict = Verdict(len(newest))
    with place.open(str(root)) as store:
        below = root / place.name
        for key in sorted({*newest, *store.list_keys()}):
            _judge_block(verdict, store, below, place, key, newest.get(key))
        store.sweep(older_than_s=-3600.0)  # the guest's clock may be ahead of ours
        assert not faultlab.temporaries(below)
    return verdict


def _judge_block(
    verdict: Verdict, store: kvio.Store, below: Path, place: Place, key: str, newest: int | None
) -> None:
    where = f"{below.parent.name} {place.name} {key}"
    try:
        data = bytes(store.read_block(key))
    except kvio.CorruptBlockError:
        verdict.torn.append(where)
        return
    except kvio.BlockNotFoundError:
        verdict.lost.append(where)
        return
    version = version_of(data, place.name, key)
    if version is None and place.layout == "block":  # whose checksum would have shown it
        verdict.wrong.append(where)
        return
    verdict.judge(where, version, newest)
    if version is not None and _peek(below, key, place.layout) != data:
        verdict.wrong.append(f"{where}: other bytes on the disk")


def _peek(below: Path, key: str, layout: str) -> bytes | None:
    try:
        return faultlab.peek(below, key, layout=layout)
    except (AssertionError, struct.error):
        return None


def judge_shared(root: Path, newest: dict[str, int]) -> Verdict:
    """Read every shared file, and remove what was not finished."""
    verdict = Verdict(len(newest))
    directory = root / SHARED
    directory.mkdir(exist_ok=True)
    verdict.torn += _abort_unfinished(directory)
    names = {name for name in os.listdir(directory) if not _LEFTOVER(name)}
    for key in sorted(newest.keys() - names):
        verdict.lost.append(f"{root.name} {SHARED} {key}")
    for key in sorted(names):
        where = f"{root.name} {SHARED} {key}"
        try:
            with kvio.SharedFile.open(directory / key) as file:
                data = bytearray(file.size)
                file.pread_into(data)
        except kvio.CorruptBlockError:
            verdict.torn.append(where)
            continue
        if version_of(bytes(data), SHARED, key) is None:
            verdict.wrong.append(where)
        elif raw.sealed(directory / key).payload != data:
            verdict.wrong.append(f"{where}: other bytes on the disk")
    return verdict


def _abort_unfinished(directory: Path) -> list[str]:
    """Do what a user does after a restart: take over what was left, and give it up.

    Those that are torn are named.
    """
    torn = []
    for name in {found[1] for found in map(_LEFTOVER, os.listdir(directory)) if found}:
        try:
            _abort(directory / name)
        except kvio.CorruptBlockError:
            torn.append(f"{directory.parent.name} {SHARED} {name}, unfinished")
    for probe in directory.glob(".*.kvio-probe.*"):  # young ones may be somebody's
        probe.unlink()
    left = [name for name in os.listdir(directory) if _LEFTOVER(name)]
    assert torn or not left, f"nobody removed {left}"
    return torn


def _abort(path: Path) -> None:
    with suppress(kvio.BlockNotFoundError):  # its making was cut short
        file = kvio.SharedFile.recover(path)
        if file.missing():
            file.abort()
        file.close()
    if not path.exists():
        kvio.SharedFile.create(path, 1).abort()
