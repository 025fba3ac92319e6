"""Every way to read a block, and which of them are taken in by damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

import kvio
from kvio.types import BlockStatus

Way: TypeAlias = Callable[[kvio.Store, str, int], bool]
Ways: TypeAlias = Mapping[str, Way]
NOT_THERE: Final = (kvio.CorruptBlockError, kvio.BlockNotFoundError)
_REFUSED: Final = (BlockStatus.CORRUPT, BlockStatus.MISSING)


def _batch(store: kvio.Store, key: str, nbytes: int) -> bool:
    (result,) = store.read_blocks_into([(key, bytearray(nbytes))])
    return result.status not in _REFUSED or not isinstance(result.error, NOT_THERE)


def _scattered(store: kvio.Store, key: str, nbytes: int) -> bool:
    third = nbytes // 3
    rooms = [bytearray(third), bytearray(nbytes - third)]
    return store.read_block_into(key, rooms) >= 0


#: These check every byte of the payload: true where a block was given out.
WHOLE: Final[Ways] = {
    "read_block_into": lambda s, k, n: s.read_block_into(k, bytearray(n)) >= 0,
    "read_block_into with room": lambda s, k, n: s.read_block_into(k, bytearray(n + 999)) >= 0,
    "read_block_into of pieces": _scattered,
    "read_block": lambda s, k, _: s.read_block(k) is not None,
    "read_blocks_into": _batch,
    "verify_block": lambda s, k, _: s.verify_block(k).ok,
}
#: These promise that the end of the block is right: its length, key and trailer.
BY_TRAILER: Final[Ways] = {
    "a range": lambda s, k, _: s.read_block(k, offset=0, nbytes=1) is not None,
    "stat_block": lambda s, k, _: s.stat_block(k).nbytes >= 0,
    "contains": lambda s, k, _: s.contains(k),
}
ALL: Final[Ways] = {**WHOLE, **BY_TRAILER}


def taken_in(ways: Ways, store: kvio.Store, key: str, nbytes: int) -> list[str]:
    """Name the ways that give a block out, or fail in another way than is promised."""
    found = []
    for name, way in ways.items():
        try:
            if way(store, key, nbytes):
                found.append(name)
        except NOT_THERE as exc:
            if exc.key != key:
                found.append(f"{name} (of {exc.key})")
        except kvio.KvioError as exc:
            found.append(f"{name} ({type(exc).__name__})")
    return found
