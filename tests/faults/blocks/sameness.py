"""Telling disks apart without making them: a number for what a disk of a log would have."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, TypeAlias

from tests.faults.blocks.log import CHANGES, Image, Kind, Record

_SECTOR: Final = 512
#: A record, from which of its bytes, to which.
Piece: TypeAlias = "tuple[int, int, int]"


class Sameness:
    """Numbers that are the same for disks with the same bytes, and differ for others.

    A disk's number is the exclusive or of one for each of its sectors, as that differs from what it
    was in the beginning; so a few writes more change it by what those sectors change.

    Args:
        before: the disk as it was before the log.
        records: the log.
    """

    def __init__(self, before: Image, records: Sequence[Record]) -> None:
        self._tokens = [self._of(record) for record in records]
        self._first: dict[int, int] = {}
        self._writes: defaultdict[int, list[int]] = defaultdict(list)
        self._prefixes = [0]
        for number, tokens in enumerate(self._tokens):
            prefix = self._prefixes[-1]
            for sector, token in tokens.items():
                if sector not in self._first:
                    self._first[sector] = _token(sector, before.read(sector * _SECTOR, _SECTOR))
                prefix ^= self._token_at(sector, number) ^ token
                self._writes[sector].append(number)
            self._prefixes.append(prefix)

    @staticmethod
    def _of(record: Record) -> dict[int, int]:
        if record.kind not in CHANGES:
            return {}
        assert not (record.offset | record.nbytes) % _SECTOR, "a write of part of a sector"
        first = record.offset // _SECTOR
        zeros, data = bytes(_SECTOR), record.data
        return {
            first + n: _token(
                first + n,
                data[n * _SECTOR : (n + 1) * _SECTOR] if record.kind is Kind.WRITE else zeros,
            )
            for n in range(record.nbytes // _SECTOR)
        }

    def _token_at(self, sector: int, until: int) -> int:
        """Return the number of a sector after the first *until* records."""
        writes = self._writes[sector]
        at = bisect_left(writes, until)
        return self._tokens[writes[at - 1]][sector] if at else self._first[sector]

    def of(self, until: int, pieces: Sequence[Piece]) -> int:
        """Return the number of the disk after *until* records and pieces of later ones."""
        changed: dict[int, int] = {}
        for number, start, stop in pieces:
            tokens = self._tokens[number]
            first = next(iter(tokens))
            for sector in range(first + start // _SECTOR, first + stop // _SECTOR):
                changed[sector] = tokens[sector]
        found = self._prefixes[until]
        for sector, token in changed.items():
            found ^= self._token_at(sector, until) ^ token
        return found


def _token(sector: int, data: bytes | memoryview) -> int:
    return hash((sector, bytes(data)))
