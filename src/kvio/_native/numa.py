"""Memory policies and the nodes of pages, as the kernel gives them: see set_mempolicy(2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvio._native import NULL, check, from_buffer, lib, new, node_mask

#: Modes of a policy, from linux/mempolicy.h.
DEFAULT: Final = 0
PREFERRED: Final = 1
BIND: Final = 2
INTERLEAVE: Final = 3
LOCAL: Final = 4

_WORD_BITS: Final = 64
_MAX_WORDS: Final = 16


def set_memory_policy(mode: int, nodes: Sequence[int] = ()) -> None:
    """Let the calling thread's new pages come from *nodes*, as *mode* says.

    Raises:
        OSError: a node does not exist or is not allowed, or policies are forbidden (EPERM).
    """
    words = node_mask(nodes)
    check(lib.kvio_set_memory_policy(mode, words or NULL, len(words)))


def get_memory_policy() -> tuple[int, tuple[int, ...]]:
    """Return the memory policy of the calling thread: its mode and its nodes.

    Raises:
        OSError: the kernel does not report it (ENOSYS, EPERM).
    """
    mode, words = new("int *"), new("uint64_t[]", _MAX_WORDS)
    check(lib.kvio_get_memory_policy(mode, words))
    nodes = (n for n in range(_MAX_WORDS * _WORD_BITS) if words[n // _WORD_BITS] >> n % 64 & 1)
    return int(mode[0]), tuple(nodes)


def bind_memory(view: memoryview, mode: int, nodes: Sequence[int] = ()) -> None:
    """Let pages of a page-aligned view that are touched from now on come from *nodes*: mbind(2).

    Raises:
        OSError: a node does not exist or is not allowed, or policies are forbidden (EPERM).
    """
    words = node_mask(nodes)
    check(lib.kvio_bind_memory(from_buffer(view), len(view), mode, words or NULL, len(words)))


def page_nodes(view: memoryview, page_bytes: int = 4096) -> list[int]:
    """Return the node of every page of a page-aligned view; -2 (-ENOENT): not touched yet.

    Raises:
        OSError: the kernel does not report it (ENOSYS, EPERM).
    """
    count = -(-len(view) // page_bytes)
    nodes = new("int32_t[]", count)
    check(lib.kvio_page_nodes(from_buffer(view), count, page_bytes, nodes))
    return [int(node) for node in nodes]
