"""The options of a staging tier."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from kvio.errors import ConfigError
from kvio.wrappers.staging.writing import WhenFull

DrainFrom: TypeAlias = Literal["accept", "high_water"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOptions:
    """The checked options of `stage`; each drain thread calls *on_start* first.

    Raises:
        ConfigError: an option is wrong.
    """

    drain_threads: int
    drain_nice: int = 10
    on_start: Callable[[int], None] | None = None
    high_water: float = 0.9
    low_water: float = 0.7
    when_full: WhenFull = "block"
    drain_from: DrainFrom = "accept"
    retries: int = 3
    checksum: bool = True
    timeout: float | None = None
    close_store: bool = False
    spool: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.low_water <= self.high_water <= 1:
            marks = f"low_water={self.low_water} and high_water={self.high_water}"
            raise ConfigError(f"{marks} must be fractions, the low one no higher")
        _check_word("when_full", self.when_full, get_args(WhenFull))
        _check_word("drain_from", self.drain_from, get_args(DrainFrom))
        if self.drain_threads < 1:
            raise ConfigError(f"drain_threads must be at least 1, not {self.drain_threads}")
        if not 0 <= self.drain_nice <= 19:
            raise ConfigError(f"drain_nice must be 0 to 19, not {self.drain_nice}")
        if self.retries < 0:
            raise ConfigError(f"retries must be at least 0, not {self.retries}")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be above 0 seconds, not {self.timeout}")
        if self.spool is not None and not os.path.isdir(self.spool):
            raise ConfigError(f"spool={self.spool!r} is not a directory")


def _check_word(name: str, given: str, words: tuple[str, ...]) -> None:
    if given not in words:
        raise ConfigError(f"{name} must be one of {', '.join(words)}, not {given!r}")
