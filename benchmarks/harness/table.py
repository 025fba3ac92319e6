"""Tables as aligned text, as Markdown, and by rich on a terminal where it is installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under headings.

    Attributes:
        right: headings whose columns hold numbers.
        rule_after: indices of rows that end a group.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[str] = frozenset()
    rule_after: frozenset[int] = field(default_factory=frozenset)

    def plain(self) -> str:
        """Return aligned text; every row is as wide as its widest."""
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            padded = (
                cell.rjust(width) if heading in self.right else cell.ljust(width)
                for cell, width, heading in zip(cells, widths, self.headings, strict=True)
            )
            return "  ".join(padded).rstrip()

        rule = "  ".join("-" * width for width in widths)
        lines = [self.title, "", line(self.headings), rule]
        for index, row in enumerate(self.rows):
            lines.append(line(row))
            if index in self.rule_after and index != len(self.rows) - 1:
                lines.append("")
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return a Markdown table under a heading."""
        marks = ["---:" if heading in self.right else "---" for heading in self.headings]
        body = (list(map(_escaped, row)) for row in self.rows)
        lines = [f"| {' | '.join(cells)} |" for cells in (list(self.headings), marks, *body)]
        return "\n".join([f"## {self.title}", "", *lines])

    def show(self) -> None:
        """Print it: by rich on a terminal that has room for it, else as aligned text."""
        text = self.plain()
        if not (sys.stdout.isatty() and self._show_rich(max(map(len, text.splitlines())))):
            sys.stdout.write(text + "\n\n")

    def _show_rich(self, width: int) -> bool:
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
        except ImportError:
            return False
        console = Console()
        if width + len(self.headings) + 1 > console.width:  # it would wrap inside cells
            return False
        table = RichTable(title=self.title, title_justify="left")
        for heading in self.headings:
            table.add_column(heading, justify="right" if heading in self.right else "left")
        for index, row in enumerate(self.rows):
            table.add_row(*row, end_section=index in self.rule_after)
        console.print(table)
        return True


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
