"""Lists of CPUs and nodes as the kernel writes them: ``0-3,8,10-11``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from kvio.errors import ConfigError

#: Far above what kernels can be built for (8192 CPUs, 1024 nodes), and small enough that a list
#: cannot fill memory.
MAX_NUMBER: Final = 0xFFFF

_PART: Final = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?").fullmatch
_NUMBER: Final = re.compile(r"-?[0-9]{1,6}").fullmatch


def parse_cpulist(text: str, *, source: str = "CPU list") -> tuple[int, ...]:
    """Return the numbers of a list, ascending and each once.

    Args:
        text: as in cpuset(7), "List format".
        source: where it is from, for the complaint.

    Raises:
        ConfigError: it is no such list, or has numbers beyond `MAX_NUMBER`.
    """
    numbers: set[int] = set()
    for part in text.strip(" \t\n").split(",") if text.strip(" \t\n") else ():
        match = _PART(part)
        if match is None:
            raise ConfigError(f"{source}: {text.strip()!r:.80} is not a list such as 0-3,8")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last <= MAX_NUMBER:
            raise ConfigError(f"{source}: {part!r} is not a range from 0 to {MAX_NUMBER}")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def format_cpulist(numbers: Iterable[int]) -> str:
    """Write numbers as the kernel does; `parse_cpulist` reads it back."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def parse_number(text: str | None) -> int | None:
    """Return the number in a file; None for a negative one, which means unknown.

    What is no number is as unknown as -1.
    """
    if text is None or _NUMBER(text.strip(" \t\n")) is None:
        return None
    number = int(text)
    return number if 0 <= number <= MAX_NUMBER else None
