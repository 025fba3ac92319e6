"""Every way to read a block, of a store or through a tier, and which are taken in by damage.

`count_leading` and `list_keys` go by names, as they say, and are no way to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias, TypeVar

import kvio
from kvio.types import BlockResult, BlockStatus

#: What both read with the same calls.
Reader: TypeAlias = kvio.Store | kvio.StagingTier
_R = TypeVar("_R")
#: True where a block was given out.
Ways: TypeAlias = Mapping[str, Callable[[_R, str, int], bool]]
NOT_THERE: Final = (kvio.CorruptBlockError, kvio.BlockNotFoundError)
LONG_S: Final = 60.0
_REFUSED: Final = (BlockStatus.CORRUPT, BlockStatus.MISSING)


def _given(result: BlockResult) -> bool:
    return result.status not in _REFUSED or not isinstance(result.error, NOT_THERE)


def _batch(reader: Reader, key: str, nbytes: int) -> bool:
    (result,) = reader.read_blocks_into([(key, bytearray(nbytes))])
    return _given(result)


def _batch_of_three(reader: Reader, key: str, nbytes: int) -> bool:
    wanted = (key, "rot/absent", key)
    results = reader.read_blocks_into([(one, bytearray(nbytes)) for one in wanted])
    return any(map(_given, results))


def _scattered(reader: Reader, key: str, nbytes: int) -> bool:
    third = nbytes // 3
    rooms = [bytearray(third), bytearray(nbytes - third)]
    return reader.read_block_into(key, rooms) >= 0


def _file(tier: kvio.StagingTier, key: str, _: int) -> bool:
    with tier.open(key, "rb") as file:
        return file.read() is not None


def _file_in_pieces(tier: kvio.StagingTier, key: str, nbytes: int) -> bool:
    with tier.open(key, "rb") as file:
        while file.read(nbytes // 3 + 1):
            pass
    return True


def _last(reader: Reader, key: str, nbytes: int) -> bool:
    return reader.read_block(key, offset=max(0, nbytes - 1), nbytes=1) is not None


#: These check every byte of the payload.
_WHOLE: Final[Ways[Reader]] = {
    "read_block_into": lambda r, k, n: r.read_block_into(k, bytearray(n)) >= 0,
    "read_block_into with room": lambda r, k, n: r.read_block_into(k, bytearray(n + 999)) >= 0,
    "read_block_into of pieces": _scattered,
    "read_block_into in time": lambda r, k, n: (
        r.read_block_into(k, bytearray(n), timeout=LONG_S) >= 0
    ),
    "read_block": lambda r, k, _: r.read_block(k) is not None,
    "read_block in time": lambda r, k, _: r.read_block(k, timeout=LONG_S) is not None,
    "read_blocks_into": _batch,
    "read_blocks_into of three": _batch_of_three,
    "verify_block": lambda r, k, _: r.verify_block(k).ok,
}
#: These promise that the end of the block is right: its length, key and trailer.
_BY_TRAILER: Final[Ways[Reader]] = {
    "a range": lambda r, k, _: r.read_block(k, offset=0, nbytes=1) is not None,
    "the last byte": _last,
    "stat_block": lambda r, k, _: r.stat_block(k).nbytes >= 0,
    "contains": lambda r, k, _: r.contains(k),
}
_STORE: Final[Ways[kvio.Store]] = {
    "submit_read_into": lambda s, k, n: s.submit_read_into(k, bytearray(n)).result(LONG_S) >= 0,
}
_STORE_BY_TRAILER: Final[Ways[kvio.Store]] = {
    "submit_read_into of a range": lambda s, k, _: (
        s.submit_read_into(k, bytearray(1), nbytes=1).result(LONG_S) >= 0
    ),
}
_TIER: Final[Ways[kvio.StagingTier]] = {"open": _file, "open, in pieces": _file_in_pieces}


class Readers(NamedTuple):
    """Ways to read from a store, and through a tier before it."""

    store: Ways[kvio.Store]
    tier: Ways[kvio.StagingTier]


WHOLE: Final = Readers({**_WHOLE, **_STORE}, {**_WHOLE, **_TIER})
ALL: Final = Readers(
    {**WHOLE.store, **_BY_TRAILER, **_STORE_BY_TRAILER}, {**WHOLE.tier, **_BY_TRAILER}
)


def taken_in(
    readers: Readers,
    store: kvio.Store,
    key: str,
    nbytes: int,
    *,
    tier: kvio.StagingTier | None = None,
) -> list[str]:
    """Name the ways that give a block out, or fail in another way than is promised."""
    found = _taken_in(readers.store, store, key, nbytes)
    if tier is not None:
        found += [f"tier: {name}" for name in _taken_in(readers.tier, tier, key, nbytes)]
    return found


def _taken_in(ways: Ways[_R], reader: _R, key: str, nbytes: int) -> list[str]:
    found = []
    for name, way in ways.items():
        try:
            if way(reader, key, nbytes):
                found.append(name)
        except NOT_THERE as exc:
            if exc.key != key:
                found.append(f"{name} (of {exc.key})")
        except kvio.KvioError as exc:
            found.append(f"{name} ({type(exc).__name__})")
    return found
