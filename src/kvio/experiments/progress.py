"""Progress on standard error: one line that changes on a terminal, a line a step elsewhere."""

from __future__ import annotations

import sys
import time


class Progress:
    """Says what is being done and how long it has taken."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._live = sys.stderr.isatty()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def say(self, step: str) -> None:
        """Show the step that begins now."""
        line = f"[{self.elapsed_s:5.0f} s] {step}"
        sys.stderr.write(f"\r\033[K{line}" if self._live else f"{line}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Clear the changing line."""
        if self._live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
