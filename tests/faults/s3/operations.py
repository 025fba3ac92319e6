"""What a store is asked for while something goes wrong, and what came of it for each block."""

from __future__ import annotations

import functools
import http.client
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, urlsplit

import kvio
from kvio.types import BlockResult
from tests.s3.failing import BUCKET, LARGE, PREFIX, SMALL, VERBS, stored
from tests.s3.rawsig import RawS3, sign

#: Of each block of an operation: ``good``, ``bad``, or the name of the error.
Outcomes = dict[str, str]
Verb = Callable[[kvio.Store, Sequence[str]], Outcomes]
#: More than a server gives of a listing at once, by so much.
PAGE, BEYOND = 1000, 5
MANY: Final = "list-pages/0"


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing to ask a store for.

    Attributes:
        does: asks for it.
        writes: it stores blocks; else they stand there before.
        deletes: it removes them.
        data: of each block.
        blocks: how many.
        several: it consists of more than one request, each of which may fail.
        usual: it is tried in every turn; else in the first.
    """

    does: Verb
    writes: bool = False
    deletes: bool = False
    data: bytes = SMALL
    blocks: int = 1
    several: bool = False
    usual: bool = True


def _one(verb: Callable[[kvio.Store, str], object]) -> Verb:
    return lambda store, keys: {keys[0]: _come_of(lambda: verb(store, keys[0]))}


def _come_of(call: Callable[[], object]) -> str:
    try:
        return "good" if call() else "bad"
    except kvio.KvioError as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001  # that is what is looked for
        return f"untyped {type(error).__name__}"


def _all(batch: Callable[[], Iterable[BlockResult]], keys: Sequence[str]) -> Outcomes:
    try:
        return {one.key: _reported(one) for one in batch()}
    except Exception as error:  # noqa: BLE001  # what happens to a block is in its result
        return dict.fromkeys(keys, f"untyped {type(error).__name__}")


def _reported(result: BlockResult) -> str:
    if result.error is not None:
        return type(result.error).__name__
    return "good" if result.ok else "bad"


def _write_several(store: kvio.Store, keys: Sequence[str]) -> Outcomes:
    items = [(key, SMALL) for key in keys]
    return _all(lambda: store.write_blocks(items, if_exists="replace"), keys)


def _read_several(store: kvio.Store, keys: Sequence[str]) -> Outcomes:
    rooms = {key: bytearray(len(SMALL)) for key in keys}
    found = _all(lambda: store.read_blocks_into(rooms.items()), keys)
    return {k: "bad" if o == "good" and rooms[k] != SMALL else o for k, o in found.items()}


def _delete_several(store: kvio.Store, keys: Sequence[str]) -> Outcomes:
    return _all(lambda: store.delete_blocks(keys), keys)


def _verify(store: kvio.Store, keys: Sequence[str]) -> Outcomes:
    return _all(lambda: [store.verify_block(keys[0])], keys)


def _submit_write(store: kvio.Store, key: str) -> object:
    return store.submit_write(key, SMALL, if_exists="replace").result()


def _submit_read(store: kvio.Store, key: str) -> object:
    out = bytearray(len(SMALL))
    return store.submit_read_into(key, out).result() == len(out) and out == SMALL


def _list_pages(store: kvio.Store, _: str) -> object:
    found = [key.removeprefix(f"{MANY}/") for key in store.list_keys(f"{MANY}/")]
    return sorted(found) == names_of_many()


#: By name. One that moves megabytes has two parts.
OPERATIONS: Final[Mapping[str, Operation]] = {
    "write": Operation(_one(VERBS["write"]), writes=True),
    "write in parts": Operation(
        _one(VERBS["write in parts"]), writes=True, data=LARGE, several=True
    ),
    "write what is new": Operation(
        _one(lambda s, k: s.write_block(k, SMALL, if_exists="error")), writes=True
    ),
    "write keeping": Operation(
        _one(lambda s, k: s.write_block(k, SMALL, if_exists="keep")), writes=True
    ),
    "write several": Operation(_write_several, writes=True, blocks=2, usual=False),
    "submit a write": Operation(_one(_submit_write), writes=True, usual=False),
    "read": Operation(_one(VERBS["read"])),
    "read in parallel": Operation(_one(VERBS["read in parallel"]), data=LARGE, several=True),
    "read a range": Operation(_one(VERBS["read a range"]), several=True),
    "read several": Operation(_read_several, blocks=2, usual=False),
    "submit a read": Operation(_one(_submit_read), usual=False),
    "stat": Operation(_one(VERBS["stat"])),
    "contains": Operation(_one(lambda s, k: s.contains(k)), usual=False),
    "verify": Operation(_verify, several=True, usual=False),
    "delete": Operation(_one(VERBS["delete"]), deletes=True, several=True),
    "delete several": Operation(_delete_several, deletes=True, blocks=2, usual=False),
    "list": Operation(_one(VERBS["list"])),
    "list pages": Operation(_one(_list_pages), several=True),
}
#: A second request would find what the first has done, and not know whose it is.
UNDECIDED: Final = "write what is new"


def folder_of(operation: str, number: int) -> str:
    """Name where the blocks of an operation lie; those of the listing in pages are made once."""
    return MANY if operation == "list pages" else f"{operation.replace(' ', '-')}/{number}"


def keys_of(operation: str, folder: str) -> list[str]:
    """Name the blocks of an operation."""
    return [f"{folder}/block{number or ''}" for number in range(OPERATIONS[operation].blocks)]


def prepare(raw: RawS3, operation: str, keys: Sequence[str]) -> None:
    """Place what an operation reads."""
    what = OPERATIONS[operation]
    if operation == "list pages":
        _place_many(raw)
    elif not what.writes:
        for key in keys:
            raw.put(BUCKET, f"{PREFIX}/{key}", stored(key, what.data))


@functools.cache
def names_of_many() -> list[str]:
    """Name what the listing in pages is to find, in order."""
    return [f"block{number:05}" for number in range(PAGE + BEYOND)]


@functools.lru_cache(maxsize=1)
def _place_many(raw: RawS3) -> None:
    """Make a server's many objects, over one connection."""
    endpoint = raw.endpoint
    address = urlsplit(endpoint.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        for name in names_of_many():
            target = quote(f"/{BUCKET}/{PREFIX}/{MANY}/{name}")
            headers = sign(endpoint, "PUT", target, "", {}, b"x")
            connection.request("PUT", target, b"x", headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200, answer.status
    finally:
        connection.close()
