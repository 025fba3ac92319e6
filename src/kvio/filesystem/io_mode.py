"""Choose the I/O mode of an operation: pure functions of size, concurrency and calibration.

A policy cannot know whether a block is in the page cache. A decision for a read may therefore say
``unless_hot``: the C core opens the file, asks the kernel (cachestat), and reads directly only if
the block is not in the page cache and was not lately read directly; the second read of a block
goes through the page cache, so that the third finds it there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvio.errors import ConfigError
from kvio.types import IOMode, KiB, MiB

#: Defaults of Lustre's hybrid I/O: SBI_DEFAULT_HYBRID_IO_{WRITE,READ}_THRESHOLD.
WRITE_DIRECT_FROM: Final = 2 * MiB
READ_DIRECT_FROM: Final = 8 * MiB
#: With cachestat only blocks that are not in the page cache are read directly: 1.2 times as fast
#: from this size on, 2.6 times at 4 MiB (ext4 on virtio; docs/experiments/hybrid.md).
COLD_READ_DIRECT_FROM: Final = 64 * KiB
CALIBRATION_VERSION: Final = 1
_ANY_NBYTES: Final = 1 << 62
_FILE_MODES: Final = (IOMode.BUFFERED, IOMode.DONTCACHE, IOMode.DIRECT)


@dataclass(frozen=True, slots=True)
class Decision:
    """An I/O mode and the reason; *unless_hot*: buffered if the page cache has the block."""

    mode: IOMode
    reason: str
    unless_hot: bool = False


class Policy(Protocol):
    """Decides by payload size in bytes and how many operations run at once."""

    def for_write(self, nbytes: int, concurrency: int) -> Decision:
        """Decide for a write."""

    def for_read(self, nbytes: int, concurrency: int) -> Decision:
        """Decide for a read."""

    def buffered_below(self) -> int:
        """Return the length in bytes below which every read is buffered."""


@dataclass(frozen=True, slots=True)
class Always:
    """Always the same mode."""

    mode: IOMode

    def for_write(self, nbytes: int, concurrency: int) -> Decision:
        """Decide for a write."""
        return Decision(self.mode, "the backend's only mode")

    def for_read(self, nbytes: int, concurrency: int) -> Decision:
        """Decide for a read."""
        return Decision(self.mode, "the backend's only mode")

    def buffered_below(self) -> int:
        """Return the length in bytes below which every read is buffered."""
        return _ANY_NBYTES if self.mode is IOMode.BUFFERED else 0


@dataclass(frozen=True, slots=True)
class Step:
    """A mode for sizes below *below_nbytes* (None: all larger sizes)."""

    below_nbytes: int | None
    mode: IOMode


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fastest modes by size, as measured on one mount for several levels of concurrency."""

    write: dict[int, tuple[Step, ...]]
    read: dict[int, tuple[Step, ...]]
    reason: str

    def pick(self, table: dict[int, tuple[Step, ...]], nbytes: int, concurrency: int) -> IOMode:
        """Return the mode for a size, at the nearest measured concurrency not above this one."""
        level = max((c for c in table if c <= concurrency), default=min(table))
        for step in table[level]:
            if step.below_nbytes is None or nbytes < step.below_nbytes:
                return step.mode
        return IOMode.BUFFERED

    def replacing(self, mode: IOMode, other: IOMode) -> Calibration:
        """Return the same calibration with one mode replaced by another."""

        def swap(table: dict[int, tuple[Step, ...]]) -> dict[int, tuple[Step, ...]]:
            return {
                level: tuple(Step(s.below_nbytes, other if s.mode is mode else s.mode) for s in row)
                for level, row in table.items()
            }

        return Calibration(swap(self.write), swap(self.read), self.reason)


def _direct_from(write_nbytes: int, read_nbytes: int) -> Calibration:
    return Calibration(
        write={1: (Step(write_nbytes, IOMode.BUFFERED), Step(None, IOMode.DIRECT))},
        read={1: (Step(read_nbytes, IOMode.BUFFERED), Step(None, IOMode.DIRECT))},
        reason="default thresholds",
    )


#: For kernels that do not report what is in the page cache.
BY_SIZE: Final = _direct_from(WRITE_DIRECT_FROM, READ_DIRECT_FROM)
#: For kernels that report what is in the page cache.
CACHE_AWARE: Final = _direct_from(WRITE_DIRECT_FROM, COLD_READ_DIRECT_FROM)


class Hybrid:
    """Choose by size, cache state, concurrency, and the calibration of this root."""

    def __init__(self, calibration: Calibration = BY_SIZE) -> None:
        self.calibration = calibration

    def for_write(self, nbytes: int, concurrency: int) -> Decision:
        """Decide for a write."""
        mode = self.calibration.pick(self.calibration.write, nbytes, concurrency)
        return Decision(mode, f"{nbytes} bytes, {self.calibration.reason}")

    def for_read(self, nbytes: int, concurrency: int) -> Decision:
        """Decide for a read."""
        mode = self.calibration.pick(self.calibration.read, nbytes, concurrency)
        reason = f"{nbytes} bytes, {self.calibration.reason}"
        return Decision(mode, reason, unless_hot=mode is IOMode.DIRECT)

    def buffered_below(self) -> int:
        """Return the length in bytes below which every read is buffered."""
        firsts = [steps[0] for steps in self.calibration.read.values()]
        if any(step.mode is not IOMode.BUFFERED for step in firsts):
            return 0
        return min(_ANY_NBYTES if s.below_nbytes is None else s.below_nbytes for s in firsts)


def dump_calibration(calibration: Calibration, measured: dict[str, Any]) -> str:
    """Return a calibration as JSON, with the measurements it was made from."""

    def table(steps: dict[int, tuple[Step, ...]]) -> dict[str, list[dict[str, object]]]:
        return {
            str(level): [{"below_nbytes": s.below_nbytes, "mode": str(s.mode)} for s in row]
            for level, row in steps.items()
        }

    content = {
        "version": CALIBRATION_VERSION,
        "reason": calibration.reason,
        "write": table(calibration.write),
        "read": table(calibration.read),
        "measured": measured,
    }
    return json.dumps(content, indent=1)


def load_calibration(text: str, source: str) -> Calibration:
    """Read a calibration file.

    Raises:
        ConfigError: it is not one, or of another version; the message names *source*.
    """
    try:
        content = json.loads(text)
        if content["version"] != CALIBRATION_VERSION:
            raise ConfigError(f"{source}: version {content['version']!r} is not known; tune again")
        return Calibration(
            write=_load_table(content["write"]),
            read=_load_table(content["read"]),
            reason=str(content["reason"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        if isinstance(exc, ConfigError):
            raise
        raise ConfigError(f"{source} is not a calibration file: {exc!r}; tune again") from exc


def _load_table(content: Any) -> dict[int, tuple[Step, ...]]:
    table = {int(level): tuple(map(_load_step, row)) for level, row in content.items()}
    if not table or not all(table.values()):
        raise ValueError("a table is empty")
    return table


def _load_step(content: Any) -> Step:
    below = content["below_nbytes"]
    mode = IOMode(content["mode"])
    if mode not in _FILE_MODES or not (below is None or (type(below) is int and below >= 0)):
        raise ValueError(f"not a step: {content!r}")
    return Step(below, mode)
