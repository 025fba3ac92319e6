"""A group: the blocks that one C call handles, column by column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeAlias

from kvio import _native
from kvio._native import Answer, lib
from kvio.backends.posix.layout import Place
from kvio.policies import Decision
from kvio.types import BlockResult, IOMode, Parts

_MODES: Final = {
    (IOMode.BUFFERED, False): lib.KVIO_MODE_BUFFERED,
    (IOMode.DONTCACHE, False): lib.KVIO_MODE_DONTCACHE,
    (IOMode.DIRECT, False): lib.KVIO_MODE_DIRECT,
    (IOMode.DIRECT, True): lib.KVIO_MODE_DIRECT_IF_COLD,
}
_BUFFERED: Final[int] = lib.KVIO_MODE_BUFFERED
BOUNCING: Final = frozenset((lib.KVIO_MODE_DIRECT, lib.KVIO_MODE_DIRECT_IF_COLD))

#: A decision as the C core wants it: its number for the mode, and the reason.
Choice: TypeAlias = tuple[int, str]
Chooser: TypeAlias = Callable[[int, int], Choice]
#: For calls that move no payload.
LOOK: Final[Choice] = (_BUFFERED, "")


def chooser(decide: Callable[[int, int], Decision]) -> Chooser:
    """Make a policy's decision by size and concurrency as quick as a look-up."""

    @lru_cache(maxsize=4096)
    def choose(nbytes: int, concurrency: int) -> Choice:
        decision = decide(nbytes, concurrency)
        return _MODES[decision.mode, decision.unless_hot], decision.reason

    return choose


@dataclass(slots=True)
class Group:
    """Blocks that one C call handles, column by column, and what became of them.

    *answers* are of the operations that ran, one for each index in *ready*; the results of blocks
    that could not run are in *failures* by index.
    """

    keys: Sequence[str]
    places: Sequence[Place]
    parts: Sequence[Parts]
    sizes: Sequence[int]
    choices: Sequence[Choice]
    offset: int = 0
    op_flags: int = 0
    ready: Sequence[int] = ()
    failures: dict[int, BlockResult] | None = None
    answers: list[Answer] = field(default_factory=list)

    def run(
        self, function: Any, call: Any, indices: Sequence[int], fds: Sequence[int]
    ) -> tuple[int, list[Answer]]:
        """Run *function* over the blocks at *indices*, whose directories are *fds*.

        Returns how many went well, and how each ended.
        """
        places, parts, sizes, choices = self.places, self.parts, self.sizes, self.choices
        if len(indices) != len(self.keys):
            places, parts = [places[i] for i in indices], [parts[i] for i in indices]
            sizes, choices = [sizes[i] for i in indices], [choices[i] for i in indices]
        return _native.run_ops(
            function,
            call,
            fds,
            [mode for mode, _ in choices],
            [name for _, name, _ in places],
            parts,
            sizes,
            [key_hash for _, _, key_hash in places],
            offset=self.offset,
            flags=self.op_flags,
        )

    def needs_bounce(self) -> bool:
        """Tell whether the call will want aligned memory of kvio's own."""
        return bool(self.op_flags & lib.KVIO_OP_SCRUB) or any(
            mode in BOUNCING for mode, _ in self.choices
        )
