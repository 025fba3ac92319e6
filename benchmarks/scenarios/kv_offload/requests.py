"""Requests as an engine sees them: tokens, and the keys of the blocks that keep their KV cache.

Pure functions of a seed. A block's key is a digest of its tokens and of every block before it, as
engines hash prefixes, so a key stands for one block after one history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final, TypeAlias

import numpy as np

from benchmarks.harness.blocks import Arena, Block
from benchmarks.harness.shapes import ModelShape

Tokens: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"

#: Requests for each shared prefix: a few system prompts serve all users.
_REQUESTS_PER_PREFIX: Final = 4
_DIGEST_BYTES: Final = 16
_SEED: Final = 20260101


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The tokens of one request and the keys of its whole blocks, in order."""

    tokens: Tokens
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a trace is.

    Attributes:
        requests: that arrive.
        tokens: of each when it first arrives.
        fresh_tokens: that it has grown by when it comes again.
        shared: the share of *tokens* that is one of a few shared prefixes.
        block_tokens: tokens of one block; what is left at the end is in no block.
    """

    requests: int
    tokens: int
    fresh_tokens: int
    shared: float
    block_tokens: int

    @property
    def prefixes(self) -> int:
        """Count the shared prefixes: of two requests or more, some share one."""
        return max(1, self.requests // _REQUESTS_PER_PREFIX)

    @property
    def shared_tokens(self) -> int:
        """Count the tokens of one shared prefix."""
        return round(self.shared * self.tokens)

    @property
    def request_blocks(self) -> int:
        """Count the blocks of a request when it first arrives."""
        return self.tokens // self.block_tokens

    def most_blocks(self) -> int:
        """Count the distinct blocks of all requests, grown, if every prefix is drawn."""
        grown = (self.tokens + self.fresh_tokens) // self.block_tokens
        shared = self.shared_tokens // self.block_tokens
        return self.prefixes * shared + self.requests * (grown - shared)


def fit(wanted: Size, most_blocks: int) -> Size:
    """Cut a trace until it has no more distinct blocks than that, and at most twice as many loads.

    Requests stay as long as there can be as many of them as they have blocks; then both are cut.
    One block is always left.
    """
    if _fits(wanted, most_blocks):
        return wanted
    for blocks in range(wanted.request_blocks, 0, -1):
        cut = _shortened(wanted, blocks)
        for requests in range(min(wanted.requests, most_blocks), 0, -1):
            size = replace(cut, requests=requests)
            if not _fits(size, most_blocks):
                continue
            if requests >= min(wanted.requests, blocks):
                return size
            break
    return replace(_shortened(wanted, 1), requests=1, fresh_tokens=0)


def _fits(size: Size, most_blocks: int) -> bool:
    loads = size.requests * size.request_blocks
    return size.most_blocks() <= most_blocks and loads <= 2 * most_blocks


def _shortened(wanted: Size, blocks: int) -> Size:
    tokens = min(wanted.tokens, blocks * wanted.block_tokens)
    fresh = min(
        wanted.fresh_tokens,
        max(wanted.block_tokens, round(wanted.fresh_tokens * tokens / wanted.tokens)),
    )
    return replace(wanted, tokens=tokens, fresh_tokens=fresh)


class Case:
    """A model, and the requests that come for it: new, then grown."""

    def __init__(self, shape: ModelShape, wanted: Size, max_bytes: int) -> None:
        self.shape = shape
        self.block_nbytes = shape.block_nbytes(wanted.block_tokens)
        self.size = fit(wanted, max(1, max_bytes // self.block_nbytes))
        self.first = make_requests(self.size, _SEED)
        self.again = grow(self.first, self.size, _SEED + 1)
        self.keys = distinct_keys(self.again)

    def __str__(self) -> str:
        return self.shape.name

    @property
    def source_nbytes(self) -> int:
        """Count the bytes of all distinct blocks."""
        return len(self.keys) * self.block_nbytes

    @property
    def target_nbytes(self) -> int:
        """Count the bytes of every block that a request may load."""
        return self.size.requests * self.size.request_blocks * self.block_nbytes

    def cut(self, arena: Arena, blocks: int) -> list[Block]:
        """Cut so many blocks of the model, K and V of every layer apart."""
        nbytes = self.shape.piece_nbytes(self.size.block_tokens)
        return arena.cut(blocks=blocks, pieces=self.shape.pieces(), piece_nbytes=nbytes)


def block_keys(tokens: Tokens, block_tokens: int) -> tuple[str, ...]:
    """Name the whole blocks of a sequence of tokens."""
    digest = b""
    keys = []
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        own = tokens[end - block_tokens : end].astype("<u8").tobytes()
        digest = hashlib.blake2b(digest + own, digest_size=_DIGEST_BYTES).digest()
        keys.append(digest.hex())
    return tuple(keys)


def make_requests(size: Size, seed: int) -> list[Request]:
    """Draw the requests, in order of arrival; the same for the same seed."""
    rng = np.random.default_rng(seed)
    prefixes = [_draw(rng, size.shared_tokens) for _ in range(size.prefixes)]
    requests = []
    for which in rng.integers(size.prefixes, size=size.requests):
        own = _draw(rng, size.tokens - size.shared_tokens)
        requests.append(_request(np.concatenate([prefixes[which], own]), size))
    return requests


def grow(requests: Sequence[Request], size: Size, seed: int) -> list[Request]:
    """Add to every request a tail of fresh tokens: the next turn of its conversation."""
    rng = np.random.default_rng(seed)
    return [
        _request(np.concatenate([request.tokens, _draw(rng, size.fresh_tokens)]), size)
        for request in requests
    ]


def predict_hits(requests: Iterable[Request], stored: Iterable[str] = ()) -> list[int]:
    """Count the leading blocks each request finds if it is served before the next arrives.

    Args:
        requests: in order of arrival; each stores what it did not find.
        stored: keys that are there before the first.
    """
    known = set(stored)
    hits = []
    for request in requests:
        hits.append(count_leading(request.keys, known))
        known.update(request.keys)
    return hits


def count_leading(keys: Sequence[str], stored: Collection[str]) -> int:
    """Count how many keys from the front are among those stored."""
    return sum(1 for _ in takewhile(stored.__contains__, keys))


def distinct_keys(requests: Iterable[Request]) -> list[str]:
    """List every key once, in order of first appearance."""
    return list(dict.fromkeys(key for request in requests for key in request.keys))


def _draw(rng: np.random.Generator, count: int) -> Tokens:
    """Draw tokens of so large a vocabulary that no two blocks agree by accident."""
    return rng.integers(0, 1 << 64, count, np.uint64)


def _request(tokens: Tokens, size: Size) -> Request:
    return Request(tokens, block_keys(tokens, size.block_tokens))
